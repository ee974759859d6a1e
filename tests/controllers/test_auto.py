"""The automatic controller in synthetic worlds: near the best fixed depth everywhere, and never much slower than plain
decoding.

Negative controls: a controller that ignores costs, and one that never looks again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from controllers.worlds import Guesser, World, informed, overconfident, steady

from paceline.controllers import Plan, Signal
from paceline.controllers.auto import PASSES, AutoController, Costs, CostStore
from paceline.controllers.auto.acceptance import BUCKETS, Acceptance, SequenceOdds, Stopper
from paceline.controllers.auto.trust import LONGEST_WAIT
from paceline.controllers.policies import FixedController
from paceline.errors import ConfigError
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Trial

PLAIN_MS = 13.0


@dataclass(frozen=True)
class Key:
    """What stored estimates belong to."""

    methods: str


DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def packed(rows: int) -> float:
    """Verification nearly free: weights packed for few rows."""
    return 1e-3 * (PLAIN_MS + 0.3 * (rows - 1))


def compute_bound(rows: int) -> float:
    """Every row costs."""
    return 1e-3 * PLAIN_MS / 3 * (2 + rows)


def jump(rows: int) -> float:
    """The second row costs more than the first, further ones little."""
    return 1e-3 * (PLAIN_MS if rows == 1 else 2.3 * PLAIN_MS + 0.5 * rows)


def tiles(rows: int) -> float:
    """A kernel works on tiles of four rows: the first row of a tile costs most."""
    return 1e-3 * PLAIN_MS * (1.0 + 1.4 * ((rows - 1) // 4) + 0.1 * ((rows - 1) % 4))


def draft(chance: object, cost: float, **options: object) -> Guesser:
    """A draft model, one level costing this share of a plain step."""
    seconds = 1e-3 * PLAIN_MS * cost
    return Guesser("draft", chance, fixed=seconds / 2, per_level=seconds, **options)  # type: ignore[arg-type]


def ngram(chance: object, finds: float = 1.0) -> Guesser:
    """A look-up: costs next to nothing, does not find something in every step, never asks while it drafts."""
    return Guesser("ngram", chance, fixed=2e-5, finds=finds, sequential=False)  # type: ignore[arg-type]


WORLDS = {
    "cheap draft, packed": World([draft(steady(0.63), 0.03)], packed),
    "draft, packed": World([draft(steady(0.63), 0.1)], packed),
    "good draft, packed": World([draft(steady(0.85), 0.1)], packed),
    "very good draft, packed": World([draft(steady(0.95), 0.03)], packed),
    "dear draft, packed": World([draft(steady(0.85), 0.3)], packed),
    "poor and dear draft, packed": World([draft(steady(0.3), 0.3)], packed),
    "draft, compute bound": World([draft(steady(0.85), 0.1)], compute_bound),
    "poor draft, compute bound": World([draft(steady(0.4), 0.1)], compute_bound),
    "very good and dear draft, tiles": World([draft(steady(0.95), 0.28)], tiles),
    "very good draft, tiles": World([draft(steady(0.97), 0.1)], tiles),
    "good draft, jump": World([draft(steady(0.95), 0.03)], jump),
    "draft, jump": World([draft(steady(0.6), 0.1)], jump),
    "informed draft, packed": World([draft(informed(0.2, 0.95), 0.1)], packed),
    "informed draft, compute bound": World([draft(informed(0.2, 0.95), 0.1)], compute_bound),
    "ngram, packed": World([ngram(steady(0.7), 0.5)], packed),
    "ngram, compute bound": World([ngram(steady(0.7), 0.5)], compute_bound),
    "both, packed": World([ngram(steady(0.8), 0.3), draft(steady(0.65), 0.1)], packed),
    "both, compute bound": World([ngram(steady(0.8), 0.3), draft(steady(0.65), 0.1)], compute_bound),
    "batch of 16, packed": World([draft(steady(0.7), 0.1)], packed, batch=16),
    "batch of 16, compute bound": World([draft(steady(0.7), 0.1)], compute_bound, batch=16),
}


def steps(world: World, most: int) -> int:
    return max(most // world.batch, 150)


def automatic(world: World) -> AutoController:
    return AutoController(world.costs(), world.names)


@cache
def best_fixed(name: str) -> float:
    world = WORLDS[name]
    return max(world.run(FixedController(depth, drafters=world.names), steps(world, 200)) for depth in DEPTHS)


@pytest.mark.parametrize("name", WORLDS)
def test_it_is_within_a_tenth_of_the_best_fixed_depth(name: str) -> None:
    world = WORLDS[name]
    assert world.run(automatic(world), steps(world, 1000)) >= 0.9 * best_fixed(name)


def ignores_costs(world: World) -> AutoController:
    """The negative control: believes that rows and drafts are free, and is never told what they took."""

    class NothingLearned(Costs):
        def observe(self, *args: object, **kwargs: object) -> None:
            self.curves.setdefault((0, 0), self._curve(1, 0)).set(1, 1.0)

    class NoTrust(AutoController):
        def _judge(self, *args: object) -> None:
            """Outcomes are not looked at."""

    return NoTrust(NothingLearned(), world.names, max_nodes=16)


@pytest.mark.parametrize("name", ["dear draft, packed", "draft, compute bound", "draft, jump"])
def test_ignoring_costs_fails_the_check(name: str) -> None:
    world = WORLDS[name]
    assert world.run(ignores_costs(world), 600) < 0.9 * best_fixed(name)


WRONG = {
    "draft, packed": World([draft(overconfident, 0.1)], packed),
    "draft, jump": World([draft(overconfident, 0.1)], jump),
    "dear draft, compute bound": World([draft(overconfident, 0.5)], compute_bound),
    "ngram, compute bound": World([ngram(overconfident)], compute_bound),
    "both, compute bound": World([ngram(overconfident), draft(overconfident, 0.3)], compute_bound),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_drafter_that_is_always_wrong_costs_less_than_a_twentieth(name: str) -> None:
    world = WRONG[name]
    controller = automatic(world)
    assert world.run(controller, 800) >= 0.95 * world.run(FixedController(0, drafters=world.names), 10)
    world.step(controller, 800, np.random.default_rng(0))
    assert controller.acceptance.sources[0].level(1) < 0.3


def test_always_wrong_and_always_drafting_fails_that_check() -> None:
    world = WRONG["draft, packed"]
    assert world.run(FixedController(1), 100) < 0.95 * world.run(FixedController(0, drafters=world.names), 10)


def turning(step: int, rng: np.random.Generator) -> tuple[float, float]:
    """Always wrong at first; from step 600 on the text repeats itself."""
    return (0.0, 0.6) if step < 600 else (0.95, 0.6)


@pytest.mark.parametrize("guesser", [ngram(turning), draft(turning, 0.1)], ids=["ngram", "draft"])
def test_it_comes_back_when_the_text_turns_repetitive(guesser: Guesser) -> None:
    world = World([guesser], packed)
    controller = automatic(world)
    before = world.run(controller, 600)
    world.run(controller, LONGEST_WAIT // 2, start=600)
    after = world.run(controller, 200, start=600 + LONGEST_WAIT // 2)
    assert after > 2 * before


class NeverAgain(AutoController):
    """The negative control: whom outcomes once spoke against is not tried again."""

    def plan(self, signals: list[Signal]) -> Plan:  # type: ignore[override]
        for guard in self._trust.values():
            guard.wait = 1000
        return super().plan(signals)


def test_never_looking_again_fails_that_check() -> None:
    world = World([draft(turning, 0.1)], packed)
    controller = NeverAgain(world.costs(), world.names)
    before = world.run(controller, 600)
    world.run(controller, LONGEST_WAIT // 2, start=600)
    assert world.run(controller, 200, start=600 + LONGEST_WAIT // 2) < 2 * before


def test_it_stops_again_when_the_drafter_turns_bad() -> None:
    world = World([draft(lambda step, rng: (0.9, 0.9) if step < 400 else (0.0, 0.9), 0.2)], packed)
    controller = automatic(world)
    world.run(controller, 400)
    world.run(controller, 200, start=400)
    assert world.run(controller, 400, start=600) > 0.95 * world.run(FixedController(0, drafters=world.names), 10)


def test_without_a_probe_it_learns_the_costs_from_its_steps() -> None:
    world = WORLDS[name := "draft, packed"]
    assert world.run(AutoController(world.costs(probe=False), world.names), 1200) >= 0.9 * best_fixed(name)


class Hopeful(Costs):
    """The negative control: a probe is thought to take no more than its passes would if rows were free."""

    def probing(self, batch: int, context: int, rows: int) -> float:
        return 8 * self.table(batch, context, 1)[1]


@pytest.mark.parametrize("seconds", [packed, compute_bound, jump, tiles])
@pytest.mark.parametrize("guesser", [ngram(steady(0.6), 0.01), ngram(steady(0.3), 0.1)], ids=["rare", "poor"])
def test_a_probe_waits_until_the_ledger_pays_all_of_it(guesser: Guesser, seconds: Callable[[int], float]) -> None:
    """Its passes and filling its cache, also where a further row costs as much as a pass; in plain steps."""
    assert min(left_by_probes(Costs, World([guesser], seconds, jitter=0.0, outliers=0.0)), default=0.0) > -0.5


def test_probes_that_are_thought_cheap_run_into_debt() -> None:
    world = World([ngram(steady(0.6), 0.01)], jump, jitter=0.0, outliers=0.0)
    assert min(left_by_probes(Hopeful, world)) < -5.0


def left_by_probes(kind: type[Costs], world: World) -> list[float]:
    """The ledger's balance after each probe of 1,200 steps."""
    left: list[float] = []
    now = 0.0

    def probe(counts: Sequence[int], context: int) -> list[float]:
        nonlocal now
        took = PASSES * sum(map(world.seconds, counts)) + world.seconds(context)
        now += took
        left.append(controller.ledger.balance - took / world.seconds(1))
        return [*map(world.seconds, counts)]

    controller = AutoController(kind(probe=probe), world.names)
    controller.clock = lambda: now  # type: ignore[method-assign]  # time stands still but for probes
    world.run(controller, 1200)
    return left


