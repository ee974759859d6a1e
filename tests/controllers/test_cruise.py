"""Steps between two plans: decisions as good as planned ones, at a fraction of the planning; the arithmetic of what is counted.

Worlds as in `test_auto`, but of a model so quick that `auto` does not plan every step. Negative control: one that goes on for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean, pvariance

import numpy as np
import pytest
import torch
from controllers.worlds import Guesser, World, informed, judged, overconfident, steady

from paceline.controllers import course
from paceline.controllers.acceptance import Acceptance, Own
from paceline.controllers.auto import APART, AutoController
from paceline.controllers.auto_learning import learn
from paceline.controllers.base import Signal, StepTimes
from paceline.controllers.cost_model import CostModel
from paceline.controllers.counts import Counts
from paceline.controllers.cruise import COLD, IN_A_ROW, LONGEST, NEAR, STEPS, TRIAL, Cruise
from paceline.controllers.fixed import FixedController
from paceline.controllers.prices import Rates
from paceline.controllers.watch import SHARE, Mode, Watch
from paceline.tree.token_tree import EMPTY_TREE, TokenTree, Trial
from paceline.tree.types import NO_BUDGET, Verdict

PLAIN = 2e-4
DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def rows_cost(share: float) -> World:
    """A draft model, each further row costing this share of a plain step."""
    return World([draft(steady(0.8), 0.05)], lambda rows: PLAIN * (1 + share * (rows - 1)))


def draft(chance: object, cost: float, **options: object) -> Guesser:
    return Guesser("draft", chance, fixed=PLAIN * cost / 2, per_level=PLAIN * cost, **options)  # type: ignore[arg-type]


def table(chance: object, finds: float = 1.0) -> Guesser:
    return Guesser("table", chance, fixed=0.05 * PLAIN, finds=finds, sequential=False)  # type: ignore[arg-type]


WORLDS = {
    "cheap rows": rows_cost(0.05),
    "dear rows": rows_cost(0.25),
    "informed": World([draft(informed(0.2, 0.95), 0.1)], lambda rows: PLAIN * (0.9 + 0.1 * rows)),
    "table": World([table(steady(0.7), 0.5)], lambda rows: PLAIN * (0.9 + 0.1 * rows)),
    "informed table": World([table(informed(0.3, 0.95), 0.7)], lambda rows: PLAIN * (0.8 + 0.2 * rows)),
    "both": World([table(steady(0.8), 0.3), draft(steady(0.65), 0.1)], lambda rows: PLAIN * (0.9 + 0.1 * rows)),
    "batch of 4": World([draft(steady(0.85), 0.1)], lambda rows: PLAIN * (0.95 + 0.05 * rows), batch=4),
}


class Watching(AutoController):
    """Counts how many steps were planned."""

    planned = gone_on = 0

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        self.gone_on += self.cruising
        self.planned += not self.cruising
        super().observe(trees, verdicts, times)


def best_fixed(world: World) -> float:
    return max(world.run(FixedController(depth), 400) for depth in DEPTHS)


@pytest.mark.parametrize("name", WORLDS)
def test_unplanned_steps_are_within_a_tenth_of_the_best_fixed_depth(name: str) -> None:
    world = WORLDS[name]
    controller = Watching(world.costs(), world.names)
    world.run(controller, 300)
    assert world.run(controller, 1200, start=300) >= 0.9 * best_fixed(world)
    assert controller.gone_on > 5 * controller.planned


def test_a_slow_model_is_planned_at_every_step() -> None:
    world = WORLDS["cheap rows"]
    controller = Watching(world.costs(), world.names, short_step=PLAIN / 2)
    world.run(controller, 600)
    assert controller.gone_on == 0


@pytest.mark.parametrize("looks", [True, False])
def test_a_number_of_rows_that_only_seems_cheap_is_left_again(monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    """The machine was quick while a pass over eight rows was measured; without steps of other lengths nobody would notice."""
    if not looks:
        monkeypatch.setattr(course, "_near", lambda depth, most: ())
    world, probed = World([table(steady(0.75))], lambda rows: PLAIN * (0.7 + 0.3 * rows)), Counter[int]()

    def probe(counts: Sequence[int], context: int) -> Iterator[float]:
        for rows in counts:
            probed[rows] += 1
            wrong = {2: 1.25, 3: 1.25, 4: 1.25, 6: 1.25, 8: 0.75} if probed[rows] <= 3 else {}
            yield world.seconds(rows) * wrong.get(rows, 1.0)

    controller = AutoController(CostModel(probe=probe), world.names)
    rates = [world.run(controller, 150, seed=seed) for seed in range(60)]
    assert (fmean(rates[-10:]) > 0.95 * best_fixed(world)) is looks


@pytest.mark.parametrize(("nodes", "deepest"), [(4, 4), (32, 5)])
def test_steps_of_other_lengths_stay_within_the_limits(nodes: int, deepest: int) -> None:
    world = World([table(steady(0.95))], lambda rows: PLAIN * (0.99 + 0.01 * rows))
    controller, asked = AutoController(world.costs(), world.names, max_nodes=nodes, max_depth=5), set[int]()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        for step in range(100):
            world.step(controller, step, rng)
            asked |= {controller.cruise.budget(0, 0, EMPTY_TREE).nodes} if controller.cruising else set()
    assert deepest - 1 in asked, "it does look"
    assert max(asked) == deepest


def grown(controller: AutoController, remaining: int) -> tuple[list[int], int]:
    """By how much each step's budget was too deep for a sequence that takes every token; steps that nobody planned."""
    over, unplanned = list[int](), 0
    while remaining > 1:
        if steady := controller.steady > 0:
            controller.steady, unplanned = controller.steady - 1, unplanned + 1
        else:
            controller.plan(signals(0, remaining=remaining))
        depth = controller.budget(0, 0, EMPTY_TREE).depth
        over.append(depth - (remaining - 1))
        tree = TokenTree.chain([1] * depth, confidence=[0.8] * depth) if depth else EMPTY_TREE
        (tree,) = [tree] if steady else controller.select([tree])
        depth = len(tree)
        times = StepTimes((1e-5,), PLAIN, 0.0, 0.0, 1 + depth)
        controller.observe([tree], [Verdict(tuple(range(depth)), (1,) * depth, 1)], times)
        remaining -= 1 + depth
    return over, unplanned


