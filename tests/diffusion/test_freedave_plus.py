"""FreeDave++: drafts that the rule would have written, and perhaps more; not lossless, and FreeDave where a round is a
slot.
"""

import numpy as np
import pytest

from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Toy
from tests.diffusion.toys_t4 import t4

DUAL = {"method": "static", "block_length": 6, "cache": "dual"}


@pytest.mark.parametrize("seed", range(3))
def test_plus_is_freedave_where_one_slot_is_written_a_round(seed: int) -> None:
    toy = t4(seed=seed)
    plain, plus = fill(toy, DUAL), fill(toy, {**DUAL, "verification": "freedave++"})
    assert same(plain, plus)
    unsure = fill(toy, {"method": "freedave++", "confidence_threshold": 1.1, "block_length": 6, "cache": "dual"})
    assert same(plain, unsure)


def test_plus_keeps_drafts_that_the_rule_would_have_written_and_more() -> None:
    # The first pass shows 4 sure slots of 8; then all are sure: a target of all holds every draft, and the furthest is
    # kept.
    class Growing(Toy):
        def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
            rows = np.zeros((slots.size, self.vocab_size))
            rows[:, 1] = np.where((slots < 4) | (ids != self.mask_token_id).any(), 9.0, 2.0 - 0.1 * slots)
            return rows

    toy = Growing(4)
    config = {"confidence_threshold": 0.9}
    outcome = fill(toy, {"method": "freedave++", "drafts": 4, **config}, 8, ())
    assert [r.slots.size for r in outcome.trajectory.rounds] == [4, 1, 1, 1, 1]
    assert outcome.trajectory.calls == 2
    exact = fill(toy, {"method": "threshold", "verification": "freedave", **config}, 8, ())
    assert same(exact, fill(toy, {"method": "threshold", **config}, 8, ()))


def test_plus_takes_the_furthest_draft_that_the_rule_would_have_written() -> None:
    # A canvas of 5 written slots changes the model's mind about slot 6; one of 4 does not, and 8 are all it would have
    # written.
    class Doubting(Toy):
        def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
            written = (ids != self.mask_token_id).sum()
            rows = np.zeros((slots.size, self.vocab_size))
            rows[:, 1] = 9.0 if written else np.where(slots < 4, 9.0, 2.0 - 0.1 * slots)
            rows[slots == 5, 2] = 20.0 if written == 5 else 0.0
            return rows

    outcome = fill(Doubting(4), {"method": "freedave++", "drafts": 4, "confidence_threshold": 0.9}, 8, ())
    assert outcome.trajectory.calls == 2
    assert outcome.canvas.tokens.tolist() == [1] * 8


def test_plus_is_not_lossless() -> None:
    config = {"confidence_threshold": 0.3, "block_length": 6}
    runs = [
        (fill(t4(seed=s), {"method": "threshold", **config}), fill(t4(seed=s), {"method": "freedave++", **config}))
        for s in range(6)
    ]
    assert any(not same(plain, plus) for plain, plus in runs)
