"""Rows that a drafter adds to a scoring pass say what a text with their states behind it says, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_hybrid import hybrid
from tiny_llama import close, runner_of, tiny_llama, tokens

from paceline.errors import CapabilityError
from paceline.models import AddedRows, LayerPlan
from paceline.models.attention.segments import Segment
from paceline.models.runners import NativeRunner, added_pass
from paceline.tree import EMPTY_TREE, TokenTree

TREE = TokenTree.build([5, 6, 7, 8], [-1, 0, 0, -1])
NODES, AFTER = [-1, -1, 1, 1, 2], [-1, 0, -1, 2, -1]
"""Two rows behind the root, two behind node 1, one behind node 2."""


RUNNERS: dict[str, Callable[[], NativeRunner]] = {
    "operators": lambda: runner_of(tiny_llama()),
    "compiled": lambda: runner_of(tiny_llama(hidden_size=64, head_dim=32, intermediate_size=64)),
    "compiled bfloat16": lambda: runner_of(
        tiny_llama(hidden_size=64, head_dim=32, intermediate_size=64).to(torch.bfloat16)
    ),
    "windows": lambda: runner_of(tiny_llama(hidden_size=64, head_dim=32, intermediate_size=64), windows=(6, None)),
    "mamba2": lambda: hybrid("mamba2"),
    "delta": lambda: hybrid("delta"),
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    return RUNNERS[request.param]()


@pytest.fixture(scope="module")
def llama() -> NativeRunner:
    return RUNNERS["compiled"]()


def embeddings(runner: NativeRunner, count: int = 5) -> torch.Tensor:
    made = torch.randn(count, runner.info.hidden_size, generator=torch.Generator().manual_seed(3))
    return made.to(runner.info.dtype)


def rows(made: torch.Tensor, sequences: int = 1, layer: int = 0) -> AddedRows:
    """The same rows behind the last sequence alone."""
    return AddedRows(layer, [NODES], [AFTER], lambda states: made).among([sequences - 1], sequences)


def opened(runner: NativeRunner, count: int, seed: int = 1) -> Any:
    cache = runner.open()
    runner.extend([cache], [tokens(count, seed)])
    return cache


def scored(runner: NativeRunner, added: list[AddedRows]) -> tuple[Any, Any, torch.Tensor]:
    """Scores of two sequences, those of the added rows, and the logits behind a path that was committed."""
    caches = [opened(runner, 9, 2), opened(runner, 7)]
    scores, more = runner.score_added(caches, [1, 2], [EMPTY_TREE, TREE], added, taps=(-1, 0, runner.info.num_layers))
    runner.commit(caches, [(), (0, 2)])
    return scores, more, runner.score(caches, [3, 4], [EMPTY_TREE] * 2).logits


def same(runner: NativeRunner, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Bits where the passes keep them."""
    return torch.equal(ours, theirs) if runner.info.passes == "compiled" else close(ours, theirs)


def alike(runner: NativeRunner, found: Any, plain: Any) -> bool:
    pairs = [(found[0].logits, plain[0].logits), (found[2], plain[2])]
    pairs += [(found[0].taps[layer], states) for layer, states in plain[0].taps.items()]
    return all(same(runner, *pair) for pair in pairs)


