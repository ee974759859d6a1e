"""Rates of batches of several sizes in one bucket."""

from __future__ import annotations

import pytest

from paceline.controllers.prices import Rates

TABLE = [0.0, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]
"""Seconds of a step by rows."""


class Mixed(Rates):
    """The negative control: as many tokens a second at every size of a bucket."""

    def of(self, size: int, table: object) -> float:
        _, tokens, seconds = self._sums[2]
        return tokens / seconds


def test_a_rate_is_tokens_a_second_lately() -> None:
    rates = Rates()
    assert rates.of(4, TABLE) == 0.0
    for _ in range(300):
        rates.count(4, 8, 2.0, TABLE)
    assert rates.of(4, TABLE) == pytest.approx(4.0)
    for _ in range(300):
        rates.count(4, 8, 1.0, TABLE)
    assert rates.of(4, TABLE) == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize(("kind", "fair"), [(Rates, True), (Mixed, False)])
def test_what_a_batch_of_another_size_brought_says_how_much_better_than_plain_it_was(kind: type[Rates], fair: bool) -> None:
    """Three sequences bring less a second than four; held against the rate of four nothing would pay for them."""
    rates, twice_plain = kind(), 2 * 4 / TABLE[4]
    rates.count(4, 8, TABLE[4], TABLE)
    assert rates.of(4, TABLE) == pytest.approx(twice_plain)
    assert (rates.of(3, TABLE) == pytest.approx(2 * 3 / TABLE[3])) is fair
    rates.count(3, 6, TABLE[3], TABLE)
    if fair:
        assert rates.of(3, TABLE) == pytest.approx(2 * 3 / TABLE[3]), "sums of both sizes are of one kind"
