"""The native runner for longrope: rotary angles that change for the whole text where it outgrows the original context.

Logits after n tokens are those of one forward pass over the n tokens. A cache is filled in one *regime*, short or long.
Where a sequence enters the other one, its tokens are run through the model again, once; a tree that reaches over the
border is scored in both regimes, and each row is taken from its own. The long copy made for that is kept, fed along,
and becomes the sequence's cache when the sequence itself has crossed. How long a text begins with is for `open` to say:
its prompt counts as one pass, in whatever chunks it comes. Source: LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch

from paceline.errors import CapabilityError
from paceline.models.abilities import check_inputs
from paceline.models.attention.segments import Segment
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.checks import check_extend, check_score
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.hidden_thoughts import ThoughtRunner
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.recurrent import RecurrentRunner
from paceline.models.runners.skipping import SkippingRunner
from paceline.models.spec import ModelSpec
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache
from paceline.models.state.parts import StateOperations
from paceline.tree import Scores, TokenTree

REPLAY_CHUNK = 512
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

    def __init__(self, arena: Arena, prompt_length: int = 0) -> None:
        super().__init__(arena, prompt_length)
        self.tokens: list[int] = []
        self.pending: list[int] = []
        self.long = False
        self.copy: LongRopeCache | None = None

    def commit(self, path: Sequence[int]) -> None:
        """See `NativeCache.commit`."""
        super().commit(path)
        self.tokens += [self.pending[0], *(self.pending[1 + node] for node in path)]

    def truncate(self, length: int) -> None:
        """See `NativeCache.truncate`."""
        super().truncate(length)
        del self.tokens[length:]
        if self.copy is not None and self.copy.length > length:
            self.copy.truncate(length)

    def fork(self) -> LongRopeCache:
        """See `NativeCache.fork`; the copy in the other regime stays behind."""
        other = LongRopeCache(self.arena, self.prompt_length)
        self.share_with(other)
        other.tokens, other.long = self.tokens.copy(), self.long
        return other

    def release(self) -> None:
        """See `NativeCache.release`."""
        super().release()
        if self.copy is not None:
            self.copy.release()

    def become(self, other: LongRopeCache) -> None:
        """Take over what `other` has cached; `other` is used up."""
        with self.arena.change():
            self.arena.pool.drop(self.blocks)
            self.blocks, self.length, self.base, self.scratch = other.blocks, other.length, other.base, 0
            self.long, self.copy, other.blocks = other.long, None, []
        self.locate()
        self._views.clear()
        other.release()


class LongRopeRunner(StateOperations[LongRopeCache]):
    """A native runner whose caches change their regime. `run_layers` works in the regime of the root.

    Keys depend on more than the text before them, so that sequences cannot share what others left. Sequences fed with
    embeddings cannot change their regime.

    Args:
        options: of `NativeRunner`.

    Attributes:
        native: runs each cache in the regime that it has.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, **options: Any) -> None:
        self.original = original_context(spec)
        native = self.native = NativeRunner(spec, weights, lengths=partial(lengths_by_regime, self.original), **options)
        self.spec, self.info, self.capabilities, self.arena = spec, native.info, native.capabilities, native.arena
        self.passes, self.embed, self.head = native.passes, native.embed, native.head

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> LongRopeCache:
        """See `Runner.open`."""
        check_inputs(self, inputs)
        return LongRopeCache(self.arena, prompt_length)

    @torch.inference_mode()
    def extend(
        self,
        caches: Sequence[LongRopeCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`.

        Raises:
            CapabilityError: a sequence would have to be run again, but its tokens are not known.
        """
        self._enter_all(caches, [len(new) for new in tokens])
        scores = self.native.extend(caches, tokens, taps=taps, all_logits=all_logits)
        for cache, new in zip(caches, tokens, strict=True):
            cache.tokens.extend(new)
        return scores

    @torch.inference_mode()
    def extend_embeddings(
        self,
        caches: Sequence[LongRopeCache],
        embeddings: Sequence[torch.Tensor],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `NativeRunner.extend_embeddings`; raises CapabilityError as `extend` does."""
        self._enter_all(caches, [len(new) for new in embeddings])
        scores = self.native.extend_embeddings(caches, embeddings, taps=taps, all_logits=all_logits)
        for cache, new in zip(caches, embeddings, strict=True):
            cache.tokens.extend([UNKNOWN] * len(new))
        return scores

    def _enter_all(self, caches: Sequence[LongRopeCache], counts: Sequence[int]) -> None:
        check_extend(self.info, caches, counts)
        for cache, count in zip(caches, counts, strict=True):
            self.enter(cache, cache.length + count)

    @torch.inference_mode()
    def score(
        self,
        caches: Sequence[LongRopeCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`; raises CapabilityError as `extend` does."""
        check_score(self.info, caches, trees)
        self._before_step(caches, roots, trees)
        scores = self.native.score(caches, roots, trees, taps=taps, computed=computed)
        for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
            if not cache.long and cache.length + 1 + tree.max_depth > self.original:
                scores = self.with_long_rows(scores, i, cache, tree, 0 if computed is None else computed[i])
        return scores

    @torch.inference_mode()
    def run_layers(
        self,
        caches: Sequence[LongRopeCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        plan: LayerPlan = ALL_LAYERS,
        hidden: torch.Tensor | None = None,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> PassResult:
        """See `RunsLayers.run_layers`; raises CapabilityError as `extend` does."""
        if plan.first == 0:
            self._before_step(caches, roots if hidden is None else [UNKNOWN] * len(caches), trees)
        return self.native.run_layers(caches, roots, trees, plan=plan, hidden=hidden, taps=taps, computed=computed)

    def _before_step(self, caches: Sequence[LongRopeCache], roots: Sequence[int], trees: Sequence[TokenTree]) -> None:
        for cache, root, tree in zip(caches, roots, trees, strict=True):
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
            self.native.extend([other], [chunk])
            other.tokens.extend(chunk)
        return other

    @torch.inference_mode()
    def with_long_rows(self, scores: Scores, index: int, cache: LongRopeCache, tree: TokenTree, done: int) -> Scores:
        """Score a tree that crosses the border again in the long regime, and take the rows beyond the border from
        there.

        Args:
            index: of the sequence. done: inputs that have no rows in `scores`.
        """
        again = self.native.score([self._other_regime(cache)], [cache.pending[0]], [tree], taps=tuple(scores.taps))
        beyond = [i for i, depth in enumerate([0, *tree.depths.tolist()]) if cache.length + depth + 1 > self.original]
        rows = [i for i in beyond if i >= done]
        at = torch.tensor([scores.rows[index] + i - done for i in rows], device=scores.logits.device)
        taps = {layer: tap.index_copy(0, at, again.taps[layer][rows]) for layer, tap in scores.taps.items()}
        return Scores(scores.logits.index_copy(0, at, again.logits[rows]), scores.rows, taps)


def lengths_by_regime(original: int, segments: Sequence[Segment], chunked: bool) -> Sequence[tuple[int, int]]:
    """See `models.runners.native.Lengths`: all rows of a segment count as of its cache's regime."""
    caches = [cast(LongRopeCache, segment.cache) for segment in segments]
    return [(segment.rows, original + int(cache.long)) for segment, cache in zip(segments, caches, strict=True)]


def original_context(spec: ModelSpec) -> int:
    """The length up to which the short angles of a longrope model hold."""
    original: Any = [
        rope.scaling.get("original_max_position_embeddings", rope.max_position)
        for rope in spec.ropes.values()
        if rope.kind == "longrope"
    ]
    return int(original[0])


def native_of(runner: object) -> NativeRunner | None:
    """The native runner of a model's passes; None where others run them."""
    inner = (
        runner.native
        if isinstance(runner, LongRopeRunner | RecurrentRunner | SkippingRunner | ThoughtRunner)
        else runner
    )
    return inner if isinstance(inner, NativeRunner) else None
