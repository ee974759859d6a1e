"""Integer products of compiled passes: packing, products, and models with weights of bytes and half bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from llvmlite import ir
from models.translated_once import translated_once
from numba import njit
from tiny_llama import CPU, spec_of, stepwise, tiny_llama, tokens, weights_of, whole_pass

from paceline.checkpoints import dequantized, quantize, spec_from_config, unpacked
from paceline.checkpoints.quantization import quantize_groups, quantize_rows
from paceline.models import MoeSpec
from paceline.models.cpu import integer_products
from paceline.models.cpu.integer_products import NIBBLE_BLOCK, half_pitch, to_bytes
from paceline.models.cpu.matrix import pack, steps_of, strip_size, strip_sums
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.processor import has_dot_bytes
from paceline.models.cpu.tiles import BYTES, NIBBLES, dot_bytes
from paceline.models.cpu.vectors import I32V, Int, Nothing, load_at, lowered, store_at
from paceline.models.passes import eligibility, self_test
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners import NativeRunner
from paceline.tree import EMPTY_TREE, TokenTree

WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 88, "vocab_size": 72}
IDS = tokens(150)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
FORMS = {"int8": quantize_rows, "int4": quantize_groups}
MIXED = pytest.mark.parametrize("form", [*FORMS, "mixed"])
EACH = pytest.mark.parametrize("form", FORMS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@translated_once
def _product(kind, weights, inputs, strips, x, rows, work, pitch, sums, out):
    steps = steps_of(kind, inputs)
    for row in range(rows):
        to_bytes(x + 4 * inputs * row, inputs, work + row * pitch, pitch, kind == NIBBLES)
    for strip in range(strips):
        strip_sums(
            kind, weights + strip * strip_size(kind, steps), steps, work, pitch, rows, np.int64(sums.ctypes.data)
        )
        for row in range(rows):
            for i in range(64):
                out[row, strip * 64 + i] = sums[row * 64 + i]


def product(packed, x, filling=0):
    """(rows, outputs) of packed weights and (rows, inputs) float32; `filling` is what the work space held before."""
    rows, inputs = x.shape
    pitch = 2 * half_pitch(inputs)
    work, sums = torch.full((rows * pitch,), filling, dtype=torch.uint8), np.zeros(2 * rows * 64, np.float32)
    out = np.zeros((rows, packed.count * 64), np.float32)
    padded, kind = (
        torch.nn.functional.pad(x.flatten(), (0, 64)),
        NIBBLES if packed.strips.shape[-1] == NIBBLE_BLOCK else BYTES,
    )
    given = packed.address, inputs, packed.count, padded.data_ptr(), rows, work.data_ptr(), pitch
    _product(kind, *given, sums, out)
    return torch.from_numpy(out)[:, : packed.outputs]


def case(form, outputs, inputs, rows, seed=0):
    """Weights of `form`, their scales, and what they are multiplied with."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    return *FORMS[form](weight / inputs**0.5), x