@pytest.mark.parametrize("careful", [True, False])
def test_steps_that_need_no_look_stay_within_what_the_sequence_may_grow(monkeypatch: pytest.MonkeyPatch, careful: bool) -> None:
    controller = cruising(World([table(steady(0.9))], lambda rows: PLAIN * (0.95 + 0.05 * rows)))
    assert controller.cruise.whole
    controller.cruise.left, controller.cruise._misses = LONGEST, 0
    if not careful:
        monkeypatch.setattr(Cruise, "steady", property(lambda cruise: cruise.left - 1))
    runs = [grown(controller, remaining) for remaining in (600, 601, 602)]
    assert runs[0][1] > 5
    assert (max(max(over) for over, _ in runs) <= 0) is careful


def test_steps_that_need_no_look_are_counted_and_explained_like_others() -> None:
    controller = cruising(World([table(steady(0.9))], lambda rows: PLAIN * (0.95 + 0.05 * rows)))
    controller.cruise.take(controller.acceptance)
    controller.cruise.left = STEPS
    controller.plan(signals(0))
    for scored in (3, 1):
        controller.budget(0, 0, EMPTY_TREE)
        tree = TokenTree.chain([1] * scored, confidence=[0.8] * scored)
        controller.observe([tree], [Verdict((0,), (1,), 1)], StepTimes((1e-5,), PLAIN, 0.0, 0.0, 1 + scored))
        assert [[len(tree) for tree in trees] for trees in controller.drafts] == [[scored], [scored]]
    counts = controller.cruise.take(controller.acceptance)
    assert (counts.steps, counts.levels, counts.asked) == (2, {0: 4}, {(0, 0): 2})
    assert controller.cruise.left == STEPS - 2


