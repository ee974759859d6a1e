"""Passages by their words: BM25 of the package bm25s, whose scores of words are computed once.

The score of a passage is the sum of those of the query's words, repeated ones as often as they stand there, added in
the query's order in float32. Words are runs of letters, digits and underscores, without regard to case. A passage that
has no word of the query is not found.

The local cache holds the words of its passages with the index's own scores, and so the index's statistics of all
passages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paceline.errors import ConfigError
from paceline.retrieval.base import NOTHING, Embed, Floats, Hits, Ids, LocalCache, PassageIndex, Reader
from paceline.retrieval.passages import read_passages, write_passages
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer

WORD: Final = re.compile(r"\w+")
Words = tuple[int, ...]
"""Numbers of a query's words that some passage has, in order."""


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())


class Bm25Index(PassageIndex[Words]):
    """Ranks passages by BM25, as Lucene computes it.

    Args:
        passages: their texts. bm25: of bm25s, over the words of these passages.
    Raises:
        ConfigError: it holds another number of passages.
    """

    kind = "bm25"

    def __init__(self, passages: Sequence[str], bm25: Any) -> None:
        count = int(bm25.scores["num_docs"])
        need(count == len(passages), "passages", f"be as many as the index holds ({count})", len(passages))
        self._passages, self._bm25 = passages, bm25
        self._rows: tuple[Ids, Ids, Floats] | None = None

    @classmethod
    def build(cls, passages: Sequence[str], *, k1: float = 1.5, b: float = 0.75) -> Bm25Index:
        """Index passages.

        Args:
            k1, b: of BM25: how fast a repeated word saturates, and how much long passages are held back.
        Raises:
            ConfigError: no words in them, or bm25s is not installed.
        """
        words = [words_of(passage) for passage in passages]
        need(any(words), "passages", "hold words", f"{len(passages)} passages without any")
        bm25 = library().BM25(k1=k1, b=b, method="lucene")
        bm25.index(words, show_progress=False)
        return cls(list(passages), bm25)

    @classmethod
    def open(cls, folder: Path, facts: dict[str, Any]) -> Bm25Index:
        """Read what `save` has written.

        Raises:
            OSError, ValueError, KeyError: it cannot be read, or is no such index.
        """
        del facts
        return cls(read_passages(folder), library().BM25.load(folder, show_progress=False))

    def save(self, folder: Path) -> None:
        self._bm25.save(folder, show_progress=False)
        write_passages(folder, self._passages)
        (folder / "index.json").write_text(json.dumps({"kind": self.kind, "entries": self.size}), encoding="utf-8")

    @property
    def size(self) -> int:
        return len(self._passages)

    def passage(self, number: int) -> str:
        return self._passages[number]

    def reader(self, tokenizer: Tokenizer, embed: Embed | None) -> Reader[Words]:
        del embed
        return lambda tokens: self.words(tokenizer.decode(list(tokens)))

    def words(self, text: str) -> Words:
        """A query: the words of a text that some passage has."""
        known = self._bm25.vocab_dict
        return tuple(known[word] for word in words_of(text) if word in known)

    def search(self, queries: Sequence[Words], most: int) -> list[Hits]:
        return [self._search(query, most) for query in queries]

    def _search(self, query: Words, most: int) -> Hits:
        if not query:
            return NOTHING
        scores = np.asarray(self._bm25.get_scores_from_ids(list(query)), np.float32)
        found = np.flatnonzero(scores > 0.0)
        if len(found) > most:
            least = np.partition(scores[found], -most)[-most]
            found = found[scores[found] >= least]  # with all that are as good as the last
        return Hits.of(found.astype(np.int64), scores[found], most)

    def cache(self) -> LocalCache[Words]:
        return Bm25Cache(self)

    def scores_of(self, number: int) -> dict[int, np.float32]:
        """Word -> score, of a passage."""
        begins, words, scores = self._by_passage()
        row = slice(int(begins[number]), int(begins[number + 1]))
        return dict(zip(words[row].tolist(), scores[row], strict=True))

    def _by_passage(self) -> tuple[Ids, Ids, Floats]:
        """Where the words of each passage begin, and all words with their scores; sorted once."""
        if self._rows is None:
            held = self._bm25.scores
            passages = np.asarray(held["indices"], np.int64)
            words = np.repeat(np.arange(len(held["indptr"]) - 1), np.diff(held["indptr"]))
            order = np.argsort(passages, kind="stable")
            begins = np.searchsorted(passages[order], np.arange(self.size + 1))
            self._rows = begins, words[order], np.asarray(held["data"], np.float32)[order]
        return self._rows


class Bm25Cache(LocalCache[Words]):
    """Some passages of such an index."""

    def __init__(self, index: Bm25Index) -> None:
        super().__init__()
        self._index, self._scores = index, dict[int, dict[int, np.float32]]()

    def _take(self, ids: Sequence[int]) -> None:
        self._scores.update({number: self._index.scores_of(number) for number in ids})

    def search(self, query: Words, most: int) -> Hits:
        sums = {}
        for number, scores in self._scores.items():
            total = np.float32(0.0)
            for word in query:
                if word in scores:
                    total += scores[word]
            if total > 0.0:
                sums[number] = total
        if not sums:
            return NOTHING
        return Hits.of(np.fromiter(sums, np.int64), np.fromiter(sums.values(), np.float32), most)


def library() -> Any:
    """The package bm25s.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import bm25s
    except ImportError:
        raise ConfigError(
            "an index of kind 'bm25' needs the package bm25s; pip install 'paceline[retrieval]'"
        ) from None
    return bm25s
