"""Decisions in words: they say what the plan did, with its figures, and nothing where nothing was decided."""

from __future__ import annotations

import logging

import pytest
from controllers.worlds import Guesser, World, judged, steady
from engine.harness import engine, run
from toys import ToyRunner

from paceline.config import SamplingParams
from paceline.controllers.acceptance import Acceptance, Own
from paceline.controllers.auto import AutoController
from paceline.controllers.base import Signal, StepTimes
from paceline.controllers.cost_model import CostModel
from paceline.controllers.fixed import FixedController
from paceline.controllers.voice import Voice
from paceline.controllers.watch import Mode, Watch
from paceline.controllers.words import Decided, auto_words, count, drafter_words, off_words
from paceline.tree.token_tree import EMPTY_TREE, TokenTree


def signals(size: int = 1, remaining: int = 100) -> list[Signal]:
    return [Signal(key, 10, remaining, 0.0) for key in range(size)]


def asleep(*, distrusted: bool) -> Watch:
    watch = Watch()
    watch.sleep()
    watch.distrusted = distrusted
    return watch


def test_a_fixed_number_says_so_and_why_it_is_less() -> None:
    controller = FixedController(5, disable_by_batch_size=3)
    for given, words in [
        (signals(), "The number is fixed: up to 5 nodes in every step."),
        (signals(remaining=3), "The number is fixed: up to 5 nodes in every step, at most 2 levels since 3 tokens may still come."),
        (signals(remaining=1), "Nothing is drafted: this is the last token."),
        (signals(3), "Nothing is drafted: 3 sequences at once, and disable_by_batch_size is 3."),
    ]:
        controller.plan(given)
        assert controller.explain(0) == words
        assert controller.budget(0, 0, EMPTY_TREE).nodes == (0 if words.startswith("Nothing") else 5)
    plain = FixedController(0)
    plain.plan(signals())
    assert plain.explain(0) == "Nothing is drafted: 0 speculative tokens are plain decoding."


@pytest.mark.parametrize(
    ("mode", "watch", "words"),
    [
        (Mode.ASK, Watch(), "d is asked for up to 4 levels: it should bring 1.50 tokens beyond the price of its time."),
        (Mode.SKIP, Watch(), "d is not asked: it should bring 1.50 tokens beyond the price of its time."),
        (Mode.SKIP, asleep(distrusted=True), "d is not asked: it has cost more time than it saved lately; next try in 4 steps."),
        (
            Mode.LISTEN,
            asleep(distrusted=True),
            "d is asked only because that costs next to nothing: it has cost more time than it saved lately.",
        ),
        (
            Mode.EXPLORE,
            Watch(),
            "d is tried with 4 levels to learn whether it pays again; as things look it would bring 1.50 tokens beyond the price "
            "of its time.",
        ),
    ],
)
def test_every_mode_has_its_sentence(mode: Mode, watch: Watch, words: str) -> None:
    assert drafter_words(Decided("d", mode, 4, 1.5, watch)) == words


def test_a_stop_is_told_with_the_chance_and_the_price_that_made_it() -> None:
    voice = Voice(Acceptance(1), Own(1), 0, 0.5, rival=False)
    depth = 2
    while voice(depth, 0.6 ** (depth - 1), None):
        assert voice.stopped == 0
        depth += 1
    assert voice.stopped == depth == voice.levels + 1
    assert voice.chance <= 0.5
    words = drafter_words(Decided("d", Mode.ASK, 8, 1.0, Watch(), voice))
    assert words.endswith(
        f"stopped before level {depth}, which would stand with a chance of {voice.chance:.2f} and take the time of 0.50 tokens."
    )


def test_selection_and_rate_are_told_with_their_numbers() -> None:
    one = [Decided("d", Mode.ASK, 8, 1.0, Watch())]
    words = auto_words(one, rates=(150.0, 100.0), remaining=9, sizes=(5, 2)).splitlines()
    assert words[1:] == [
        "Of 5 nodes, 2 are scored; the rest is worth less than its time.",
        "Time is charged at 150 tokens/s, the recent rate, 100 without drafts.",
    ]
    assert "Nothing was found" in auto_words(one, rates=(100.0, 100.0), remaining=9, sizes=(0, 0))
    whole = auto_words(one, rates=(100.0, 100.0), remaining=9, sizes=(5, 5))
    assert "scored" not in whole
    assert "without drafts" not in whole
    assert auto_words([], rates=(1.0, 1.0), remaining=1, sizes=(0, 0)) == "Nothing is drafted: this is the last token."


