"""A runner of other ids: what it is fed, where its logits go, and maps over maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toys import ToyRunner

from paceline.errors import ConfigError
from paceline.models import MappedRunner
from paceline.tree import TokenTree

INNER = 6
INTO = np.array([3, -1, 0, 5, 1])
COLUMNS, TOKENS = np.array([0, 3, 5]), np.array([2, 0, 3])


def mapped(inner: Any) -> MappedRunner:
    """Outer ids 0, 2, 3, 4 are inner 3, 0, 5, 1; the last has no column."""
    return MappedRunner(inner, INTO, COLUMNS, TOKENS, 4)


def test_ids_go_in_and_columns_come_out() -> None:
    inner = ToyRunner(INNER, order=None)
    runner = mapped(inner)
    cache = runner.open()
    row = runner.extend([cache], [[0, 2, 4]]).logits[0]
    plain = inner.logits([3, 0, 1])
    assert row.tolist() == [plain[3], -torch.inf, plain[0], plain[5]]
    rows = runner.score([cache], [3], [TokenTree.build([0, 2], [-1, -1])]).logits
    assert [float(r[2]) for r in rows] == [float(inner.logits([3, 0, 1, 5, *path])[0]) for path in ([], [3], [0])]
    runner.commit([cache], [[1]])
    other = runner.fork(cache)
    runner.truncate(other, 2)
    assert (cache.length, other.length) == (5, 2)
    assert cache.tokens == [3, 0, 1, 5, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("tokens", [[1], [9], [-1], [0, 1]])
def test_what_the_model_does_not_have_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ConfigError, match="was fed a token that it does not have"):
        mapped(ToyRunner(INNER)).inside(tokens)


def test_maps_over_maps() -> None:
    """Newer ids 0, 1, 2 are 3, 2, 1 of the map above; of these the last is nobody."""
    inner = ToyRunner(INNER, order=None)
    runner = mapped(inner).renamed(np.array([3, 2, -1]), np.array([-1, -1, 1, 0]), 3)
    row = runner.extend([runner.open()], [[0, 1]]).logits[0]
    plain = inner.logits([5, 0])
    assert row.tolist() == [plain[5], plain[0], -torch.inf]
    whole = MappedRunner(inner, np.arange(INNER), None, np.arange(INNER), INNER)  # type: ignore[arg-type]
    same = whole.renamed(np.arange(INNER), np.arange(INNER)[::-1].copy(), INNER)
    assert same.extend([same.open()], [[1, 2]]).logits[0].tolist() == inner.logits([1, 2]).flip(0).tolist()
