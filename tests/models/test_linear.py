"""Packed linears against F.linear, norms against their definition, products with small weights against the weights that
they stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import CASES
from tiny_llama import CPU
from torch.nn import functional as F

from paceline.checkpoints import (
    Checkpoint,
    Form,
    dequantized,
    load_weights,
    quantize,
    read_config,
    spec_from_config,
    values_of,
)
from paceline.checkpoints.quantization import quantize_groups, quantize_rows
from paceline.errors import UnsupportedModelError
from paceline.models import Runner, load_runner
from paceline.models.layers import linear
from paceline.models.layers.linear import (
    Map,
    agrees,
    can_pack,
    dense,
    make_head_norm,
    make_linear,
    make_norm,
    make_quantized_linear,
)
from paceline.models.passes.padding import padded
from paceline.models.runners import native_of
from paceline.tree import EMPTY_TREE, TokenTree

DTYPES = [torch.float32, torch.bfloat16]


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    return ours.dtype == dtype and torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_both_forms_multiply(dtype, packed, with_bias):
    if packed and not can_pack(CPU, dtype):
        pytest.skip("packed linears are not supported on this CPU")
    weight, bias = (torch.randn(96, 40) / 6).to(dtype), torch.randn(96).to(dtype) if with_bias else None
    layer = make_linear(weight, bias, packed=packed)
    for rows in (1, 3, 8, 33):
        x = torch.randn(rows, 40).to(dtype)
        reference = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert close(layer(x), reference, dtype)
        assert not close(layer(x), reference + 0.3, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_owns_its_weights(dtype):
    weight, x = torch.randn(32, 16).to(dtype), torch.randn(2, 16).to(dtype)
    if not can_pack(CPU, dtype):
        pytest.skip("packed linears are not supported on this CPU")
    layer = make_linear(weight)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)
    assert before.any()


@pytest.mark.parametrize("shape", [(96, 64), (64, 352), (512, 256)])
def test_packed_rows_have_the_same_bits_whatever_stands_beside_them(shape):
    if not can_pack(CPU, torch.bfloat16):
        pytest.skip("packed bfloat16 linears are not supported on this CPU")
    layer = make_linear(torch.randn(*shape).bfloat16())
    x = torch.randn(16, shape[1]).bfloat16()
    whole = layer(x)
    for rows in (1, 2, 3, 8):
        assert torch.equal(layer(x[:rows]), whole[:rows])
    assert not torch.equal(layer(x[1:2]), whole[:1])


def test_a_strided_input_is_read_right():
    layer, x = make_linear(weight := torch.randn(8, 16)), torch.randn(4, 32)
    assert close(layer(x[:, :16]), x[:, :16] @ weight.T, torch.float32)


def test_the_probe_falls_back_when_the_operators_are_missing_or_wrong(monkeypatch):
    for broken in (_missing, _wrong):
        linear.packing_works.cache_clear()
        monkeypatch.setattr(linear, "packed_linear", broken)
        assert not can_pack(CPU, torch.float32)
        weight, x = torch.randn(8, 4), torch.randn(2, 4)
        assert torch.equal(make_linear(weight)(x), F.linear(x, weight))
    linear.packing_works.cache_clear()


def _missing(weight, bias):
    raise AttributeError("no such operator")


def _wrong(weight, bias):
    return lambda x: F.linear(x, weight, bias) + 1.0


def test_other_dtypes_and_devices_are_not_packed():
    assert not can_pack(CPU, torch.float16)
    assert not can_pack(torch.device("meta"), torch.float32)


def test_agrees_has_teeth():
    x = torch.ones(1, 4)
    assert agrees(lambda v: v, lambda v: v, x)
    assert not agrees(lambda v: v + 1e-3, lambda v: v, x)


def definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_norm(dtype, offset, magnitude):
    weight, x = torch.randn(48).to(dtype), (torch.randn(5, 48) * magnitude + magnitude).to(dtype)
    theirs = definition(x, weight.float() + offset, 1e-5)
    assert close(make_norm(weight, 1e-5, offset=offset)(x), theirs, dtype)
    assert not close(make_norm(weight, 1e-5, offset=not offset)(x), theirs, dtype)


def test_norm_is_no_layer_norm():
    x = torch.randn(2, 8) + 3
    assert not close(make_norm(torch.ones(8), 1e-6)(x), F.layer_norm(x, (8,)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norm(dtype):
    weight, x = torch.randn(6, 16).to(dtype), torch.randn(3, 6, 16).to(dtype)
    assert close(make_head_norm(weight, 1e-6)(x), definition(x, weight, 1e-6), dtype)
    assert not close(make_head_norm(weight.flip(0), 1e-6)(x), definition(x, weight, 1e-6), dtype)


def test_norms_in_float64_lose_nothing():
    weight, x = torch.randn(6, 16).double(), torch.randn(3, 6, 16, dtype=torch.float64)
    for norm, used in ((make_head_norm(weight, 1e-6), weight), (make_norm(weight[0], 1e-6), weight[0])):
        assert torch.allclose(norm(x), definition(x, used, 1e-6), rtol=0, atol=1e-12)
        assert not torch.allclose(norm(x), definition(x.float(), used, 1e-6), rtol=0, atol=1e-12)


def test_the_form_for_other_devices_agrees():
    weight, x = torch.randn(32), torch.randn(4, 32)
    assert close(linear.rms_norm(weight, 32, 1e-6)(x), make_norm(weight, 1e-6)(x), torch.float32)


def test_small_float32_layers_stay_dense_where_rows_may_differ():
    weight, x = torch.randn(32, 16), torch.randn(3, 16)
    assert torch.equal(make_linear(weight, row_invariant=False)(x), F.linear(x, weight))


BOTH = pytest.mark.parametrize("rounded", [quantize_rows, quantize_groups])
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
IDS = torch.randint(3, 128, (45,), generator=torch.Generator().manual_seed(1)).tolist()
TREE = TokenTree.build([70, 71, 72, 73, 74], [-1, -1, 0, 0, 1])

Rounded = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def case(rounded: Rounded, outputs: int, inputs: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(outputs, inputs, generator=generator), torch.randn(rows, inputs, generator=generator)
    return *rounded(weight / inputs**0.5), x


def exact(weight: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    named = {"a.weight": weight, "a.scale": scale}
    return x.double() @ dequantized(named)["a.weight"].T


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights_are_rounded_once(rounded: Rounded, dtype: torch.dtype) -> None:
    weight, scale, _ = case(rounded, 6, 72)
    want = dequantized({"a.weight": weight, "a.scale": scale})["a.weight"]
    assert torch.equal(dense(weight, scale, dtype), want.float().to(dtype))
    twice = values_of(weight, scale.to(dtype))
    assert torch.equal(twice, want.float().to(dtype)) == (dtype is torch.float32 or rounded is quantize_groups)


@BOTH
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_blocks_and_with_inputs_in_another_order(rounded: Rounded, bias: bool, monkeypatch: Any) -> None:
    weight, scale, x = case(rounded, 70, 96)
    offset = torch.randn(70) if bias else None
    want = exact(weight, scale, x).float() + (0 if offset is None else offset)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    for block in (2**24, 96 * 16, 1):
        monkeypatch.setattr(linear, "DENSE_BLOCK", block)
        layer = make_quantized_linear(weight, scale, offset, dtype=torch.float32)
        assert torch.allclose(layer(x), want, atol=1e-5)
        moved = make_quantized_linear(weight, scale, offset, dtype=torch.float32, columns=order)
        assert torch.allclose(moved(x[:, order]), want, atol=1e-5)
        assert not torch.allclose(moved(x), want, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounded", [quantize_rows, quantize_groups])
def test_direct_products_agree_or_are_not_taken(rounded: Rounded, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DIRECT_SERVES", {})
    weight, scale, x = (one.to(device) for one in case(rounded, 128, 256, rows=9))
    layer = make_quantized_linear(weight, scale, dtype=torch.bfloat16)
    want = exact(weight, scale, x.bfloat16())
    assert (layer(x.bfloat16()) - want).square().mean().sqrt() < 2**-6 * want.square().mean().sqrt()
    assert {(weight.dtype, *weight.shape, weight.device): True} == linear.DIRECT_SERVES, (
        "this PyTorch has another operator"
    )
    assert (layer(x.bfloat16().flip(1)) - want).square().mean().sqrt() > 2**-6 * want.square().mean().sqrt()


def test_a_direct_product_that_errs_or_is_absent_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale, x = case(quantize_rows, 128, 256)
    right = torch._weight_int8pack_mm  # private: PyTorch's operator
    readable = linear.by_blocks(weight, scale, None, x.bfloat16())

    def absent(*args: Any) -> Any:
        raise NotImplementedError

    for operator, taken in ((right, True), (lambda x, w, s: right(x, w, s) * 1.05, False), (absent, False)):
        monkeypatch.setattr(linear, "DIRECT_SERVES", {})
        monkeypatch.setattr(torch, "_weight_int8pack_mm", operator)  # private: PyTorch's operator
        layer = make_quantized_linear(weight, scale, dtype=torch.bfloat16)
        assert list(linear.DIRECT_SERVES.values()) == [taken]
        assert taken or torch.equal(layer(x.bfloat16()), readable)


def test_strict_layers_keep_a_rows_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def depends_on_rows(
        weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        calls.append(len(x))
        return x @ dense(weight, scale, x.dtype).T + 1e-3 * len(x)

    monkeypatch.setattr(linear, "by_blocks", depends_on_rows)
    weight, scale, x = case(quantize_groups, 40, 64, rows=20)
    layer: Map = make_quantized_linear(weight, scale, dtype=torch.float32, row_invariant="proven")
    assert torch.equal(layer(x[3:4]), layer(x)[3:4])
    assert calls[-1] == 16
    loose = make_quantized_linear(weight, scale, dtype=torch.float32)
    assert not torch.equal(loose(x[3:4]), loose(x)[3:4])


def test_an_odd_number_of_inputs_is_rejected() -> None:
    with pytest.raises(UnsupportedModelError, match="even number of inputs, a weight has 7; use quantization='int8'"):
        quantize_groups(torch.ones(3, 7))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return cache(lambda name: checkpoints.write(name, "new", tmp_path_factory.mktemp(name)))


FAMILIES = sorted(set(CASES) - {"llama3", "llama-linear", "llama-yarn", "gemma3", "qwen3_moe-unnormed"})


@pytest.mark.parametrize(("name", "form"), list(zip(FAMILIES, cycle(("int8", "int4")), strict=False)))
def test_every_family_runs_the_model_that_its_small_weights_stand_for(folders: Any, name: str, form: Form) -> None:
    """Families take turns with the forms, which do the same to all maps of all families."""
    folder = folders(name)
    runner = load_runner(folder, quantization=form)
    native = native_of(runner)
    assert native is not None
    assert runner.info.quantization == form
    spec = spec_from_config(read_config(folder))
    plain = load_weights(Checkpoint(folder), spec, device=CPU, dtype=torch.float32)
    read = {key: padded(key, value, spec) for key, value in plain.items()} if native.spec != spec else plain
    small = {key: value.float() for key, value in dequantized(quantize(read, native.spec, form)).items()}
    untied = replace(native.spec, tied=False)
    want = logits(type(runner)(untied, small, name="t", device=CPU, dtype=torch.float32, compiled=False))
    amplified = any(state.heads for state in spec.states.values())  # rounded activations, by a recurrence
    assert near(logits(runner), want, 2e-2 if amplified else 2e-3)
    dense = logits(type(runner)(spec, plain, name="t", device=CPU, dtype=torch.float32, compiled=False))
    assert not near(dense, want, 2e-2 if amplified else 2e-3)
    cache = runner.open()
    runner.extend([cache], [IDS[:30]])
    tree = runner.score([cache], [IDS[30]], [TREE]).logits
    for token, row in ((IDS[30], 0), (70, 1), (73, 4)):
        one = runner.score([cache], [token], [EMPTY_TREE]).logits[0]
        assert near(tree[row], one, 2e-2 if amplified else 2e-3)
        runner.commit([cache], [()])
    assert not near(tree[3], tree[4])


def near(a: torch.Tensor, b: torch.Tensor, share: float = 2e-3) -> bool:
    return bool((a - b).abs().max() < share * b.std())


def logits(runner: Runner) -> torch.Tensor:
    return runner.extend([runner.open()], [IDS], all_logits=True).logits
