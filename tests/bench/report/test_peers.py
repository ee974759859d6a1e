"""Our settings over a peer's: paired, batches counted once, failures never as speed."""

from __future__ import annotations

from typing import Any

import pytest
from bench.documents import cell, peer, row

from paceline.bench.report import fastest_setting, peer_ratio


def rows(seconds: list[list[float]], *, batch: int = 1, **other: Any) -> list[dict[str, Any]]:
    """Eight tokens a prompt; `seconds` by group and repeat."""
    return [
        row(f"p{group}-{i}", group=group, repeat=repeat, seconds=one, **other)
        for group, found in enumerate(seconds)
        for repeat, one in enumerate(found)
        for i in range(batch)
    ]


def test_the_ratio_is_paired_by_group_and_repeat() -> None:
    ours, theirs = cell("ngram", rows=rows([[1.0, 2.0], [3.0, 8.0]])), peer("p", rows=rows([[2.0, 4.0], [6.0, 16.0]]))
    found = peer_ratio(ours, theirs)
    assert found is not None
    assert (found.value, found.low, found.high, found.n) == (
        pytest.approx(2.0),
        pytest.approx(2.0),
        pytest.approx(2.0),
        2,
    )


def test_prompts_of_one_batch_are_one_measurement() -> None:
    found = peer_ratio(cell("ngram", rows=rows([[1.0, 1.0]], batch=4)), peer("p", rows=rows([[3.0, 5.0]], batch=4)))
    assert found is not None
    assert (found.value, found.n) == (pytest.approx(4.0), 2)
    assert found.low == pytest.approx(3.0)
    assert found.high == pytest.approx(5.0)


def test_failures_and_withheld_speeds_give_no_ratio() -> None:
    good = cell("ngram", rows=rows([[1.0]]))
    assert peer_ratio(good, peer("p", None, None)) is None
    assert peer_ratio(good, peer("p", rows=rows([[1.0]], error="broken"))) is None
    mixed = rows([[1.0]], batch=2)
    mixed[1] |= {"error": "broken", "tokens": 0}
    assert peer_ratio(good, peer("p", rows=mixed)) is None
    assert peer_ratio(good, peer("p", rows=rows([[2.0]]))) is not None


def test_the_fastest_has_a_speed() -> None:
    slow, fast, none = peer("a", speed=10.0), peer("b", speed=20.0), peer("c", speed=None)
    assert fastest_setting([slow, fast, none]) is fast
    assert fastest_setting([none]) is fastest_setting([]) is None
