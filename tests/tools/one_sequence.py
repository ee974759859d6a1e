"""One sequence through a drafter, and a draft whose draws are enumerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tools.enumerate_draws import Choices

from paceline.drafters import Context
from paceline.drafters.common import draft_rows
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Trial

PROMPT = [1, 2, 3]


def begin(drafter: Any, text: Sequence[int] = PROMPT, **fields: Any) -> Any:
    """The state of a new sequence; `fields` of its context."""
    (state,) = drafter.begin([Context("r", list(text), len(text), **fields)])
    return state


def propose(drafter: Any, state: Any, nodes: int = 6) -> TokenTree:
    """A tree of at most so many nodes and levels."""
    found: TokenTree = drafter.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])[0]
    return found


def enumerated(choices: Choices) -> Callable[[torch.Tensor, Sequence[int], float], tuple[int, float] | None]:
    """`draft_rows.draw` that asks `choices` instead of luck."""

    def draw(row_v: torch.Tensor, removed: Sequence[int], luck: float) -> tuple[int, float] | None:
        q = row_v.double().numpy().copy()
        q[list(removed)] = 0.0
        if not q.sum() > 0:
            return None
        token = choices.choose(list(q / q.sum()))
        return token, min(float(row_v[token]), 1.0)

    return draw


def program(monkeypatch: pytest.MonkeyPatch, drafter: Any, nodes: int = 3) -> Callable[[Choices], TokenTree]:
    """A drafter's tree behind `PROMPT`, as a program whose draws go through `Choices`."""

    def draws(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "draw_tokens", enumerated(choices))
        state = begin(drafter, temperature=1.0)
        tree = propose(drafter, state, nodes)
        drafter.end([state])
        return tree

    return draws


def recorded_with(tree: TokenTree, logits: Callable[[list[int]], torch.Tensor]) -> TokenTree:
    """The tree behind `PROMPT`, with its trials recorded as drawn from the distribution of other logits, (v,) of a
    text."""
    rows = {p: logits([*PROMPT, *(int(tree.tokens[i]) for i in tree.path(p))]).softmax(0) for p in tree.trials}
    return tree.replace(trials={p: (Trial(each[0].node, rows[p]),) for p, each in tree.trials.items()})