def warmed(world: World, count: int = 300) -> AutoController:
    controller = automatic(world)
    world.run(controller, count)
    return controller


def budget_of(
    controller: AutoController, drafter: int = 0, *, remaining: int = 1000, temperature: float = 0.0
) -> Budget | None:
    """What a drafter may propose for the one sequence of the next step that is not plain to be timed."""
    for _ in range(2):
        plan = controller.plan([Signal(0, 500, remaining, temperature)])
        if plan.drafts:
            return plan.budgets[0][drafter]
    return None


def test_the_dear_drafter_is_asked_where_the_table_is_not_sure() -> None:
    controller = warmed(World([ngram(informed(0.1, 0.97)), draft(steady(0.8), 0.1)], packed), 300)
    found = budget_of(controller, 1)
    assert found is not None
    assert found.nodes > 0

    def needed(confidence: float) -> bool:
        return found.needed(TokenTree.chain([1], confidence=[confidence]))

    assert found.needed(EMPTY_TREE)
    assert needed(0.1)
    assert not needed(0.97)


def test_a_table_and_a_dear_drafter_together_beat_each_alone() -> None:
    table, dear = ngram(informed(0.1, 0.97)), draft(steady(0.8), 0.1)
    worlds = [World(names, packed) for names in ([table, dear], [table], [dear])]
    both, *alone = (world.run(warmed(world, 300), 300, seed=1, start=300) for world in worlds)
    assert both > 1.1 * max(alone)


