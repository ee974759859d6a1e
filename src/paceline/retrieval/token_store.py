"""Tokens by the states before them: what a model has read, as pairs of a state and the token that came next.

kNN-LM mixes the tokens behind the nearest states into the model's distribution. Entries are kept in the order of the
texts, so that the ones behind an entry go on with its text. Source: Generalization through Memorization: Nearest
Neighbor Language Models (arXiv:1911.00172).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from paceline.retrieval.base import Floats, Hits, Index, LocalCache
from paceline.retrieval.vectors import VECTORS, VectorCache, VectorSearch
from paceline.utils import need

FOLLOWING: Final = "tokens.npy"


class TokenStore(Index[Floats]):
    """Finds the nearest states, by squared distance.

    Args:
        kind: of `vectors`, "exact", "hnsw" or "ivf".
        tokens: (n,) that came next. layer: behind which the states were taken, as `Scores.taps` counts them.
        model: fingerprint of the model's tokenizer.
    Raises:
        ConfigError: another number of tokens than vectors.
    """

    kind = "knn"

    def __init__(self, vectors: VectorSearch, kind: str, tokens: NDArray[np.int32], *, layer: int, model: str) -> None:
        need(len(tokens) == vectors.size, "tokens", f"be one for each of {vectors.size} states", len(tokens))
        self.vectors, self.form, self.tokens, self.layer, self.model = vectors, kind, tokens, layer, model
        self.approximate = kind != "exact"

    @classmethod
    def build(
        cls, states: Floats, tokens: Sequence[int] | NDArray[Any], kind: str = "exact", *, layer: int, model: str
    ) -> TokenStore:
        """Index states (n, hidden) with the token behind each.

        Raises:
            ConfigError: none, or faiss is not installed.
        """
        search = VectorSearch.build(states, kind, inner=False)
        return cls(search, kind, np.asarray(tokens, np.int32), layer=layer, model=model)

    @classmethod
    def open(cls, folder: Path, facts: dict[str, Any]) -> TokenStore:
        """Read what `save` has written.

        Raises:
            OSError, ValueError, KeyError: it cannot be read, or is no such index.
        """
        tokens = np.load(folder / FOLLOWING, allow_pickle=False)
        vectors = VectorSearch.open(folder / VECTORS)
        return cls(vectors, facts["form"], tokens, layer=int(facts["layer"]), model=facts["model"])

    def save(self, folder: Path) -> None:
        self.vectors.save(folder / VECTORS)
        np.save(folder / FOLLOWING, self.tokens, allow_pickle=False)
        facts = {"kind": self.kind, "entries": self.size, "form": self.form, "layer": self.layer, "model": self.model}
        (folder / "index.json").write_text(json.dumps(facts), encoding="utf-8")

    @property
    def size(self) -> int:
        return self.vectors.size

    def search(self, queries: Sequence[Floats], most: int) -> list[Hits]:
        return self.vectors.search(np.stack(list(queries)), most) if queries else []

    def cache(self) -> LocalCache[Floats]:
        return VectorCache(self.vectors)