def test_the_words_of_auto_agree_with_its_budgets() -> None:
    good = World([Guesser("draft", steady(0.9), fixed=1e-4, per_level=1e-4)], lambda rows: 1e-2 + 1e-5 * rows)
    dear = World([Guesser("draft", steady(0.2), fixed=5e-2, per_level=5e-2)], lambda rows: 1e-2 * rows)
    for world, verb in ((good, "is asked for up to"), (dear, "is not asked")):
        controller = AutoController(world.costs(), world.names)
        world.run(controller, 150)
        controller._gates.clear()  # whether to draft at all is told apart, see below
        controller.plan(signals())
        asked = controller.budget(0, 0, EMPTY_TREE).nodes > 0
        controller.select([EMPTY_TREE])
        assert asked == (verb == "is asked for up to")
        assert f"draft {verb}" in controller.explain(0)
        controller.plan(signals(remaining=1))
        controller.budget(0, 0, EMPTY_TREE)
        assert controller.explain(0) == "Nothing is drafted: this is the last token."


def test_the_words_hold_for_each_sequence_of_a_batch_and_outlive_observe() -> None:
    controller = AutoController(CostModel(probe=lambda counts, context: [1e-2 + 1e-5 * rows for rows in counts]), ["draft"])
    controller.plan(signals(2))
    for index in range(2):
        controller.budget(index, 0, EMPTY_TREE)
    trees = controller.select([TokenTree.chain([1, 1, 1]), EMPTY_TREE])
    controller.observe(trees, [judged(tree) for tree in trees], StepTimes((1e-4,), 1e-2, 0.0, 0.0, 5))
    assert "Nothing was found" not in controller.explain(0)
    assert "Nothing was found" in controller.explain(1)


def test_auto_says_why_it_is_off() -> None:
    costs = CostModel(probe=lambda counts, context: [1e-2] * len(counts))
    crowd = AutoController(costs, ["draft"], disable_by_batch_size=2)
    crowd.plan(signals(2))
    assert crowd.explain(1) == "Nothing is drafted: 2 sequences at once, and disable_by_batch_size is 2."
    nobody = AutoController(costs, [])
    nobody.plan(signals())
    assert nobody.explain(0) == "Nothing is drafted: there is no drafter."


def test_counts() -> None:
    assert [count(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


class Counting(FixedController):
    """Counts how often it was asked for words."""

    asked = 0

    def explain(self, index: int | None = None) -> str:
        self.asked += 1
        return super().explain(index)


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_the_engine_logs_the_words_only_for_those_who_listen(level: int, caplog: pytest.LogCaptureFixture) -> None:
    controller = Counting(0)
    with caplog.at_level(level, "paceline.engine"):
        run(engine(ToyRunner(), controller=controller), [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    said = [record.getMessage() for record in caplog.records if "are plain decoding" in record.getMessage()]
    assert len(said) == controller.asked == (3 if level == logging.DEBUG else 0)


def test_drafting_that_is_off_as_a_whole_is_told() -> None:
    assert off_words(2, None, 7) == (
        "Nothing is drafted for 2 sequences at once: it has cost more time than it saved lately; next try in 7 steps."
    )
    assert off_words(1, None, 0) == "Nothing is drafted for 1 sequence at once: a plain step is timed."
    dear = World([Guesser("draft", steady(0.2), fixed=5e-2, per_level=5e-2)], lambda rows: 1e-2 * rows)
    controller = AutoController(dear.costs(), dear.names)
    told = set()
    for _ in range(40):
        dear.run(controller, 5)
        told.add(controller.explain(0).split(";")[0])
    assert "Nothing is drafted for 1 sequence at once: it has cost more time than it saved lately" in told
