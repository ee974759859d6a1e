"""The compiled draw gives the tokens of the readable one, and follows its row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.drafters.draft_draw import BLOCK, draw_row
from paceline.drafters.draft_rows import draw, draw_anywhere
from paceline.errors import DrafterError

ENDS = (0.0, 1 - 2**-53)


def rows(count: int) -> list[tuple[torch.Tensor, list[int], float]]:
    """Rows of all sizes with some zeros, tokens removed from them, luck with its ends."""
    found = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        size = int(torch.randint(1, 6 * BLOCK, (1,), generator=generator))
        row_v = (torch.randn(size, generator=generator) * 4).softmax(-1)
        if i % 3 == 0:
            row_v[torch.rand(size, generator=generator) < 0.6] = 0.0
        removed = torch.randint(0, size, (i % 5,), generator=generator).tolist()
        luck = ENDS[i % 2] if i % 5 == 0 else float(torch.rand(1, generator=generator, dtype=torch.float64))
        found.append((row_v, removed, luck))
    return found


def test_it_draws_what_the_readable_form_draws() -> None:
    cases = rows(1500)
    wanted = [draw_anywhere(*case) for case in cases]
    assert [draw(*case) for case in cases] == wanted
    assert len({one is None for one in wanted}) == 2
    forgetful = [draw(row_v, (), luck) for row_v, _, luck in cases]
    assert sum(a != b for a, b in zip(forgetful, wanted, strict=True)) > 50, "the check sees what was removed"


def test_removed_tokens_and_zeros_never_come_up_and_the_rest_in_proportion() -> None:
    row_v = np.zeros(3 * BLOCK, np.float32)
    row_v[[5, 70, 71, 130]] = [0.1, 0.2, 0.3, 0.4]
    grid = (np.arange(2000) + 0.5) / 2000
    tokens = np.array([draw_row(row_v, np.array([71]), luck)[0] for luck in grid])
    for token, share in ((5, 1 / 7), (70, 2 / 7), (130, 4 / 7)):
        assert (tokens == token).sum() == pytest.approx(2000 * share, abs=1)
    assert {draw_row(row_v, np.array([5]), luck)[0] for luck in ENDS} == {70, 130}


def test_rounding_never_draws_nothing() -> None:
    """A goal that is beyond all sums by a rounding takes the last token that is left."""
    row_v = np.full(1000, 1e-3, np.float32)
    row_v[990:] = 0.0
    token, whole = draw_row(row_v, np.array([989]), 1.0)
    assert token == 988
    assert whole == pytest.approx(0.989)


def test_nothing_left_and_nan() -> None:
    row_v = torch.tensor([0.0, 0.5, 0.5])
    assert draw(row_v, (1, 2), 0.3) is None
    with pytest.raises(DrafterError, match="NaN"):
        draw(torch.tensor([0.5, float("nan")]), (), 0.5)


def test_rows_of_other_types_and_strides_are_drawn_from_too() -> None:
    row_v = torch.tensor([0.0, 0.25, 0.75])
    assert draw(row_v.double(), (), 0.1) == draw(torch.stack((row_v, row_v), 1)[:, 0], (), 0.1) == (1, 0.25)
