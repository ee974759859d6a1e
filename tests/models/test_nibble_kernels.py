"""models/kernels/nibbles.py: integer products with half bytes against float64, and passes over int4 weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models.test_quantized_kernels import DTYPES, IDS, TREE, WIDE, stepwise, whole_pass
from numba import njit
from tiny_llama import CPU, spec_of, tiny_llama, weights_of

from paceline.models.kernels import nibbles, try_out
from paceline.models.kernels.fused import FusedDecoder
from paceline.models.kernels.matrix import pack, steps_of, strip_size
from paceline.models.kernels.nibbles import nibble_sums
from paceline.models.kernels.pages import Pages
from paceline.models.kernels.quantized import half_pitch, to_bytes
from paceline.models.kernels.tiles import GROUP, NIBBLES
from paceline.models.native import NativeRunner
from paceline.models.quantize import dequantized, quantize, quantize_groups, unpacked
from paceline.tree.token_tree import EMPTY_TREE


@njit
def _product(weights, inputs, strips, x, rows, work, pitch, sums, out):
    steps = steps_of(NIBBLES, inputs)
    for row in range(rows):
        to_bytes(x + 4 * inputs * row, inputs, work + row * pitch, pitch, True)
    for strip in range(strips):
        nibble_sums(weights + strip * strip_size(NIBBLES, steps), steps // GROUP, work, pitch, rows, sums.ctypes.data)
        out[:, strip * 64 : strip * 64 + 64] = sums[: rows * 64].reshape(rows, 64)


def product(packed, x, filling=0):
    """(rows, outputs) of packed half bytes and (rows, inputs) float32; `filling` is what the work space held before."""
    rows, inputs = x.shape
    pitch = 2 * half_pitch(inputs)
    work, sums = torch.full((rows * pitch,), filling, dtype=torch.uint8), np.zeros(2 * rows * 64, np.float32)
    out = np.zeros((rows, packed.count * 64), np.float32)
    padded = torch.nn.functional.pad(x.flatten(), (0, 64))
    _product(packed.address, inputs, packed.count, padded.data_ptr(), rows, work.data_ptr(), pitch, sums, out)
    return torch.from_numpy(out)[:, : packed.outputs]


def case(outputs, inputs, rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    return *quantize_groups(weight / inputs**0.5), x


def exact(pairs, scale, x):
    return x.double() @ dequantized({"a.weight": pairs, "a.scale": scale})["a.weight"].T


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (70, 96), (1, 1024), (130, 2816), (8, 80)])
def test_packing_keeps_every_weight_and_scale_once(outputs, inputs):
    pairs, scale, _ = case(outputs, inputs, 1)
    blocks = pack(pairs, Pages(), scale=scale).strips
    body = blocks[:, :, nibbles.SCALES :].view(len(blocks), -1, 4, 64, 1, 4)
    whole = torch.cat((body & 15, body >> 4), -2).permute(0, 3, 1, 2, 4, 5).reshape(64 * len(blocks), -1).to(torch.int8) - 8
    assert torch.equal(whole[:outputs, :inputs], unpacked(pairs))
    assert not whole[:outputs, inputs:].any()
    scales = blocks[:, :, : nibbles.SCALES].contiguous().view(torch.bfloat16).transpose(1, 2).reshape(64 * len(blocks), -1)
    assert torch.equal(scales[:outputs], scale)
    assert not scales[outputs:].any()


def test_paired_packing_moves_scales_with_their_rows():
    pairs, scale, x = case(2 * 40, 64, 3)
    both, want = pack(pairs, Pages(), paired=True, scale=scale), exact(pairs, scale, x)
    out = product(both, x)
    gate, up = want.split(40, 1)
    assert torch.allclose(torch.cat((out[:, :32], out[:, 64:72]), 1).double(), gate, atol=1e-3)
    assert torch.allclose(out[:, 32:64].double(), up[:, :32], atol=1e-3)


@pytest.mark.parametrize("inputs", [32, 96, 1024, 2816])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
def test_products_err_less_than_bfloat16_activations(inputs, rows):
    pairs, scale, x = case(130, inputs, rows)
    x[:, 3] = 20.0  # one large element takes the scale of its row
    x[0] *= 1e-20
    want = exact(pairs, scale, x)
    error = (product(pack(pairs, Pages(), scale=scale), x).double() - want).abs().mean(1)
    rounded = (exact(pairs, scale, x.bfloat16()) - want).abs().mean(1)
    assert (error < rounded).all()
    wrong = (pairs.roll(1, 0), scale), (pairs, scale * 1.02), (pairs ^ 1, scale), (pairs.roll(1, 1), scale)
    for other, factor in wrong:
        assert not ((product(pack(other, Pages(), scale=factor), x).double() - want).abs().mean(1) < rounded).any()


@pytest.mark.parametrize("inputs", [8, 24, 40, 48, 88])
def test_what_lies_behind_a_row_counts_for_nothing(inputs):
    pairs, scale, x = case(64, inputs, 1)
    packed = pack(pairs, Pages(), scale=scale)
    if inputs % 16 == 0:
        assert torch.equal(product(packed, x, filling=77), product(packed, x))
    assert torch.allclose(product(packed, torch.cat((x, x))[:1]).double(), exact(pairs, scale, x), atol=1e-3)


def test_rows_of_zeros_and_rows_that_are_not_finite():
    pairs, scale, x = case(64, 32, 4)
    x[0], x[1, 3], x[2, 5] = 0.0, torch.nan, -torch.inf
    out = product(pack(pairs, Pages(), scale=scale), x)
    assert not out[0].any()
    assert out[1:3].isnan().all()
    assert out[3].isfinite().all()


def test_a_row_has_the_same_bits_among_any_number_of_rows():
    pairs, scale, x = case(70, 1056, 16)
    packed = pack(pairs, Pages(), scale=scale)
    want = product(packed, x)
    for rows in range(1, 16):
        assert torch.equal(product(packed, x[:rows]), want[:rows])
    assert not torch.equal(product(packed, x[1:2]), want[:1])


def small_runner(dtype=torch.float32, **changes):
    model = tiny_llama(**WIDE | changes).to(dtype)
    weights = quantize(weights_of(model), spec_of(model.config), "int4")
    runner = NativeRunner(spec_of(model.config), dict(weights), name="t", device=CPU, dtype=dtype, cache_slots=64)
    assert isinstance(runner.passes, FusedDecoder)
    return runner, weights


@pytest.mark.parametrize("tied", [False, True])
def test_passes_are_those_of_the_weights_that_half_bytes_stand_for(tied):
    runner, weights = small_runner(tie_word_embeddings=tied, initializer_range=0.1)

    def plain(weights):
        return whole_pass(NativeRunner(runner.spec, dict(weights), name="t", device=CPU, dtype=torch.float32, compiled=False), IDS)

    want, error = plain(weights), 1e-3
    assert (whole_pass(runner, IDS) - want).abs().max() < error * want.std()
    for wrong in ("layers.1.o.scale", "layers.1.down.weight"):
        assert (plain(weights | {wrong: weights[wrong].roll(1, 1)}) - want).abs().max() > 10 * error * want.std()


@DTYPES
def test_a_row_has_the_same_bits_however_the_text_is_fed(dtype):
    runner, _ = small_runner(dtype)
    plain = stepwise(runner, IDS)
    assert torch.equal(whole_pass(runner, IDS), plain)
    for width in (2, 4, 7, 16):
        assert torch.equal(stepwise(runner, IDS, width), plain), width
    assert not torch.equal(plain[1:], plain[:-1])


@DTYPES
def test_a_row_has_the_same_bits_beside_others_and_in_trees(dtype):
    runner, _ = small_runner(dtype)
    caches = [runner.open() for _ in range(4)]
    runner.extend(caches, [IDS[i : i + 5 + 2 * i] for i in range(4)])
    alone = [runner.score([cache], [3 + i], [EMPTY_TREE]).logits for i, cache in enumerate(caches)]
    assert torch.equal(runner.score(caches, [3, 4, 5, 6], [EMPTY_TREE] * 4).logits, torch.cat(alone))
    cache = runner.open()
    runner.extend([cache], [IDS[:40]])
    rows = runner.score([cache], IDS[40:41], [TREE]).logits
    for node in range(len(TREE)):
        assert torch.equal(rows[1 + node], whole_pass(runner, [*IDS[:41], *(int(TREE.tokens[i]) for i in TREE.path(node))])[-1])


@DTYPES
def test_the_self_test_passes_and_could_fail(dtype, monkeypatch):
    assert try_out.agrees(dtype, quantization="int4")
    right = nibbles.pack_nibbles
    monkeypatch.setattr(
        "paceline.models.kernels.matrix.pack_nibbles", lambda pairs, scale, pages: right(pairs, scale.roll(1, 1), pages)
    )
    assert not try_out.agrees(dtype, quantization="int4")
