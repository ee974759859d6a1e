"""How the engine calls a controller: in the documented order, for as many steps as a plan holds, and with nobody else's
errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine.harness import engine, run, tokens
from engine.test_loop import Guess
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers import Controller, Footprint, LimitedController, Outcome, Plan, Signal
from paceline.controllers.auto import AutoController, Costs
from paceline.controllers.policies import FixedController, PPDController
from paceline.controllers.policies.heuristic import HeuristicController
from paceline.drafters import Context
from paceline.engine import Request, drafter_set
from paceline.engine.scheduler import Scheduler
from paceline.tree import EMPTY_TREE, Budget, TokenTree

PROMPTS = [[1, 2, 3], [4, 5], [1, 2, 1, 2, 1], [7, 8]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
Call = tuple[str, Any]


def each(*lengths: int) -> list[SamplingParams]:
    return [replace(GREEDY, max_tokens=length) for length in lengths]


class Notes(Controller):
    """Notes every call; a plan holds for `steps`."""

    name = "notes"

    def __init__(self, steps: int, most: int = 3) -> None:
        self.steps, self.most = steps, most
        self.calls: list[Call] = []

    def plan(self, signals: Sequence[Signal]) -> Plan:
        self.calls.append(("plan", tuple(signals)))
        budgets = [Budget(self.most, self.most)] * self.drafters if self.most else []
        return Plan([budgets] * len(signals), self.steps)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        self.calls.append(("select", list(trees)))
        return list(trees)

    def observe(self, outcome: Outcome) -> None:
        self.calls.append(("observe", outcome))

    def forget(self, key: int) -> None:
        self.calls.append(("forget", key))

    def names(self) -> str:
        """The calls, a letter each."""
        return "".join(name[0] for name, _ in self.calls)

    def outcomes(self) -> list[Outcome]:
        return [about for name, about in self.calls if name == "observe"]


def check_order(controller: Notes) -> None:
    """One observe for each plan, before the next plan and before anybody is forgotten."""
    open_ = False
    for name, about in controller.calls:
        if name == "plan":
            assert not open_, "a plan before the last one's outcome"
            open_, batch, steps = True, about, 0
        elif name == "select":
            assert open_
            assert len(about) == len(batch)
            steps += 1
        elif name == "observe":
            assert open_
            open_ = False
            assert len(about.trees) == len(about.proposed) == len(about.verdicts) == len(batch)
            assert steps <= about.steps <= controller.steps
        else:
            assert not open_, "forgotten before the outcome of its last steps"
    assert not open_


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("most", [0, 3])
def test_calls_come_in_the_documented_order_and_every_step_is_counted_once(steps: int, most: int) -> None:
    runner, controller, made = ToyRunner(16, order=None), Notes(steps, most), list[int]()
    live = engine(runner, [Guess(runner)], controller=controller, max_num_seqs=3)
    live.watchers.append(lambda record: made.append(len(record.sequences)))
    requests = run(live, PROMPTS, each(9, 20, 13, 5))
    assert tokens(requests) == [[runner.greedy(p, n)] for p, n in zip(PROMPTS, (9, 20, 13, 5), strict=True)]
    check_order(controller)
    assert sum(outcome.steps for outcome in controller.outcomes()) == len(made)
    assert sum(outcome.tokens for outcome in controller.outcomes()) >= 9 + 20 + 13 + 5
    assert sorted(about for name, about in controller.calls if name == "forget") == sorted(
        {signal.key for name, about in controller.calls if name == "plan" for signal in about}
    )
    assert all(outcome.seconds >= outcome.times.total for outcome in controller.outcomes())
    assert ("s" in controller.names()) == (most > 0), "nothing to select where nobody drafts"


def test_the_order_check_catches_an_engine_that_forgets_first() -> None:
    controller = Notes(2)
    controller.calls = [("plan", (Signal(0, 1, 2, 0.0),)), ("forget", 0)]
    with pytest.raises(AssertionError, match="forgotten before"):
        check_order(controller)


@pytest.mark.parametrize(("steps", "plans"), [(1, 20), (4, 5), (7, 3), (64, 1)])
def test_a_plan_is_replayed_for_its_steps(steps: int, plans: int) -> None:
    runner, controller = ToyRunner(16, order=None), Notes(steps, 0)
    run(engine(runner, controller=controller), PROMPTS[:1], GREEDY)
    assert controller.names().count("p") == plans
    assert [outcome.steps for outcome in controller.outcomes()][:-1] == [steps] * (plans - 1)


def test_a_plan_ends_where_a_sequence_ends_and_where_one_joins() -> None:
    """Steps without drafts give one token each: 5 steps of two, 2 of one, then a newcomer."""
    runner, controller = ToyRunner(16, order=None), Notes(64, 0)
    live = engine(runner, controller=controller)
    first = requests_of(live, PROMPTS[:2], each(5, 20))
    live.step()
    while len(first[1].outputs[0].token_ids) < 7:
        live.step()
    requests_of(live, PROMPTS[2:3], each(6))
    while live.has_work:
        live.step()
    sizes = [len(about) for name, about in controller.calls if name == "plan"]
    assert [outcome.steps for outcome in controller.outcomes()] == [5, 2, 6, 7]
    assert sizes == [2, 1, 2, 1]
    check_order(controller)


def requests_of(live: Any, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
    """Queue them."""
    made = [Request(f"q{id(p)}", None, list(p), q, 7, q.max_tokens) for p, q in zip(prompts, params, strict=True)]
    for one in made:
        live.add(one)
    return made


def test_budgets_go_no_deeper_than_a_sequence_may_still_grow() -> None:
    """Where a plan of many steps holds to the end; without the last token's step, in which nobody is asked."""
    seen: list[tuple[int, int]] = []

    class Sees(Guess):
        def _one(self, text: list[int], budget: Budget) -> TokenTree:
            seen.append((20 + 3 - len(text), budget.depth))
            return EMPTY_TREE

    runner = ToyRunner(16, order=None)
    run(engine(runner, [Sees(runner)], controller=Notes(64, 5)), PROMPTS[:1], GREEDY)
    assert [remaining for remaining, _ in seen] == list(range(20, 1, -1))
    assert all(depth == min(5, remaining - 1) for remaining, depth in seen)