def exact(whole, scale, x):
    return x.double() @ dequantized({"a.weight": whole, "a.scale": scale})["a.weight"].T


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 16), (70, 96), (1, 1024), (130, 2816)])
def test_packing_keeps_every_weight_and_scale_once(outputs, inputs):
    whole, scale, _ = case("int8", outputs, inputs, 1)
    strips = pack(whole, Pages(), scale=scale).strips
    body = (
        (strips[:, :-1] ^ 128)
        .view(torch.int8)
        .view(len(strips), inputs // 4, 64, 4)
        .transpose(1, 2)
        .reshape(-1, inputs)
    )
    assert torch.equal(body[:outputs], whole)
    assert not body[outputs:].any()
    scales = strips[:, -1].contiguous().view(torch.float32).flatten()
    assert torch.equal(scales[:outputs], scale)


@EACH
def test_paired_packing_moves_scales_with_their_rows(form):
    whole, scale, x = case(form, 2 * 40, 64, 3)
    both, want = pack(whole, Pages(), paired=True, scale=scale), exact(whole, scale, x)
    assert both.count == 2
    out, (gate, up) = product(both, x), want.split(40, 1)
    assert torch.allclose(torch.cat((out[:, :32], out[:, 64:72]), 1).double(), gate, atol=1e-3)
    assert torch.allclose(out[:, 32:64].double(), up[:, :32], atol=1e-3)
    assert not torch.allclose(out[:, :32].double(), up[:, :32], atol=1e-3)


@EACH
@pytest.mark.parametrize("inputs", [16, 32, 96, 1024, 2816])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
def test_products_err_less_than_bfloat16_activations(form, inputs, rows):
    whole, scale, x = case(form, 130, inputs, rows)
    x[:, 3] = 20.0  # one large element takes the scale of its row
    x[0] *= 1e-20
    want = exact(whole, scale, x)
    error = (product(pack(whole, Pages(), scale=scale), x).double() - want).abs().mean(1)
    rounded = (exact(whole, scale, x.bfloat16()) - want).abs().mean(1)
    assert (error < rounded).all()
    wrong = [(whole.roll(1, 0), scale), (whole.roll(1, 1), scale), (whole, scale * 1.02)]
    for other, factor in [*wrong, (whole ^ 1, scale)] if form == "int4" else wrong:
        assert not ((product(pack(other, Pages(), scale=factor), x).double() - want).abs().mean(1) < rounded).any()


@EACH
def test_a_product_has_the_same_bits_among_any_number_of_rows(form):
    whole, scale, x = case(form, 70, 1056, 16)
    packed = pack(whole, Pages(), scale=scale)
    want = product(packed, x)
    for rows in range(1, 16):
        assert torch.equal(product(packed, x[:rows]), want[:rows])
    assert not torch.equal(product(packed, x[1:2]), want[:1])


def test_sums_are_exact_at_the_widest_rows():
    inputs = eligibility.MAX_INPUTS
    signs = torch.ones(64, inputs, dtype=torch.int8)
    signs[1::2, ::2] = -1
    whole = 127 * signs
    for x in (torch.ones(1, inputs), -torch.ones(1, inputs), torch.linspace(-1, 1, inputs)[None].float()):
        want = exact(whole, torch.ones(64), x)
        assert torch.allclose(
            product(pack(whole, Pages(), scale=torch.ones(64)), x).double(), want, rtol=1e-6, atol=4.0
        )


@EACH
def test_rows_of_zeros_and_rows_that_are_not_finite(form):
    whole, scale, x = case(form, 64, 32, 4)
    x[0], x[1, 3], x[2, 5] = 0.0, torch.nan, -torch.inf
    out = product(pack(whole, Pages(), scale=scale), x)
    assert not out[0].any()
    assert out[1:3].isnan().all()
    assert out[3].isfinite().all()


def test_the_instruction_and_its_replacement_give_the_same_integers():
    def dot(native):
        def emit(builder, a, b, out):
            zero = ir.Constant(I32V, [7] * 16)
            store_at(
                builder,
                out,
                dot_bytes(builder, zero, load_at(builder, a, I32V), load_at(builder, b, I32V), native=native),
            )

        emit.__name__ = f"dot_{'native' if native else 'plain'}"
        function = lowered(Nothing, Int, Int, Int)(emit)

        @njit
        def run(a, b, out):
            function(a, b, out)

        return run

    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 256, 64, np.uint8), generator.integers(-128, 128, 64, np.int8)
    a[:8], b[:4], b[4:8] = 255, -128, 127
    want = 7 + (a.astype(np.int64) * b).reshape(16, 4).sum(1)
    for native in {False, has_dot_bytes()}:
        out = np.zeros(16, np.int32)
        dot(native)(a.ctypes.data, b.ctypes.data, out.ctypes.data)
        assert (out == want).all()
    assert (want != 7 + (a.astype(np.int8).astype(np.int64) * b).reshape(16, 4).sum(1)).any()


