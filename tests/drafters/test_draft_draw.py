"""Draws follow their row without the tokens that were removed."""

from __future__ import annotations

import pytest
import torch

from paceline.drafters.common.draft_rows import draw_tokens
from paceline.errors import DrafterError

ENDS = (0.0, 1 - 2**-53)


def token(row_v: torch.Tensor, removed: tuple[int, ...], luck: float) -> int:
    found = draw_tokens(row_v, removed, luck)
    assert found is not None
    assert found[1] == pytest.approx(float(row_v[found[0]]))
    return found[0]


def test_removed_tokens_and_zeros_never_come_up_and_the_rest_in_proportion() -> None:
    """Negative control: with nothing removed the shares are others."""
    row_v = torch.zeros(192)
    row_v[[5, 70, 71, 130]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    grid = [(i + 0.5) / 2000 for i in range(2000)]
    tokens, whole = [token(row_v, (71,), luck) for luck in grid], [token(row_v, (), luck) for luck in grid]
    for one, share in ((5, 1 / 7), (70, 2 / 7), (130, 4 / 7)):
        assert tokens.count(one) == pytest.approx(2000 * share, abs=1)
        assert whole.count(one) == pytest.approx(1400 * share, abs=1)
    assert {token(row_v, (5,), luck) for luck in ENDS} == {70, 130}


def test_rounding_never_draws_nothing() -> None:
    """A goal that is beyond all sums by a rounding takes the last token that is left."""
    row_v = torch.full((1000,), 1e-3)
    row_v[990:] = 0.0
    assert token(row_v, (989,), 1.0) == 988


def test_nothing_left_and_nan() -> None:
    row_v = torch.tensor([0.0, 0.5, 0.5])
    assert draw_tokens(row_v, (1, 2), 0.3) is None
    with pytest.raises(DrafterError, match="NaN"):
        draw_tokens(torch.tensor([0.5, float("nan")]), (), 0.5)


def test_rows_of_other_types_and_strides_are_drawn_from_too() -> None:
    row_v = torch.tensor([0.0, 0.25, 0.75])
    assert (
        draw_tokens(row_v.double(), (), 0.1) == draw_tokens(torch.stack((row_v, row_v), 1)[:, 0], (), 0.1) == (1, 0.25)
    )
