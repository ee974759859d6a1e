"""Indices made of texts with a model: passages by their words or vectors, and tokens by the model's states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import CapabilityError, ConfigError
from paceline.models import HasEmbedding
from paceline.registry import ABILITIES
from paceline.retrieval import Bm25Index, DenseIndex, Index, TokenStore, passages_of
from paceline.utils import choice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.checkpoints import Tokenizer
    from paceline.models import Runner

INDEX_KINDS = ("bm25", "dense", "knn")
BLOCK = 512
"""Tokens of a text that the model reads together for a store of tokens."""


def build_index(
    texts: Iterable[str], kind: str, *, tokenizer: Tokenizer, runner: Runner | None, vectors: str = "exact",
    encoder: Any = "tokens", passage_words: int = 100,
) -> Index[Any]:  # fmt: skip
    """An index of texts.

    Args:
        kind: "bm25" or "dense" (passages), "knn" (tokens).
        runner: of the model; None with "bm25", or a function as encoder, which need none.
        vectors: how those of "dense" and "knn" are searched: "exact", "hnsw" or "ivf".
        encoder: of passages, "tokens" or a function of texts, itself or as "module:function".
        passage_words: most words of a passage.
    Raises:
        ConfigError: nothing to index, an unknown kind, or a package that is not installed.
        CapabilityError: a model that lacks what the kind needs.
    """
    choice("kind", kind, INDEX_KINDS)
    if kind == "knn":
        assert runner is not None
        return token_store(runner, tokenizer, texts, vectors)
    passages = list(passages_of(texts, passage_words))
    if kind == "bm25":
        return Bm25Index.build(passages)
    if encoder != "tokens":
        return DenseIndex.build(passages, vectors, encoder=encoder)
    if not isinstance(runner, HasEmbedding):
        raise CapabilityError(
            f"encoder 'tokens' needs a model that {ABILITIES['input_embeddings']}; give a function, as module:function"
        )
    return DenseIndex.build(
        passages, vectors, tokenizer=tokenizer, embed=runner.embed, vocab_size=runner.info.vocab_size
    )


def token_store(runner: Runner, tokenizer: Tokenizer, texts: Iterable[str], vectors: str = "exact") -> TokenStore:
    """A store of all tokens of texts, by the states behind the final norm.

    Raises:
        ConfigError: fewer than two tokens. CapabilityError: a model that does not show its states.
    """
    info = runner.info
    if not runner.capabilities.taps:
        raise CapabilityError(f"a store of tokens needs a model that {ABILITIES['taps']}; {info.name} is not one")
    layer, block = info.num_layers, min(BLOCK, info.max_context - 1)
    states, following = [], []
    for text in texts:
        ids = tokenizer.encode(text)
        for start in range(0, len(ids) - 1, block):
            piece = ids[start : start + block + 1]
            states.append(states_of(runner, piece[:-1], layer))
            following += piece[1:]
    if not following:
        raise ConfigError("the texts have no tokens that follow others; give longer ones")
    return TokenStore.build(np.concatenate(states), following, vectors, layer=layer, model=tokenizer.fingerprint())


def states_of(runner: Runner, tokens: Sequence[int], layer: int) -> NDArray[np.float32]:
    """(n, hidden) behind a layer, of n tokens that are read from the beginning of a sequence."""
    cache = runner.open(len(tokens))
    try:
        states = runner.extend([cache], [tokens], taps=(layer,)).taps[layer]
        return states.float().cpu().numpy().copy()  # the next pass may use that memory
    finally:
        runner.release(cache)