def small_runner(form, dtype=torch.float32, **changes):
    model = tiny_llama(**WIDE | changes).to(dtype)
    weights = weights_of(model)
    mixed = {name: "int8" if ".1.qkv" in name or ".0.down" in name else "int4" for name in weights}
    weights = quantize(weights, spec_of(model.config), mixed if form == "mixed" else form)
    runner = NativeRunner(spec_of(model.config), dict(weights), name="t", device=CPU, dtype=dtype, cache_slots=64)
    assert isinstance(runner.passes, CompiledDecoder)
    return runner, weights


@MIXED
@pytest.mark.parametrize("tied", [False, True])
def test_passes_are_those_of_the_weights_that_bytes_stand_for(form, tied):
    runner, weights = small_runner(form, tie_word_embeddings=tied, initializer_range=0.1)
    spec = runner.spec if not tied else spec_of(tiny_llama(**WIDE).config)

    def plain(weights):
        near = {name: weight.float() for name, weight in dequantized(weights).items()}
        return whole_pass(NativeRunner(spec, near, name="t", device=CPU, dtype=torch.float32, compiled=False), IDS)

    want, error = plain(weights), 1e-3
    assert (whole_pass(runner, IDS) - want).abs().max() < error * want.std()
    for wrong in ("layers.1.o.scale", "layers.1.down.weight"):
        assert (plain(weights | {wrong: weights[wrong].roll(1, -1)}) - want).abs().max() > 10 * error * want.std()


@MIXED
@DTYPES
def test_a_row_has_the_same_bits_however_the_text_is_fed(form, dtype):
    runner, _ = small_runner(form, dtype)
    plain = stepwise(runner, IDS)
    assert torch.equal(whole_pass(runner, IDS), plain)
    for width in (2, 3, 4, 5, 7, 8, 16):
        assert torch.equal(stepwise(runner, IDS, width), plain), width
    assert not torch.equal(plain[1:], plain[:-1])


@MIXED
@DTYPES
def test_a_row_has_the_same_bits_beside_others_and_in_trees(form, dtype):
    runner, _ = small_runner(form, dtype)
    caches = [runner.open() for _ in range(16)]
    runner.extend(caches, [IDS[i : i + 5 + 2 * i] for i in range(16)])
    roots = [3 + i for i in range(16)]
    alone = [runner.score([cache], [root], [EMPTY_TREE]).logits for cache, root in zip(caches, roots, strict=True)]
    for count in (2, 3, 4, 7, 16):
        assert torch.equal(
            runner.score(caches[:count], roots[:count], [EMPTY_TREE] * count).logits, torch.cat(alone[:count])
        )
    assert not torch.equal(runner.score(caches, [*roots[1:], 3], [EMPTY_TREE] * 16).logits[:1], alone[0])
    cache = runner.open()
    runner.extend([cache], [IDS[:40]])
    rows = runner.score([cache], IDS[40:41], [TREE]).logits
    for node in range(len(TREE)):
        assert torch.equal(
            rows[1 + node], whole_pass(runner, [*IDS[:41], *(int(TREE.tokens[i]) for i in TREE.path(node))])[-1]
        )