def requests(prompt: int) -> World:
    """Requests of 40 steps, whose prompts a good draft model reads at 32 tokens in the time of a plain step."""
    guesser = Guesser("draft", steady(0.9), per_level=0.15e-3 * PLAIN_MS, reading=1e-3 * PLAIN_MS * prompt / 32)
    return World([guesser], packed, request=40, prompt=prompt)


def test_prompts_are_read_where_the_drafts_pay_for_it() -> None:
    """A long prompt takes longer to read than drafts save in a short answer; nothing is read of the next ones."""
    for prompt, least, most in ((64, 1.5, 9.0), (8000, 0.97, 1.01)):
        world = requests(prompt)
        controller = automatic(world)
        world.run(controller, 400)
        gain = world.run(controller, 400, start=400) / world.run(FixedController(0, drafters=world.names), 10)
        assert least < gain < most, prompt
    always = requests(8000).run(FixedController(4, drafters=["draft"]), 400)
    assert always < 0.8 * requests(8000).run(FixedController(0, drafters=["draft"]), 10), (
        "the control reads each of them"
    )


def test_no_drafts_from_the_given_batch_size_on() -> None:
    world = WORLDS["good draft, packed"]
    controller = AutoController(world.costs(), world.names, disable_by_batch_size=2)
    world.run(controller, 50)
    assert not controller.plan([Signal(0, 10, 100, 0.0), Signal(1, 10, 100, 0.0)]).drafts
    assert "disable_by_batch_size is 2" in controller.explain(0)
    assert budget_of(controller) is not None


