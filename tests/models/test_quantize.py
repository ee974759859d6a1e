"""models/quantize.py: rounding to int8, and models that are loaded with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write
from tiny_llama import spec_of, tiny_llama, weights_of

from paceline import LLM, SamplingParams
from paceline.bench.demo import BUNDLED_TARGET
from paceline.controllers.cost_store import CostKey
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models.kernels import choose
from paceline.models.load import load_runner
from paceline.models.quantize import dequantized, is_quantized, quantize, quantize_rows, quantized_sizes

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


def test_loading_says_what_it_did_and_is_told_apart(tmp_path: Path) -> None:
    folder = small_llama(tmp_path)
    dense, small, again = load_runner(folder), *(load_runner(folder, quantization=name) for name in ("int8", "int8_weight_only"))
    assert (dense.info.quantization, small.info.quantization) == (None, "int8")
    assert small.info == again.info
    assert small.info.fingerprint == dense.info.fingerprint + "-int8"
    assert CostKey.of(small.info) != CostKey.of(dense.info)
    assert small.info.dtype is dense.info.dtype
    rows = [runner.extend([runner.open()], [[5, 6, 7]]).logits for runner in (dense, small, again)]
    assert torch.equal(rows[1], rows[2])
    assert not torch.equal(rows[1], rows[0])


def test_refusals_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"^quantization must be None or one of int8, .* got 'int3'$"):
        LLM(quantization="int3")
    with pytest.raises(ConfigError, match="got 'fp8'"):
        load_runner(folder, quantization="fp8")
    for options in ({"dtype": "float16"}, {"native": False}):
        with pytest.raises(UnsupportedModelError, match="quantization") as caught:
            load_runner(folder, quantization="int8", **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(choose, "machine_lacks", lambda dtype, quantized: "a CPU")
    with pytest.raises(UnsupportedModelError, match="do not cover: a CPU"):
        load_runner(folder, quantization="int8")


@pytest.fixture(scope="module")
def small() -> LLM:
    return LLM(speculative_config=None, quantization="int8", threads=2)


def ids(llm: LLM, count: int = len(PROMPTS)) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS[:count], GREEDY)]


def test_the_bundled_model_keeps_nearly_all_of_its_greedy_tokens(small: LLM) -> None:
    dense: Any = load_runner(BUNDLED_TARGET)
    runner: Any = small.runner
    assert 0.4 < runner.info.weight_bytes / dense.info.weight_bytes < 0.55
    text = [token for one in ids(small) for token in one]
    logits = [one.extend([one.open()], [text], all_logits=True).logits.float() for one in (dense, runner)]
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() > 0.9
    assert 0 < (logits[0] - logits[1]).abs().mean() < 0.05 * logits[0].std()


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
