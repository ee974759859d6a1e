"""Rounding to int8 and int4, and models that are loaded with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import edit_weights, write
from tiny_llama import spec_of, tiny_llama, weights_of

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_TARGET
from paceline.checkpoints import (
    GROUP,
    Form,
    dequantized,
    form_of,
    is_quantized,
    quantize,
    quantized_sizes,
    unpacked,
    values_of,
)
from paceline.checkpoints import quantization as module
from paceline.checkpoints.quantization import quantize_groups, quantize_rows, scale_of
from paceline.controllers.auto import CostKey
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models import load_runner
from paceline.models.passes import eligibility
from paceline.models.passes.compiled_decoder import CompiledDecoder

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
PROMPTS = ["def add(a, b):", "The sea was", "Question: how many apples?"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_to_the_nearest_multiple_of_a_rows_scale(dtype: torch.dtype) -> None:
    weight = torch.randn(2050, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, scale = quantize_rows(weight)
    assert whole.dtype is torch.int8
    assert torch.equal(scale, weight.float().abs().amax(1) / 127)
    assert torch.equal(whole.abs().amax(1), torch.full((2050,), 127, dtype=torch.int8))
    error = (whole.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * (0.5 + 1e-4)).all()
    assert not (error <= scale.double()[:, None] * 0.4).all()


def test_rows_of_zeros_and_rows_that_are_not_finite() -> None:
    weight = torch.ones(4, 8)
    weight[0], weight[1, 3], weight[2, 5] = 0.0, torch.inf, torch.nan
    whole, scale = quantize_rows(weight)
    assert scale[0] == 1
    assert not whole[0].any()
    assert scale[1:3].isnan().all()
    assert scale[3] == 1 / 127


def spread(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The scale of every weight."""
    return scale[..., 0].double().repeat_interleave(GROUP, 1)[:, : weight.shape[1]]