def test_twelve_misses_in_a_row_end_the_steps_that_need_no_look() -> None:
    controller = cruising(World([table(steady(0.9))], lambda rows: PLAIN * (0.95 + 0.05 * rows)))
    controller.cruise.left, controller.cruise._misses = STEPS, 0
    controller.plan(signals(0))
    assert controller.steady > 12
    for _ in range(12):
        depth = controller.budget(0, 0, EMPTY_TREE).depth
        tree = TokenTree.chain([1] * depth, confidence=[0.8] * depth)
        assert controller.steady > 0
        controller.observe([tree], [Verdict((), (), 1)], StepTimes((1e-5,), PLAIN, 0.0, 0.0, 1 + depth))
    assert controller.steady == 0


def test_a_batch_needs_no_look_as_long_as_the_one_nearest_to_its_end() -> None:
    controller = cruising(replace(WORLDS["batch of 4"], drafters=[table(steady(0.9))]))
    assert controller.cruise.whole
    controller.cruise.left = LONGEST
    far, near = signals(0, 1, 2, 3, remaining=1000), signals(0, 1, 2, 3, remaining=1000)
    controller.plan(far)
    before = controller.steady
    controller.plan([*near[:3], near[3]._replace(remaining=100)])
    assert 0 < controller.steady < before


def test_short_requests_look_at_other_lengths_too() -> None:
    """No stretch between two plans is as long as it takes from one look to the next."""
    world, looked = World([table(steady(0.95))], lambda rows: PLAIN * (0.9 + 0.1 * rows)), list[bool]()
    controller = AutoController(world.costs(), world.names)
    for seed in range(300):
        rng = np.random.default_rng(seed)
        for step in range(12):
            world.step(controller, step, rng)
            if controller.cruising and (one := controller.cruise._courses[0][0][0]) is not None and one.near:
                looked.append(controller.cruise.budget(0, 0, EMPTY_TREE) != one.budget)
        controller.forget(0)
        controller.cruise.left = 0
    assert 0.5 * IN_A_ROW / NEAR < fmean(looked) < 2 * IN_A_ROW / NEAR


def test_the_only_drafter_is_judged_by_what_plain_decoding_brings() -> None:
    """Drafting brings a twentieth more; a rate of a faster minute would say that the drafter loses."""
    controller = cruising(WORLDS["cheap rows"])
    controller._rates = Rates()
    controller._rates.count(1, 1000, 1000 * PLAIN / 10.0, controller.now.table)
    controller.now.rate = controller._rates.of(1, controller.now.table)
    plain = 1.0 / controller._gates[0].plain_seconds(1, controller.now.table)
    assert controller._price() == pytest.approx(plain * controller.gain)
    controller.names += ("another",)
    assert controller._price() == pytest.approx(10.0 / PLAIN)


def turning(step: int, rng: np.random.Generator) -> tuple[float, float]:
    return (0.9, 0.9) if step < 500 else (0.0, 0.9)


class ForEver(AutoController):
    """The negative control: never plans again."""

    def plan(self, signals: Sequence[Signal]) -> None:
        self.cruise.left, self.cruise._misses = max(self.cruise.left, bool(self.cruise.left)), 0
        if self.cruise.done:
            self.cruise.left = STEPS
        super().plan(signals)


@pytest.mark.parametrize(("kind", "stops"), [(AutoController, True), (ForEver, False)])
def test_it_stops_when_the_drafter_turns_bad(kind: type[AutoController], stops: bool) -> None:
    world, rates = World([draft(turning, 0.2)], lambda rows: PLAIN * (0.8 + 0.2 * rows)), list[float]()
    for seed in range(6):
        controller = kind(world.costs(), world.names)
        world.run(controller, 600, seed=seed)
        rates.append(world.run(controller, 400, start=600, seed=seed))
    assert (fmean(rates) > 0.93 * world.run(FixedController(0), 10)) is stops


def test_a_drafter_that_is_always_wrong_costs_less_than_a_twentieth() -> None:
    world = World([table(overconfident), draft(overconfident, 0.3)], lambda rows: PLAIN * (0.7 + 0.3 * rows))
    plain, controller = world.run(FixedController(0), 10), AutoController(world.costs(), world.names)
    assert world.run(controller, 300) >= 0.9 * plain
    assert world.run(controller, 800, start=300) >= 0.95 * plain


