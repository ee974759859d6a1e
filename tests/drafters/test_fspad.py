"""FSPAD's head: what the sampler and the decoupled state do; its rows are compared with the paper's in test_eagle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.stand_ins import head_weights, written_head
from paceline.models import Runner, load_runner
from paceline.models.heads import HeadConfig
from paceline.models.runners import FeatureHead
from paceline.tree import EMPTY_TREE, TokenTree
from tests.drafters.head_worlds import close, head_config

Weights = dict[str, torch.Tensor]
TOKENS = [7, 9, 11]


@pytest.fixture(scope="module")
def target(folder: Path) -> Runner:
    return load_runner(str(folder), dtype="float32")


@pytest.fixture
def config(target: Runner) -> HeadConfig:
    return head_config("fspad", target.info, draft_vocab_size=target.info.vocab_size, inner_size=24)


@pytest.fixture
def weights(config: HeadConfig) -> Weights:
    """The target's embedding and head; matrices of size 1."""
    return head_weights(config)


def drafted(target: Runner, config: HeadConfig, weights: Weights, tokens: list[int]) -> list[torch.Tensor]:
    """Logits and the state that goes on, after each of a text's tokens, which go with states made of the same noise;
    all behind the first go on from the head's own.
    """
    head = FeatureHead.load(written_head(config, weights), target, ("eagle", "fspad"))
    cache, found = head.open(), list[torch.Tensor]()
    states = torch.randn(1, target.info.hidden_size, generator=torch.Generator().manual_seed(0))
    for i, token in enumerate(tokens):
        fed = TokenTree.chain([0] * i) if i else EMPTY_TREE
        result = head.step([cache], [fed], [i], tokens=[token], states=states, picked=[0])
        states = result.states
        found += [result.logits[0], states[0]]
    return found


def as_eagle(config: HeadConfig, weights: Weights, gate: torch.Tensor) -> tuple[HeadConfig, Weights]:
    """The EAGLE head whose fc holds the sampler with that constant gate (inner,)."""
    d = config.hidden_size
    own = {name: one for name, one in weights.items() if not name.startswith(("sampler.", "feature_proj."))}
    sampler = torch.eye(d) + weights["sampler.down.weight"] @ (gate[:, None] * weights["sampler.up.weight"])
    of_token, of_state = weights["fc.weight"].split(d, 1)
    own["fc.weight"] = torch.cat((of_token, of_state @ sampler), 1)
    return replace(config, method="eagle", inner_size=None), own


@pytest.mark.parametrize("constant", [True, False])
def test_a_constant_gate_is_concatenation_and_fc(
    target: Runner, config: HeadConfig, weights: Weights, constant: bool
) -> None:
    bias = torch.linspace(-1, 2, 24)
    weights |= {"sampler.gate.bias": bias, "feature_proj.weight": torch.zeros_like(weights["feature_proj.weight"])}
    if constant:
        weights["sampler.gate.weight"] = torch.zeros_like(weights["sampler.gate.weight"])
    own = drafted(target, config, weights, TOKENS)
    eagle = drafted(target, *as_eagle(config, weights, torch.nn.functional.silu(bias)), TOKENS)
    assert all(close(a, b) for a, b in zip(own, eagle, strict=True)) is constant


@pytest.mark.parametrize("samples", [True, False])
def test_the_sampler_tells_tokens_apart(target: Runner, config: HeadConfig, weights: Weights, samples: bool) -> None:
    """Where fc does not see the token, the sampler alone does."""
    weights["fc.weight"][:, : config.hidden_size] = 0.0
    if not samples:
        weights["sampler.down.weight"] = torch.zeros_like(weights["sampler.down.weight"])
    one, other = (drafted(target, config, weights, [token])[1] for token in (7, 8))
    assert close(one, other) is not samples


def test_what_is_aligned_is_read_by_later_levels_alone(target: Runner, config: HeadConfig, weights: Weights) -> None:
    """The first token's logits are those of the layer's state; the second level reads the aligned one."""
    coupled = weights | {"feature_proj.weight": torch.zeros_like(weights["feature_proj.weight"])}
    own, other = (drafted(target, config, one, TOKENS) for one in (weights, coupled))
    assert close(own[0], other[0])
    assert not close(own[1], other[1])
    assert not close(own[2], other[2])
    assert close(own[1], other[1] + weights["feature_proj.weight"] @ other[1])
