"""What an index is: entries with numbers, found by a query, best first; and a local cache of some of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from paceline.checkpoints import Tokenizer

Q = TypeVar("Q")
"""What an index is asked with."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

Embed = Callable[[Sequence[int]], "torch.Tensor"]
"""(n, hidden) input embeddings of n tokens."""

Reader = Callable[[Sequence[int]], Q]
"""Makes a query of the last tokens of a text."""


@dataclass(frozen=True, slots=True)
class Hits:
    """What was found for a query, best first.

    Attributes:
        ids: of entries. scores: the higher the better; of equal ones the lower id comes first.
    """

    ids: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    @property
    def best(self) -> int | None:
        """The first entry; None where nothing was found."""
        return self.ids[0] if self.ids else None

    @classmethod
    def of(cls, ids: Ids, scores: Floats, most: int) -> Hits:
        """The best of some entries.

        Args:
            ids: (n,). scores: (n,), of each.
        """
        order = np.lexsort((ids, -scores))[:most]
        return cls(tuple(ids[order].tolist()), tuple(scores[order].tolist()))


NOTHING: Final = Hits()


class LocalCache(ABC, Generic[Q]):
    """Some entries of an index, which are ranked as the index ranks them: by the same scores, to the last bit."""

    def __init__(self) -> None:
        self.ids: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Iterable[int]) -> None:
        """Take entries in; those that are here stay as they are."""
        fresh = [one for one in dict.fromkeys(ids) if one not in self.ids]
        self.ids.update(dict.fromkeys(fresh))
        if fresh:
            self._take(fresh)

    @abstractmethod
    def _take(self, ids: Sequence[int]) -> None:
        """Take entries in that are not here."""

    @abstractmethod
    def search(self, query: Q, most: int) -> Hits:
        """The best of its entries, as `Index.search` ranks them."""


class Index(ABC, Generic[Q]):
    """Entries that are numbered from 0.

    Attributes:
        kind: name of the kind, as in `paceline retrieval build --kind`. approximate: whether it may miss the best.
    """

    kind: ClassVar[str]
    approximate: bool = False

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of entries."""

    @abstractmethod
    def search(self, queries: Sequence[Q], most: int) -> list[Hits]:
        """The best entries for each query, as many as `most` at most. What is found for a query does not depend on
        those beside it. Several threads may search at once.
        """

    @abstractmethod
    def cache(self) -> LocalCache[Q]:
        """An empty local cache."""

    def save(self, folder: Path) -> None:
        """Write it into a folder, which is there and empty, for `open_index`.

        Raises:
            OSError: it cannot be written.
            ConfigError: an index that cannot be kept.
        """
        del folder
        raise ConfigError(f"index: one of {type(self).__name__} cannot be kept in a folder")


class PassageIndex(Index[Q]):
    """Passages of text."""

    @abstractmethod
    def passage(self, number: int) -> str:
        """The text of an entry."""

    @abstractmethod
    def reader(self, tokenizer: Tokenizer, embed: Embed | None) -> Reader[Q]:
        """What makes queries for this index of the tokens of a model.

        Args:
            embed: the model's input embeddings; None where they cannot be had.
        Raises:
            PacelineError: they are needed, or the index was made for another model.
        """
