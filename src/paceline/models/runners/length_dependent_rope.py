"""The native runners for rotary embeddings whose angles depend on the length of the text: dynamic and longrope.

Both want to know how long the text is that a sequence begins with (`open`): its prompt counts as one pass, in whatever
chunks it comes.

*Dynamic*: the base grows with every token beyond the declared context, and what is cached keeps its angles. Tokens of
the prompt have those of its full length, later ones count one by one, as in transformers. A prompt within the declared
context does not outgrow it (`ModelInfo.rope_border`): one pass over the whole text would find other logits.

*Longrope*: the angles change for the whole text where it outgrows the original context, and logits after n tokens are
those of one forward pass over the n tokens. A cache is filled in one *regime*, short or long. Where a sequence enters
the other one, its tokens are run through the model again, once; a tree that reaches over the border is scored in both
regimes, and each row is taken from its own. The long copy made for that is kept, fed along, and becomes the sequence's
cache when the sequence itself has crossed. Source: LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch

from paceline.errors import CapabilityError
from paceline.models.attention.segments import Segment
from paceline.models.base import check_extend
from paceline.models.runners.native import NativeRunner
from paceline.models.spec import ModelSpec
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache
from paceline.tree import Scores, TokenTree

REPLAY_CHUNK = 512
"""Tokens of one pass when a sequence is run again."""

UNKNOWN = -1


class DynamicRopeRunner(NativeRunner):
    """See `NativeRunner`; for dynamic rotary embeddings.

    Keys depend on more than the text before them, so that sequences cannot share what others left.
    """

    capabilities = replace(NativeRunner.capabilities, blocks=False)

    def __init__(self, spec: ModelSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        border = min(rope.max_position for rope in spec.ropes.values() if rope.kind == "dynamic")
        self.info = replace(self.info, rope_border=border)


class LongRopeCache(NativeCache):
    """A sequence that knows its tokens and its regime.

    Attributes:
        tokens: the committed tokens; UNKNOWN where embeddings were fed.
        pending: root and node tokens of the last step.
        long: regime of what is cached.
        copy: the same text in the other regime, as far as it was fed, or None.
    """

    __slots__ = ("copy", "long", "pending", "tokens")

    def __init__(self, arena: Arena, prompt_length: int = 0) -> None:
        super().__init__(arena, prompt_length)
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
        self.arena.begin()
        self.arena.pool.drop(self.blocks)
        self.blocks, self.length, self.base, self.scratch = other.blocks, other.length, other.base, 0
        self.long, self.copy, other.blocks = other.long, None, []
        self.arena.pool.end()
        self.locate()
        self._views.clear()
        other.release()


class LongRopeRunner(NativeRunner):
    """See `NativeRunner`. `run_layers` works in the regime of the root.

    Keys depend on more than the text before them, so that sequences cannot share what others left. Sequences fed with
    embeddings cannot change their regime.
    """

    capabilities = replace(NativeRunner.capabilities, blocks=False)

    def __init__(self, spec: ModelSpec, *args: Any, **options: Any) -> None:
        super().__init__(spec, *args, **options)
        self.original = original_context(spec)

    def open(self, prompt_length: int = 0) -> LongRopeCache:
        """See `Runner.open`."""
        return LongRopeCache(self.arena, prompt_length)

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
        own = cast(Sequence[LongRopeCache], caches)
        for cache, count in zip(own, rows, strict=True):
            self.enter(cache, cache.length + count)
        scores = super()._extend(caches, rows, inputs, taps, all_logits)
        tokens = iter([UNKNOWN] * len(inputs) if isinstance(inputs, torch.Tensor) else inputs)
        for cache, count in zip(own, rows, strict=True):
            cache.tokens.extend(islice(tokens, count))
        return scores

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
                scores = self.with_long_rows(scores, i, cache, tree, 0 if computed is None else computed[i])
        return scores

    def _before_step(
        self, caches: Sequence[NativeCache], roots: Sequence[int] | None, trees: Sequence[TokenTree]
    ) -> None:
        own = cast(Sequence[LongRopeCache], caches)
        for cache, root, tree in zip(own, roots or [UNKNOWN] * len(caches), trees, strict=True):
            cache.pending = [root, *tree.tokens.tolist()]
            self.enter(cache, cache.length + 1)

    def enter(self, cache: LongRopeCache, length: int) -> None:
        """Bring the cache into the regime of a text of `length` tokens."""
        long = max(length, cache.prompt_length) > self.original
        if cache.long == long:
            return
        if cache.length == 0:
            cache.long = long
        else:
            cache.become(self._other_regime(cache))

    def _other_regime(self, cache: LongRopeCache) -> LongRopeCache:
        """The committed text of a sequence in the other regime.

        Raises:
            CapabilityError: embeddings were fed.
        """
        if UNKNOWN in cache.tokens:
            raise CapabilityError(
                f"a sequence fed with embeddings cannot cross {self.original} tokens, where the angles of "
                f"{self.info.name} change; feed tokens"
            )
        if cache.copy is None:
            cache.copy = self.open()
            cache.copy.long = not cache.long
        other, tokens = cache.copy, cache.tokens
        for start in range(other.length, len(tokens), REPLAY_CHUNK):
            chunk = tokens[start : start + REPLAY_CHUNK]
            NativeRunner._extend(self, [other], [len(chunk)], chunk, (), False)
            other.tokens.extend(chunk)
        return other

    @torch.inference_mode()
    def with_long_rows(self, scores: Scores, index: int, cache: LongRopeCache, tree: TokenTree, done: int) -> Scores:
        """Score a tree that crosses the border again in the long regime, and take the rows beyond the border from
        there.

        Args:
            index: of the sequence. done: inputs that have no rows in `scores`.
        """
        again = super()._score([self._other_regime(cache)], [cache.pending[0]], [tree], tuple(scores.taps), None)
        beyond = [i for i, depth in enumerate([0, *tree.depths.tolist()]) if cache.length + depth + 1 > self.original]
        rows = [i for i in beyond if i >= done]
        at = torch.tensor([scores.rows[index] + i - done for i in rows], device=scores.logits.device)
        taps = {layer: tap.index_copy(0, at, again.taps[layer][rows]) for layer, tap in scores.taps.items()}
        return Scores(scores.logits.index_copy(0, at, again.logits[rows]), scores.rows, taps)

    def _lengths(self, segments: Sequence[Segment], chunked: bool) -> Sequence[tuple[int, int]]:
        caches = [cast(LongRopeCache, segment.cache) for segment in segments]
        return [
            (segment.rows, self.original + int(cache.long)) for segment, cache in zip(segments, caches, strict=True)
        ]


def original_context(spec: ModelSpec) -> int:
    """The length up to which the short angles of a longrope model hold."""
    original: Any = [
        rope.scaling.get("original_max_position_embeddings", rope.max_position)
        for rope in spec.ropes.values()
        if rope.kind == "longrope"
    ]
    return int(original[0])
