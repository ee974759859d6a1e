"""Stop rules: Prophet, cutting at the end of the text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, ConfiguredMethod, Predictions, part
from paceline.errors import ConfigError
from tests.diffusion.decoding import Planned, complete, fill, same
from tests.diffusion.toys import Independent, Toy, with_ends

ProphetStop = part("stop", "prophet")

INFINITE = float("inf")


class Gaps(Toy):
    """The first token leads the second by a constant, slot by slot."""

    def __init__(self, gaps: list[float]) -> None:
        super().__init__(4)
        self.gaps = np.array(gaps)

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        rows = np.zeros((slots.size, 4))
        rows[:, 1] = self.gaps[slots]
        return rows


def bars(*values: float) -> dict[str, object]:
    return {"method": "prophet", "gap_thresholds": values}


def test_infinite_bars_are_the_two_ends() -> None:
    toy = Independent([0.5, 0.9, 0.3, 0.7])
    assert same(fill(toy, bars(INFINITE, INFINITE, INFINITE), 4, ()), fill(toy, "static", 4, ()))
    at_once = fill(toy, bars(-INFINITE, -INFINITE, -INFINITE), 4, ())
    assert at_once.trajectory.calls == 1
    assert same(at_once, fill(toy, {"method": "static", "denoising_steps": 1}, 4, ()))


@pytest.mark.parametrize(("gap", "rounds"), [(8.0, 1), (6.0, 5), (3.0, 10), (2.0, 12)])
def test_the_bar_falls_in_thirds(gap: float, rounds: int) -> None:
    """12 rounds: a gap of 6 passes from the first round at a third or more, which is the fifth (4 / 12)."""
    assert fill(Gaps([gap] * 12), "prophet", 12, ()).trajectory.calls == rounds


def test_the_exit_crosses_blocks() -> None:
    outcome = fill(Gaps([6.0] * 12), {"method": "prophet", "block_length": 3}, 12, ())
    assert outcome.trajectory.calls == 5
    assert outcome.trajectory.rounds[-1].slots.size == 8


def test_a_policy_that_computes_one_block_fills_that_and_goes_on() -> None:
    toy = Planned([0.999] * 8)
    config = {**bars(0.0, 0.0, 0.0), "block_length": 4, "cache": "dual"}
    outcome = fill(toy, config, 8, ())
    assert not outcome.canvas.masked().size
    assert outcome.trajectory.calls < 8


def test_the_gap_is_in_units_of_logits() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 5)))
    one, two = (Predictions.of(scale * logits, np.arange(3)).gap for scale in (1, 2))
    assert np.allclose(two, 2 * one)


def test_regions() -> None:
    sure_at_the_end = Gaps([0.1] * 8 + [10.0] * 4)
    assert (
        fill(sure_at_the_end, {"method": "prophet", "monitor": "last", "answer_length": 4}, 12, ()).trajectory.calls
        == 1
    )
    assert fill(sure_at_the_end, "prophet", 12, ()).trajectory.calls > 1
    span = {"method": "prophet", "monitor": "span", "answer_start": 7, "answer_length": 5}
    assert fill(sure_at_the_end, span, 12, ()).trajectory.calls == 1
    assert fill(sure_at_the_end, {**span, "answer_start": 2}, 12, ()).trajectory.calls > 1


def test_the_slots_after_a_template_are_monitored() -> None:
    toy = Gaps([0.1] * 6 + [9.0] * 2 + [0.1] * 4)
    canvas = Canvas.of((), 12, mask_token_id=toy.mask_token_id, priors={4: 2, 5: 0})
    config = {"method": "prophet", "monitor": "template", "answer_template": (2, 0), "answer_length": 2}
    assert complete(toy, canvas, config).trajectory.calls == 1
    assert complete(toy, canvas, {**config, "answer_length": 4}).trajectory.calls > 1
    with pytest.raises(ConfigError, match="canvas must hold answer_template"):
        complete(toy, canvas, {**config, "answer_template": (0, 2)})


def test_without_a_template_the_slots_after_the_last_text_given_are_monitored() -> None:
    toy = Gaps([0.1] * 6 + [9.0] * 2 + [0.1] * 4)
    config = {"method": "prophet", "monitor": "template", "answer_length": 2}
    for priors in ({5: 0}, {1: 2, 4: 2, 5: 0}, {5: 0, 10: 1, 11: 1}):
        canvas = Canvas.of((), 12, mask_token_id=toy.mask_token_id, priors=priors)
        assert complete(toy, canvas, config).trajectory.calls == 1
    for priors in ({3: 0}, {5: 0, 8: 1}):
        canvas = Canvas.of((), 12, mask_token_id=toy.mask_token_id, priors=priors)
        assert complete(toy, canvas, config).trajectory.calls > 1
    for priors in ({}, {11: 1}):
        canvas = Canvas.of((), 12, mask_token_id=toy.mask_token_id, priors=priors)
        with pytest.raises(ConfigError, match="canvas must give the text before the answer"):
            complete(toy, canvas, config)


def test_the_bar_of_each_round() -> None:
    toy = Gaps([1.0] * 100)
    parts = ConfiguredMethod("prophet").parts(toy, Canvas.of((), 100, mask_token_id=3))
    rule = parts.transition.stop
    assert isinstance(rule, ProphetStop)
    assert [rule.bar(s) for s in (0, 32, 33, 66, 67, 99)] == [7.5, 7.5, 5.0, 5.0, 2.5, 2.5]


END = 6


def test_the_text_is_cut_after_its_first_end() -> None:
    toy = with_ends([0.5, 0.4, 0.9, 0.3, 0.2], [0, 1, END, 1, END], END)
    outcome = fill(toy, "eotp", 5, ())
    assert outcome.canvas.output == [0, 1, END]
    assert outcome.trajectory.calls == 3
    assert outcome.trajectory.slots_computed == 5 + 3 + 3


def test_an_earlier_end_cuts_again() -> None:
    toy = with_ends([0.5, 0.4, 0.9, 0.3], [0, END, END, 1], END)
    outcome = fill(toy, "eotp", 4, ())
    assert outcome.canvas.output == [0, END]


def test_the_eager_rule_cuts_on_a_guess() -> None:
    toy = with_ends([0.9, 0.4, 0.35, 0.3], [0, 0, END, END], END)
    assert fill(toy, "eotp", 4, ()).canvas.output == [0, 0, END]
    eager = fill(toy, {"method": "eotp", "eager_end": True}, 4, ())
    assert eager.canvas.output == [0, 0, END]
    assert eager.trajectory.slots_computed < fill(toy, "eotp", 4, ()).trajectory.slots_computed


def test_the_eager_rule_cuts_at_the_surest_guess() -> None:
    """Of the ends guessed at slots 1 and 3 the second is surer: passes over 5, 4, 4 and 4 slots."""
    toy = with_ends([0.9, 0.3, 0.4, 0.35, 0.2], [0, END, 0, END, 0], END)
    eager = fill(toy, {"method": "eotp", "eager_end": True}, 5, ())
    assert eager.trajectory.slots_computed == 5 + 4 + 4 + 4
    assert eager.canvas.output == [0, END]


def test_texts_without_an_end_keep_their_length() -> None:
    toy = with_ends([0.5, 0.4, 0.9], [0, 1, 2], END)
    assert same(fill(toy, "eotp", 3, ()), fill(toy, "static", 3, ()))
