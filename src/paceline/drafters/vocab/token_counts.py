"""How often a target writes each of its tokens, as `paceline count-tokens` finds out: which rows of a draft's head are
worth their time.

Texts are counted in two halves, so that what a set of tokens covers is judged on texts that did not choose it: tokens
that were seen once are many, and what is never seen is not rare.

Source: VocabTrim (arXiv:2506.22694), which counts texts that the target wrote, and keeps the most frequent tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.checkpoints import digest_of
from paceline.errors import ConfigError
from paceline.utils import replacing, user_cache

Ints = npt.NDArray[np.int64]

FORMAT: Final = "paceline-token-counts"
VERSION: Final = 1

STEP: Final = 1024
"""Sizes that are tried are multiples of it."""

WORTH: Final = 3.0
"""What coverage is worth, in reading the draft's weights: a token that the head lacks ends a draft, and takes those
behind it along; reading weights is the draft's part of a step alone. At acceptances of 0.75 to 0.95 it is 2 to 5.
"""


def counts_path(folder: Path) -> Path:
    """Where the counts of a target are kept.

    Args:
        folder: of its checkpoint, or its GGUF file.
    """
    return user_cache("token-counts") / f"{digest_of(folder)}.json"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts how often a target writes each token, in two halves of its texts.

    Attributes:
        halves: (2, v), of every second text.
        tokenizer: fingerprint of its tokenizer. model: its name. origin: what was counted, in words. texts: how many.
    """

    halves: Ints
    tokenizer: str
    model: str
    origin: str
    texts: int

    @classmethod
    def of(
        cls, texts: Iterable[Sequence[int]], vocab_size: int, *, tokenizer: str, model: str, origin: str
    ) -> TokenCounts:
        """Counts of texts of token ids; one text alone is cut into two."""
        halves, number, first = np.zeros((2, vocab_size), np.int64), 0, list[int]()
        for number, text in enumerate(texts, 1):
            known = [token for token in text if 0 <= token < vocab_size]
            halves[number % 2] += np.bincount(known, minlength=vocab_size)
            first = known if number == 1 else []
        if number == 1:
            middle = len(first) // 2
            halves = np.stack([np.bincount(part, minlength=vocab_size) for part in (first[:middle], first[middle:])])
        return cls(halves, tokenizer, model, origin, number)

    @property
    def total(self) -> Ints:
        """Add up both halves, (v,)."""
        total: Ints = self.halves.sum(0)
        return total

    def fitted(self, vocab_size: int) -> TokenCounts:
        """Make the same for a vocabulary of so many tokens."""
        halves = np.zeros((2, vocab_size), np.int64)
        shared = min(vocab_size, self.halves.shape[1])
        halves[:, :shared] = self.halves[:, :shared]
        return replace(self, halves=halves)

    @property
    def tokens(self) -> int:
        """Count the tokens that were counted."""
        return int(self.halves.sum())

    def plus(self, other: TokenCounts) -> TokenCounts:
        """Add the counts of further texts.

        Raises:
            ConfigError: they were made with another tokenizer.
        """
        if self.tokenizer != other.tokenizer or self.halves.shape != other.halves.shape:
            raise ConfigError("counts of two tokenizers cannot be added; count anew, without --add")
        origin = self.origin if self.origin == other.origin else f"{self.origin} and {other.origin}"
        return replace(self, halves=self.halves + other.halves, origin=origin, texts=self.texts + other.texts)

    def coverage(self, always: AbstractSet[int]) -> list[float]:
        """By multiples of STEP from 0 on, what so many tokens cover of the half that did not choose them.

        Args:
            always: tokens that are kept in any case.
        """
        size = self.halves.shape[1]
        covered = np.zeros(-(-size // STEP) + 1)
        for counted, other in (self.halves, self.halves[::-1]):
            held = counted[most_frequent(other, always)]
            sums = np.concatenate(([0], np.cumsum(held)))
            covered += sums[np.minimum(np.arange(len(covered)) * STEP, size)] / max(int(held.sum()), 1) / 2
        kept: list[float] = covered.tolist()
        return kept

    def best_size(self, always: AbstractSet[int], share: float) -> int:
        """How many tokens a head should keep; the vocabulary's size for all.

        Args:
            always: as above. share: of what a step of the draft reads, the whole head.
        """
        size, covered = int(self.halves.shape[1]), self.coverage(always)
        sizes = [min(i * STEP, size) for i in range(len(covered))]
        loss = {
            kept: WORTH * (1.0 - cover) + share * kept / size
            for kept, cover in zip(sizes, covered, strict=True)
            if kept >= max(len(always), 1)
        }
        return min(loss, key=lambda kept: loss[kept]) if self.tokens else size

    def save(self, path: Path) -> None:
        """Write a file in one piece.

        Raises:
            ConfigError: it cannot be written.
        """
        halves = [{str(i): int(half[i]) for i in np.flatnonzero(half)} for half in self.halves]
        document = {
            "format": FORMAT, "version": VERSION, "model": self.model, "tokenizer": self.tokenizer,
            "origin": self.origin, "texts": self.texts, "vocab_size": self.halves.shape[1], "halves": halves,
        }  # fmt: skip
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the folder of {str(path)!r} cannot be made ({error.strerror}); give another") from None
        with replacing(path) as fresh:
            fresh.write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> TokenCounts:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, or is no such file.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"counts in {str(path)!r} cannot be read ({why}); {AGAIN}") from None
        return cls.parse(content, path)

    @classmethod
    def parse(cls, content: Any, path: Path) -> TokenCounts:
        """Make counts of what `load` has read, see there."""
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise ConfigError(f"{str(path)!r} holds no counts of tokens of this version; {AGAIN}")
        try:
            size, texts = int(content["vocab_size"]), int(content["texts"])
            halves = np.zeros((2, size), np.int64)
            for counts, half in zip(halves, content["halves"], strict=True):
                ids = np.array([int(token) for token in half], np.int64)
                counts[ids] = np.array([int(count) for count in half.values()], np.int64)
                if len(ids) and ids.min() < 0:
                    raise ValueError("an id below 0")
            if (halves < 0).any():
                raise ValueError("a count below 0")
            return cls(halves, str(content["tokenizer"]), str(content["model"]), str(content["origin"]), texts)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, MemoryError) as error:
            raise ConfigError(f"counts in {str(path)!r} are damaged ({error}); {AGAIN}") from None


AGAIN: Final = "run `paceline count-tokens` again"


def most_frequent(counts: Ints, always: AbstractSet[int]) -> Ints:
    """(v,) all ids, those of `always` first, then by falling counts; of equal ones the lowest, which byte-pair
    vocabularies learned first.
    """
    ranked = counts.copy()
    ranked[sorted(always)] = np.iinfo(np.int64).max
    return np.argsort(-ranked, kind="stable")