def test_where_one_token_is_left_nobody_is_asked_and_nothing_is_learned() -> None:
    controller = warmed(WORLDS["both, packed"], 600)
    finds = [source.finds for source in controller.acceptance.sources]
    assert not controller.plan([Signal(0, 500, 1, 0.0)]).drafts
    assert "one token is left" in controller.explain(0)
    assert [source.finds for source in controller.acceptance.sources] == finds
    assert budget_of(controller) is not None


def test_a_drafter_that_has_nothing_to_do_with_a_text_is_not_tried_for_ever() -> None:
    """`prediction` without one is planned, but never asked; the others are not held up by it."""
    silent = Guesser("prediction", steady(0.5), finds=0.0, sequential=False)
    world = World([silent, ngram(steady(0.9), 0.6)], packed)
    controller = automatic(world)
    world.run(controller, 200)
    assert controller.costs.line("prediction").count > 2
    assert world.run(controller, 200, start=200) > 1.2 * world.run(FixedController(0, drafters=world.names), 10)


def test_the_stopper_goes_further_the_surer_the_drafter_is() -> None:
    controller = warmed(WORLDS["informed draft, packed"], 600)
    found = budget_of(controller)
    assert found is not None

    def depth(confidence: float) -> int:
        level = 1
        while level < 16 and found.go_on(level + 1, confidence**level, None):
            level += 1
        return level

    assert depth(0.2) < depth(0.95)
    assert depth(0.2) < depth(0.95), "a second draft under the same budget begins anew"


def stopped_before(chance: float, prices: list[float]) -> int:
    """The level before which a draft ends whose tokens are all accepted with this chance."""
    acceptance, own = Acceptance(1), SequenceOdds(1)
    right = np.random.default_rng(0).random(4000) < chance
    for hit in right.tolist():
        for bucket in range(1, BUCKETS):
            acceptance.sources[0].learn(bucket, 0.9, hit)
            acceptance.sources[0].learn_level(bucket, 1, hit)
    stopper, depth = Stopper(acceptance, own, 0, prices), 2
    while depth <= len(prices) and stopper(depth, 0.9 ** (depth - 1), None):
        depth += 1
    return depth


def test_the_stopper_looks_beyond_the_dear_first_row_of_a_tile() -> None:
    tile = [0.2, 0.2, 0.2, 1.0, 0.2, 0.2, 0.2]
    assert stopped_before(0.97, tile) == 8, "the next rows are worth the dear one"
    assert stopped_before(0.97, tile[:4]) == 4, "which alone is not"
    assert stopped_before(0.7, tile) == 4


def test_drawn_trials_are_never_cut_for_what_came_up() -> None:
    controller = warmed(WRONG["dear draft, compute bound"])
    controller.plan([Signal(0, 500, 1000, 1.0)])
    row = torch.tensor([0.5, 0.5])
    drawn = TokenTree.build([0, 1], [-1, 0], confidence=[0.01, 0.01], trials={-1: [Trial(0, row)], 0: [Trial(1, row)]})
    (kept,) = controller.select([drawn])
    assert kept.tokens.tolist() == [0, 1]
    assert kept.trials == drawn.trials
    controller.plan([Signal(0, 500, 1000, 0.0)])
    assert len(controller.select([TokenTree.chain([0, 1], confidence=[0.01, 0.01])])[0]) < 2


def test_learning_costs_no_more_than_its_share_of_decoding() -> None:
    """All exploration and probing is paid from one ledger, however bad the drafters are."""
    for name, world in WRONG.items():
        controller, rng, seconds = automatic(world), np.random.default_rng(0), 0.0
        for step in range(1500):
            seconds += world.step(controller, step, rng)[1]
        assert controller.ledger.spent <= 0.025 * seconds + 20 * world.seconds(1), name