def cruising(world: World) -> AutoController:
    """A controller in the middle of unplanned steps."""
    controller, rng = AutoController(world.costs(), world.names), np.random.default_rng(0)
    for step in range(1000):
        world.step(controller, step, rng)
        if step > 300 and 2 <= controller.cruise.left < STEPS - 2:
            return controller
    raise AssertionError("it always plans")


def signals(*keys: int, remaining: int = 1000) -> list[Signal]:
    return [Signal(key, 500, remaining, 0.0) for key in keys]


def test_another_sequence_calls_for_a_plan() -> None:
    controller = cruising(WORLDS["cheap rows"])
    controller.plan(signals(0))
    assert controller.cruising
    controller.plan(signals(0, 1))
    assert not controller.cruising
    controller.plan(signals(0))
    assert controller.cruising, "as it did before"


def test_others_go_on_as_planned_when_a_sequence_of_their_batch_ends() -> None:
    controller = cruising(WORLDS["batch of 4"])
    batch, courses = list(controller.batch), list(controller.cruise._courses)
    controller.forget(1)
    controller.plan(signals(0, 2, 3))
    assert controller.cruising, "of the same bucket"
    assert controller.batch == [batch[index] for index in (0, 2, 3)]
    assert controller.cruise._courses == [courses[index] for index in (0, 2, 3)]
    trees = [TokenTree.chain([1, 1], confidence=[0.8] * 2)] * 3
    for index in range(3):
        assert controller.budget(index, 0, EMPTY_TREE).nodes > 0
    controller.observe(controller.select(trees), [judged(tree) for tree in trees], StepTimes((1e-5,), PLAIN, 0.0, 0.0, 9))
    counts = controller.cruise.counts
    assert (counts.steps, set(counts.asked)) == (1, {(0, 0), (1, 0), (2, 0)}), "what came before was learned of all four"
    assert "as planned" in controller.explain(2)
    controller.forget(3)
    controller.plan(signals(0, 2))
    assert not controller.cruising, "costs of another bucket are others"


def test_those_who_stay_may_be_those_for_whom_nobody_drafts() -> None:
    controller = cruising(replace(WORLDS["batch of 4"], drafters=[table(steady(0.9))]))
    controller.cruise.left = LONGEST
    controller.plan(signals(0, 1, 2, 3))
    assert controller.steady > 0
    for index in (0, 2, 3):
        controller.cruise._courses[index][0][0] = None
    controller.forget(1)
    controller.plan(signals(0, 2, 3))
    assert (controller.cruise.silent, controller.idle, controller.steady) == (True, True, 0)


def switched(controller: AutoController, *keys: int) -> bool:
    """Whether a step of these sequences goes as planned, once all others have ended; the step is seen to its end."""
    for key in {*controller.cruise._keys} - {*keys}:
        controller.forget(key)
    controller.plan(signals(*keys))
    went, size = controller.cruising, len(keys)
    depths = [controller.budget(index, 0, EMPTY_TREE).depth for index in range(size)]
    trees = [TokenTree.chain([1] * depth, confidence=[0.8] * depth) if depth else EMPTY_TREE for depth in depths]
    rows = size + sum(map(len, trees := controller.select(trees)))
    controller.observe(trees, [judged(tree) for tree in trees], StepTimes((1e-5,), PLAIN, 0.0, 0.0, rows))
    return went


@pytest.mark.parametrize("resumes", [True, False])
def test_a_batch_goes_on_as_the_last_one_of_its_size_did(monkeypatch: pytest.MonkeyPatch, resumes: bool) -> None:
    if not resumes:
        monkeypatch.setattr(AutoController, "_resumes", lambda self, signals: False)
    controller = cruising(replace(WORLDS["batch of 4"], drafters=[table(steady(0.9))]))
    assert switched(controller, 0, 1, 2, 3)
    planned, steps = controller.cruise._courses[0], controller.cost.steps
    assert not switched(controller, 0), "of one by itself nothing is known yet"
    assert switched(controller, 4, 5, 6, 7) is resumes
    if resumes:
        assert controller.cruise._courses == [planned] * 4
        controller.cruise._courses[0][0][0] = None
        assert controller.cruise._courses[1] == planned, "each goes its own way from here"
        assert "as planned" in controller.explain(3)
        assert "table is asked" in controller.explain(3)
        assert controller.cost.steps > steps, "what came before was learned"
        assert controller.cruise.take(controller.acceptance).asked == {(index, 0): 1 for index in range(4)}


