"""The native runner for longrope models, whose rotary angles change for the whole text where it outgrows the original context.

In:  what `models.native` takes, with a longrope table. Out: a runner whose logits after n tokens are those of one forward pass over
the n tokens, as transformers' generation gives them too. Not here: the angles (models.rope).

A cache is filled in one *regime*, short or long. Where a sequence enters the other one, its tokens are run through the model again,
once; a tree that reaches over the border is scored in both regimes, and each row is taken from its own. The long copy made for
that is kept, fed along, and becomes the sequence's cache when the sequence itself has crossed. A prompt fed in chunks ends in the
regime of its full length (rows of earlier chunks keep that of theirs). Source: LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import CapabilityError
from paceline.models.cache import Arena, NativeCache
from paceline.models.decoder import ALL_LAYERS, LayerPlan
from paceline.models.native import NativeRunner
from paceline.models.segments import Segment
from paceline.models.spec import ModelSpec
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import Scores

CHUNK = 512
"""Tokens of one pass when a sequence is run again."""

UNKNOWN = -1


class LongRopeCache(NativeCache):
    """A sequence that knows its tokens and its regime.

    Attributes:
        tokens: the committed tokens; UNKNOWN where embeddings were fed.
        pending: root and node tokens of the last step.
        long: regime of what is cached.
        copy: the same text in the other regime, as far as it was fed, or None.
    """

    __slots__ = ("copy", "long", "pending", "tokens")

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena)
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.long = False
        self.copy: LongRopeCache | None = None

    def keep(self, path: Sequence[int]) -> None:
        """See `NativeCache.keep`."""
        super().keep(path)
        self.tokens += [self.pending[0], *(self.pending[1 + node] for node in path)]

    def truncate(self, length: int) -> None:
        """See `NativeCache.truncate`."""
        super().truncate(length)
        del self.tokens[length:]
        if self.copy is not None and self.copy.length > length:
            self.copy.truncate(length)

    def fork(self) -> LongRopeCache:
        """See `NativeCache.fork`; the copy in the other regime stays behind."""
        other = super().fork()
        assert isinstance(other, LongRopeCache)
        other.tokens, other.long = self.tokens.copy(), self.long
        return other

    def release(self) -> None:
        """See `NativeCache.release`."""
        super().release()
        if self.copy is not None:
            self.copy.release()

    def become(self, other: LongRopeCache) -> None:
        """Take over what `other` has cached; `other` is used up."""
        self.arena.pool.drop(self.blocks)
        self.blocks, self.length, self.base, self.scratch = other.blocks, other.length, other.base, 0
        self.long, self.copy, other.blocks = other.long, None, []
        self._views.clear()
        other.release()


class LongRopeRunner(NativeRunner):
    """See `NativeRunner`. `run_layers` works in the regime of the root; sequences fed with embeddings cannot change theirs."""

    def __init__(self, spec: ModelSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.original = original_context(spec) or spec.max_context

    def open(self) -> LongRopeCache:
        """A new, empty sequence."""
        return LongRopeCache(self.arena)

    def extend(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[LongRopeCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `NativeRunner.extend`."""
        for cache, own in zip(caches, tokens, strict=True):
            self._settle(cache, cache.length + len(own))
        scores = super().extend(caches, tokens, taps=taps, all_logits=all_logits)
        for cache, own in zip(caches, tokens, strict=True):
            cache.tokens.extend(own)
        return scores

    def extend_embeddings(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[LongRopeCache],
        embeddings: Sequence[torch.Tensor],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `NativeRunner.extend_embeddings`.

        Raises:
            CapabilityError: the sequence would cross the original context.
        """
        for cache, own in zip(caches, embeddings, strict=True):
            self._settle(cache, cache.length + len(own))
        scores = super().extend_embeddings(caches, embeddings, taps=taps, all_logits=all_logits)
        for cache, own in zip(caches, embeddings, strict=True):
            cache.tokens += [UNKNOWN] * len(own)
        return scores

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
        self._prepare(caches, roots, trees)
        scores = super().score(caches, roots, trees, taps=taps, computed=computed)
        for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
            if not cache.long and cache.length + 1 + tree.max_depth > self.original:
                self._replace_long_rows(scores, i, cache, tree, 0 if computed is None else computed[i])
        return scores

    def run_layers(  # type: ignore[override]  # takes the handles that `open` gives
        self,
        caches: Sequence[LongRopeCache],
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
            self._prepare(caches, roots, trees)
        elif plan.first == 0:
            self._prepare(caches, [UNKNOWN] * len(caches), trees)
        return super().run_layers(caches, roots, trees, plan=plan, hidden=hidden, taps=taps, computed=computed)

    def _prepare(self, caches: Sequence[LongRopeCache], roots: Sequence[int], trees: Sequence[TokenTree]) -> None:
        for cache, root, tree in zip(caches, roots, trees, strict=True):
            self._settle(cache, cache.length + 1)
            cache.pending = [root, *tree.tokens.tolist()]

    def _settle(self, cache: LongRopeCache, length: int) -> None:
        """Bring the cache into the regime of a text of `length` tokens."""
        long = length > self.original
        if cache.long == long:
            return
        if cache.length == 0:
            cache.long = long
        else:
            cache.become(self._other_regime(cache))

    def _other_regime(self, cache: LongRopeCache) -> LongRopeCache:
        """The committed text of a sequence in the other regime."""
        if UNKNOWN in cache.tokens:
            raise CapabilityError(
                f"a sequence fed with embeddings cannot cross {self.original} tokens, where the angles of {self.info.name} change; "
                "stay on one side"
            )
        if cache.copy is None:
            cache.copy = self.open()
            cache.copy.long = not cache.long
        for start in range(cache.copy.length, cache.length, CHUNK):
            super().extend([cache.copy], [cache.tokens[start : start + CHUNK]])
        return cache.copy

    @torch.inference_mode()
    def _replace_long_rows(self, scores: Scores, index: int, cache: LongRopeCache, tree: TokenTree, done: int) -> None:
        """Score a tree that crosses the border again in the long regime, and take the rows beyond the border from there."""
        beyond = [i for i, depth in enumerate([0, *tree.depths.tolist()]) if cache.length + depth + 1 > self.original]
        rows = [i for i in beyond if i >= done]
        again = super().score([self._other_regime(cache)], [cache.pending[0]], [tree], taps=tuple(scores.taps))
        targets = [scores.rows[index] + i - done for i in rows]
        scores.logits[targets] = again.logits[rows]
        for layer, tap in scores.taps.items():
            tap[targets] = again.taps[layer][rows]

    def _lengths(self, segments: Sequence[Segment], positions: Sequence[int], chunked: bool) -> Sequence[tuple[int, int]]:
        return [run for segment in segments for run in self._runs(segment, chunked)]

    def _runs(self, segment: Segment, chunked: bool) -> list[tuple[int, int]]:
        if getattr(segment.cache, "long", False):
            return [(segment.rows, self.original + 1)]
        return [(segment.rows, self.original)] if chunked else [(1, position + 1) for position in segment.positions()]


def original_context(spec: ModelSpec) -> int | None:
    """The length up to which the short angles of a longrope model hold; None for other models."""
    for rope in spec.ropes.values():
        if rope.kind == "longrope":
            original: Any = rope.scaling.get("original_max_position_embeddings", rope.max_position)
            return int(original)
    return None
