"""Indices without a library: what they find changes with every query, so that guesses are often wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.checkpoints import Tokenizer
from paceline.llm import BUNDLED
from paceline.retrieval import Hits, LocalCache, PassageIndex, TokenStore
from paceline.retrieval.base import NOTHING

PASSAGES = (
    "A fox and a hen lived by the river.", "The king said no, and the queen said yes.", "def add(a, b): return a + b",
    "Rain fell on the hills for seven days.", "She opened the box. It was empty.", "print('hello')",
    "Numbers: one two three four five.", "The ship left the harbour at night.",
)  # fmt: skip


def score(query: int, entry: int, spread: int) -> float:
    """Of an entry, without pattern, and the same for queries that are `spread` apart."""
    return float(((query // spread + 1) * 7919 + entry * 104729 + entry * (query // spread) * 31) % 997)


class Shifting(PassageIndex[int]):
    """Ranks passages by a number made of the query's tokens.

    Args:
        spread: queries whose numbers are so close find the same.
    Attributes:
        asked: the queries of each search. before: called in each search.
    """

    kind = "shifting"

    def __init__(self, spread: int = 50, passages: Sequence[str] = PASSAGES) -> None:
        self.spread, self.passages = spread, passages
        self.asked: list[list[int]] = []
        self.before: Callable[[], object] = lambda: None

    @property
    def size(self) -> int:
        return len(self.passages)

    def passage(self, number: int) -> str:
        return self.passages[number]

    def reader(self, tokenizer: Any, embed: Any) -> Any:
        return sum

    def search(self, queries: Sequence[int], most: int) -> list[Hits]:
        self.asked.append(list(queries))
        self.before()
        return [self.ranked(query, range(self.size), most) for query in queries]

    def ranked(self, query: int, entries: Any, most: int) -> Hits:
        ids = np.array(list(entries), np.int64)
        return Hits.of(ids, np.array([score(query, one, self.spread) for one in ids.tolist()], np.float32), most)

    def cache(self) -> LocalCache[int]:
        return ShiftingCache(self)


class ShiftingCache(LocalCache[int]):
    """Some of them."""

    def __init__(self, index: Shifting) -> None:
        super().__init__()
        self.index = index

    def _take(self, ids: Sequence[int]) -> None:
        del ids

    def search(self, query: int, most: int) -> Hits:
        return self.index.ranked(query, self.ids, most) if self.ids else NOTHING


class Nothing(Shifting):
    """Finds nothing."""

    def search(self, queries: Sequence[int], most: int) -> list[Hits]:
        return [NOTHING for _ in super().search(queries, most)]


class States:
    """Vectors of a store that are compared one by one, by squared distance."""

    def __init__(self, vectors: np.ndarray[Any, Any]) -> None:
        self.held, self.size, self.dimension = vectors, len(vectors), vectors.shape[1]

    def vectors(self, ids: Any) -> Any:
        return self.held[np.asarray(ids)]

    def scores(self, query: Any, vectors: Any) -> Any:
        return (-np.square(vectors - query)).sum(1, dtype=np.float32)

    def search(self, queries: Any, most: int) -> list[Hits]:
        every = np.arange(self.size)
        return [Hits.of(every, self.scores(query, self.held), most) for query in queries]


def store_of(vectors: np.ndarray[Any, Any], tokens: Sequence[int], layer: int) -> TokenStore:
    """A store of the bundled model's."""
    model = Tokenizer.load(BUNDLED / "target").fingerprint()
    return TokenStore(States(vectors), "exact", np.array(tokens, np.int32), layer=layer, model=model)  # type: ignore[arg-type]
