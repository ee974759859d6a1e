"""The ascending step schedule: log2 of the length in rounds."""

import numpy as np
import pytest

from paceline.diffusion import Canvas
from paceline.errors import ConfigError
from tests.diffusion.decoding import complete, fill
from tests.diffusion.toys import Independent


def toy_of(length: int) -> Independent:
    return Independent(np.random.default_rng(length).uniform(0.2, 0.9, length))


@pytest.mark.parametrize("power", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("method", ["ass", "eoser_ass"])
def test_quotas_double_and_sum_to_the_length(method: str, power: int) -> None:
    length = 2**power
    outcome = fill(toy_of(length), method, length, ())
    sizes = [r.slots.size for r in outcome.trajectory.rounds]
    assert sizes == [*(2**s for s in range(power - 1)), 2 ** (power - 1) + 1]
    assert outcome.trajectory.calls == power
    assert np.unique(outcome.trajectory.order).size == length


@pytest.mark.parametrize(("length", "sizes"), [(1, [1]), (3, [3]), (100, [1, 2, 4, 8, 16, 69])])
def test_other_lengths_leave_the_rest_to_the_last_round(length: int, sizes: list[int]) -> None:
    assert [r.slots.size for r in fill(toy_of(length), "ass", length, ()).trajectory.rounds] == sizes


@pytest.mark.parametrize("blocks", [1, 2, 4, 7])
def test_blocks_take_a_large_power_each(blocks: int) -> None:
    outcome = fill(toy_of(128), {"method": "ass_blocks", "ascending_blocks": blocks}, 128, ())
    sizes = [r.slots.size for r in outcome.trajectory.rounds]
    assert sizes == [1, 2, 4, 8, 16, 32, 65]
    first = 7 - blocks + 1
    start = 2**first - 1
    if blocks > 1:
        assert max(outcome.trajectory.rounds[first - 1].slots) < start
        for s in range(first, 7):
            slots = np.sort(outcome.trajectory.rounds[s].slots)
            assert slots.tolist() == list(range(start, start + sizes[s]))
            start += sizes[s]


def test_slots_given_in_advance_count_in_no_quota() -> None:
    toy = toy_of(10)
    canvas = Canvas.of((), 10, mask_token_id=toy.mask_token_id, priors={0: 2, 5: 2})
    outcome = complete(toy, canvas, {"method": "ass_blocks", "ascending_blocks": 2})
    assert [r.slots.size for r in outcome.trajectory.rounds] == [1, 2, 5]
    assert outcome.canvas.tokens[[0, 5]].tolist() == [2, 2]


def test_more_blocks_than_rounds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ascending_blocks must lie in 1..3"):
        fill(toy_of(8), {"method": "ass_blocks", "ascending_blocks": 4}, 8, ())


def test_blocks_that_its_last_round_would_write_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_length must be that of the whole text for the ascending schedule"):
        fill(toy_of(32), {"method": "ass", "block_length": 8}, 32, ())
