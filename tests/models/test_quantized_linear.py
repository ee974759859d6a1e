"""models/quantized_linear.py: products with small weights, and models of all families that run with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import CASES
from tiny_llama import CPU

from paceline.errors import UnsupportedModelError
from paceline.models import load_runner
from paceline.models.decoder import Map, NativeRunner, dense, make_quantized_linear
from paceline.models.decoder import linear as module
from paceline.models.loading import (
    Checkpoint,
    Form,
    dequantized,
    factors,
    load_weights,
    quantize,
    quantize_groups,
    quantize_rows,
    read_config,
    spec_from_config,
    unpacked,
)
from paceline.tree import EMPTY_TREE, TokenTree

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
    twice = unpacked(weight).to(dtype) * factors(scale, weight).to(dtype)
    assert torch.equal(twice, want.float().to(dtype)) == (dtype is torch.float32 or rounded is quantize_groups)


@BOTH
@pytest.mark.parametrize("bias", [False, True])
def test_products_by_blocks_and_with_inputs_in_another_order(rounded: Rounded, bias: bool, monkeypatch: Any) -> None:
    weight, scale, x = case(rounded, 70, 96)
    offset = torch.randn(70) if bias else None
    want = exact(weight, scale, x).float() + (0 if offset is None else offset)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    for block in (2**24, 96 * 16, 1):
        monkeypatch.setattr(module, "DENSE_BLOCK", block)
        linear = make_quantized_linear(weight, scale, offset, dtype=torch.float32)
        assert torch.allclose(linear(x), want, atol=1e-5)
        moved = make_quantized_linear(weight, scale, offset, dtype=torch.float32, columns=order)
        assert torch.allclose(moved(x[:, order]), want, atol=1e-5)
        assert not torch.allclose(moved(x), want, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounded", [quantize_rows, quantize_groups])
def test_direct_products_agree_or_are_not_taken(rounded: Rounded, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DIRECT_SERVES", {})
    weight, scale, x = (one.to(device) for one in case(rounded, 128, 256, rows=9))
    linear = make_quantized_linear(weight, scale, dtype=torch.bfloat16)
    want = exact(weight, scale, x.bfloat16())
    assert (linear(x.bfloat16()) - want).square().mean().sqrt() < 2**-6 * want.square().mean().sqrt()
    if device == "cuda" or rounded is quantize_rows:
        assert {(weight.dtype, *weight.shape, weight.device): True} == module._DIRECT_SERVES, (
            "this PyTorch has another operator"
        )


def test_a_direct_product_that_errs_or_is_absent_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale, x = case(quantize_rows, 128, 256)
    right = torch._weight_int8pack_mm
    readable = module._by_blocks(weight, scale, None, x.bfloat16())

    def absent(*args: Any) -> Any:
        raise NotImplementedError

    for operator, taken in ((right, True), (lambda x, w, s: right(x, w, s) * 1.05, False), (absent, False)):
        monkeypatch.setattr(module, "_DIRECT_SERVES", {})
        monkeypatch.setattr(torch, "_weight_int8pack_mm", operator)
        linear = make_quantized_linear(weight, scale, dtype=torch.bfloat16)
        assert list(module._DIRECT_SERVES.values()) == [taken]
        assert taken or torch.equal(linear(x.bfloat16()), readable)


def test_strict_layers_keep_a_rows_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def depends_on_rows(
        weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
    ) -> torch.Tensor:
        calls.append(len(x))
        return x @ dense(weight, scale, x.dtype).T + 1e-3 * len(x)

    monkeypatch.setattr(module, "_by_blocks", depends_on_rows)
    weight, scale, x = case(quantize_groups, 40, 64, rows=20)
    linear: Map = make_quantized_linear(weight, scale, dtype=torch.float32, row_invariant="proven")
    assert torch.equal(linear(x[3:4]), linear(x)[3:4])
    assert calls[-1] == 16
    loose = make_quantized_linear(weight, scale, dtype=torch.float32)
    assert not torch.equal(loose(x[3:4]), loose(x)[3:4])


def test_an_odd_number_of_inputs_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="even number of inputs, a weight has 7; use quantization='int8'"):
        quantize_groups(torch.ones(3, 7))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return cache(lambda name: checkpoints.write(name, "new", tmp_path_factory.mktemp(name)))


FAMILIES = sorted(set(CASES) - {"llama3", "llama-linear", "llama-yarn", "gemma3", "qwen3_moe-unnormed"})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_every_family_runs_the_model_that_its_small_weights_stand_for(folders: Any, name: str, form: Form) -> None:
    folder = folders(name)
    runner = load_runner(folder, quantization=form)
    assert isinstance(runner, NativeRunner)
    assert runner.info.quantization == form
    spec = spec_from_config(read_config(folder))
    plain = load_weights(Checkpoint(folder), spec, device=CPU, dtype=torch.float32)
    near = {key: value.float() for key, value in dequantized(quantize(plain, spec, form)).items()}
    untied = replace(spec, tied=False)
    want = logits(type(runner)(untied, near, name="t", device=CPU, dtype=torch.float32, compiled=False))
    assert close(logits(runner), want)
    dense = logits(type(runner)(spec, plain, name="t", device=CPU, dtype=torch.float32, compiled=False))
    assert not close(dense, want)
    cache = runner.open()
    runner.extend([cache], [IDS[:30]])
    tree = runner.score([cache], [IDS[30]], [TREE]).logits
    for token, row in ((IDS[30], 0), (70, 1), (73, 4)):
        assert close(tree[row], runner.score([cache], [token], [EMPTY_TREE]).logits[0])
        runner.commit([cache], [()])
    assert not close(tree[3], tree[4])


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-3 * b.std())


def logits(runner: NativeRunner) -> torch.Tensor:
    return runner.extend([runner.open()], [IDS], all_logits=True).logits
