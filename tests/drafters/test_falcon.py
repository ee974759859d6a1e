"""Falcon: units of inputs see each other, a pass drafts as many tokens, and the first unit always ends with the text.
(`test_eagle.py` decodes with all heads of this kind.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_reference as reference
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.stand_ins import head_weights, written_head
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.falcon import FalconDrafter
from paceline.drafters.heads.feature_drafts import FeatureDrafts
from paceline.drafters.heads.semi_autoregressive import SemiAutoregressiveDrafts, UnitState
from paceline.errors import ConfigError
from paceline.models import load_runner
from paceline.models.attention.segments import Segment, seeing_each_other, split_into_passes
from paceline.tree import EMPTY_TREE, TokenTree
from tests.drafters.head_worlds import HeadWorld, close, head_config

PROMPT = [(7 * i) % 500 + 4 for i in range(30)]
BRANCHING = {"tree_policy": "rsd_c", "tree_width": [2, 1, 2, 1]}


def lstm(weights: Any, x: torch.Tensor) -> torch.Tensor:
    """(n, d) of rows (n, 2 d), by PyTorch's LSTM on texts of one token."""
    d = x.shape[1] // 2
    module = torch.nn.LSTM(2 * d, d, num_layers=2)
    for layer in range(2):
        zeros = {f"bias_{kind}_l{layer}": torch.zeros(4 * d) for kind in ("ih", "hh")}
        module.load_state_dict({f"weight_ih_l{layer}": weights[f"lstm.weight_ih_l{layer}"], **zeros}, strict=False)
    with torch.no_grad():
        found: torch.Tensor = module(x[None])[0][0]
    return found


def rows_of(
    config: Any,
    weights: Any,
    tables: tuple[torch.Tensor, torch.Tensor],
    known: tuple[list[int], torch.Tensor],
    drafted: Sequence[int],
    *,
    causal: bool = False,
) -> torch.Tensor:
    """(k, v) logits of the tokens behind a text and the whole units that were drafted behind it, without a cache.

    Args:
        tables, known: as of `eagle_reference.after`. causal: wrong, rows see none behind them.
    """
    k, (embedding, head), (tokens, states) = config.block_size, tables, known
    for done in range(0, len(drafted) + 1, k):
        x = lstm(weights, torch.cat((embedding[tokens], states), 1))
        units = torch.arange(len(x) - 1, -1, -1) // k
        seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        seen = seen if causal else seen | (units[:, None] == units)
        x = x + reference.attention(config, weights, x, seen=seen)
        x = x + reference.mlp(config, weights, x)
        tokens, states = [*tokens, *drafted[done : done + k]], torch.cat((states, x[-k:]))
    return x[-k:] @ head.T


class World(HeadWorld[UnitState]):
    """One drafter, and the plain forward pass."""

    drafter: FalconDrafter

    def __init__(self, folder: Path, k: int = 2, prompt: Sequence[int] = PROMPT, **options: Any) -> None:
        super().__init__(folder)
        self.use(head_config("falcon", self.target.info, block_size=k))
        self.start(FalconDrafter(self.args, model=written_head(self.config, self.weights), **options), prompt)
        stored = load_file(folder / "model.safetensors")
        self.embedding, self.head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]

    def row(self, drafted: Sequence[int] = (), **wrong: Any) -> torch.Tensor:
        """(v,) the head's logits behind drafted tokens, by the plain forward pass."""
        ids, k = self.weights["draft_to_target"], self.config.block_size or 1
        whole = len(drafted) // k * k
        given = self.config, self.weights, (self.embedding, self.head[ids]), (self.tokens[1:], self.states)
        found = torch.full((len(self.head),), float("-inf"))
        found[ids] = rows_of(*given, drafted[:whole], **wrong)[len(drafted) - whole]
        return found


# ------------------------------------------------------------------------------------------------ what a pass says