@pytest.mark.parametrize("why", ["gate", "asleep", "sampled", "limit", "over"])
def test_it_is_planned_anew_where_that_may_say_something_else(why: str) -> None:
    controller = cruising(replace(WORLDS["batch of 4"], drafters=[table(steady(0.9))]))
    assert switched(controller, 0, 1, 2, 3)
    switched(controller, 0)
    leg = controller.cruise.legs[2]
    if why == "gate":
        controller._gates[2].wait = 5
    elif why == "asleep":
        controller._latest[0, True].sleep()
    elif why == "sampled":
        controller.cruise.legs[2] = leg._replace(greedy=False)
    elif why == "limit":
        controller.disable_by_batch_size = 4
    else:
        controller.cruise.legs[2] = leg._replace(left=0)
    controller.forget(0)
    controller.plan(signals(4, 5, 6, 7))
    assert not controller.cruising


@pytest.mark.parametrize(("ended", "goes_on"), [((1, 6), True), ((1, 3, 4, 6), False)], ids=["same bucket", "another bucket"])
def test_several_that_end_in_one_step_are_learned_from_once(ended: tuple[int, ...], goes_on: bool) -> None:
    controller, taken = cruising(replace(WORLDS["batch of 4"], batch=8)), list[int]()
    steps, take = controller.cruise.counts.steps, controller.cruise.take
    assert steps > 0

    def watched(acceptance: Acceptance) -> Counts:
        found = take(acceptance)
        taken.append(found.steps)
        return found

    controller.cruise.take = watched  # type: ignore[method-assign]
    for key in ended:
        controller.forget(key)
    left = [key for key in range(8) if key not in ended]
    controller.plan(signals(*left))
    assert taken == [steps]
    assert controller.cruising is goes_on
    assert len(controller.batch) == len(left)
    assert set(controller._known) == set(left)


def test_a_batch_that_shrinks_and_grows_is_planned() -> None:
    controller = cruising(WORLDS["batch of 4"])
    controller.forget(1)
    controller.plan(signals(0, 2, 3, 9))
    assert not controller.cruising


def test_a_sequence_that_follows_another_goes_on_as_that_one_did_unless_it_is_of_another_kind() -> None:
    controller = cruising(WORLDS["cheap rows"])
    for key, temperature, goes_on in ((1, 0.0, True), (2, 1.0, False), (3, 0.0, False)):
        controller.forget(key - 1)
        controller.plan([Signal(key, 20, 100, temperature)])
        assert controller.cruising is goes_on
        assert controller.budget(0, 0, EMPTY_TREE).nodes > 0 or not goes_on
    assert set(controller._known) == {3}


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_a_sequence_taught_is_learned_at_once_unless_the_next_goes_on_as_it_did(goes_on: bool) -> None:
    """Then it is learned with the next plan, each outcome as of the sequence that had it."""
    controller = cruising(WORLDS["cheap rows"])
    controller.cruise.take(controller.acceptance)
    tree, owners = TokenTree.chain([1, 1, 2], confidence=[0.8] * 3), []
    for key, path in ((0, (0, 1)), (1, ())):
        controller.plan(signals(key))
        assert controller.cruising
        owners.append(controller.batch[0].own)
        controller.budget(0, 0, EMPTY_TREE)
        controller.observe([tree], [Verdict(path, path, 1)], StepTimes((1e-5,), 2e-4, 1e-6, 2e-6, 4))
        controller.cruise.left = controller.cruise.left if goes_on else 0
        controller.forget(key)
        assert (controller.cruise.counts.steps == 0) is not goes_on
        if not goes_on:
            return
    assert owners[0] is not owners[1]
    seen: list[tuple[object, list[tuple[int, int, int]]]] = []
    controller.acceptance.observe_chains = lambda own, source, found: seen.append((own, found))  # type: ignore[method-assign]
    assert controller.cruise.take(controller.acceptance).chains == {(0, 0, 3, 2): 1, (0, 0, 3, 0): 1}
    assert seen == [(owners[0], [(3, 2, 1)]), (owners[1], [(3, 0, 1)])]


