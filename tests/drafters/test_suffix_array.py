"""Suffix arrays against sorting by hand, and searches against looking everywhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from paceline.drafters.retrieval import suffix_bound
from paceline.drafters.retrieval.suffix_arrays import DEPTH, suffix_array


def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    random = [rng.integers(-1, vocab, length).tolist() for vocab in (1, 2, 5, 40) for length in (0, 1, 2, 17, 300)]
    return [*random, [0] * 200, [1, 2, 3] * 60, list(range(50)), list(range(50, 0, -1)), [-1, -1, 4, -1]]


@pytest.mark.parametrize("text", texts(), ids=lambda text: f"{len(text)} of {len(set(text))}")
def test_suffixes_are_in_order(text: list[int]) -> None:
    found = suffix_array(np.array(text, np.int32))
    assert found.dtype == np.int32
    assert found.tolist() == sorted(range(len(text)), key=lambda i: text[i : i + DEPTH])


def test_a_smaller_depth_orders_by_fewer_tokens() -> None:
    """Negative control: the order by two tokens is not the whole order."""
    text = np.random.default_rng(1).integers(0, 2, 200).astype(np.int32)
    two = suffix_array(text, depth=2).tolist()
    heads = [text[i : i + 2].tolist() for i in two]
    assert all(a <= b for a, b in pairwise(heads))
    assert two != suffix_array(text).tolist()


def positions(text: list[int], tail: list[int]) -> list[int]:
    n = len(tail)
    return [i for i in range(len(text) - n) if text[i : i + n] == tail and text[i + n] >= 0]


@pytest.mark.parametrize("text", texts(), ids=lambda text: f"{len(text)} of {len(set(text))}")
def test_a_search_finds_all_places_that_go_on(text: list[int]) -> None:
    text_n = np.array(text, np.int32)
    order = suffix_array(text_n)
    rng = np.random.default_rng(2)
    tails = [rng.integers(0, 5, int(n)).tolist() for n in rng.integers(1, 6, 30)]
    tails += [
        text[i : i + n] for i, n in zip(rng.integers(0, max(len(text), 1), 30), rng.integers(1, 9, 30), strict=True)
    ]
    for tail in tails:
        if tail and min(tail) >= 0:
            longer = np.array([3, 9, *tail], np.int32)  # only the last `length` tokens count
            first, end = (suffix_bound(text_n, order, longer, len(tail), above) for above in (0, 1))
            assert sorted(order[first:end].tolist()) == positions(text, tail)


def test_damaged_arrays_do_not_read_outside() -> None:
    text = np.arange(8, dtype=np.int32)
    order = np.array([-5, 2**31 - 1, 99, 8, 7, 1, -2, 0], np.int32)
    assert 0 <= suffix_bound(text, order, np.array([7, 1], np.int32), 2, 0) <= 8