@pytest.mark.parametrize(
    ("size", "k", "policy"), [("folder", 2, BRANCHING), ("folder", 3, {}), ("wide", 2, {}), ("wide", 3, BRANCHING)]
)
def test_logits_are_those_of_a_plain_forward_pass(
    size: str, k: int, policy: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """In several rounds, behind which the text goes on by more and by fewer tokens than a unit has. Negative control:
    rows that do not see those behind them in their unit.
    """
    world = World(request.getfixturevalue(size), k, **policy)
    passes = {"folder": "EagerPasses", "wide": "CompiledDecoder"}[size]
    assert type(world.drafter.head.runner.passes).__name__ == passes
    state, wrong = world.begin(temperature=1.0), 0
    for accepted in (1, 9, 0, 0):
        tree = world.propose(state, 14, 4)
        assert max(tree.depths) == 4
        for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
            path = [int(tree.tokens[i]) for i in tree.path(parent)] if parent >= 0 else []
            for trial in tree.trials_of(parent):
                assert close(trial.row, world.row(path).softmax(0))
                wrong += not close(trial.row, world.row(path, causal=True).softmax(0))
        world.commit(state, tree, tree.path(tree.leaves()[-1])[:accepted], own=11)
    assert wrong > 6


def test_units_of_four_inputs_are_seen_as_the_paper_has_it() -> None:
    """Counted from the last one. Negative control: units of another size."""
    wanted = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]], np.bool_)
    segment: Any = Segment(None, 4)  # type: ignore[arg-type]
    assert np.array_equal(seeing_each_other(segment, 2).sees, wanted)
    assert not np.array_equal(seeing_each_other(segment, 3).sees, wanted)
    five: Any = Segment(None, 5)  # type: ignore[arg-type]
    assert np.array_equal(seeing_each_other(five, 2).sees[1:, 1:], wanted)
    assert not np.array_equal(seeing_each_other(five, 2).sees[:4, :4], wanted)


def test_no_unit_is_cut_where_passes_are() -> None:
    """Whatever stands before it. Negative control: rows that are no units."""
    for unit in (1, 3):
        segments: list[Any] = [Segment(None, 4), seeing_each_other(Segment(None, 10), unit)]  # type: ignore[arg-type]
        cut = [[(part.done, part.slots) for part in parts] for parts in split_into_passes(segments, 6)]
        assert cut == (
            [[(0, 4), (0, 2)], [(2, 8)], [(8, 10)]] if unit == 1 else [[(0, 4), (0, 1)], [(1, 7)], [(7, 10)]]
        )


@pytest.mark.parametrize("options", [{}, {"tree_policy": "eagle2", "tree_width": 3}, {"tree_policy": "dyspec"}])
def test_units_of_one_behind_a_matrix_are_eagle(folder: Path, options: dict[str, Any]) -> None:
    """Token by token. Negative control: the same head in units of two."""
    target = load_runner(str(folder), dtype="float32")
    own = head_config("eagle", target.info)
    weights = head_weights(own)

    class Eagle(HeadWorld[Any]):
        """EAGLE's head, as it drafts itself or in units."""

        def __init__(self, drafting: type[FeatureDrafts], unit: int) -> None:
            super().__init__(folder)
            kind = type("Own", (EagleDrafter,), {"drafting": drafting})
            drafter = kind(self.args, model=written_head(own, weights), **options)
            drafter.head.unit = unit
            self.start(drafter, PROMPT)

        def drafted(self) -> list[Any]:
            """The trees of some rounds."""
            state, found = self.begin(), list[Any]()
            for _ in range(3):
                tree = self.propose(state, 7, 4)
                found.append((tree.tokens.tolist(), tree.parents.tolist(), tree.confidence.round(4).tolist()))
                self.commit(state, tree, tree.path(0), own=12)
            return found

    expected = Eagle(FeatureDrafts, 1).drafted()
    assert Eagle(SemiAutoregressiveDrafts, 1).drafted() == expected
    assert Eagle(SemiAutoregressiveDrafts, 2).drafted() != expected


# ------------------------------------------------------------------------------------------------ trees and passes


