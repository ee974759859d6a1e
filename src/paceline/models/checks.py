"""What runners reject before a pass: tokens, trees and lengths that do not fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import CapabilityError, ConfigError
from paceline.models.base import ModelInfo, SequenceCache

if TYPE_CHECKING:
    from paceline.tree import TokenTree


def check_chains(what: str, trees: Sequence[TokenTree]) -> None:
    """Reject trees that branch.

    Args:
        what: scores chains only, for the message.
    Raises:
        CapabilityError: one that does.
    """
    for tree in trees:
        if not tree.is_chain:
            raise CapabilityError(
                f"score: {what} scores chains only, but drafter number {int(tree.sources[-1])} proposed a tree that "
                "branches; choose a method or settings that draft chains"
            )


def check_extend(info: ModelInfo, caches: Sequence[SequenceCache], counts: Sequence[int]) -> None:
    """Reject chunks that do not fit into the context.

    Args:
        counts: tokens that each sequence shall get.
    Raises:
        ConfigError: the first sequence that would become too long.
    """
    for cache, count in zip(caches, counts, strict=True):
        if cache.length + count > info.max_context:
            raise _too_long(info, cache.length, count)


def check_score(info: ModelInfo, caches: Sequence[SequenceCache], trees: Sequence[TokenTree]) -> None:
    """Reject trees with a path that does not fit into the context.

    Raises:
        ConfigError: the first sequence that would become too long.
    """
    for cache, tree in zip(caches, trees, strict=True):
        if cache.length + 1 + len(tree.tokens) > info.max_context < cache.length + 1 + tree.max_depth:
            raise _too_long(info, cache.length, 1 + tree.max_depth)


def check_tokens(info: ModelInfo, tokens: Sequence[int], rows: int) -> None:
    """Reject tokens without a row in the embedding, which compiled passes would read from beyond it.

    Raises:
        ConfigError: the first of them.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < rows:
        wrong = next(token for token in tokens if not 0 <= token < rows)
        raise ConfigError(
            f"{info.name} was fed token {wrong}, and its ids lie in 0..{rows - 1}; use a model that has all tokens of "
            "the text"
        )


def _too_long(info: ModelInfo, length: int, count: int) -> ConfigError:
    most = info.max_context
    return ConfigError(
        f"{length} + {count} tokens exceed the context of {most} tokens; shorten the text or raise max_model_len"
    )
