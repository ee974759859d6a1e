"""The measure of deviation: nought where a policy is exact, something where it is not, and the right amount."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.diffusion import deviation, pooled
from paceline.diffusion import Canvas
from paceline.models import Call
from tests.diffusion.decoding import Planned, fill
from tests.diffusion.toys import Toy, t4


def canvas_of(toy: Toy, length: int = 12) -> Canvas:
    return Canvas.of((3, 4, 5), length, mask_token_id=toy.mask_token_id)


@pytest.mark.parametrize("kind", ["full", "shifted"])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_an_exact_policy_deviates_by_rounding_only(kind: str, cache: str) -> None:
    toy = t4(kind)
    config = {"method": "static", "block_length": 6, "cache": cache} | (
        {} if cache == "none" else {"refresh_period": 1}
    )
    found = deviation(toy, canvas_of(toy), config)
    assert (found.different, found.other_tokens, found.slots) == (0, 0, 12)
    assert found.largest < 1e-9
    if cache == "prefix":
        assert found.predictions == sum(range(1, 13))


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_an_approximate_policy_deviates(cache: str) -> None:
    toys = [t4(seed=seed) for seed in range(3)]
    each = [deviation(toy, canvas_of(toy), {"method": "static", "block_length": 6, "cache": cache}) for toy in toys]
    found = pooled(each)
    assert found.largest == max(one.largest for one in each) > 0.01
    assert 0 < found.mean < found.largest
    assert 0 < found.fraction <= 1
    assert found.slots == 36
    assert found.cost.slots_computed < found.cost_without.slots_computed == 3 * 12 * 15
    assert found.cost.calls == found.cost_without.calls == 36


def test_the_exact_block_cache_does_not() -> None:
    toy = t4("block", dtype=torch.float32)
    found = deviation(toy, canvas_of(toy, 13), {"method": "static", "cache": "block"})
    assert (found.different, found.largest, found.mean) == (0, 0.0, 0.0)
    assert found.predictions > 0


class Neighbours(Toy):
    """Slot 0 says 1 with a logit of the number of written slots that it sees; the others say 2 whatever they see."""

    def forward(self, calls: list[Call]) -> list[torch.Tensor]:
        outputs = []
        for call in calls:
            seen = set(call.slots[call.ids != self.mask_token_id].tolist())
            rows = np.zeros((call.slots.size, self.vocab_size))
            rows[:, 2] = 10 - call.slots
            rows[call.slots == 0] = 0
            rows[call.slots == 0, 1] = 0.5 + len(seen)
            rows[:, self.mask_token_id] = -np.inf
            outputs.append(torch.from_numpy(rows if call.wanted is None else rows[call.wanted]))
        return outputs


def test_logits_are_compared_at_masked_slots_with_a_full_pass() -> None:
    # The small passes of the first block do not see the given slot 5; where the block is the whole text, they see
    # everything.
    canvas = Canvas.infill([3, 3, 3, 3, 3, 3, 1], mask_token_id=3)
    found = deviation(Neighbours(4), canvas, {"method": "static", "block_length": 7, "cache": "dual"})
    assert found.largest == 0
    canvas = Canvas.of((), 6, mask_token_id=3, priors={5: 1})
    found = deviation(Neighbours(4), canvas, {"method": "static", "block_length": 3, "cache": "dual"})
    assert found.largest == 1.0
    assert found.different == 0
    assert found.other_tokens == 0


def test_slots_that_both_runs_cut_off_are_alike() -> None:
    toy = Planned([0.9, 0.8, 0.7], prompt=1, tokens=[1, 6, 1])
    toy.eos_token_ids = (6,)
    config = {"method": "window_diffusion", "stop": "adaptive_length"}
    found = deviation(toy, Canvas.of((1,), 3, mask_token_id=7), config)
    assert (found.different, found.slots) == (0, 3)
    assert fill(toy, config, 3, (1,)).canvas.length == 3
