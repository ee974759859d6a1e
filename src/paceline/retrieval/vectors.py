"""Vectors that are found by faiss: all compared (exact), or along a graph or in lists (approximate); and passages by
theirs.

Faiss adds in an order that depends on how many queries it gets. So what it has found is ranked again by scores that are
computed here, each by itself; the local cache ranks by the same. Whatever is not found by an approximate index is not
found, however it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paceline.errors import CapabilityError, ConfigError
from paceline.registry import ABILITIES
from paceline.retrieval.base import NOTHING, Embed, Floats, Hits, Ids, LocalCache, PassageIndex, Reader
from paceline.retrieval.encoders import Encoder, TokenEncoder, encoded, encoder_of
from paceline.retrieval.passages import read_passages, write_passages
from paceline.utils import choice, integer, need

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer

VECTORS: Final = "vectors.faiss"
WEIGHTS: Final = "token_weights.npy"
TOKENS: Final = "tokens"
"""Encoder: the model's own input embeddings (`TokenEncoder`)."""

KINDS: Final = ("exact", "hnsw", "ivf")
NEIGHBOURS: Final = 32
"""Links of a node of the graph."""
WIDTH: Final = 64
"""Nodes of the graph that are looked at side by side in a search."""
PROBES: Final = 8
"""Lists of vectors that are looked into."""


class VectorSearch:
    """Vectors in faiss.

    Args:
        index: of faiss, by inner product or by squared distance.
    Attributes:
        dimension, size: of the vectors, and their number.
    """

    def __init__(self, index: Any) -> None:
        faiss = library()
        self._index, self._inner = index, index.metric_type == faiss.METRIC_INNER_PRODUCT
        self.dimension, self.size = int(index.d), int(index.ntotal)
        lists = faiss.try_extract_index_ivf(index)
        if lists is not None:
            lists.make_direct_map()  # or its vectors could not be read

    @classmethod
    def build(cls, vectors: Floats, kind: str, *, inner: bool) -> VectorSearch:
        """Index vectors (n, d).

        Args:
            kind: "exact", "hnsw" (a graph) or "ivf" (lists around centres, sqrt(n) of them).
            inner: the largest inner product is the best; else the smallest distance.
        Raises:
            ConfigError: another kind, no vectors, or faiss is not installed.
        """
        choice("kind", kind, KINDS)
        need(vectors.ndim == 2 and len(vectors) > 0, "vectors", "be at least one", vectors.shape)
        faiss = library()
        metric = faiss.METRIC_INNER_PRODUCT if inner else faiss.METRIC_L2
        size, dimension = vectors.shape
        if kind == "exact":
            index = faiss.IndexFlat(dimension, metric)
        elif kind == "hnsw":
            index = faiss.IndexHNSWFlat(dimension, NEIGHBOURS, metric)
            index.hnsw.efSearch = WIDTH
        else:
            index = faiss.IndexIVFFlat(faiss.IndexFlat(dimension, metric), dimension, max(1, int(size**0.5)), metric)
            index.nprobe, index.cp.min_points_per_centroid = PROBES, 1
            index.train(vectors)
        index.add(np.ascontiguousarray(vectors, np.float32))
        return cls(index)

    def search(self, queries: Floats, most: int) -> list[Hits]:
        """The best vectors for each of (q, d)."""
        integer("most", most, 1)
        _, found = self._index.search(np.ascontiguousarray(queries, np.float32), min(most, self.size))
        return [self._ranked(query, ids[ids >= 0], most) for query, ids in zip(queries, found, strict=True)]

    def _ranked(self, query: Floats, ids: Ids, most: int) -> Hits:
        return Hits.of(ids, self.scores(query, self.vectors(ids)), most) if len(ids) else NOTHING

    def vectors(self, ids: Ids) -> Floats:
        """(n, d) of entries."""
        return np.asarray(self._index.reconstruct_batch(np.ascontiguousarray(ids, np.int64)), np.float32)

    def scores(self, query: Floats, vectors: Floats) -> Floats:
        """(n,) float32 of vectors (n, d): inner products with the query (d,), or squared distances with a minus; each
        is added up by itself, so that it does not depend on the others.
        """
        terms = vectors * query if self._inner else -np.square(vectors - query)
        return np.asarray(terms.sum(1), np.float32)

    def save(self, path: Path) -> None:
        library().write_index(self._index, str(path))

    @classmethod
    def open(cls, path: Path) -> VectorSearch:
        """Raises OSError or ValueError where there is no such index."""
        path.stat()
        try:
            return cls(library().read_index(str(path)))
        except RuntimeError as error:
            raise ValueError(f"faiss cannot read {path.name}: {str(error).strip().splitlines()[-1]}") from None


class VectorCache(LocalCache[Floats]):
    """Some of the vectors."""

    def __init__(self, vectors: VectorSearch) -> None:
        super().__init__()
        self._all = vectors
        self._ids: Ids = np.empty(0, np.int64)
        self._held: Floats = np.empty((0, vectors.dimension), np.float32)

    def _take(self, ids: Sequence[int]) -> None:
        fresh = np.asarray(ids, np.int64)
        self._ids = np.concatenate([self._ids, fresh])
        self._held = np.concatenate([self._held, self._all.vectors(fresh)])

    def search(self, query: Floats, most: int) -> Hits:
        if not len(self._ids):
            return NOTHING
        return Hits.of(self._ids, self._all.scores(query, self._held), most)