def test_an_abort_ends_the_plan_with_its_outcome() -> None:
    runner, controller = ToyRunner(16, order=None), Notes(64, 2)
    live = engine(runner, [Guess(runner)], controller=controller)
    kept, gone = requests_of(live, PROMPTS[:2], each(20, 20))
    for _ in range(3):
        live.step()
    live.abort(gone.id)
    while live.has_work:
        live.step()
    check_order(controller)
    assert controller.outcomes()[0].steps == 3
    assert kept.outputs[0].token_ids == runner.greedy(PROMPTS[0], 20)


def test_a_controller_that_takes_over_hears_nothing_of_the_last_ones_plan() -> None:
    runner, controllers = ToyRunner(16, order=None), [Notes(64, 2), Notes(64, 0)]
    live = engine(runner, [Guess(runner)], controller=controllers[0])
    (request,) = requests_of(live, PROMPTS[:1], each(20))
    for _ in range(3):
        live.step()
    live.use_controller(controllers[1])
    assert controllers[0].names() == "pssso"
    while live.has_work:
        live.step()
    assert controllers[0].names() == "pssso", "it is asked no more"
    assert controllers[1].names() == "pof"
    for controller in controllers:
        check_order(controller)
    assert request.outputs[0].token_ids == runner.greedy(PROMPTS[0], 20)


def test_a_step_that_was_cut_short_says_nothing() -> None:
    """The plan is over without an outcome, and the next request begins with a new one."""
    runner, controller = ToyRunner(16, order=None), Notes(64, 2)
    live = engine(runner, [Guess(runner)], controller=controller)
    (first,) = requests_of(live, PROMPTS[:1], each(20))
    live.step()
    live.fail_started(KeyboardInterrupt())
    assert first.outputs[0].finish_reason == "error"
    assert controller.names() == "psf"
    controller.calls.clear()
    run(live, PROMPTS[1:2], GREEDY)
    check_order(controller)


# Sequences that leave the batch for a while

CONTROLLERS: dict[str, Callable[[], Any]] = {
    "notes": lambda: Notes(64),
    "fixed": lambda: FixedController(3, drafters=["guess"]),
    "two drafters": lambda: FixedController(3, drafters=["guess", "guess"]),
    "auto": lambda: AutoController(Costs(), ["guess"]),
    "auto of two": lambda: AutoController(Costs(), ["guess", "guess"]),
    "heuristic": HeuristicController,
    "ppd": lambda: PPDController(Costs(probe=lambda counts, context: [1.0] * len(counts)), ["guess"]),
    "limited": lambda: LimitedController(
        AutoController(Costs(), ["guess"]), Footprint(slot=1, row=1, drawn=1, caches=lambda tokens: tokens), 10**6
    ),
}


