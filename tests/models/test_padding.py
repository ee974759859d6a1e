"""Sizes that do not fill vectors: padded models in compiled passes against PyTorch's operators over the plain ones, and
against transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import perturb
from tiny_llama import CPU, close, spec_of, stepwise, tiny_llama, tokens, whole_pass

from paceline.checkpoints import quantize, targets
from paceline.models import LayerPlan, LayerSpec, ModelSpec, MoeSpec, RopeSpec, load_runner
from paceline.models.passes import EagerPasses
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.passes.padding import padded, padded_spec
from paceline.models.runners import NativeRunner, layer_drafts_of, what_varies
from paceline.tree import TokenTree

Weights = Mapping[str, torch.Tensor]

IDS = tokens(60)
TREE = TokenTree.build([5, 6, 7, 8, 9, 5], [-1, -1, 0, 1, 2, 3])
PLAN = LayerPlan(skip_attention=(1,), skip_mlp=(0,))


def heads_of(size: int, dims: int | None = None) -> dict[str, Any]:
    return {"head_dim": size, "ropes": {"default": RopeSpec(theta=10000.0, dims=dims or size)}}


MIXTURE = {
    "moe": MoeSpec(experts=5, top_k=2, intermediate=44, norm_top_k=True, bias=True),
    "layers": (LayerSpec(moe=True), LayerSpec(rope=None), LayerSpec(moe=True)),
    "activation": "clamped_swiglu",
}
FEATURES: dict[str, dict[str, Any]] = {
    "heads of 80": heads_of(80),
    "heads of 100": heads_of(100) | {"qkv_bias": True, "o_bias": True},
    "heads of 72, normed one by one": heads_of(72) | {"qk_norm": "head"},
    "heads of 80, normed together": heads_of(80) | {"qk_norm": "full", "norm_offset": True},
    "heads of 100, a part rotated": heads_of(100, 50) | {"qk_norm": "head"},
    "heads of 80, vectors rotated": heads_of(80, 32),
    "heads of 64, less than a vector rotated": heads_of(64, 16) | {"qk_norm": "head"},
    "heads of 80 with sinks and a scale": heads_of(80) | {"attention_sinks": True, "attention_scale": 0.3},
    "angles stretched": {
        "head_dim": 80,
        "ropes": {"default": RopeSpec(theta=1e4, dims=80, kind="yarn", scaling={"factor": 4.0}, max_position=512)},
    },
    "inner width": heads_of(32) | {"intermediate_size": 83},
    "inner width without a gate": heads_of(32)
    | {"intermediate_size": 83, "gated": False, "activation": "gelu", "mlp_bias": True},
    "experts": heads_of(80) | MIXTURE,
    "an MLP beside experts": heads_of(80)
    | {
        "moe": MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=False, shared=51, shared_gate=True),
        "layers": MIXTURE["layers"],
    },
}


def plain_model(changes: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Weights]:
    """A spec with features and random weights. The large epsilon shows what padding does to it."""
    config = tiny_llama(hidden_size=64, intermediate_size=96, vocab_size=72).config
    spec = replace(spec_of(config), norm_eps=0.1, **changes)
    generator = torch.Generator().manual_seed(0)
    shapes = {target.name: target.shape for target in targets(spec)}
    return spec, {name: (torch.randn(shape, generator=generator) / 4).to(dtype) for name, shape in shapes.items()}


def wide_model(spec: ModelSpec, weights: Weights) -> tuple[ModelSpec, Weights]:
    return padded_spec(spec), {name: padded(name, weight, spec) for name, weight in weights.items()}


def runner_of(spec: ModelSpec, weights: Weights, **options: Any) -> NativeRunner:
    dtype = weights["embed.weight"].dtype
    return NativeRunner(spec, dict(weights), name="tiny", device=CPU, dtype=dtype, **options)


@pytest.mark.parametrize("name", FEATURES)
def test_a_padded_model_gives_the_numbers_of_the_plain_one(name: str) -> None:
    spec, weights = plain_model(FEATURES[name])
    plain, wide = runner_of(spec, weights), wide_model(spec, weights)
    compiled, operators = runner_of(*wide), runner_of(*wide, compiled=False)
    assert isinstance(plain.passes, EagerPasses)
    assert isinstance(compiled.passes, CompiledDecoder)
    want, states = whole_pass(plain, IDS), plain.run_layers([plain.open()], [4], [TREE], plan=PLAN).states
    assert want.std() > 0.05
    for one in (compiled, operators):
        assert close(whole_pass(one, IDS), want)
        assert close(one.run_layers([one.open()], [4], [TREE], plan=PLAN).states, states)
    assert not close(whole_pass(compiled, [IDS[1], *IDS[1:]]), want)


@pytest.mark.parametrize("name", ["heads of 72, normed one by one", "heads of 80, normed together"])
@pytest.mark.parametrize("spoilt", ["epsilon", "weights"])
def test_norms_that_count_the_zeros_would_be_noticed(name: str, spoilt: str) -> None:
    spec, weights = plain_model(FEATURES[name])
    want, (wide, found) = whole_pass(runner_of(spec, weights), IDS), wide_model(spec, weights)
    if spoilt == "epsilon":
        wide = replace(wide, qk_norm_eps=None)
    else:
        factor, offset = (wide.head_dim / spec.head_dim) ** 0.5, 1.0 if spec.norm_offset else 0.0
        found = {k: (v + offset) * factor - offset if k.endswith(("q_norm.weight", "k_norm.weight")) else v
                 for k, v in found.items()}  # fmt: skip
    assert not close(whole_pass(runner_of(wide, found), IDS), want, 1e-3)


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["heads of 80", "heads of 100, a part rotated", "experts"])
def test_rows_keep_their_bits_drafted_or_not(name: str, form: Any) -> None:
    spec, weights = wide_model(*plain_model(FEATURES[name], torch.bfloat16))
    runner = runner_of(spec, quantize(weights, spec, form) if form else weights)
    assert isinstance(runner.passes, CompiledDecoder)
    assert what_varies(runner) is None
    want = stepwise(runner, IDS)
    assert torch.equal(whole_pass(runner, IDS), want)
    assert torch.equal(stepwise(runner, IDS, 5), want)
    cache = runner.open()
    runner.extend([cache], [IDS[:20]])
    rows = runner.score([cache], IDS[20:21], [TREE]).logits
    for node in range(len(TREE)):
        path = [int(TREE.tokens[i]) for i in TREE.path(node)]
        assert torch.equal(rows[1 + node], whole_pass(runner, [*IDS[:21], *path])[-1])
    assert not torch.equal(want[1:], want[:-1])


def test_drafts_by_part_of_the_layers_read_the_same_cache() -> None:
    spec, weights = plain_model(FEATURES["heads of 72, normed one by one"])
    found = []
    for runner in (runner_of(*wide_model(spec, weights)), runner_of(spec, weights)):
        cache, drafts = runner.open(), layer_drafts_of(runner, "kangaroo")
        runner.extend([cache], [IDS[:20]])
        drafts.step([cache], [[4]], LayerPlan(stop=2))
        found.append(drafts.step([cache], [[4, 5]], LayerPlan(stop=2)).logits)
    assert close(*found)
    assert found[0].std() > 0.05


def test_the_spec_of_a_padded_model() -> None:
    spec, _ = plain_model(heads_of(80))
    wide = padded_spec(spec)
    assert (wide.head_dim, wide.ropes["default"].dims, wide.ropes["default"].width) == (96, 80, 96)
    assert wide.scale == spec.scale
    assert padded_spec(wide) is wide
    full, _ = plain_model(heads_of(64, 32))
    assert padded_spec(full) is full
    small, _ = plain_model(heads_of(16))
    assert padded_spec(small) is small, "heads would double"


SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 80},
    "qwen3": {"head_dim": 100},
    "olmo2": {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1},
    "cohere2": {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8},
    "glm4": {"head_dim": 72},
}
"""cohere2 and glm4 rotate neighbours, glm4 half of each head."""


def checkpoint(family: str, folder: Path) -> Any:
    """A checkpoint in `folder`; its model in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**SIZES, **HEADS, **CHECKPOINTS[family]})
    model = perturb(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_checkpoints_are_padded_as_they_are_read(family: str, tmp_path: Path) -> None:
    model, runner = checkpoint(family, tmp_path), load_runner(tmp_path)
    assert isinstance(runner, NativeRunner)
    assert isinstance(runner.passes, CompiledDecoder)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    assert want.std() > 0.2
    assert close(whole_pass(runner, IDS), want)
    assert close(stepwise(runner, IDS), want)


@pytest.mark.parametrize(("form", "error"), [("int8", 0.05), ("int4", 0.4)])
def test_weights_are_rounded_behind_padding(form: str, error: float, tmp_path: Path) -> None:
    model, runner = checkpoint("qwen3", tmp_path), load_runner(tmp_path, quantization=form)
    assert isinstance(runner, NativeRunner)
    assert isinstance(runner.passes, CompiledDecoder)
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    assert (whole_pass(runner, IDS) - want).std() < error * want.std()
    part = load_runner(tmp_path, quantization=form, head_rows=range(40))
    rows = part.extend([part.open()], [IDS], all_logits=True).logits
    assert close(rows[:, :40], whole_pass(runner, IDS)[:, :40])