@pytest.mark.parametrize("options", [{}, {"tree_width": 3}, {"tree_policy": "eagle2", "tree_width": 3}])
def test_each_further_unit_takes_one_pass(
    folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of k rows for each node at its beginning; nodes as deep below such a one have children of one distribution."""
    world = World(folder, 2, **options)
    head, fed = world.drafter.head, list[int]()
    step, state = head.step, world.begin()
    world.drafter.catch_up([state])

    def counted(*args: Any, picked: Sequence[int], **more: Any) -> Any:
        fed.append(len(picked))
        return step(*args, picked=picked, **more)

    monkeypatch.setattr(head, "step", counted)
    tree = world.propose(state, 30, 5)
    levels = [[node for node in range(len(tree)) if tree.depths[node] == depth] for depth in range(1, 6)]
    assert len(fed) == 3
    assert fed[0] == 2
    if not options:
        assert fed == [2, 2, 2]
        return
    assert 2 < fed[1] <= 2 * len(levels[1])
    chances = [
        {(int(tree.tokens[i]), float(tree.confidence[i])) for node in level for i in tree.children(node)[:1]}
        for level in levels[:4]
    ]
    assert len(chances[0]) == 1
    assert len([node for node in levels[0] if tree.children(node)]) > 1
    assert len(chances[1]) > 1, "behind units of their own"


# ------------------------------------------------------------------------------------------------ the cache


def cached(world: World, cache: Any) -> torch.Tensor:
    """Keys and values of a head's committed inputs."""
    slots = torch.as_tensor(cache.slot_index(0, cache.length))
    return torch.stack([layer[slots] for layer in world.drafter.head.runner.arena.layers])


@pytest.mark.parametrize(("size", "k"), [("folder", 4), ("wide", 2)])
def test_the_cache_is_that_of_a_fresh_pass_with_true_states(size: str, k: int, request: pytest.FixtureRequest) -> None:
    """Without the last unit, which is fed again. Negative control: states of other tokens."""
    world = World(request.getfixturevalue(size), k)
    state = world.begin()
    for turn in range(6):
        tree = world.propose(state, 8, 4)
        path = tree.path(tree.leaves()[turn % len(tree.leaves())])[: turn % 4]
        world.commit(state, EMPTY_TREE if turn == 3 else tree, () if turn == 3 else path, own=20 + turn)
    world.propose(state, 4, 2)
    count, head = state.cache.length, world.drafter.head
    assert len(PROMPT) < count <= len(world.states) - k

    def fresh(states: torch.Tensor) -> torch.Tensor:
        cache, chain = head.open(), TokenTree.chain([0] * (count - 1))
        head.step([cache], [chain], [0], tokens=world.tokens[1 : 1 + count], states=states[:count], picked=())
        head.commit([cache], [range(count - 1)])
        return cached(world, cache)

    assert close(cached(world, state.cache), fresh(world.states))
    assert not close(cached(world, state.cache), fresh(world.states.roll(1, 0)))


def test_nothing_is_drafted_before_a_whole_unit_is_known(folder: Path) -> None:
    """Behind a gap, and at the beginning of a text; states are added up until there is one."""
    world = World(folder, 3)
    state = world.begin()
    assert len(world.propose(state, 4)) == 4
    state.context.tokens += [9, 10]
    world.states = torch.cat((world.states, world.extended([PROMPT[-1], 9])))
    world.tokens += [9, 10]
    for missing in (2, 1, 0):
        assert world.propose(state, 4) is EMPTY_TREE
        world.commit(state, EMPTY_TREE, (), 12 + missing)
    world.tokens, world.states = world.tokens[-4:], world.states[-3:]
    tree = world.propose(state, 4)
    assert int(tree.tokens[0]) == int(world.row().argmax())
    short = World(folder, 3, prompt=[5, 6])
    begun = short.begin()
    for _ in range(2):
        assert short.propose(begun, 4) is EMPTY_TREE
        short.commit(begun, EMPTY_TREE, (), 7)
    assert int(short.propose(begun, 4).tokens[0]) == int(short.row().argmax())


def test_a_fork_drafts_as_its_twin(folder: Path) -> None:
    world = World(folder, 3)
    state = world.begin()
    world.commit(state, tree := world.propose(state, 4), tree.path(1), 9)
    twin = world.drafter.fork(state, replace(state.context, tokens=list(state.context.tokens)))
    assert world.propose(twin, 5).tokens.tolist() == world.propose(state, 5).tokens.tolist()


def test_a_unit_has_a_size(folder: Path) -> None:
    own = World(folder).config
    for size in (0, 65, None):
        with pytest.raises(ConfigError, match=r"block_size must be an integer in 1\.\.64"):
            replace(own, block_size=size)
    with pytest.raises(ConfigError, match="num_layers must be"):
        replace(own, num_layers=2)
    with pytest.raises(ConfigError, match="block_size must be left out for method 'eagle'"):
        replace(own, method="eagle")
