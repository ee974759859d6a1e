"""ReCAP: what makes its local steps approximate, and how that grows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, deviation, pooled
from paceline.models.denoiser import Call
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys_t4 import t4

SEEDS = range(4)
PERIODS = (2, 4, 6)


class Fenced:
    """A denoiser in which the context of a group of rounds, the slots written when it began, sees nothing that was
    masked then.
    """

    def __init__(self, inner: Any, period: int) -> None:
        self.inner, self.period, self.rounds = inner, period, 0
        self.context = np.zeros(0, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        [call] = calls
        if self.rounds % self.period == 0:
            self.context = call.slots[call.ids != self.inner.mask_token_id]
        self.rounds += 1
        keys = call.slots if call.read is None else np.concatenate([call.read, call.slots])
        fence = np.isin(call.slots, self.context)[:, None] & ~np.isin(keys, self.context)[None, :]
        return self.inner.forward([replace(call, mask=~fence)])


@pytest.mark.parametrize("period", PERIODS)
@pytest.mark.parametrize("kind", ["full", "shifted"])
def test_local_steps_are_exact_where_the_context_sees_nothing_masked(kind: str, period: int) -> None:
    for seed in SEEDS:
        toy = t4(kind, seed=seed)
        plain = fill(Fenced(toy, period), {"method": "static"})
        local = fill(Fenced(toy, period), {"method": "recap", "refresh_period": period})
        assert same(plain, local), seed
        assert local.trajectory.slots_computed < plain.trajectory.slots_computed


def test_they_are_not_where_it_does() -> None:
    pairs = [
        (fill(t4(seed=s), {"method": "static"}), fill(t4(seed=s), {"method": "recap", "refresh_period": 4}))
        for s in SEEDS
    ]
    assert any(not same(plain, local) for plain, local in pairs)


def test_the_deviation_grows_with_the_length_of_a_group() -> None:
    def drift(period: int) -> float:
        config = {"method": "recap", "refresh_period": period}
        toys = [t4(seed=seed) for seed in range(12)]
        canvases = [Canvas.of((3, 4, 5), 12, mask_token_id=toy.mask_token_id) for toy in toys]
        return pooled([deviation(toy, canvas, config) for toy, canvas in zip(toys, canvases, strict=True)]).mean

    found = [drift(period) for period in (1, *PERIODS)]
    assert found[0] < 1e-9
    assert found == sorted(found)
    assert found[-1] > 2 * found[1] > 0