@DTYPES
def test_one_thread_gives_the_bits_of_two(dtype):
    before, rows = torch.get_num_threads(), []
    runner, _ = small_runner("int8", dtype)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            rows.append(whole_pass(runner, IDS[:70]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(rows[0], other) for other in rows[1:])


@EACH
@DTYPES
def test_the_self_test_passes_and_could_fail(form, dtype, monkeypatch):
    assert self_test.agrees(dtype, quantization=form)
    right = self_test.expected
    monkeypatch.setattr(self_test, "expected", lambda weights, ids: right(weights, [*ids[:4], ids[4] ^ 1, *ids[5:]]))
    assert not self_test.agrees(dtype, quantization=form)


def test_the_head_alone_and_taps():
    runner, _ = small_runner("int8")
    scores = runner.extend([runner.open()], [IDS[:70]], all_logits=True, taps=(2,))
    assert torch.equal(runner.head(scores.taps[2]), scores.logits)
    assert not torch.equal(runner.head(scores.taps[2], norm=False), scores.logits)


def test_rows_too_long_for_integer_sums_are_rejected(monkeypatch):
    spec = spec_of(tiny_llama(**WIDE).config)
    assert eligibility.lacks(spec, torch.float32, CPU, quantization="int8") is None
    monkeypatch.setattr(eligibility, "MAX_INPUTS", 64)
    assert "rows of more than 64" in str(eligibility.lacks(spec, torch.float32, CPU, quantization="int8"))
    assert eligibility.lacks(spec, torch.float32, CPU) is None
    beside = MoeSpec(experts=4, top_k=2, intermediate=32, norm_top_k=True, shared=136)
    monkeypatch.setattr(eligibility, "MAX_INPUTS", 128)
    assert eligibility.lacks(spec, torch.float32, CPU, quantization="int8") is None
    assert eligibility.lacks(replace(spec, moe=beside), torch.float32, CPU, quantization="int8")


@pytest.mark.parametrize(("family", "reason"), [("deepseek_v2", "None"), ("qwen2_moe", "None"), ("qwen3_moe", "None")])
def test_what_compiled_passes_do_not_cover(family: str, reason: str) -> None:
    from transformers import AutoConfig

    spec = spec_from_config(AutoConfig.for_model(family, num_experts_per_tok=4, moe_intermediate_size=1408).to_dict())
    assert str(eligibility.unsupported(spec, torch.bfloat16, CPU)).startswith(reason)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 96), (1, 1024), (130, 2816), (8, 80)])
def test_packing_half_bytes_keeps_every_weight_and_scale_once(outputs, inputs):
    pairs, scale, _ = case("int4", outputs, inputs, 1)
    blocks = pack(pairs, Pages(), scale=scale).strips
    kept, moved, body = blocks.split((128, 64, 1024), -1)
    body = body.view(len(blocks), -1, 4, 64, 1, 4)
    whole = torch.cat((body & 15, body >> 4), -2).permute(0, 3, 1, 2, 4, 5).reshape(64 * len(blocks), -1)
    assert torch.equal(whole[:outputs, :inputs], unpacked(pairs))
    assert not whole[:outputs, inputs:].any()
    scales, zeros = kept.contiguous().view(torch.bfloat16), moved.float() / 8 - 8
    scales, zeros = (one.transpose(1, 2).reshape(64 * len(blocks), -1) for one in (scales, zeros))
    assert torch.equal(torch.stack((scales, zeros), -1)[:outputs], scale.float())
    assert not scales[outputs:].any()


@pytest.mark.parametrize("inputs", [8, 24, 40, 48, 88])
def test_what_lies_behind_a_row_counts_for_nothing(inputs):
    pairs, scale, x = case("int4", 64, inputs, 1)
    packed = pack(pairs, Pages(), scale=scale)
    if inputs % 16 == 0:
        assert torch.equal(product(packed, x, filling=77), product(packed, x))
    assert torch.allclose(product(packed, torch.cat((x, x))[:1]).double(), exact(pairs, scale, x), atol=1e-3)


@DTYPES
def test_the_self_test_catches_scales_of_other_groups(dtype, monkeypatch):
    right = integer_products.pack_nibbles
    monkeypatch.setattr(
        "paceline.models.cpu.matrix.pack_nibbles", lambda pairs, scale, pages: right(pairs, scale.roll(1, 1), pages)
    )
    assert not self_test.agrees(dtype, quantization="int4")
