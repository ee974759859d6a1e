"""Hostile drafters in the engine: greedy tokens, the output distribution and other requests stay as they were; broken
ones are dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from itertools import count, product
from typing import Any

import adversaries
import pytest
from engine.harness import engine, run, tokens
from engine.test_engine_distribution import LENGTH, PROMPT, TEMPERATURE, VOCAB, target_distribution
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers import Signal
from paceline.controllers.auto import AutoController, Costs
from paceline.controllers.policies import FixedController
from paceline.drafters import DrafterArgs
from paceline.tree import Budget, TokenTree

KINDS = [
    kind for kind in vars(adversaries).values() if isinstance(kind, type) and issubclass(kind, adversaries.Adversary)
]
VALID = adversaries.VALID
PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 1, 2, 1]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


def build(kind: type, runner: ToyRunner) -> Any:
    return kind(DrafterArgs(vocab_size=runner.info.vocab_size, index=0, max_context=4096, target=runner))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tokens_stay_and_nothing_leaks(kind: type) -> None:
    for temperature, auto in product((0.0, 1.0), (False, True)):
        runner = ToyRunner(VOCAB, order=None)
        drafter = build(kind, runner)
        controller = AutoController(Costs(), [drafter.name]) if auto else None
        params = SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True)
        plain = run(engine(runner), PROMPTS, params)
        fast = run(engine(runner, [drafter], 6, controller=controller), PROMPTS, params)
        if temperature == 0 or kind.__name__ != "Gambler":  # drawn drafts keep the distribution, not a seed's tokens
            assert tokens(fast) == tokens(plain), (temperature, auto)
        assert all(output.finish_reason == "length" for request in fast for output in request.outputs)
        assert runner.open_caches == 0
        if kind in VALID:
            assert drafter.open == 0
            assert not any(request.metrics.dropped_drafters for request in fast)


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if k not in (*VALID, adversaries.Adversary, adversaries.RaisesForOne)]
)
def test_broken_drafters_are_dropped_and_named(kind: type) -> None:
    runner = ToyRunner(VOCAB, order=None)
    drafter = build(kind, runner)
    for request in run(engine(runner, [drafter], 6), PROMPTS, GREEDY):
        assert drafter.name in request.metrics.dropped_drafters, kind.__name__


def test_a_message_over_several_lines_is_told_in_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Verbose(adversaries.Adversary):
        def propose(self, states: Any, budgets: Any, so_far: Any) -> Any:
            raise ValueError("one line\n\n  and another\n")

    runner = ToyRunner(VOCAB, order=None)
    drafter = build(Verbose, runner)
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        (request,) = run(engine(runner, [drafter], 6), PROMPTS[:1], GREEDY)
    assert request.metrics.dropped_drafters == {drafter.name: "ValueError: one line and another"}
    assert [record.getMessage() for record in caplog.records] == [
        f"request {request.id} goes on without drafter {drafter.name} (ValueError: one line and another)"
    ]


@pytest.mark.parametrize("kind", [kind for kind in VALID if kind.__name__ != "Oracle"], ids=lambda kind: kind.__name__)
def test_the_output_distribution_stays(kind: type) -> None:
    target = ToyRunner(VOCAB, order=2, sharpness=1.0)
    live = engine(target, [build(kind, target)], 6)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, n=64, ignore_eos=True)
    requests = run(live, [PROMPT] * 14, params, seed=5000)
    counts = Counter(tuple(o.token_ids) for request in requests for o in request.outputs)
    distribution = target_distribution(target)
    assert g_test([counts[k] for k in distribution], list(distribution.values())) > ERROR


@pytest.mark.parametrize("way", ["append", "clear", "last", "first", "replace"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_writing_into_the_text_harms_nobody_else(way: str, temperature: float) -> None:
    runner = ToyRunner(VOCAB, order=None)
    writer, oracle = build(adversaries.Writer, runner), build(adversaries.Oracle, runner)
    writer.way = way
    params = SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True, n=2)
    found = run(engine(runner, [writer, oracle], 6), PROMPTS, params)
    assert tokens(found) == tokens(run(engine(runner), PROMPTS, params))
    for request in found:
        assert ("writer" in request.metrics.dropped_drafters) == (way in ("append", "clear", "last"))
        assert "oracle" not in request.metrics.dropped_drafters
        assert request.metrics.drafters["oracle"].num_accepted_tokens > 5 or temperature > 0


def test_one_bad_request_keeps_the_drafter_for_the_others() -> None:
    class Picky(adversaries.Oracle):
        def tree(self, context: Any, budget: Any) -> Any:
            if context.tokens[:2] == [4, 5]:
                raise RuntimeError("not this one")
            return super().tree(context, budget)

    runner = ToyRunner(VOCAB, order=None)
    requests = run(engine(runner, [build(Picky, runner)], 4), PROMPTS, GREEDY)
    assert [bool(request.metrics.dropped_drafters) for request in requests] == [False, True, False]
    assert requests[0].metrics.num_accepted_tokens > 5
    assert tokens(requests) == tokens(run(engine(runner), PROMPTS, GREEDY))


class Brief(adversaries.Oracle):
    """Right, and leaves room for others."""

    def tree(self, context: Any, budget: Any) -> Any:
        return super().tree(context, Budget(min(budget.nodes, 3), budget.depth))


class Spoiler(adversaries.Adversary):
    """Writes into what the drafters before it proposed."""

    def propose(self, states: Any, budgets: Any, so_far: Any) -> Any:
        for tree in so_far:
            if len(tree):
                tree.tokens[:] = 0
        return super().propose(states, budgets, so_far)


@pytest.mark.parametrize("guarded", [True, False])
def test_writing_into_the_trees_of_others_harms_nobody(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ToyRunner(VOCAB, order=None)
    brief, spoiler = build(Brief, runner), build(Spoiler, runner)
    if not guarded:
        monkeypatch.setattr(TokenTree, "read_only", lambda tree: tree)
    found = run(engine(runner, [brief, spoiler], 6), PROMPTS, GREEDY)
    accepted = [request.metrics.drafter("brief").num_accepted_tokens for request in found]
    if guarded:
        assert min(accepted) > 5
        assert all("spoiler" in request.metrics.dropped_drafters for request in found)
        assert not any("brief" in request.metrics.dropped_drafters for request in found)
    else:
        assert min(accepted) <= 5  # the test would see it
    assert tokens(found) == tokens(run(engine(runner), PROMPTS, GREEDY))


def failing(where: str) -> FixedController:
    """A controller that raises in one of its parts from the second time on."""
    controller, seen = FixedController(6), count()
    part = getattr(controller, where)

    def broken(*given: Any) -> Any:
        if next(seen):
            raise ZeroDivisionError(f"in {where}")
        return part(*given)

    setattr(controller, where, broken)
    return controller


@pytest.mark.parametrize("where", ["plan", "select", "observe", "forget"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_controller_that_raises_ends_drafting_and_nothing_else(
    where: str, temperature: float, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ToyRunner(VOCAB, order=None)
    params = SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True)
    prompts = [*PROMPTS, *PROMPTS]
    plain, fast = (
        run(engine(runner), prompts, params),
        engine(runner, [build(adversaries.Oracle, runner)], 6, controller=failing(where)),
    )
    with caplog.at_level(logging.WARNING, "paceline"):
        found = run(fast, prompts, params)
    assert tokens(found) == tokens(plain)
    assert all(output.finish_reason == "length" for request in found for output in request.outputs)
    assert f"controller fixed failed to {where} (ZeroDivisionError: in {where})" in caplog.text
    assert not fast.parts.controller.plan([Signal(0, 3, 9, temperature)]).drafts
    assert runner.open_caches == 0
