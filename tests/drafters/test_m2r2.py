"""M2R2: a stream at rate 1 is the target, and nothing of it stays behind; the text stays the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stand_ins import written_rate_adapters
from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.self.m2r2 import M2R2Drafter
from paceline.errors import CheckpointError, ConfigError
from paceline.models import Runner, load_runner
from paceline.models.heads import RateAdapters
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from tests.drafters.head_worlds import GREEDY, PROMPTS, outputs

PROMPT = [(7 * i) % 500 + 4 for i in range(30)]


def adapters(target: Runner, rate: int, **more: Any) -> str:
    return written_rate_adapters(target.info.hidden_size, target.info.num_layers, rate, **more)


def accepted(plain: LLM, rate: int, scale: float) -> float:
    """Share of the drafted tokens that stood."""
    entry = {"method": "m2r2", "model": adapters(plain.runner, rate, scale=scale), "num_speculative_tokens": 4}
    fast = plain.with_speculative_config(entry | {"controller": "fixed"})
    found = fast.generate(PROMPTS, GREEDY)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    drafted = sum(out.metrics.num_draft_tokens for out in found)
    assert drafted > 20
    return sum(out.metrics.num_accepted_tokens for out in found) / drafted


def test_at_rate_1_without_adapters_the_stream_is_the_target(plain: LLM) -> None:
    """Controls: layers left out, and adapters that add something."""
    assert accepted(plain, 1, 0.0) > 0.99
    assert accepted(plain, 2, 0.0) < 0.9
    assert accepted(plain, 1, 0.5) < 0.9


def test_it_drafts_for_a_quantised_target_by_its_own_passes() -> None:
    rounded = LLM(speculative_config=None, dtype="bfloat16", quantization="int8", seed=1)
    entry = {"method": "m2r2", "model": adapters(rounded.runner, 2), "num_speculative_tokens": 3}
    fast = rounded.with_speculative_config(entry)
    assert outputs(fast, GREEDY) == outputs(rounded, GREEDY)


class World:
    """One drafter over a target, whose cache it drafts in."""

    def __init__(self, folder: Path, rate: int = 2) -> None:
        self.target: Any = load_runner(str(folder), dtype="float32")
        args = DrafterArgs(vocab_size=self.target.info.vocab_size, index=0, max_context=128, target=self.target)
        self.drafter = M2R2Drafter(args, model=adapters(self.target, rate))
        self.cache, self.tokens = self.target.open(), list(PROMPT)
        self.target.extend([self.cache], [PROMPT[:-1]])
        context = Context("r", self.tokens, len(PROMPT), cache=lambda: self.cache)
        (self.state,) = self.drafter.begin([context])

    def round(self, accept: int, *, careless: bool = False) -> None:
        """Draft, score another chain, and accept some of it; `careless`: what was drafted is kept instead."""
        (tree,) = self.drafter.propose([self.state], [Budget(3, 3)], [EMPTY_TREE])
        assert len(tree) == 3
        other = TokenTree.chain([9, *tree.tokens.tolist()[1:]])
        if not careless:
            self.target.score([self.cache], [self.tokens[-1]], [other])
        path = range(min(accept, 2 if careless else 3))
        self.target.commit([self.cache], [path])
        self.tokens += [*(int(other.tokens[i]) for i in path), 11]

    def keys(self, cache: Any) -> torch.Tensor:
        """(layers, n, ...) what a cache holds."""
        slots = torch.as_tensor(cache.slot_index(0, cache.length))
        return torch.stack([layer[slots] for layer in self.target.arena.layers])


@pytest.mark.parametrize("size", ["folder", "wide"])
def test_nothing_of_the_stream_stays_in_the_cache(size: str, request: pytest.FixtureRequest) -> None:
    """Control: a drafter whose own keys and values are kept."""
    for careless in (False, True):
        world = World(request.getfixturevalue(size))
        for accept in (0, 2, 3, 1):
            world.round(accept, careless=careless)
        fresh = world.target.open()
        world.target.extend([fresh], [world.tokens[:-1]])
        assert world.cache.length == fresh.length > len(PROMPT)
        same = torch.allclose(world.keys(world.cache), world.keys(fresh), atol=1e-5, rtol=1e-4)
        assert same is not careless


def test_wrong_adapters_are_named(folder: Path, tmp_path: Path) -> None:
    target = load_runner(str(folder), dtype="float32")
    args = DrafterArgs(vocab_size=target.info.vocab_size, index=0, max_context=128, target=target)
    with pytest.raises(ConfigError, match="speculative_config model must be the folder or hub id of adapters"):
        M2R2Drafter(args)
    for width, layers, words in ((16, 2, "for hidden_size 16, but"), (32, 3, "for num_layers 3, but")):
        with pytest.raises(CheckpointError, match=words):
            RateAdapters.read(written_rate_adapters(width, layers, 2), target.info)
    model = Path(adapters(target, 2))
    stored = json.loads((model / "config.json").read_text())
    for change, words in (
        ({"rank": 9}, r"steps\.0\.down\.weight must be \(9, 32\) by its config\.json, got \(8, 32\)"),
        ({"rate": 1}, r"steps\.1\.down\.weight must be \(8, 32\) by its config\.json, got none"),
        ({"rate": 0}, "holds no adapters of m2r2"),
    ):
        changed = {"paceline_rate_adapters": stored["paceline_rate_adapters"] | change}
        (model / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=words):
            RateAdapters.read(model, target.info)
