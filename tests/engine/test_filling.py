"""Texts are fed whole and in order, in passes of limited size."""

from __future__ import annotations

from typing import Any

import pytest
from toys import ToyRunner

from paceline.engine import fill_caches

TEXTS = [[1, 2, 3, 4, 5], [], [6, 7], [8]]


class Noting(ToyRunner):
    def __init__(self) -> None:
        super().__init__(16, order=None)
        self.passes: list[list[tuple[int, list[int]]]] = []
        self.caches = [self.open() for _ in TEXTS]

    def extend(self, caches: Any, chunks: Any, **more: Any) -> Any:
        self.passes.append(
            [(self.caches.index(cache), list(chunk)) for cache, chunk in zip(caches, chunks, strict=True)]
        )
        return super().extend(caches, chunks, **more)


@pytest.mark.parametrize(
    ("most", "fed"),
    [
        (3, [[(0, [1, 2, 3])], [(0, [4, 5]), (2, [6])], [(2, [7]), (3, [8])]]),
        (5, [[(0, [1, 2, 3, 4, 5])], [(2, [6, 7]), (3, [8])]]),
        (99, [[(0, [1, 2, 3, 4, 5]), (2, [6, 7]), (3, [8])]]),
    ],
)
def test_passes_hold_at_most_so_many_tokens(most: int, fed: list[Any]) -> None:
    runner = Noting()
    fill_caches(runner, runner.caches, TEXTS, most)
    assert runner.passes == fed
    assert [cache.length for cache in runner.caches] == [5, 0, 2, 1]


def test_where_nothing_is_missing_no_pass_runs() -> None:
    runner = Noting()
    fill_caches(runner, runner.caches, [[], [], [], []], 4)
    assert not runner.passes