def row_world(share: float, batch: int) -> World:
    """A pass of 10 ms of which every further row takes a share, and a cheap good drafter."""
    return World([Guesser("draft", steady(0.8), 1e-4, 2e-4)], lambda rows: 1e-2 * (1 + share * (rows - 1)), batch=batch)


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize("share", [0.0005, 0.02])
def test_rows_beyond_the_measured_range_are_neither_dear_nor_free(share: float, batch: int) -> None:
    """Priced at 2 % each for ever, cheap rows gave 0.85 and 0.65 of the best length; at nothing, dear ones 0.82."""
    world = row_world(share, batch)
    controller = automatic(world)
    world.run(controller, 250)
    best = max(world.run(FixedController(depth), 400 // batch) for depth in DEPTHS)
    assert world.run(controller, 250, start=250) >= 0.93 * best


def test_sequences_may_pause_and_join_between_plans() -> None:
    """A batch of 4 that goes on as 3, and one of 8 as 6: the engine ends the plan, nothing of it is asked again."""
    for large, small in ((4, 3), (8, 6)):
        world = World([draft(steady(0.8), 0.05)], packed, batch=large)
        controller = automatic(world)
        for _ in range(20):
            world.run(controller, 3)
            world.batch, world._left = (small if world.batch == large else large), 0
        assert controller.explain(small - 1)


def test_explaining_changes_nothing() -> None:
    world, other = WORLDS["both, packed"], WORLDS["both, packed"]
    quiet, explained = automatic(world), automatic(other)
    first, second = np.random.default_rng(0), np.random.default_rng(0)
    for step in range(200):
        assert world.step(quiet, step, first) == other.step(explained, step, second)
        explained.explain(0)
        explained.explain()
    assert quiet.explain(0) == explained.explain(0)


def test_it_forgets_ended_sequences_and_explains_itself() -> None:
    controller = warmed(World([draft(overconfident, 0.3)], packed), 100)
    assert "times as fast as plain decoding lately" in controller.explain()
    assert re.search("cost more time than it saved|would cost more than the budget", controller.explain(0))
    controller.forget(0)
    controller.forget(0)
    assert controller.sequences == {}


def test_what_was_learned_of_drafters_survives_a_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World([draft(steady(0.85), 0.1)], packed)
    first = AutoController(Costs(), ("draft",), memory=CostStore(Key("a"), tmp_path))
    rng = np.random.default_rng(0)
    for step in range(60):
        world.step(first, step, rng)
    first.forget(0)
    again = AutoController(Costs(), ("draft",), memory=CostStore(Key("a"), tmp_path))
    assert again.acceptance.sources[0].level(1) == pytest.approx(first.acceptance.sources[0].level(1), abs=0.1)
    assert again.costs.line("draft").at(4) == pytest.approx(first.costs.line("draft").at(4))
    other = AutoController(Costs(), ("draft",), memory=CostStore(Key("b"), tmp_path))
    assert other.costs.line("draft").count == 0, "another draft model has other prices"
    CostStore(Key("b"), tmp_path).save({"sources": first.acceptance.sources[0].to_list()})
    assert AutoController(Costs(), ("draft",), memory=CostStore(Key("b"), tmp_path)).costs.line("draft").count == 0
    assert caplog.text.count("is not valid") == 1


def test_plans_hold_longer_where_steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes 1 % of decoding at most: 100 microseconds a plan are nothing beside 13 ms, and 50 steps of 0.2
    ms.
    """
    ticks = count(0.0, 5e-5)
    monkeypatch.setattr(AutoController, "clock", staticmethod(lambda: next(ticks)))

    def held(world: World) -> int:
        controller = automatic(world)
        world.run(controller, 500)
        return controller.plan([Signal(0, 700, 1000, 0.0)]).steps

    quick = World([Guesser("ngram", steady(0.8), 1e-6)], lambda rows: 2e-4 * (1 + 0.1 * rows))
    assert held(WORLDS["good draft, packed"]) <= 2
    assert held(quick) >= 8


def test_limits_are_checked() -> None:
    for wrong in (0, 1025, 2**62, 1.5, True):
        with pytest.raises(ConfigError, match=r"max_nodes must be an integer in 1\.\.1024, got "):
            AutoController(Costs(), ["draft"], max_nodes=wrong)  # type: ignore[arg-type]  # a float, on purpose
