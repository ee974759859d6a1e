"""dParallel's rule: slots of low entropy are written together."""

import numpy as np
import pytest

from paceline.diffusion import Canvas, ConfiguredMethod
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Toy
from tests.diffusion.toys_t4 import t4

NATS = [float(np.log(2)), float(np.log(4)), 0.0, float(np.log(3))]


class Even(Toy):
    """Slot i is torn evenly between as many tokens as its entropy says."""

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(
                [[float(token < round(np.exp(NATS[slot]))) for token in range(self.vocab_size)] for slot in slots]
            )


@pytest.mark.parametrize(("bar", "first"), [(0.5, [2]), (0.7, [0, 2]), (1.1, [0, 2, 3]), (1.4, [0, 1, 2, 3])])
def test_slots_below_the_bar_are_written_together(bar: float, first: list[int]) -> None:
    rounds = fill(Even(5), {"method": "dparallel", "entropy_threshold": bar}, 4, ()).trajectory.rounds
    assert sorted(rounds[0].slots.tolist()) == first


def test_where_none_is_the_lowest_is_written_alone() -> None:
    order = fill(Even(5), {"method": "dparallel", "entropy_threshold": -1.0}, 4, ()).trajectory
    assert [r.slots.tolist() for r in order.rounds] == [[2], [0], [3], [1]]


def test_the_bar_is_half_a_nat_of_the_clean_distribution() -> None:
    toy = t4()
    assert same(fill(toy, "dparallel"), fill(toy, {"method": "dparallel", "entropy_threshold": 0.5}))
    cold = ConfiguredMethod({"method": "dparallel", "temperature": 0.01}).parts(
        Even(5), Canvas.of((), 4, mask_token_id=4)
    )
    assert cold.transition.commit.threshold == 0.5
    rounds = fill(Even(5), {"method": "dparallel", "temperature": 0.01}, 4, ()).trajectory.rounds
    assert [r.slots.size for r in rounds] == [1, 1, 1, 1]


def test_wrong_options_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"entropy_threshold must be a number in -1\.\."):
        ConfiguredMethod({"method": "dparallel", "entropy_threshold": -2})
    with pytest.raises(ConfigError, match="no option 'confidence_threshold'"):
        ConfiguredMethod({"method": "dparallel", "confidence_threshold": 0.5})