def test_the_trees_rows_and_what_follows_are_those_of_a_pass_without(
    runner: NativeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [opened(runner, 9, 2), opened(runner, 7)]
    scores = runner.score(caches, [1, 2], [EMPTY_TREE, TREE], taps=(-1, 0, runner.info.num_layers))
    runner.commit(caches, [(), (0, 2)])
    plain = scores, None, runner.score(caches, [3, 4], [EMPTY_TREE] * 2).logits
    found = scored(runner, [rows(embeddings(runner), 2)])
    assert alike(runner, found, plain)
    assert found[0].rows == scores.rows
    assert found[0].best == scores.best
    assert found[1].rows == (0, 0, 5)
    if not runner.spec.states:  # of which each input stands behind another

        def seen_by_all(segment: Segment, nodes: Any, after: Any, inputs: int) -> Segment:
            wide = added_pass_widened(segment, nodes, after, inputs)
            if wide.tree is not None:
                wide.tree.sees[1:inputs, inputs:] = True
            return wide

        added_pass_widened = added_pass.widened
        monkeypatch.setattr(added_pass, "widened", seen_by_all)
        assert not alike(runner, scored(runner, [rows(embeddings(runner), 2)]), plain)


def test_an_added_row_is_what_a_text_says_with_its_embedding_behind_it(runner: NativeRunner) -> None:
    """In a pass of its own, along the path to the node and the rows between."""
    made, cache = embeddings(runner), opened(runner, 7)
    _, found = runner.score_added([cache], [2], [TREE], [rows(made)])
    for row, (node, before) in enumerate(zip(NODES, AFTER, strict=True)):
        path = [2, *(int(TREE.tokens[i]) for i in TREE.path(node))] if node >= 0 else [2]
        line = [before, row] if before >= 0 else [row]
        fed = torch.cat([runner.embed([*tokens(7, 1), *path]), made[line]])
        alone = runner.extend_embeddings([runner.open()], [fed]).logits
        tolerance = 0.1 if runner.info.dtype is torch.bfloat16 else 2e-3 if runner.spec.states else 1e-4
        assert close(found.logits[row : row + 1], alone, tolerance)
        wrong = runner.extend_embeddings([runner.open()], [torch.cat([fed[:-1], fed[-1:], fed[-1:]])]).logits
        assert not close(found.logits[row : row + 1], wrong, tolerance), "its position matters"


@pytest.mark.parametrize("name", ["operators", "compiled", "windows"])
def test_rows_may_enter_at_later_layers(name: str) -> None:
    """A row is made of the state of the node behind which it stands, and sees earlier rows from its layer on."""
    runner = RUNNERS[name]()
    turn = torch.linalg.qr(embeddings(runner, runner.info.hidden_size).float()).Q
    first = AddedRows(1, [[1, 3]], [[-1, -1]], lambda states: states @ turn)
    second = AddedRows(2, [[1]], [[0]], lambda states: -states)
    taps = (-1, 0, 1, runner.info.num_layers)
    cache, other = opened(runner, 7), opened(runner, 7)
    scores, found = runner.score_added([cache], [2], [TREE], [first, second], taps=taps)
    plain = runner.score([other], [2], [TREE], taps=taps)
    assert close(scores.logits, plain.logits)
    assert all(close(scores.taps[layer], plain.taps[layer]) for layer in taps)
    runner.commit([cache, other], [(0, 2)] * 2)
    after = runner.score([cache, other], [3, 3], [EMPTY_TREE] * 2).logits
    assert close(after[:1], after[1:])
    path, middle, later = (TokenTree.chain([5, 6, *none]) for none in ((), (0,), (0, 0)))

    def by_hand(rows: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]) -> torch.Tensor:
        """Logits behind [2, 5, 6] and what stands behind them, layer by layer."""
        cache = opened(runner, 7)
        x = runner.run_layers([cache], [2], [path], plan=LayerPlan(stop=1)).states
        entered = x[2:] @ turn
        x = torch.cat([x, entered])
        x = runner.run_layers([cache], [2], [middle], plan=LayerPlan(first=1, stop=2), hidden=x).states
        x = torch.cat(rows(x, entered))
        x = runner.run_layers([cache], [2], [later], plan=LayerPlan(first=2), hidden=x).states
        return runner.head(x)[3:]

    assert close(found.logits[[0, 2]], by_hand(lambda x, entered: [x, -x[2:3]]))
    assert not close(found.logits[[0, 2]], by_hand(lambda x, entered: [x, -x[1:2]])), "another node's state"
    assert not close(found.logits[[0, 2]], by_hand(lambda x, entered: [x[:3], entered, -x[2:3]])), "left as it was"


@pytest.mark.parametrize("name", ["operators", "compiled"])
def test_behind_the_last_layer_a_row_is_a_head_of_the_last_state(name: str) -> None:
    runner = RUNNERS[name]()
    last, turn = runner.info.num_layers, torch.linalg.qr(embeddings(runner, runner.info.hidden_size)).Q
    _, found = runner.score_added(
        [opened(runner, 7)], [2], [TREE], [AddedRows(last, [[1]], [[-1]], lambda x: x @ turn)]
    )
    before = runner.score([opened(runner, 7)], [2], [TREE], taps=(last - 1,)).taps[last - 1]
    assert close(found.logits, runner.head(before[2:3] @ turn))
    assert not close(found.logits, runner.head(before[2:3]))


def test_what_cannot_be_added_is_refused() -> None:
    mamba = hybrid("mamba2")
    cache, late = opened(mamba, 7), replace(rows(embeddings(mamba)), layer=1)
    with pytest.raises(CapabilityError, match="takes rows before its first layer alone"):
        mamba.score_added([cache], [2], [TREE], [late])
