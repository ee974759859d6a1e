"""The automatic controller in synthetic worlds: near the best fixed depth everywhere, and never much slower than plain decoding.

Negative controls: a controller that ignores costs, and one that never looks again.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from controllers.worlds import Guesser, World, informed, overconfident, steady
from paceline.controllers.cost_model import CostModel
from paceline.controllers.gate import MOST
from paceline.controllers.voice import Voice

from paceline.controllers.auto import AutoController
from paceline.controllers.base import Signal
from paceline.controllers.fixed import FixedController
from paceline.errors import ConfigError
from paceline.tree.token_tree import EMPTY_TREE, TokenTree, Trial
from paceline.tree.types import NO_BUDGET

PLAIN_MS = 13.0


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


def steps(world: World, count: int) -> int:
    return max(count // world.batch, 150)


def automatic(world: World) -> AutoController:
    return AutoController(world.costs(), world.names)


def best_fixed(world: World) -> float:
    return max(world.run(FixedController(depth), steps(world, 400)) for depth in DEPTHS)


@pytest.mark.parametrize("name", WORLDS)
def test_it_is_within_a_tenth_of_the_best_fixed_depth(name: str) -> None:
    world = WORLDS[name]
    assert world.run(automatic(world), steps(world, 1200)) >= 0.9 * best_fixed(world)


class IgnoresCosts(AutoController):
    """The negative control: believes that time is free, each drafter's and that of drafting as a whole."""

    def plan(self, signals: list[Signal]) -> None:  # type: ignore[override]
        self._gates.clear()
        super().plan(signals)
        self.now.rate = 0.0


@pytest.mark.parametrize("name", ["dear draft, packed", "draft, compute bound", "draft, jump"])
def test_ignoring_costs_fails_the_check(name: str) -> None:
    world = WORLDS[name]
    assert world.run(IgnoresCosts(world.costs(), world.names), 600) < 0.9 * best_fixed(world)


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
    assert world.run(controller, 800) >= 0.95 * world.run(FixedController(0), 10)
    world.step(controller, 800, np.random.default_rng(0))
    assert "accepted at depth 1, 2, 3-4, 5-8, 9+: 0.0" in controller.explain()


def test_always_wrong_and_always_drafting_fails_that_check() -> None:
    world = WRONG["draft, packed"]
    assert world.run(FixedController(1), 100) < 0.95 * world.run(FixedController(0), 10)


def turning(step: int, rng: np.random.Generator) -> tuple[float, float]:
    """Always wrong at first; from step 600 on the text repeats itself."""
    return (0.0, 0.6) if step < 600 else (0.95, 0.6)


@pytest.mark.parametrize("guesser", [ngram(turning), draft(turning, 0.1)], ids=["ngram", "draft"])
def test_it_comes_back_when_the_text_turns_repetitive(guesser: Guesser) -> None:
    world = World([guesser], packed)
    controller = automatic(world)
    before = world.run(controller, 600)
    world.run(controller, MOST, start=600)  # the longest that the gate stays closed
    after = world.run(controller, 200, start=600 + MOST)
    assert after > 2 * before


class NeverAgain(AutoController):
    """The negative control: forgets to try a sleeping drafter, and drafting as a whole once it was off."""

    def plan(self, signals: list[Signal]) -> None:  # type: ignore[override]
        super().plan(signals)
        for gate in self._gates.values():
            gate.wait = 1000 if gate.wait else 0
        for sequence in self.batch:
            for watch in sequence.watches:
                watch.wait = 1000


def test_never_looking_again_fails_that_check() -> None:
    world = World([draft(turning, 0.1)], packed)
    controller = NeverAgain(world.costs(), world.names)
    before = world.run(controller, 600)
    world.run(controller, 150, start=600)
    assert world.run(controller, 200, start=750) < 2 * before


def test_it_stops_again_when_the_drafter_turns_bad() -> None:
    world = World([draft(lambda step, rng: (0.9, 0.9) if step < 400 else (0.0, 0.9), 0.2)], packed)
    controller = automatic(world)
    world.run(controller, 400)
    world.run(controller, 100, start=400)
    assert world.run(controller, 400, start=500) > 0.95 * world.run(FixedController(0), 10)


