"""The native runners for rotary embeddings whose angles depend on the length of the text: dynamic and longrope.

They remember each sequence's tokens and run them through the model again where their cached angles no longer hold.

*Dynamic*: the base grows with every token beyond the declared context, and what is cached keeps its angles, as in
transformers, where a prompt is one pass. So a prompt that comes in chunks is run again for every chunk beyond that
context, and ends as one pass over it would have left it; from the first scored step on, tokens count one by one.

*Longrope*: the angles change for the whole text where it outgrows the original context, and logits after n tokens are
those of one forward pass over the n tokens. A cache is filled in one *regime*, short or long. Where a sequence enters
the other one, its tokens are run through the model again, once; a tree that reaches over the border is scored in both
regimes, and each row is taken from its own. The long copy made for that is kept, fed along, and becomes the sequence's
cache when the sequence itself has crossed. A prompt fed in chunks ends in the regime of its full length (rows of
earlier chunks keep that of theirs). Source: LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch

from paceline.errors import CapabilityError
from paceline.models.base import check_extend
from paceline.models.decoder.arena import Arena
from paceline.models.decoder.cache import NativeCache
from paceline.models.decoder.native import NativeRunner
from paceline.models.decoder.segments import Segment
from paceline.models.model_spec import ModelSpec
from paceline.tree import Scores, TokenTree

REPLAY_CHUNK = 512
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
    """See `NativeRunner`; for dynamic rotary embeddings, and the base of the runner for longrope.

    Keys depend on more than the text before them, so that sequences cannot share what others left.
    """

    capabilities = replace(NativeRunner.capabilities, blocks=False)

    def open(self) -> ReplayCache:
        """A new, empty sequence."""
        return ReplayCache(self.arena)

    def _extend(
        self,
        caches: Sequence[NativeCache],
        rows: Sequence[int],
        inputs: Sequence[int] | torch.Tensor,
        taps: Sequence[int],
        all_logits: bool,
    ) -> Scores:
        """Raises CapabilityError where a sequence would have to be run again, but its tokens are not known."""
        check_extend(self.info, caches, rows)
        own = cast(Sequence[ReplayCache], caches)
        for cache, count in zip(own, rows, strict=True):
            self.before_chunk(cache, cache.length + count)
        scores = super()._extend(caches, rows, inputs, taps, all_logits)
        tokens = iter([UNKNOWN] * len(inputs) if isinstance(inputs, torch.Tensor) else inputs)
        for cache, count in zip(own, rows, strict=True):
            cache.tokens.extend(islice(tokens, count))
        return scores

    def _before_step(
        self, caches: Sequence[NativeCache], roots: Sequence[int] | None, trees: Sequence[TokenTree]
    ) -> None:
        for cache, root, tree in zip(
            cast(Sequence[ReplayCache], caches), roots or [UNKNOWN] * len(caches), trees, strict=True
        ):
            cache.pending = [root, *tree.tokens.tolist()]
            cache.decoding = True

    def before_chunk(self, cache: ReplayCache, length: int) -> None:
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
                "change; feed tokens"
            )
        return cache.tokens.copy()

    def _replay(self, cache: ReplayCache, tokens: Sequence[int]) -> None:
        """Append the part of `tokens` that the cache lacks."""
        for start in range(cache.length, len(tokens), REPLAY_CHUNK):
            chunk = tokens[start : start + REPLAY_CHUNK]
            NativeRunner._extend(self, [cache], [len(chunk)], chunk, (), False)
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


class LongRopeCache(ReplayCache):
    """A sequence that knows its regime.

    Attributes:
        long: regime of what is cached.
        copy: the same text in the other regime, as far as it was fed, or None.
    """

    __slots__ = ("copy", "long")

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.long = False
        self.copy: LongRopeCache | None = None

    def truncate(self, length: int) -> None:
        """See `NativeCache.truncate`."""
        super().truncate(length)
        if self.copy is not None and self.copy.length > length:
            self.copy.truncate(length)

    def fork(self) -> LongRopeCache:
        """See `NativeCache.fork`; the copy in the other regime stays behind."""
        other = super().fork()
        assert isinstance(other, LongRopeCache)
        other.long = self.long
        return other

    def release(self) -> None:
        """See `NativeCache.release`."""
        super().release()
        if self.copy is not None:
            self.copy.release()

    def become(self, other: LongRopeCache) -> None:
        """Take over what `other` has cached; `other` is used up."""
        self.arena.begin()
        self.arena.pool.drop(self.blocks)
        self.blocks, self.length, self.base, self.scratch = other.blocks, other.length, other.base, 0
        self.long, self.copy, other.blocks = other.long, None, []
        self.arena.pool.end()
        self.locate()
        self._views.clear()
        other.release()


class LongRopeRunner(ReplayRunner):
    """See `NativeRunner`. `run_layers` works in the regime of the root.

    Sequences fed with embeddings cannot change theirs.
    """

    def __init__(self, spec: ModelSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.original = original_context(spec)

    def open(self) -> LongRopeCache:
        """A new, empty sequence."""
        return LongRopeCache(self.arena)

    def _score(
        self,
        caches: Sequence[NativeCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        taps: Sequence[int],
        computed: Sequence[int] | None,
    ) -> Scores:
        scores = super()._score(caches, roots, trees, taps, computed)
        for i, (cache, tree) in enumerate(zip(cast(Sequence[LongRopeCache], caches), trees, strict=True)):
            if not cache.long and cache.length + 1 + tree.max_depth > self.original:
                self.replace_long_rows(scores, i, cache, tree, 0 if computed is None else computed[i])
        return scores

    def _before_step(
        self, caches: Sequence[NativeCache], roots: Sequence[int] | None, trees: Sequence[TokenTree]
    ) -> None:
        super()._before_step(caches, roots, trees)
        for cache in cast(Sequence[LongRopeCache], caches):
            self.before_chunk(cache, cache.length + 1)

    def before_chunk(self, cache: ReplayCache, length: int) -> None:
        """Bring the cache into the regime of a text of `length` tokens."""
        assert isinstance(cache, LongRopeCache)
        long = length > self.original
        if cache.long == long:
            return
        if cache.length == 0:
            cache.long = long
        else:
            cache.become(self._other_regime(cache))

    def _other_regime(self, cache: LongRopeCache) -> LongRopeCache:
        """The committed text of a sequence in the other regime."""
        tokens = self._known(cache, self.original)
        if cache.copy is None:
            cache.copy = self.open()
            cache.copy.long = not cache.long
        self._replay(cache.copy, tokens)
        return cache.copy

    @torch.inference_mode()
    def replace_long_rows(self, scores: Scores, index: int, cache: LongRopeCache, tree: TokenTree, done: int) -> None:
        """Score a tree that crosses the border again in the long regime, and take the rows beyond the border from
        there.
        """
        beyond = [i for i, depth in enumerate([0, *tree.depths.tolist()]) if cache.length + depth + 1 > self.original]
        rows = [i for i in beyond if i >= done]
        other = self._other_regime(cache)
        again = super()._score([other], [cache.pending[0]], [tree], tuple(scores.taps), None)
        targets = [scores.rows[index] + i - done for i in rows]
        scores.logits[targets] = again.logits[rows]
        for layer, tap in scores.taps.items():
            tap[targets] = again.taps[layer][rows]

    def _runs(self, segment: Segment, chunked: bool) -> list[tuple[int, int]]:
        cache = segment.cache
        assert isinstance(cache, LongRopeCache)
        if cache.long:
            return [(segment.rows, self.original + 1)]
        return [(segment.rows, self.original)] if chunked else super()._runs(segment, chunked)


def original_context(spec: ModelSpec) -> int:
    """The length up to which the short angles of a longrope model hold."""
    original: Any = [
        rope.scaling.get("original_max_position_embeddings", rope.max_position)
        for rope in spec.ropes.values()
        if rope.kind == "longrope"
    ]
    return int(original[0])
