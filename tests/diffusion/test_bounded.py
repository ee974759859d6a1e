"""BACD: a threshold that follows the block; blocks of growing length."""

from itertools import pairwise

import numpy as np
import pytest

from paceline.diffusion import Canvas, ConfiguredMethod, Step, decode
from paceline.diffusion.commit import BoundedCommit
from paceline.errors import ConfigError
from tests.diffusion.decoding import PlannedBlocks, fill, same
from tests.diffusion.toys import Independent
from tests.diffusion.toys_scripted import Scripted
from tests.diffusion.toys_t4 import t4

CARD = [0.7, 0.65, 0.5, 0.95]


def test_the_trace_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[float] = []
    threshold = BoundedCommit.threshold

    def noting(self: BoundedCommit, step: Step) -> float:
        bars.append(threshold(self, step))
        return bars[-1]

    monkeypatch.setattr(BoundedCommit, "threshold", noting)
    outcome = fill(Independent(CARD), "bacd", 4, ())
    assert [r.slots.tolist() for r in outcome.trajectory.rounds] == [[3], [0], [1], [2]]
    assert bars == pytest.approx([0.9, 0.9, 0.825, (0.95 + 0.7 + 0.65) / 3])


def test_the_bar_falls_with_what_was_written() -> None:
    """A block that starts unsure takes at 0.7 what one that starts sure does not."""

    def script(first: float) -> Scripted:
        return Scripted(lambda filled, slot: (1, 0.7 if filled else first - 0.001 * slot))

    unsure = fill(script(0.65), "bacd", 4, ())
    assert [r.slots.size for r in unsure.trajectory.rounds] == [1, 3]
    sure = fill(script(0.899), "bacd", 4, ())
    assert [r.slots.size for r in sure.trajectory.rounds] == [1, 1, 1, 1]
    kept_up = fill(script(0.65), {"method": "bacd", "confidence_low": 0.75}, 4, ())
    assert [r.slots.size for r in kept_up.trajectory.rounds] == [1, 1, 1, 1]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_equal_bounds_are_the_threshold_rule(threshold: float) -> None:
    toy = t4()
    ours = {"method": "bacd", "confidence_low": threshold, "confidence_high": threshold, "block_length": 6}
    theirs = {"method": "threshold", "confidence_threshold": threshold, "block_length": 6}
    assert same(fill(toy, ours), fill(toy, theirs))


def test_history_ends_with_the_block() -> None:
    """An unsure first block does not lower the bar of the second: 0.9 alone passes there first."""
    toy = Independent([0.62, 0.61, 0.7, 0.9])
    rounds = fill(toy, {"method": "bacd", "block_length": 2}, 4, ()).trajectory.rounds
    assert [r.slots.tolist() for r in rounds] == [[0], [1], [3], [2]]
    one = fill(toy, "bacd", 4, ()).trajectory.rounds
    assert one[0].slots.tolist() == [3]


def test_history_is_of_one_text() -> None:
    toys = Independent([0.9, 0.7, 0.65, 0.66])
    canvases = [Canvas.of((), 4, mask_token_id=7), Canvas.of((), 4, mask_token_id=7, priors={0: 1, 1: 1})]
    method = ConfiguredMethod("bacd")
    together = decode(canvases, toys, [method.parts(toys, canvas) for canvas in canvases])
    for canvas, outcome in zip(canvases, together, strict=True):
        [alone] = decode([canvas], toys, [method.parts(toys, canvas)])
        assert same(outcome, alone)
    assert not np.array_equal(together[0].trajectory.order, together[1].trajectory.order)


def test_bounds_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="confidence_low must be at most confidence_high"):
        fill(Independent(CARD), {"method": "bacd", "confidence_low": 0.95}, 4, ())


def test_blocks_grow() -> None:
    toy = Independent(np.linspace(0.9, 0.1, 14))
    config = {"method": "static", "schedule": "progressive", "block_lengths": (2, 3, 4), "score": "random"}
    order = fill(toy, config, 14, ()).trajectory.order
    edges = [0, 2, 5, 9, 13, 14]
    for low, high in pairwise(edges):
        assert set(order[low:high].tolist()) == set(range(low, high))


def test_blocks_stay_within_those_of_the_model() -> None:
    toy = PlannedBlocks([0.5] * 8, block_length=4)
    assert (
        fill(
            toy, {"method": "static", "schedule": "progressive", "block_lengths": (1, 1, 2, 4)}, 8, ()
        ).trajectory.calls
        == 8
    )
    with pytest.raises(ConfigError, match="not cross the model's, of 4 slots each"):
        fill(toy, {"method": "static", "schedule": "progressive", "block_lengths": (3, 4)}, 8, ())