class DenseIndex(PassageIndex[Floats]):
    """Ranks passages by the inner product of their vectors with the query's, all of length 1.

    Args:
        kind: of `vectors`, "exact", "hnsw" or "ivf".
        passages: their texts; there may be more vectors, which stand for nothing (`passage` is then empty).
        encoder: "tokens", or a function of texts, itself or as "module:function".
        weights: (v,) of tokens, with "tokens". model: fingerprint of the model whose embeddings these were.
    """

    kind = "dense"

    def __init__(
        self, passages: Sequence[str], vectors: VectorSearch, kind: str, encoder: Encoder | str, *,
        weights: Floats | None = None, model: str = "",
    ) -> None:  # fmt: skip
        choice("kind", kind, KINDS)
        self._passages, self.vectors, self.form, self.encoder = passages, vectors, kind, encoder
        self.weights, self.model, self.approximate = weights, model, kind != "exact"

    @classmethod
    def build(
        cls, passages: Sequence[str], kind: str = "exact", *, encoder: Encoder | str = TOKENS,
        tokenizer: Tokenizer | None = None, embed: Embed | None = None, vocab_size: int = 0,
    ) -> DenseIndex:  # fmt: skip
        """Index passages.

        Args:
            encoder: as of the class. tokenizer, embed, vocab_size: of the model, with "tokens".
        Raises:
            ConfigError: no passages, or a function that makes no vectors.
        """
        need(len(passages) > 0, "passages", "be at least one", len(passages))
        if encoder != TOKENS:
            vectors = encoded(encoder_of(encoder), passages)
            return cls(list(passages), VectorSearch.build(vectors, kind, inner=True), kind, encoder)
        assert tokenizer is not None
        assert embed is not None
        ids = [tokenizer.encode(passage, add_special_tokens=False) for passage in passages]
        encode = TokenEncoder.of(ids, embed, vocab_size)
        vectors = np.stack([encode(one) for one in ids])
        search = VectorSearch.build(vectors, kind, inner=True)
        return cls(list(passages), search, kind, encoder, weights=encode.weights, model=tokenizer.fingerprint())

    @classmethod
    def open(cls, folder: Path, facts: dict[str, Any]) -> DenseIndex:
        """Read what `save` has written.

        Raises:
            OSError, ValueError, KeyError: it cannot be read, or is no such index.
        """
        weights = np.load(folder / WEIGHTS, allow_pickle=False) if facts["encoder"] == TOKENS else None
        vectors = VectorSearch.open(folder / VECTORS)
        if vectors.size != facts["entries"]:
            raise ValueError(f"{VECTORS} holds {vectors.size} vectors, not {facts['entries']}")
        return cls(
            read_passages(folder), vectors, facts["form"], facts["encoder"], weights=weights, model=facts["model"]
        )

    def save(self, folder: Path) -> None:
        need(isinstance(self.encoder, str), "encoder", 'be named as "module:function" to be kept', self.encoder)
        self.vectors.save(folder / VECTORS)
        write_passages(folder, self._passages)
        if self.weights is not None:
            np.save(folder / WEIGHTS, self.weights, allow_pickle=False)
        facts = {"kind": self.kind, "entries": self.size, "form": self.form, "encoder": self.encoder}
        (folder / "index.json").write_text(json.dumps({**facts, "model": self.model}), encoding="utf-8")

    @property
    def size(self) -> int:
        return self.vectors.size

    def passage(self, number: int) -> str:
        return self._passages[number] if number < len(self._passages) else ""

    def reader(self, tokenizer: Tokenizer, embed: Embed | None) -> Reader[Floats]:
        if self.encoder != TOKENS:
            return self._by_function(tokenizer, encoder_of(self.encoder))
        if tokenizer.fingerprint() != self.model:
            raise ConfigError("index: it was built with another tokenizer than the model's; build one for this model")
        if embed is None:
            raise CapabilityError(
                f"an index with encoder {TOKENS!r} needs a model that {ABILITIES['input_embeddings']}; build it with "
                "encoder module:function"
            )
        assert self.weights is not None
        encode = TokenEncoder(embed, self.weights)
        size = len(encode([0]))
        need(size == self.vectors.dimension, "index", f"hold vectors of {size} numbers, as the model's embeddings are",
             self.vectors.dimension)  # fmt: skip
        return encode

    def _by_function(self, tokenizer: Tokenizer, encoder: Encoder) -> Reader[Floats]:
        def read(tokens: Sequence[int]) -> Floats:
            made: Floats = encoded(encoder, [tokenizer.decode(list(tokens))], self.vectors.dimension)[0]
            return made

        return read

    def search(self, queries: Sequence[Floats], most: int) -> list[Hits]:
        return self.vectors.search(np.stack(list(queries)), most) if queries else []

    def cache(self) -> LocalCache[Floats]:
        return VectorCache(self.vectors)


@cache
def library() -> Any:
    """The package faiss, which compares few queries, too, by matrix products: they read the vectors once, whatever the
    number of queries.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ConfigError("vectors are searched by the package faiss-cpu; pip install 'paceline[retrieval]'") from None
    faiss.cvar.distance_compute_blas_threshold = 1
    return faiss