def test_budgets_end_where_the_sequence_does() -> None:
    controller = cruising(WORLDS["cheap rows"])
    controller.plan(signals(0, remaining=3))
    assert controller.cruising
    assert controller.budget(0, 0, EMPTY_TREE).depth == 2
    controller.plan(signals(0, remaining=1))
    assert controller.budget(0, 0, EMPTY_TREE) is NO_BUDGET


def test_chains_are_trimmed_by_their_confidence_and_drawn_trials_never() -> None:
    controller = cruising(WORLDS["informed table"])
    controller.plan(signals(0))
    assert controller.budget(0, 0, EMPTY_TREE).nodes
    sure, unsure = (TokenTree.chain([1] * 4, confidence=confidence) for confidence in ([0.97] * 4, [0.97, 0.05, 0.05, 0.05]))
    row = torch.tensor([0.5, 0.5])
    drawn = TokenTree.build([0, 1], [-1, 0], confidence=[0.01, 0.01], trials={-1: [Trial(0, row)], 0: [Trial(1, row)]})
    assert controller.select([sure]) == [sure]
    assert len(controller.select([unsure])[0]) == 1
    assert len(controller.select([TokenTree.chain([1] * 4, confidence=[0.01] * 4)])[0]) == 1, "or a miss would not show"
    known = controller.acceptance.sources[0]
    known.chance = [1.0] * len(known.chance)
    assert controller.select([unsure]) == [unsure], "what confidences were found to be worth decides"
    assert controller.select([drawn]) == [drawn]
    assert "as planned" in controller.explain(0)


@pytest.mark.parametrize(("chance", "kept"), [(0.02, 1), (0.9, 4)])
def test_a_guess_that_is_a_tree_is_cut_to_what_is_worth_its_rows(chance: float, kept: int) -> None:
    """Its root's best child stays where the last guess came true, to show what the text does; a drawn one stays whole."""
    controller = cruising(WORLDS["table"])
    controller.guesses.tables, controller.guesses._came, controller.bursting = [0], True, True
    controller._guess(signals(0)[0])
    for _ in range(30):
        tree = TokenTree.build([1, 2, 3, 4], [-1, -1, 0, 1], confidence=[chance] * 4)
        controller.acceptance.observe(controller.batch[0].own, tree, (0, 2) if chance > 0.5 else ())
    assert len(controller.select([tree])[0]) == kept
    row = torch.tensor([0.5, 0.5])
    drawn = TokenTree.build([0, 1], [-1, 0], confidence=[0.01, 0.01], trials={-1: [Trial(0, row)], 0: [Trial(1, row)]})
    assert controller.select([drawn]) == [drawn]
    assert controller.select([EMPTY_TREE]) == [EMPTY_TREE]


def test_what_was_counted_is_what_happened() -> None:
    controller = cruising(WORLDS["cheap rows"])
    controller.cruise.left = STEPS
    controller.cruise.take(controller.acceptance)
    trees = [TokenTree.chain([1, 1, 2], confidence=[0.8] * 3), EMPTY_TREE, TokenTree.chain([2], confidence=[0.8])]
    for tree in trees:
        controller.plan(signals(0))
        controller.budget(0, 0, EMPTY_TREE)
        assert controller.cruising
        controller.observe([tree], [judged(tree)], StepTimes((1e-5,), 2e-4, 1e-6, 2e-6, 1 + len(tree)))
    counts = controller.cruise.take(controller.acceptance)
    assert (counts.steps, counts.tokens, counts.found(0)) == (3, 5, (3, 2))
    assert controller.cruise.counts == Counts(drafting=[0.0])
    assert counts.seconds == pytest.approx(3 * 2.13e-4)
    assert counts.chains == {(0, 0, 3, 2): 1, (0, 0, 1, 0): 1}
    nets = {(net.scored, net.accepted): net.net for net in counts.nets(1000.0, [0.0, 2e-4, 3e-4, 3.5e-4, 5e-4], 1)}
    assert nets == pytest.approx({(3, 2): 2 - 0.01 - 0.3, (1, 0): -0.01 - 0.1, (0, 0): -0.01})
    worth = counts.worths(1000.0, [0.0, 2e-4, 3e-4, 3.5e-4, 5e-4], 1)[0, 0]
    assert worth == pytest.approx((3, fmean(nets.values()), pvariance(nets.values())))


