"""Texts as vectors: by the model's own input embeddings, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.retrieval.base import Embed, Floats
from paceline.utils import need, resolve_name

Encoder = Callable[[Sequence[str]], Any]
"""Of n texts, (n, d) numbers."""


class TokenEncoder:
    """The mean of the input embeddings of a text's tokens, weighted by how few passages have them, and of length 1.

    It costs no pass of a model. A text without a token of any passage is the zero vector.

    Args:
        embed: of the model. weights: (v,) float32 of tokens.
    """

    def __init__(self, embed: Embed, weights: Floats) -> None:
        self.embed, self.weights = embed, weights

    @classmethod
    def of(cls, passages: Iterable[Sequence[int]], embed: Embed, vocab_size: int) -> TokenEncoder:
        """Count the passages that have each token: of n passages, a token of m weighs log(n / m), or a little where all
        have it, and one of none 0.
        """
        counts, total = np.zeros(vocab_size, np.int64), 0
        for tokens in passages:
            counts[np.unique(np.asarray(tokens, np.int64))] += 1
            total += 1
        weights = np.log(np.maximum(total, 1) / np.maximum(counts, 1)) + 1e-3 / (1.0 + log(1.0 + total))
        return cls(embed, np.where(counts > 0, weights, 0.0).astype(np.float32))

    def __call__(self, tokens: Sequence[int]) -> Floats:
        """(hidden,) float32 of a text's tokens."""
        ids = np.asarray(tokens, np.int64)
        ids = ids[(ids < len(self.weights)) & (self.weights[np.minimum(ids, len(self.weights) - 1)] > 0.0)]
        embeddings = self.embed(ids.tolist() or [0]).float().cpu().numpy()
        summed = self.weights[ids] @ embeddings if len(ids) else np.zeros(embeddings.shape[1], np.float32)
        made: Floats = normalised(summed[None])[0]
        return made


def encoded(encoder: Encoder, texts: Sequence[str], dimension: int | None = None) -> Floats:
    """(n, d) float32 vectors of length 1 that a function makes of texts.

    Args:
        dimension: d, where it is known.
    Raises:
        ConfigError: it makes something else.
    """
    try:
        vectors: NDArray[Any] = np.asarray(encoder(texts), np.float32)
    except (TypeError, ValueError):
        vectors = np.empty(0, np.float32)
    fine = vectors.ndim == 2 and len(vectors) == len(texts) and bool(np.isfinite(vectors).all())
    need(fine, "encoder", f"make {len(texts)} vectors of finite numbers", getattr(vectors, "shape", vectors))
    size = vectors.shape[1]
    need(dimension in (None, size), "encoder", f"make vectors of {dimension} numbers, as those of the index", size)
    return normalised(vectors)


def normalised(vectors: Floats) -> Floats:
    """(n, d) made as long as 1; those without any length stay zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.where(lengths > 0.0, lengths, 1.0)).astype(np.float32)


def encoder_of(given: Encoder | str) -> Encoder:
    """The function given, or the one that "module:function" names.

    Raises:
        ConfigError: it cannot be imported, or is none.
    """
    function: Any = given
    if isinstance(given, str):
        try:
            function = resolve_name(given)
        except Exception as error:  # a module of a user's may raise anything
            raise ConfigError(f"encoder: cannot import {given!r}: {error}; give module:function") from error
    need(callable(function), "encoder", 'be a function, or its name as "module:function"', given)
    return function  # type: ignore[no-any-return]
