"""A drafter that says for how long it has nothing to propose is left alone that long, and misses nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers.fixed import FixedController
from paceline.drafters.base import Context
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget

PARAMS = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
EVERY = 6


class Sleepy:
    """Drafts in one step of so many, and notes the length of the text when it is asked and when the text ends."""

    name, taps, catches_up = "sleepy", (), True

    def __init__(self, every: int = EVERY) -> None:
        self.every = every
        self.asked: list[list[int]] = []
        self.ended: list[int] = []

    def begin(self, contexts: list[Context]) -> list[Context]:
        return list(contexts)

    def propose(self, states: list[Context], budgets: list[Budget], so_far: list[TokenTree]) -> list[TokenTree]:
        self.asked.append([len(state.tokens) - state.prompt_length for state in states])
        return [EMPTY_TREE if self._left(state) else TokenTree.chain([0]) for state in states]

    def _left(self, state: Context) -> int:
        return self.every - 1 - (len(state.tokens) - state.prompt_length) % self.every

    def rest(self, states: list[Context]) -> int:
        return min(self._left(state) for state in states) - 1

    def observe(self, *_: Any) -> None: ...

    def fork(self, state: Context, context: Context) -> Context:
        return context

    def end(self, states: list[Context]) -> None:
        self.ended += [len(state.tokens) - state.prompt_length for state in states]


def asked(drafters: list[Any], prompts: list[list[int]], **parts: Any) -> list[list[int]]:
    """What was asked of the first drafter, after a look at the tokens."""
    runner = ToyRunner(16, order=None)
    one = engine(runner, drafters, 1)
    one.parts = replace(one.parts, **parts)
    found = run(one, prompts, PARAMS)
    assert tokens(found) == tokens(run(engine(runner), prompts, PARAMS))
    for each in found:
        assert set(each.metrics.dropped_drafters) <= {"broken"}
    return list(drafters[0].asked)


def test_it_is_asked_again_when_it_said_so_and_hears_of_every_token() -> None:
    drafter = Sleepy()
    steps = asked([drafter], [[1, 2, 3]])
    drafted = [step for (step,) in steps if step % EVERY == EVERY - 1]
    assert drafted == [5, 11, 17, 23]
    assert len(steps) <= 2 * len(drafted) + 1, "once more behind each draft"
    assert drafter.ended == [PARAMS.max_tokens], "the steps before the end were not asked about"


class Moody(Sleepy):
    """Rests for long on texts whose prompt begins with 1, and drafts in every step of all others."""

    def _left(self, state: Context) -> int:
        return 50 if state.tokens[0] == 1 else 0


def test_a_rest_ends_with_the_text_that_it_was_for() -> None:
    """One text after the other, the first of which ends in the middle of its rest; and one that joins another's rest."""
    runner, drafter = ToyRunner(16, order=None), Moody()
    one = engine(runner, [drafter], 1)
    run(one, [[1, 2]], replace(PARAMS, max_tokens=6))
    assert one.parts.controller.resting > 0, "it is left over"
    drafter.asked.clear()
    (found,) = run(one, [[2, 2]], PARAMS)
    assert found.metrics.num_draft_tokens >= PARAMS.max_tokens // 2 - 1
    drafter.asked.clear()
    (_, other) = run(engine(runner, [drafter], 1), [[1, 2], [2, 2]], PARAMS)
    assert other.metrics.num_draft_tokens >= PARAMS.max_tokens // 2 - 1


@pytest.mark.parametrize("answer", [2.5, None, "3"])
def test_an_answer_that_is_no_number_of_steps_drops_the_drafter(answer: Any) -> None:
    class Broken(Sleepy):
        name = "broken"

        def rest(self, states: list[Context]) -> Any:
            return answer

    broken = Broken()
    assert len(asked([broken], [[1, 2, 3]])) == 1
    assert len(asked([Sleepy(), Broken()], [[1, 2, 3]])) < 20


class Impatient(FixedController):
    patient = False


def test_a_controller_with_plans_of_its_own_asks_in_every_step() -> None:
    assert len(asked([Sleepy()], [[1, 2, 3]], controller=Impatient(1))) > 20


def test_a_drafter_beside_it_that_does_not_say_is_asked_in_every_step() -> None:
    class Awake(Sleepy):
        name, rest = "awake", property()  # type: ignore[assignment]  # what `hasattr` finds missing

    assert len(asked([Sleepy(), Awake()], [[1, 2, 3]])) > 20
    assert len(asked([Sleepy(), Sleepy(5)], [[1, 2, 3]])) < 20


def test_a_batch_rests_as_long_as_the_first_that_wants_to_draft() -> None:
    """Sequences that began in different steps: whoever joins or leaves wakes the others."""
    drafter = Sleepy()
    steps = asked([drafter], [[1, 2, 3], list(range(1, 9)), [4]])
    assert any(len(step) == 3 for step in steps)
    assert sorted(drafter.ended) == [PARAMS.max_tokens] * 3
    drafting = {length for step in steps for length in step if length % EVERY == EVERY - 1}
    assert {5, 11, 17, 23} <= drafting


@pytest.mark.parametrize("others", [0, 1])
def test_one_that_fails_to_say_is_dropped_and_the_text_goes_on(others: int) -> None:
    class Broken(Sleepy):
        name = "broken"

        def rest(self, states: list[Context]) -> int:
            raise RuntimeError("no idea")

    broken = Broken()
    assert len(asked([broken, *[Sleepy() for _ in range(others)]], [[1, 2, 3], [4]])) < 4
    assert len(broken.ended) == 2
