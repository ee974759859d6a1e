"""One step of a policy with one sequence: what a drafter proposes under its budget, and what the target makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controllers.worlds import RIGHT, judged

from paceline.controllers import Outcome, Plan, Signal, StepTimes
from paceline.tree import EMPTY_TREE, NO_BUDGET, Budget, TokenTree, Verdict

TIMES = StepTimes((0.0,), 0.0, 0.0, 0.0, 1)
WRONG = 2


def planned(controller: Any, *, size: int = 1, remaining: int = 1000, temperature: float = 0.0, key: int = 0) -> Plan:
    """The plan for so many sequences."""
    plan: Plan = controller.plan([Signal(key + i, 10, remaining, temperature) for i in range(size)])
    assert len(plan.budgets) == size
    return plan


def plan(controller: Any, **signal: Any) -> Any:
    """The controller, under a plan."""
    planned(controller, **signal)
    return controller


def granted(controller: Any, index: int = 0, drafter: int = 0, **signal: Any) -> Budget:
    """What one drafter may draft for one sequence."""
    budgets = planned(controller, **signal).budgets[index]
    return budgets[drafter] if budgets else NO_BUDGET


def outcome(trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes = TIMES, **more: Any) -> Outcome:
    """What came of a plan of one step."""
    tokens = sum(len(verdict.tokens) for verdict in verdicts)
    return Outcome(1, tokens, times.total, more.get("proposed", trees), trees, verdicts, times)


def requested(
    controller: Any, confidence: Sequence[float], features: Sequence[object] | None = None, **signal: Any
) -> tuple[Budget, int]:
    """The budget, and how many tokens of these confidences a drafter that asks before each token drafts under it."""
    budget = granted(controller, **signal)
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
    budget, drafted = requested(controller, confidence, **signal)
    if not sequential:
        drafted = min(budget.nodes, budget.depth, len(confidence))
    tokens = [RIGHT if i < accepted else WRONG for i in range(drafted)]
    tree = TokenTree.chain(tokens, confidence=confidence[:drafted]) if tokens else EMPTY_TREE
    (scored,) = controller.select([tree])
    controller.observe(outcome([scored], [judged(scored)], proposed=[tree]))
    return len(scored)
