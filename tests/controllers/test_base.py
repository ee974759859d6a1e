"""What a policy need not have: the base class drafts nothing, and the engine can do with every default of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine.harness import engine, run, tokens
from toys import ToyRunner

from paceline.assembly.controller_setup import PARTS
from paceline.config import SamplingParams
from paceline.controllers import Controller, Outcome, Plan, Signal, StepTimes
from paceline.controllers.base import Share
from paceline.drafters import DrafterArgs
from paceline.drafters.lookup.ngram import NgramDrafter
from paceline.tree import NO_BUDGET, Budget, TokenTree, Verdict, merge

PROMPT = [1, 2, 3, 1, 2, 3, 1]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Bare(Controller):
    name = "bare"


class Generous(Bare):
    """Only says how much."""

    def plan(self, signals: Sequence[Signal]) -> Plan:
        return Plan([[Budget(3, 3)]] * len(signals))


@pytest.mark.parametrize(("controller", "drafts"), [(Bare(), False), (Generous(), True)])
def test_the_engine_decodes_under_the_defaults(controller: Controller, drafts: bool) -> None:
    runner = ToyRunner()
    drafter = NgramDrafter(DrafterArgs(vocab_size=runner.info.vocab_size, index=0, max_context=512))
    requests = run(engine(runner, [drafter], controller=controller), [PROMPT], PARAMS)
    assert tokens(requests) == [[runner.greedy(PROMPT, 12)]]
    assert (requests[0].metrics.num_draft_tokens > 0) == drafts
    assert controller.explain(0) == ""


def test_the_engine_asks_for_all_parts_of_the_class_and_no_more() -> None:
    public = {name for name in {*vars(Controller), *Controller.__annotations__} if not name.startswith("_")}
    others = {"drafters", "plain_seconds", "reads_acceptance"}  # told by the engine, for the live page, for assembly
    assert set(PARTS) == public - others


def test_a_plan_says_whether_anybody_drafts_and_holds_for_a_step_or_more() -> None:
    assert Plan([[NO_BUDGET, Budget(1, 1)], []]).drafts
    assert not Plan([[NO_BUDGET], []]).drafts
    assert not Plan.nothing(3, 5).drafts
    assert (len(Plan.nothing(3, 5).budgets), Plan.nothing(3, 5).steps) == (3, 5)
    with pytest.raises(ValueError, match="1 step or more, got 0"):
        Plan.nothing(1, 0)


def test_outcomes_add_up_and_the_last_is_the_sample() -> None:
    early, late = (
        Outcome(count, 10 * count, 0.5 * count, [], [], [], StepTimes((), count, 0.0, 0.0, 1)) for count in (2, 1)
    )
    both = late.merged(early)
    assert (both.steps, both.tokens, both.seconds) == (3, 30, 1.5)
    assert both.times is late.times


def test_shares_of_drafters_are_those_of_all_steps() -> None:
    tree = merge([TokenTree.chain([5, 6], source=0), TokenTree.chain([7], source=1)])

    def step(path: tuple[int, ...]) -> Outcome:
        times = StepTimes((0.5, 0.25), 1.0, 0.0, 0.0, 4, (0.0, 2.0))
        return Outcome(1, 1 + len(path), 2.0, [tree], [tree], [Verdict(path, (5, 6)[: len(path)], 9)], times)

    assert step((0, 1)).shares == [Share(2, 2, 0.5, 0.0), Share(0, 1, 0.25, 2.0)]
    every = step((0, 1)).merged(step((0,)).merged(step(())))
    assert every.shares == [Share(3, 6, 1.5, 0.0), Share(0, 3, 0.75, 6.0)]
    assert every.times.total == 3.75