@pytest.mark.parametrize("inputs", [24, 32, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_rounded_to_sixteen_values(inputs: int, dtype: torch.dtype) -> None:
    weight = torch.randn(1030, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    pairs, scale = quantize_groups(weight)
    assert (pairs.dtype, pairs.shape) == (torch.uint8, (1030, inputs // 2))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (1030, -(-inputs // GROUP), 2))
    whole, near = unpacked(pairs), dequantized({"a.weight": pairs, "a.scale": scale})["a.weight"]
    assert whole.unique().tolist() == list(range(16))
    assert torch.equal(scale[..., 1] * 8, (scale[..., 1] * 8).round())
    unclipped = (whole > 0) & (whole < 15)
    error = (near - weight.double()).abs() / spread(weight, scale).abs()
    assert (error[unclipped] <= 0.5001).all()
    assert torch.equal(whole[:, 0], (pairs[:, 0] & 15).to(torch.int8))
    plain = weight.double().abs().amax(1, keepdim=True) / 7
    assert (near - weight.double()).square().mean() < (
        (weight.double() / plain).round() * plain - weight.double()
    ).square().mean()
    assert not (error[unclipped] <= 0.4).all()


def near_values(pairs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values_of(pairs, scale.float())


def test_of_the_grids_the_one_of_least_error_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))

    def error() -> float:
        return float((near_values(*quantize_groups(weight)) - weight).square().mean())

    best, shares = error(), module.SHARES
    monkeypatch.setattr(module, "STEPS", ())
    assert error() > 1.01 * best
    for share in shares:
        monkeypatch.setattr(module, "SHARES", (share,))
        assert error() > 1.02 * best


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 8, 11, 14, 15])
def test_numbers_on_a_grid_of_up_to_sixteen_values_are_found_again(steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, steps + 1, (64, GROUP), generator=generator)
    numbers[:, 0], numbers[:, 1] = 0, steps
    for zero in (8.0, steps / 2, 0.25, -2.0):
        values = (numbers - zero) * 0.0137
        near = near_values(*quantize_groups(values))
        assert (near - values).abs().max() < 0.0137 * 15 * 2.0**-8
        assert (near_values(*quantize_groups(values + torch.randn(64, GROUP) * 0.004)) - values).abs().max() > 0.001


@pytest.mark.parametrize("values", [(1.0, 1.0), (-1.0, -1.0), (1.0, 1.01), (-3.0, -2.5), (0.0, 1e-30), (-1e30, 1e30)])
def test_groups_whose_zero_lies_far_outside(values: tuple[float, float]) -> None:
    weight = torch.tensor(values).repeat(2, GROUP // 2)
    near = near_values(*quantize_groups(weight))
    assert ((near - weight).abs() <= 0.04 * weight.abs().max()).all()


def test_groups_of_zeros_and_groups_that_are_not_finite() -> None:
    weight = torch.ones(4, 64)
    weight[0, :32], weight[1, 3], weight[2, 40] = 0.0, torch.inf, torch.nan
    pairs, scale = quantize_groups(weight)
    assert scale[0, 0, 0] == 1
    assert not values_of(pairs, scale)[0, :32].any()
    assert scale[..., 0].isnan().tolist() == [[False, False], [True, False], [False, True], [False, False]]


@pytest.mark.parametrize("tied", [False, True])
def test_what_becomes_int4(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    dense, spec = weights_of(model), spec_of(model.config)
    small = quantize(dense, spec, "int4")
    assert (form_of(small), form_of(quantize(dense, spec)), form_of(dense)) == ("int4", "int8", None)
    kinds = {
        name: weight.dtype for name, weight in small.items() if scale_of(name) in small and not name.endswith(".scale")
    }
    assert {name for name, kind in kinds.items() if kind is torch.int8} == {"head.weight"}
    assert len(kinds) == 1 + 4 * 3
    assert sum(quantized_sizes(spec, torch.float32, "int4").values()) == sum(weight.nbytes for weight in small.values())


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_quantised_and_what_is_not(tied: bool) -> None:
    model = tiny_llama(tie_word_embeddings=tied)
    dense, spec = weights_of(model), spec_of(model.config)
    small = quantize(dense, spec)
    assert is_quantized(small)
    assert not is_quantized(dense)
    kept = {name for name, weight in small.items() if weight.dtype is torch.float32 and not name.endswith(".scale")}
    assert kept == {name for name in dense if "norm" in name or name == "embed.weight"}
    assert {name for name in small if name.endswith(".scale")} == {
        "head.scale",
        *(f"layers.{i}.{part}.scale" for i in range(3) for part in ("qkv", "o", "gate_up", "down")),
    }
    near, head = dequantized(small), dense["embed.weight" if tied else "head.weight"]
    for name, weight in (dense | {"head.weight": head}).items():
        assert (near[name] - weight).abs().max() <= 0.51 * weight.abs().max() / 127
    sizes = quantized_sizes(spec, torch.float32)
    assert sum(sizes.values()) == sum(weight.nbytes for weight in small.values())


def small_llama(folder: Path, **changes: Any) -> Path:
    return write(folder, **{"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, **changes})


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_loading_says_what_it_did_and_is_told_apart(tmp_path: Path, form: Form) -> None:
    folder = small_llama(tmp_path)
    names = (form, f"{form}_weight_only", f"{form}wo")
    dense, small, again, _ = load_runner(folder), *(load_runner(folder, quantization=name) for name in names)
    assert (dense.info.quantization, small.info.quantization) == (None, form)
    assert small.info == again.info
    assert small.info.fingerprint == f"{dense.info.fingerprint}-{form}"
    assert CostKey.of(small.info) != CostKey.of(dense.info)
    assert small.info.dtype is dense.info.dtype
    rows = [runner.extend([runner.open()], [[5, 6, 7]]).logits for runner in (dense, small, again)]
    assert torch.equal(rows[1], rows[2])
    assert not torch.equal(rows[1], rows[0])


def test_what_is_rejected_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"^quantization must be None or one of none, int8, .* got 'int3'$"):
        LLM(quantization="int3")
    with pytest.raises(ConfigError, match="got 'fp8'"):
        load_runner(folder, quantization="fp8")
    with pytest.raises(UnsupportedModelError, match="quantization") as caught:
        load_runner(folder, quantization="int8", native=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_pytorchs_operators_serve_where_compiled_passes_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    folder = small_llama(tmp_path)
    edit_weights(folder, lambda weights: weights.update({name: one.half() for name, one in weights.items()}))
    compiled: Any = load_runner(folder, quantization=form, dtype="float32")
    half: Any = load_runner(folder, quantization=form, dtype="float16")
    monkeypatch.setattr(eligibility, "machine_lacks", lambda dtype, quantization: "a CPU")
    plain: Any = load_runner(folder, quantization=form, dtype="float32")
    assert [isinstance(runner.passes, CompiledDecoder) for runner in (compiled, half, plain)] == [True, False, False]
    assert plain.info == replace(compiled.info, passes="operators")
    rows = [runner.extend([runner.open()], [[5, 6, 7]]).logits.float() for runner in (compiled, plain, half)]
    error = [float((row - rows[1]).abs().max() / rows[1].std()) for row in rows]
    assert 0 < error[0] < 2e-3
    assert error[2] < 0.1
    other: Any = load_runner(folder, dtype="float32")
    assert (other.extend([other.open()], [[5, 6, 7]]).logits - rows[1]).abs().max() > 2 * error[0] * rows[1].std()


@pytest.fixture(scope="module", params=["int8", "int4"])
def small(request: pytest.FixtureRequest) -> LLM:
    return LLM(speculative_config=None, quantization=request.param, threads=2)


def ids(llm: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS[:count], GREEDY)]


def test_the_bundled_model_keeps_nearly_all_of_its_greedy_tokens(small: LLM) -> None:
    dense: Any = load_runner(BUNDLED_TARGET)
    runner: Any = small.runner
    share, argmax, error = {"int8": (0.5, 0.9, 0.05), "int4": (0.36, 0.8, 0.15)}[runner.info.quantization]
    assert 0.8 * share < runner.info.weight_bytes / dense.info.weight_bytes < 1.1 * share
    text = [token for one in ids(small) for token in one]
    logits = [one.extend([one.open()], [text], all_logits=True).logits.float() for one in (dense, runner)]
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() > argmax
    assert 0 < (logits[0] - logits[1]).abs().mean() < error * logits[0].std()


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 6},
        {"method": "draft_model", "num_speculative_tokens": 8, "tree_width": 2},
        {"method": ["ngram", "draft_model"]},
    ],
)
def test_drafts_verify_to_the_tokens_of_the_quantised_model(small: LLM, config: dict[str, Any]) -> None:
    assert small.exactness.proven
    fast = small.with_speculative_config(config)
    assert ids(fast) == ids(small)
    assert ids(fast, 1) == ids(small, 1)