@pytest.mark.parametrize("made", CONTROLLERS)
@pytest.mark.parametrize(("size", "left"), [(4, 3), (8, 6)])
def test_pausing_a_part_of_a_batch_raises_nothing(
    made: str, size: int, left: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    runner, controller = ToyRunner(16, order=None), CONTROLLERS[made]()
    drafters = [Guess(runner) for _ in range(2 if "two" in made else 1)]
    live = engine(runner, drafters, controller=controller)
    prompts = [[1 + i, 2, 3] for i in range(size)]
    found = requests_of(live, prompts, each(*[30] * size))
    live.step()
    everybody = list(live.scheduler.running)
    with caplog.at_level(logging.WARNING, "paceline"):
        while live.has_work:
            running = list(live.scheduler.running)
            here = running[:left] if len(running) == len(everybody) else running
            live.decode(here)
            live.decode(list(live.scheduler.running)) if live.scheduler.running else None
    assert not caplog.records
    assert live.parts.controller is controller
    assert [one.outputs[0].token_ids for one in found] == [runner.greedy(prompt, 30) for prompt in prompts]


# Whose error it is


class Raises(Exception):
    pass


def broken(*_: Any, **__: Any) -> Any:
    raise Raises("on purpose")


@pytest.mark.parametrize("method", ["plan", "select", "observe", "forget"])
@pytest.mark.parametrize("steps", [1, 5])
def test_an_error_of_the_controller_ends_its_drafting_and_the_text_stays(
    method: str, steps: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    runner, controller = ToyRunner(16, order=None), Notes(steps)
    setattr(controller, method, broken)
    live = engine(runner, [Guess(runner)], controller=controller)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        found = run(live, PROMPTS, each(9, 20, 13, 5))
    assert tokens(found) == [[runner.greedy(p, n)] for p, n in zip(PROMPTS, (9, 20, 13, 5), strict=True)]
    assert [record.getMessage() for record in caplog.records] == [
        f"controller notes failed to {method} (Raises: on purpose); decoding goes on without drafts"
    ]
    assert not any(request.metrics.dropped_drafters for request in found)
    assert live.parts.controller is not controller


class Asking(Guess):
    """Asks the budget before it drafts, and may fail behind that."""

    def __init__(self, runner: ToyRunner, *, fails: bool = False) -> None:
        super().__init__(runner)
        self.fails = fails

    def propose(self, states: list[Context], budgets: list[Budget], so_far: list[TokenTree]) -> list[TokenTree]:
        assert all(budget.go_on(2, 0.5, None) for budget in budgets)
        return broken() if self.fails else super().propose(states, budgets, so_far)


class BrokenOnThird:
    """A `go_on` that is an object, and fails for one request alone."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, depth: int, confidence: float, features: object) -> bool:
        return True if self.number != 2 else broken()


class Bounds(Notes):
    """Its budgets have functions of their own."""

    def __init__(self, steps: int, **functions: Any) -> None:
        super().__init__(steps)
        self.functions = functions

    def plan(self, signals: Sequence[Signal]) -> Plan:
        plan = super().plan(signals)
        made = [
            {name: function(i) if isinstance(function, type) else function for name, function in self.functions.items()}
            for i in range(len(signals))
        ]
        rows = zip(plan.budgets, made, strict=True)
        return replace(plan, budgets=[[replace(budget, **each) for budget in row] for row, each in rows])


@pytest.mark.parametrize("functions", [{"needed": broken}, {"go_on": broken}, {"go_on": BrokenOnThird}])
@pytest.mark.parametrize("steps", [1, 5])
def test_an_error_of_a_budgets_function_is_the_controllers_and_not_the_drafters(
    steps: int, functions: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    runner, controller = ToyRunner(16, order=None), Bounds(steps, **functions)
    live = engine(runner, [Asking(runner)], controller=controller)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        found = run(live, PROMPTS, each(9, 20, 13, 5))
    assert tokens(found) == [[runner.greedy(p, n)] for p, n in zip(PROMPTS, (9, 20, 13, 5), strict=True)]
    assert [record.getMessage() for record in caplog.records] == [
        "controller notes failed to bound a draft (Raises: on purpose); decoding goes on without drafts"
    ]
    assert not any(request.metrics.dropped_drafters for request in found)
    assert live.parts.controller is not controller


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_behind_a_budgets_function_is_the_drafters(fails: bool) -> None:
    def always(*_: Any) -> bool:
        return True

    runner, controller = ToyRunner(16, order=None), Bounds(3, go_on=always, needed=always)
    live = engine(runner, [Asking(runner, fails=fails)], controller=controller)
    found = run(live, PROMPTS, GREEDY)
    assert tokens(found) == [[runner.greedy(prompt, 20)] for prompt in PROMPTS]
    assert all(("guess" in request.metrics.dropped_drafters) == fails for request in found)
    assert any(request.metrics.num_drafts for request in found) != fails
    assert live.parts.controller is controller


def test_an_error_in_words_is_the_controllers_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    runner, controller = ToyRunner(16, order=None), Notes(3)
    controller.explain = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.DEBUG, "paceline.engine"):
        found = run(engine(runner, [Guess(runner)], controller=controller), PROMPTS[:1], GREEDY)
    assert tokens(found) == [[runner.greedy(PROMPTS[0], 20)]]
    assert "controller notes failed to explain" in caplog.text


class Short(Notes):
    """Says nothing of the last sequence, or of the last drafter, or loses a tree."""

    wrong = "sequences"

    def plan(self, signals: Sequence[Signal]) -> Plan:
        plan = super().plan(signals)
        if self.wrong == "sequences":
            return replace(plan, budgets=plan.budgets[:-1])
        if self.wrong == "drafters":
            return replace(plan, budgets=[budgets[:-1] for budgets in plan.budgets])
        return plan if self.wrong == "trees" else None  # type: ignore[return-value]

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return list(trees)[:-1] if self.wrong == "trees" else list(trees)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("sequences", "failed to plan (ValueError: budgets for 3 sequences instead of 4)"),
        ("drafters", "failed to plan (ValueError: budgets for 1 drafters instead of 2)"),
        ("nothing", "failed to plan (AttributeError"),
        ("trees", "failed to select (ValueError: 3 trees instead of 4)"),
    ],
)
def test_a_plan_or_choice_of_another_size_is_the_controllers_error(
    wrong: str, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    runner, controller = ToyRunner(16, order=None), Short(3)
    controller.wrong = wrong
    live = engine(runner, [Guess(runner), Guess(runner)], controller=controller)
    with caplog.at_level(logging.WARNING, "paceline.engine"):
        found = run(live, PROMPTS, GREEDY)
    assert tokens(found) == [[runner.greedy(prompt, 20)] for prompt in PROMPTS]
    assert words in caplog.text
    assert not any(request.metrics.dropped_drafters for request in found)


def test_an_error_of_a_drafter_is_the_drafters() -> None:
    class Bad(Guess):
        def propose(self, states: list[Context], budgets: list[Budget], so_far: list[TokenTree]) -> list[TokenTree]:
            raise Raises("on purpose")

    runner, controller = ToyRunner(16, order=None), Notes(3)
    live = engine(runner, [Bad(runner)], controller=controller)
    found = run(live, PROMPTS[:2], GREEDY)
    assert tokens(found) == [[runner.greedy(prompt, 20)] for prompt in PROMPTS[:2]]
    assert all("guess" in request.metrics.dropped_drafters for request in found)
    assert live.parts.controller is controller
    check_order(controller)


@pytest.mark.parametrize(("where", "what"), [(drafter_set, "merge"), (Scheduler, "fit")])
def test_an_error_of_the_engine_is_not_blamed_on_the_controller(
    where: Any, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    monkeypatch.setattr(where, what, broken)
    runner, controller = ToyRunner(16, order=None), Notes(3)
    live = engine(runner, [Guess(runner), Guess(runner)], controller=controller)
    with caplog.at_level(logging.WARNING, "paceline.engine"), pytest.raises(Raises):
        run(live, PROMPTS, GREEDY)
    assert not caplog.records
    assert live.parts.controller is controller


def test_a_cheap_drafter_does_not_take_all_the_nodes_of_a_fixed_list() -> None:
    """The first one fills the number with nodes that it hardly believes in; the second one is right."""

    class Table(Guess):
        name = "table"

        def _one(self, text: list[int], budget: Budget) -> TokenTree:
            best = int(self.runner.logits(text).argmax())
            wrong = [token for token in range(1, 16) if token != best][: budget.nodes]
            return TokenTree.build(wrong, [-1] * len(wrong), confidence=[0.05] * len(wrong))

    class Right(Guess):
        name = "right"

        def _one(self, text: list[int], budget: Budget) -> TokenTree:
            found = self.runner.greedy(text, budget.depth)
            return TokenTree.chain(found, confidence=[0.9] * len(found))

    runner = ToyRunner(16, order=None)
    (found,) = run(engine(runner, [Table(runner), Right(runner)], 4), PROMPTS[:1], replace(GREEDY, max_tokens=40))
    assert tokens([found]) == [[runner.greedy(PROMPTS[0], 40)]]
    assert found.metrics.drafters["right"].num_accepted_tokens >= 30
    assert found.metrics.num_steps <= 10