def test_without_a_probe_it_learns_the_costs_from_its_steps() -> None:
    world = WORLDS["draft, packed"]
    assert world.run(AutoController(world.costs(probe=False), world.names), 1200) >= 0.9 * best_fixed(world)


def warmed(world: World, count: int = 300) -> AutoController:
    controller = automatic(world)
    world.run(controller, count)
    controller._gates.clear()  # these tests look at single decisions, not at whether to draft at all
    return controller


def test_a_long_confident_ngram_chain_leaves_nothing_for_the_dear_drafter() -> None:
    controller = warmed(World([ngram(steady(0.9), 0.3), draft(steady(0.8), 0.1)], packed))
    chain = TokenTree.chain([1] * 8, confidence=[0.95] * 8)
    controller.plan([Signal(0, 500, 1000, 0.0)])
    assert controller.budget(0, 1, EMPTY_TREE).nodes > 0
    controller.plan([Signal(0, 500, 1000, 0.0)])
    assert controller.budget(0, 1, chain) is NO_BUDGET


def test_depth_ends_where_the_sequence_does() -> None:
    controller = warmed(WORLDS["good draft, packed"])
    controller.plan([Signal(0, 500, 3, 0.0)])
    assert controller.budget(0, 0, EMPTY_TREE).depth == 2
    controller.plan([Signal(0, 500, 1, 0.0)])
    assert controller.budget(0, 0, EMPTY_TREE) is NO_BUDGET


def test_no_drafts_from_the_given_batch_size_on() -> None:
    controller = AutoController(CostModel(), ["draft"], disable_by_batch_size=2)
    controller.plan([Signal(0, 10, 100, 0.0), Signal(1, 10, 100, 0.0)])
    assert controller.budget(0, 0, EMPTY_TREE) is NO_BUDGET
    controller.plan([Signal(0, 10, 100, 0.0)])
    assert controller.budget(0, 0, EMPTY_TREE).nodes > 0


def test_the_voice_goes_further_the_surer_the_drafter_is() -> None:
    controller = warmed(WORLDS["informed draft, packed"], 600)
    controller.plan([Signal(0, 500, 1000, 0.0)])

    def depth(confidence: float) -> int:
        voice = controller.budget(0, 0, EMPTY_TREE).go_on
        level = 1
        while level < 16 and voice(level + 1, confidence**level, None):
            level += 1
        return level

    assert depth(0.2) < depth(0.95)


def test_the_voice_reads_nothing_of_the_level_it_decides_about() -> None:
    """It is asked with the path so far only; the same path gives the same word, whatever is drawn next."""
    controller = warmed(WORLDS["good draft, packed"])
    controller.plan([Signal(0, 500, 1000, 1.0)])
    first, second = (controller.budget(0, 0, EMPTY_TREE).go_on for _ in range(2))
    assert isinstance(first, Voice)
    assert [first(d, 0.9 ** (d - 1), None) for d in range(2, 10)] == [second(d, 0.9 ** (d - 1), None) for d in range(2, 10)]


def test_drawn_trials_are_never_cut_for_what_came_up() -> None:
    controller = warmed(WRONG["dear draft, compute bound"])
    controller.plan([Signal(0, 500, 1000, 1.0)])
    row = torch.tensor([0.5, 0.5])
    drawn = TokenTree.build([0, 1], [-1, 0], confidence=[0.01, 0.01], trials={-1: [Trial(0, row)], 0: [Trial(1, row)]})
    assert controller.select([drawn]) == [drawn]
    controller.plan([Signal(0, 500, 1000, 0.0)])
    assert len(controller.select([TokenTree.chain([0, 1], confidence=[0.01, 0.01])])[0]) < 2


def test_it_forgets_ended_sequences_and_explains_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "paceline.controllers"):
        controller = warmed(World([draft(overconfident, 0.3)], packed), 100)
    assert "sleeps" in caplog.text or controller.explain().endswith("per level")
    assert "tokens/s lately" in controller.explain()
    controller.forget(0)
    controller.forget(0)
    assert controller._known == {}


def test_limits_are_checked() -> None:
    for wrong in (0, 1025, 2**62, 1.5, True):
        with pytest.raises(ConfigError, match=r"max_nodes must be an integer in 1\.\.1024, got "):
            AutoController(CostModel(), ["draft"], max_nodes=wrong)  # type: ignore[arg-type]  # a float, on purpose
