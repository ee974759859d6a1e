"""Steps that a controller need not look at: it plans and selects once, then budgets stay and trees are scored as they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers.base import Controller, Signal
from paceline.drafters.base import Context, Drafter
from paceline.engine.loop import Engine
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import Budget

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


class Zeros(Drafter):
    """Drafts token 0."""

    name, catches_up = "zeros", True

    def begin(self, contexts: list[Context]) -> list[Context]:
        return list(contexts)

    def propose(self, states: list[Context], budgets: list[Budget], so_far: list[TokenTree]) -> list[TokenTree]:
        return [TokenTree.chain([0]) for _ in states]

    def fork(self, state: Context, context: Context) -> Context:
        return context


class Steady(Controller):
    """Notes the sequences of each plan, and how many trees each selection was of."""

    name = "steady"

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.plans: list[tuple[int, ...]] = []
        self.selections = 0

    def plan(self, signals: Sequence[Signal]) -> None:
        self.plans.append(tuple(signal.key for signal in signals))
        self.steady = self.steps

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        return Budget(1, 1)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        self.selections += 1
        return list(trees)


def decoded(steps: int, prompts: list[list[int]], params: Sequence[SamplingParams]) -> Steady:
    runner, controller = ToyRunner(16, order=None), Steady(steps)
    found = run(engine(runner, [Zeros()], controller=controller), prompts, params)
    assert tokens(found) == tokens(run(engine(runner), prompts, params))
    return controller


@pytest.mark.parametrize(("steps", "most"), [(0, 24), (5, 4), (100, 1)])
def test_so_many_steps_go_without_a_look(steps: int, most: int) -> None:
    controller = decoded(steps, [[1, 2, 3]], [PARAMS])
    assert most / 2 <= len(controller.plans) <= most
    assert controller.selections == len(controller.plans)


def test_a_sequence_that_joins_or_ends_is_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def plans() -> list[int]:
        short = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return [len(keys) for keys in decoded(100, [[1, 2], [2, 2]], [short, PARAMS]).plans]

    assert plans() == [2, 1]
    rests = Engine._rests

    def blind(self: Engine, batch: Sequence[object]) -> bool:
        found = rests(self, batch)  # type: ignore[arg-type]
        self._same = True
        return found

    monkeypatch.setattr(Engine, "_rests", blind)
    assert plans() != [2, 1], "the negative control"
