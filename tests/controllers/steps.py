"""One step of a policy with one sequence: what a drafter proposes under its budget, and what the target makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controllers.worlds import RIGHT, judged

from paceline.controllers.base import Signal, StepTimes
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget

TIMES = StepTimes((0.0,), 0.0, 0.0, 0.0, 1)
WRONG = 2


def plan(controller: Any, *, size: int = 1, remaining: int = 1000, temperature: float = 0.0, key: int = 0) -> Any:
    controller.plan([Signal(key + i, 10, remaining, temperature) for i in range(size)])
    return controller


def asked(
    controller: Any, confidence: Sequence[float], features: Sequence[object] | None = None, **signal: Any
) -> tuple[Budget, int]:
    """The budget, and how many tokens of these confidences a drafter that asks before each token drafts under it."""
    budget = plan(controller, **signal).budget(0, 0, EMPTY_TREE)
    most = min(budget.nodes, budget.depth, len(confidence))
    if most < 1:
        return budget, 0
    path, drafted = confidence[0], 1
    while drafted < most and budget.go_on(drafted + 1, path, None if features is None else features[drafted - 1]):
        path *= confidence[drafted]
        drafted += 1
    return budget, drafted


def step(controller: Any, confidence: Sequence[float], accepted: int, *, sequential: bool = True, **signal: Any) -> int:
    """A whole step in which `accepted` of the tokens would stand; how many were scored."""
    budget, drafted = asked(controller, confidence, **signal)
    if not sequential:
        drafted = min(budget.nodes, budget.depth, len(confidence))
    tokens = [RIGHT if i < accepted else WRONG for i in range(drafted)]
    tree = TokenTree.chain(tokens, confidence=confidence[:drafted]) if tokens else EMPTY_TREE
    (scored,) = controller.select([tree])
    controller.observe([scored], [judged(scored)], TIMES)
    return len(scored)
