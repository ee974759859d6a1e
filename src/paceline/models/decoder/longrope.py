"""The native runner for longrope models, whose rotary angles change for the whole text where it outgrows the original
context.

In:  what `models.decoder.native` takes, with a longrope table. Out: a runner whose logits after n tokens are those of
one forward pass over the n tokens, as transformers' generation gives them too. Not here: the angles
(models.decoder.rope).

A cache is filled in one *regime*, short or long. Where a sequence enters the other one, its tokens are run through the
model again, once; a tree that reaches over the border is scored in both regimes, and each row is taken from its own.
The long copy made for that is kept, fed along, and becomes the sequence's cache when the sequence itself has crossed. A
prompt fed in chunks ends in the regime of its full length (rows of earlier chunks keep that of theirs). Source:
LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.models.decoder.cache import Arena
from paceline.models.decoder.replay import ReplayCache, ReplayRunner
from paceline.models.decoder.segments import Segment
from paceline.models.spec import ModelSpec
from paceline.tree import Scores, TokenTree


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
        self.settle()
        self._views.clear()
        other.release()


class LongRopeRunner(ReplayRunner):
    """See `NativeRunner`. `run_layers` works in the regime of the root; sequences fed with embeddings cannot change
    theirs.
    """

    def __init__(self, spec: ModelSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.original = original_context(spec)

    def open(self) -> LongRopeCache:
        """A new, empty sequence."""
        return LongRopeCache(self.arena)

    def score(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[LongRopeCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `NativeRunner.score`."""
        scores = super().score(caches, roots, trees, taps=taps, computed=computed)
        for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
            if not cache.long and cache.length + 1 + tree.max_depth > self.original:
                self._replace_long_rows(scores, i, cache, tree, 0 if computed is None else computed[i])
        return scores

    def _before_step(self, caches: Sequence[ReplayCache], roots: Sequence[int], trees: Sequence[TokenTree]) -> None:
        super()._before_step(caches, roots, trees)
        for cache in caches:
            self._before_chunk(cache, cache.length + 1)

    def _before_chunk(self, cache: ReplayCache, length: int) -> None:
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
    def _replace_long_rows(self, scores: Scores, index: int, cache: LongRopeCache, tree: TokenTree, done: int) -> None:
        """Score a tree that crosses the border again in the long regime, and take the rows beyond the border from
        there.
        """
        beyond = [i for i, depth in enumerate([0, *tree.depths.tolist()]) if cache.length + depth + 1 > self.original]
        rows = [i for i in beyond if i >= done]
        other = self._other_regime(cache)
        again = super(ReplayRunner, self).score([other], [cache.pending[0]], [tree], taps=tuple(scores.taps))
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