def test_outcomes_are_told_in_an_order_that_favours_none() -> None:
    outcomes = [1.0] * 55 + [-1.0] * 45
    mixed = np.random.default_rng(0).permutation(outcomes).tolist()
    fair, shuffled, biased = Watch(), Watch(), Watch()
    fair.record_many(fmean(outcomes), pvariance(outcomes), len(outcomes))
    for net in mixed:
        shuffled.record(net, Mode.ASK, 3, 3)
    for net in outcomes:  # the control: the same outcomes, one kind after the other
        biased.record(net, Mode.ASK, 3, 3)
    assert not fair.asleep
    assert fair.count == pytest.approx(shuffled.count)
    assert fair.mean == pytest.approx(shuffled.mean, abs=0.1)
    assert fair.square == pytest.approx(shuffled.square, rel=0.1)
    assert biased.asleep


def test_a_drafter_that_sleeps_is_tried_by_many_steps_in_a_row_the_first_of_which_do_not_count() -> None:
    controller = cruising(WORLDS["cheap rows"])
    cruise, one = controller.cruise, controller.batch[0]
    one.watches[0].sleep()
    one.modes[0], one.tried, controller.worths = Mode.EXPLORE, 3, {(0, 0): (0.0, 3)}
    cruise.start(controller, signals(0), 1.0)
    assert (cruise.left, cruise.trials) == (TRIAL, {(0, 0)})
    tree = TokenTree.chain([1, 1, 1], confidence=[0.8] * 3)
    for _ in range(TRIAL):
        controller.plan(signals(0))
        assert controller.cruising
        assert controller.budget(0, 0, EMPTY_TREE).depth == 3
        controller.observe([tree], [judged(tree)], StepTimes((1e-5,), 2e-4, 1e-6, 2e-6, 4))
    assert (cruise.counts.steps, cruise.left) == (TRIAL - COLD, 0)
    assert one.watches[0].asleep
    learn(controller)
    assert not one.watches[0].asleep


def test_a_trial_that_lost_puts_the_next_one_off() -> None:
    watch = Watch()
    watch.sleep()
    waits = []
    for _ in range(6):
        watch.after_trial(-0.5, 24)
        waits.append(watch.wait)
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] == int(0.5 * 24 / SHARE)
    watch.after_trial(0.2, 24)
    assert not watch.asleep


def test_nothing_is_asked_while_nobody_drafts_and_what_did_not_go_by_is_given_back() -> None:
    controller = cruising(WORLDS["cheap rows"])
    controller.cruise._set_out([[[None, None]]])
    controller.cruise.left, controller.guesses.burst.of(signals(0)[0].key).wait = 20, 200
    controller.plan(signals(0))
    assert (controller.idle, controller.resting, controller.cruise.left) == (True, 19, 0)
    controller.resting -= 5
    controller.plan(signals(0))
    assert (controller.idle, controller.resting + controller.cruise.left) == (True, 13)
    controller = cruising(WORLDS["cheap rows"])
    controller.cruise._set_out([[[None, None]]])
    controller.cruise.left, controller.guesses.burst.of(signals(0)[0].key).wait = 400, 200
    controller.plan(signals(0))
    assert (controller.idle, controller.resting) == (True, APART - 1), "a short rest would cost a plan every few milliseconds"


def test_chains_learned_from_together_teach_what_they_teach_one_by_one() -> None:
    rng, together, apart = np.random.default_rng(1), Acceptance(1), Acceptance(1)
    for _ in range(60):
        stood = [min(int(rng.geometric(0.3)) - 1, 6) for _ in range(8)]
        together.observe_chains(Own(1), 0, [(6, count, stood.count(count)) for count in sorted(set(stood))])
        for count in stood:
            apart.observe(Own(1), TokenTree.chain([1] * 6, confidence=[0.7] * 6), range(count))
    assert together.sources[0].level == pytest.approx(apart.sources[0].level, abs=0.03)
    assert together.sources[0].level[1] == pytest.approx(0.7, abs=0.1)
