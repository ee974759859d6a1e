"""DEL where times are measured: it rests where no exit pays, is hardly asked meanwhile, and goes on looking."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drafters.exits import FREE, LAYERS, PROMPTS, fast

from paceline import LLM, SamplingParams
from paceline.drafters import exit_costs
from paceline.drafters.dynamic_exit import NAP
from paceline.drafters.exit_choice import ExitCosts
from paceline.drafters.exit_costs import RoundClock, measured
from paceline.drafters.exit_rounds import DelState
from paceline.models.decoder import LayerPlan
from paceline.models.layer_drafts import layer_drafts_of


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.mark.parametrize(("dear", "counted"), [(True, False), (True, True), (False, False)])
def test_it_rests_where_no_exit_pays_and_goes_on_looking(
    plain: LLM, monkeypatch: pytest.MonkeyPatch, dear: bool, counted: bool
) -> None:
    """Rows that cost as much as steps, and free ones (control)."""
    llm, drafter = fast(plain, num_speculative_tokens=2, controller="fixed", resume_verification=False)
    drafter._costs = ExitCosts(np.zeros(5), np.ones(5), np.array([1.0, 2.0, 3.0]), counted) if dear else FREE
    looks: list[int] = []
    look = drafter._look

    def spy(state: DelState, *more: Any) -> None:
        looks.append(state.rounds)
        look(state, *more)

    monkeypatch.setattr(drafter, "_look", spy)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (found,) = llm.generate(PROMPTS[:1], params)
    assert found.outputs[0].token_ids == plain.generate(PROMPTS[:1], params)[0].outputs[0].token_ids
    assert 3 < len(looks) < 8 if dear else len(looks) < 4, looks
    drafted = found.metrics.num_draft_tokens
    assert drafted == len(looks) if dear else drafted > 20, "it drafts to look"


def test_while_it_rests_it_looks_now_and_then_and_its_rounds_go_on(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several texts, and not where a text ends."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    llm, drafter = fast(plain, num_speculative_tokens=2, controller="fixed", resume_verification=False)
    drafter._costs = ExitCosts(np.zeros(5), np.ones(5), np.array([1.0, 2.0, 3.0]))
    looks, look = list[int](), drafter._look
    monkeypatch.setattr(drafter, "_look", lambda state, *more: (looks.append(state.rounds), look(state, *more)))
    lengths = [len(llm.generate(PROMPTS[i : i + 1], params)[0].outputs[0].token_ids) for i in (0, 1, 2, 0)]
    assert lengths == [60] * 4
    assert 6 <= len(looks) <= 8
    assert max(looks) < 59


def test_it_rests_no_longer_than_rounds_without_a_draft_take_to_be_timed(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first, and where they were timed long ago; then it drafts at once and not from its next look on."""
    llm, drafter = fast(plain, num_speculative_tokens=2, controller="fixed", resume_verification=False)
    monkeypatch.setattr(exit_costs, "LATE", 24)
    monkeypatch.setattr(drafter.clock, "whole", lambda verify: verify)
    drafter._costs = FREE
    drafter.clock.know(FREE)
    drafted: list[str] = []
    llm.engine.watchers.append(lambda record: drafted.append("d" if len(record.trees[0]) else " "))
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    rests = [len(pause) for pause in "".join(drafted).split("d") if pause]
    assert sum(rests) >= 2 * exit_costs.FIRST
    assert max(rests) <= exit_costs.FIRST + NAP, rests


def test_costs_are_measured_in_order(plain: LLM) -> None:
    """No figure is checked, only that deeper exits and more rows are not free of charge by construction."""
    drafts, plans = layer_drafts_of(plain.runner, "del"), [LayerPlan(stop=one) for one in range(1, LAYERS)]
    free = plain.runner.memory.left()  # type: ignore[attr-defined]  # a native runner
    costs = measured(plain.runner, drafts, plans, 12)
    assert costs is not None
    assert (len(costs.start), len(costs.token), len(costs.verify)) == (5, 5, 13)
    assert (costs.token >= 0).all()
    assert (costs.verify > 0).all()
    assert plain.runner.memory.left() == free  # type: ignore[attr-defined]


def test_the_clock_finds_what_rounds_take_beside_their_passes() -> None:
    """Apart for rounds with and without a draft: 0.4 and 0.25; interruptions count for nothing."""
    clock, key, verify = RoundClock(), 7, np.array([1.0, 1.5, 2.0])
    clock.round(key, 0, 0.0)
    assert not clock.is_new, "nothing is measured"
    assert clock.whole(verify) == pytest.approx(verify)
    clock.know(ExitCosts(np.array([0.1]), np.array([0.2]), verify))
    assert clock.is_new
    now = 0.0
    for turn in range(120):
        length = turn % 3
        clock.round(key, length, now)
        now += [1.0 + 0.25, 1.5 + 0.3 + 0.4, 2.0 + 0.5 + 0.4][length] + (100.0 if turn in {112, 114} else 0.0)
    assert not clock.is_new
    found = clock.whole(verify)
    assert found == pytest.approx([1.25, 1.9, 2.4])
    clock.round(None, 0, now)
    for other in range(20):
        clock.round(10 + other, 0, now + 50.0)
    assert clock.whole(verify) == pytest.approx(found), "time between two sequences' rounds is nobody's"
    for _ in range(600):
        clock.round(key, 2, now)
        now += 3.0
    assert clock.is_new, "what plain rounds took long ago says nothing"
    assert clock.whole(verify) == pytest.approx([1.0, 2.0, 2.5])
