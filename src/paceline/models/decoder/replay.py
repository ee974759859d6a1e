"""The native runner for rotary embeddings whose angles depend on the length of the text (longrope, dynamic).

In:  what `models.decoder.native` takes. Out: a runner that remembers each sequence's tokens and runs them through the
model again where their cached angles no longer hold. Not here: the angles (models.decoder.rope), when longrope changes
regime (models.decoder.longrope).

*Dynamic*: the base grows with every token beyond the declared context, and what is cached keeps its angles, as in
transformers, where a prompt is one pass. So a prompt that comes in chunks is run again for every chunk beyond that
context, and ends as one pass over it would have left it; from the first scored step on, tokens count one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.errors import CapabilityError
from paceline.models.base import check_extend, check_score
from paceline.models.decoder.cache import Arena, NativeCache
from paceline.models.decoder.decoder import ALL_LAYERS, LayerPlan
from paceline.models.decoder.native import NativeRunner
from paceline.models.decoder.segments import Segment
from paceline.tree import Scores, TokenTree

CHUNK = 512
"""Tokens of one pass when a sequence is run again."""

UNKNOWN = -1


class ReplayCache(NativeCache):
    """A sequence that knows its tokens.

    Attributes:
        tokens: the committed tokens; UNKNOWN where embeddings were fed.
        pending: root and node tokens of the last step.
        decoding: a step was scored, so that what is cached stays as it is (dynamic).
        forced: length that counts for the angles while the sequence is run again; 0 otherwise (dynamic).
    """

    __slots__ = ("decoding", "forced", "pending", "tokens")

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.decoding, self.forced = False, 0

    def keep(self, path: Sequence[int]) -> None:
        """See `NativeCache.keep`."""
        super().keep(path)
        self.tokens += [self.pending[0], *(self.pending[1 + node] for node in path)]

    def truncate(self, length: int) -> None:
        """See `NativeCache.truncate`."""
        super().truncate(length)
        del self.tokens[length:]
        self.decoding = self.decoding and length > 0

    def fork(self) -> ReplayCache:
        """See `NativeCache.fork`."""
        other = super().fork()
        assert isinstance(other, ReplayCache)
        other.tokens, other.decoding = self.tokens.copy(), self.decoding
        return other


class ReplayRunner(NativeRunner):
    """See `NativeRunner`; for dynamic rotary embeddings, and the base of the runner for longrope. Keys depend on more
    than the text before them, so that sequences cannot share what others left.
    """

    capabilities = replace(NativeRunner.capabilities, blocks=False)

    def open(self) -> ReplayCache:
        """A new, empty sequence."""
        return ReplayCache(self.arena)

    def extend(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[ReplayCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `NativeRunner.extend`."""
        check_extend(self.info, caches, [len(own) for own in tokens])
        for cache, own in zip(caches, tokens, strict=True):
            self._before_chunk(cache, cache.length + len(own))
        scores = super().extend(caches, tokens, taps=taps, all_logits=all_logits)
        for cache, own in zip(caches, tokens, strict=True):
            cache.tokens.extend(own)
        return scores

    def extend_embeddings(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[ReplayCache],
        embeddings: Sequence[torch.Tensor],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `NativeRunner.extend_embeddings`.

        Raises:
            CapabilityError: the sequence would have to be run again, but its tokens are not known.
        """
        check_extend(self.info, caches, [len(own) for own in embeddings])
        for cache, own in zip(caches, embeddings, strict=True):
            self._before_chunk(cache, cache.length + len(own))
        scores = super().extend_embeddings(caches, embeddings, taps=taps, all_logits=all_logits)
        for cache, own in zip(caches, embeddings, strict=True):
            cache.tokens += [UNKNOWN] * len(own)
        return scores

    def score(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[ReplayCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `NativeRunner.score`."""
        check_score(self.info, caches, trees)
        self._before_step(caches, roots, trees)
        return super().score(caches, roots, trees, taps=taps, computed=computed)

    def run_layers(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[ReplayCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        plan: LayerPlan = ALL_LAYERS,
        hidden: torch.Tensor | None = None,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """See `NativeRunner.run_layers`."""
        if hidden is None:
            self._before_step(caches, roots, trees)
        elif plan.first == 0:
            self._before_step(caches, [UNKNOWN] * len(caches), trees)
        return super().run_layers(caches, roots, trees, plan=plan, hidden=hidden, taps=taps, computed=computed)

    def _before_step(self, caches: Sequence[ReplayCache], roots: Sequence[int], trees: Sequence[TokenTree]) -> None:
        for cache, root, tree in zip(caches, roots, trees, strict=True):
            cache.pending = [root, *tree.tokens.tolist()]
            cache.decoding = True

    def _before_chunk(self, cache: ReplayCache, length: int) -> None:
        """Make what is cached fit a chunk that leads to `length`."""
        limit = min(rope.max_position for rope in self.spec.ropes.values())
        if cache.length == 0 or cache.decoding or length <= limit:
            return
        tokens = self._known(cache, limit)
        cache.truncate(0)
        cache.forced = length
        self._replay(cache, tokens)
        cache.forced = 0

    def _known(self, cache: ReplayCache, limit: int) -> list[int]:
        """A copy of the sequence's tokens, if they are known."""
        if UNKNOWN in cache.tokens:
            raise CapabilityError(
                f"a sequence fed with embeddings cannot cross {limit} tokens, where the angles of {self.info.name} "
                f"change; "
                "feed tokens"
            )
        return cache.tokens.copy()

    def _replay(self, cache: ReplayCache, tokens: Sequence[int]) -> None:
        """Append the part of `tokens` that the cache lacks."""
        for start in range(cache.length, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            NativeRunner.extend(self, [cache], [chunk])
            cache.tokens.extend(chunk)

    def _lengths(
        self, segments: Sequence[Segment], positions: Sequence[int], chunked: bool
    ) -> Sequence[tuple[int, int]]:
        return [run for segment in segments for run in self._runs(segment, chunked)]

    def _runs(self, segment: Segment, chunked: bool) -> list[tuple[int, int]]:
        cache = segment.cache
        assert isinstance(cache, ReplayCache)
        if chunked:
            return [(segment.rows, cache.forced or cache.length + segment.inputs)]
        return [(1, position + 1) for position in segment.positions()]
