"""The draft model's cache of one sequence: what it holds, what of it is still true, and how it catches up.

The cache holds committed tokens first (`base` of them), then possibly drafted ones (`ahead`), whose keys and values are
kept as far as the text turns out to agree with them. The last token of the text is never kept: it must be fed to get
logits after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from paceline.errors import DrafterError
from paceline.models import MappedRunner

if TYPE_CHECKING:
    from paceline.drafters.base import Context
    from paceline.models import Runner, SequenceCache
    from paceline.tree import Scores

CHUNK: Final = 512
"""Most tokens of one sequence that are fed at once when a draft model catches up."""

FEW: Final = 16
"""Tokens of a text that are fed together with a tree behind it, where a cache lacks no more."""


class CacheFollower:
    """A cache that follows the text of one sequence."""

    __slots__ = ("cache", "context")

    def __init__(self, context: Context, cache: SequenceCache) -> None:
        self.context, self.cache = context, cache

    @property
    def pending(self) -> list[int]:
        """The tokens of the text that the cache lacks, at least the last one."""
        return self.context.tokens[self.cache.length :]

    def fed(self) -> None:
        """Note that the cache holds more of the text; by default nothing."""


class DraftState(CacheFollower):
    """Keeps what a draft model knows of one sequence.

    Attributes:
        base: number of tokens at the start of the text that the cache holds.
        ahead: drafted tokens that the cache holds after those.
        fed_tokens, fed_parents: inputs scored as a tree after `base` and not committed yet, the first being its root.
    """

    __slots__ = ("ahead", "base", "fed_parents", "fed_tokens")

    def __init__(self, context: Context, cache: SequenceCache, base: int = 0) -> None:
        super().__init__(context, cache)
        self.base = base
        self.ahead: list[int] = []
        self.fed_tokens: list[int] = []
        self.fed_parents: list[int] = []

    def fed(self) -> None:
        self.base = self.cache.length

    def confirm(self, runner: Runner) -> None:
        """Keep what the text has confirmed, drop all else. Harmless if there is nothing to do."""
        if self.fed_tokens:
            self._confirm_tree(runner)
        text, length = self.context.tokens, self.cache.length
        keep = min(self.base, len(text) - 1, length)
        keep += agreed(self.ahead, text[keep : min(len(text) - 1, length)])
        if keep < length:
            runner.truncate(self.cache, keep)
        self.base, self.ahead = keep, []

    def forget(self, runner: Runner, kept: int) -> None:
        """The text behind its first `kept` tokens was taken back or replaced: hold none of it."""
        if kept < self.base:
            self.fed_tokens, self.fed_parents, self.ahead = [], [], []
            self.base = min(kept, self.cache.length)
            runner.truncate(self.cache, self.base)

    def _confirm_tree(self, runner: Runner) -> None:
        """Commit the scored inputs that the text agrees with, up to the one before the last token."""
        path = along(self.fed_tokens, self.fed_parents, self.context.tokens[self.base : -1])
        self.fed_tokens, self.fed_parents = [], []
        if path:
            runner.commit([self.cache], [[i - 1 for i in path[1:]]])
            self.base = self.cache.length


def agreed(old: Sequence[int], new: Sequence[int]) -> int:
    """Count the tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def along(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The nodes of a tree along a text from the root, as far as they are there."""
    children = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
    nodes: list[int] = []
    for token in text:
        node = children.get((nodes[-1] if nodes else -1, token))
        if node is None:
            break
        nodes.append(node)
    return nodes


def check_known(runner: Runner, tokens: Sequence[int]) -> None:
    """Reject a text that a draft model cannot read; it may have fewer embeddings than the target, and read others.

    Raises:
        DrafterError: a token beyond its embeddings.
    """
    known = len(runner.into) if isinstance(runner, MappedRunner) else runner.info.vocab_size
    if tokens and (highest := max(tokens)) >= known:
        raise DrafterError(
            f"the text holds token {highest}, and draft model {runner.info.name!r} has only {known} tokens; choose one "
            "with the target's vocabulary to draft for such texts"
        )


def catch_up(runner: Runner, states: Sequence[CacheFollower], leave: int, most: int | None = None) -> None:
    """Feed what the caches lack but for the last `leave` tokens, in chunks, where it is more than `most` (None: than
    `leave`).

    Raises:
        DrafterError: a text holds a token that the model does not have.
    """
    most = leave if most is None else most
    for state in states:
        check_known(runner, state.pending)
    while behind := [state for state in states if len(state.pending) > most]:
        chunks = [state.pending[: min(CHUNK, len(state.pending) - leave)] for state in behind]
        runner.extend([state.cache for state in behind], chunks)
        for state in behind:
            state.fed()


def feed_text(runner: Runner, states: Sequence[DraftState]) -> torch.Tensor:
    """Feed all that the caches lack; (r, v) logits after each text's last token. Caches then hold the whole text."""
    catch_up(runner, states, CHUNK)
    logits = runner.extend([state.cache for state in states], [state.pending for state in states]).logits
    for state in states:
        state.fed()
    return logits


def feed_ahead(runner: Runner, states: Sequence[DraftState], tokens: Sequence[int], taps: Sequence[int] = ()) -> Scores:
    """Feed one drafted token each; (r, v) logits after them, and the states behind the layers of `taps`."""
    scores = runner.extend([state.cache for state in states], [[token] for token in tokens], taps=taps)
    for state, token in zip(states, tokens, strict=True):
        state.ahead.append(token)
    return scores
