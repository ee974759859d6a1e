"""The stride: what rounds bring is what they bring when they are played, and the best is chosen from what is seen."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.retrieval import StrideScheduler
from paceline.retrieval.stride import best_stride, steps_per_second


def played(stride: int, step: float, verification: float, chance: float, *, asynchronous: bool) -> float:
    """Steps per second of many rounds. A round brings its right guesses, and one step where a guess was wrong."""
    rng = np.random.default_rng(1)
    wrong = rng.random((200_000, stride)) >= chance
    right = np.where(wrong.any(1), wrong.argmax(1), stride)
    all_right = right == stride
    seconds = np.full(len(right), stride * step + verification)
    if asynchronous:
        seconds[all_right] = (stride - 1) * step + max(step, verification)
    brought = np.minimum(right + 1, stride)  # the step that corrects is the next round's where all was right
    return float(brought.sum() / seconds.sum())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("step", "verification", "chance"), [(1.0, 4.0, 0.6), (1.0, 0.5, 0.4), (2.0, 3.0, 0.5)])
def test_rounds_bring_what_the_formula_says(
    step: float, verification: float, chance: float, asynchronous: bool
) -> None:
    for stride in (1, 2, 5):
        formula = steps_per_second(stride, step, verification, chance, asynchronous=asynchronous)
        assert formula == pytest.approx(played(stride, step, verification, chance, asynchronous=asynchronous), rel=0.01)
    other = steps_per_second(2, step, verification, chance, asynchronous=not asynchronous)
    assert abs(other / played(2, step, verification, chance, asynchronous=asynchronous) - 1) > 0.03


def test_a_costly_index_has_a_longer_stride_and_a_cheap_one_none() -> None:
    assert best_stride(1.0, 0.01, 0.5, asynchronous=False) == 1
    strides = [best_stride(1.0, cost, 0.6, asynchronous=False) for cost in (0.1, 1.0, 10.0, 100.0)]
    assert strides == sorted(strides)
    assert strides[-1] > strides[0]
    assert best_stride(1.0, 0.9, 0.6, asynchronous=True) == 1, "the verification hides behind a step"
    assert best_stride(1.0, 0.9, 0.6, asynchronous=False) > 1


def test_the_chance_is_that_of_the_last_rounds_and_limited() -> None:
    scheduler = StrideScheduler(asynchronous=False)
    assert (scheduler.stride(), scheduler.chance) == (1, 0.0)
    scheduler.observe_step(1.0)
    scheduler.observe(1, 3, 5.0)
    scheduler.observe(0, 2, 5.0)
    assert scheduler.chance == pytest.approx(1 / 3)
    scheduler.observe(4, 4, 5.0)
    assert scheduler.chance == 0.6, "5 right of 7, at most 0.6"
    assert scheduler.stride() == best_stride(1.0, 5.0, 0.6, asynchronous=False) > 1
    for _ in range(5):
        scheduler.observe(0, 2, 5.0)
    assert (scheduler.chance, scheduler.stride()) == (0.0, 1), "older rounds are forgotten"
