"""What of a canvas is recomputed in a pass, and what is read from stored keys and values.

The exact policies give the predictions of passes without a cache, but for rounding. The others compute and store
everything now and then, and little in the passes between. What is computed between two refreshes is not stored: the
later passes until the next refresh compute it again, so storing it would change nothing, and drafts of one canvas can
be computed side by side.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np

from paceline.diffusion.base import Cache, CanvasPass, Setting
from paceline.diffusion.canvas import Canvas, Status
from paceline.models import Ints
from paceline.utils import need


class NoCache(Cache):
    """Every slot is computed in every pass; in a block-causal model, those up to the end of the current block.

    Args:
        blocks_ahead: further blocks that a block-causal model computes, for drafts that reach into them; without effect
            in a model with full attention, where it is rejected unless the verification takes it too.
    """

    exact = True

    def __init__(self, setting: Setting, *, blocks_ahead: int = 0) -> None:
        need(blocks_ahead >= 0, "blocks_ahead", "be at least 0", blocks_ahead)
        self.own = setting.denoiser.block_length if setting.denoiser.attention == "block" else None
        self.more = blocks_ahead

    def plans(self, canvas: Canvas, block: range) -> list[CanvasPass]:
        return [self.ahead(canvas, block)]

    def ahead(self, canvas: Canvas, block: range) -> CanvasPass:
        if self.own is None:
            return CanvasPass(np.arange(canvas.length))
        end = -(-block.stop // self.own) * self.own + self.more * self.own
        return CanvasPass(np.arange(min(end, canvas.length)))


class BlockCache(Cache):
    """Blocks of the model before the current one are stored when they are finished, the prompt's at the start.

    A block that an edit rule rewrites after it was stored is stored again, with all that follow. Nothing masked is ever
    read. Where logits are shifted, each pass computes the last slot before its own once more, and equals a pass without
    cache up to rounding; otherwise to the bit, as far as the model's rows keep their bits in passes of other sizes.

    Args:
        merge_writes: store a finished block in the first pass over the next one; False takes a pass of its own for it.
        blocks_ahead: further blocks computed in each pass, for drafts that reach into them.
    Raises:
        ConfigError: a model that is not block-causal.
    Source: Block Diffusion (arXiv:2503.09573); SDAR and LLaDA2.x decode so.
    """

    exact = True

    def __init__(self, setting: Setting, *, merge_writes: bool = True, blocks_ahead: int = 0) -> None:
        denoiser, canvas = setting.denoiser, setting.canvas
        rule = (
            "be none, prefix, dual or window (this model's attention is full: what is written changes the states "
            "of all slots)"
        )
        need(denoiser.attention == "block" and denoiser.block_length is not None, "cache", rule, "block")
        need(blocks_ahead >= 0, "blocks_ahead", "be at least 0", blocks_ahead)
        setting.store = denoiser.new_cache(canvas.length)
        self.own, self.left = denoiser.block_length or 1, int(denoiser.needs_left)
        self.merge, self.more = merge_writes, blocks_ahead
        self.tokens = canvas.tokens[:0]
        self.before = 0

    def plans(self, canvas: Canvas, block: range) -> list[CanvasPass]:
        low, high = self._bounds(canvas, block)
        self.before = min(self._intact(canvas), low)
        stale = low > self.before
        self.tokens = canvas.tokens[:low].copy()
        if not stale or self.merge:
            return [self._plan(self.before, high, write=stale)]
        first = self._plan(self.before, low, write=True)
        self.before = low
        return [first, self._plan(low, high)]

    def ahead(self, canvas: Canvas, block: range) -> CanvasPass | None:
        if not np.array_equal(canvas.tokens[: self.before], self.tokens[: self.before]):
            return None
        return self._plan(self.before, self._bounds(canvas, block)[1])

    def _bounds(self, canvas: Canvas, block: range) -> tuple[int, int]:
        """Of the model's blocks that hold `block`, and those ahead of it."""
        high = -(-block.stop // self.own) * self.own + self.more * self.own
        return block.start // self.own * self.own, min(high, canvas.length)

    def _intact(self, canvas: Canvas) -> int:
        """Slots whose stored states are still those of the canvas: whole blocks, as they were stored."""
        size = min(self.tokens.size, canvas.length)
        changed = np.flatnonzero(self.tokens[:size] != canvas.tokens[:size])
        return int(changed[0] if changed.size else size) // self.own * self.own

    def _plan(self, first: int, high: int, *, write: bool = False) -> CanvasPass:
        first = max(first - self.left, 0)
        read: Ints = np.arange(first)
        return CanvasPass(np.arange(first, high), read, write)


class RefreshedCache(Cache):
    """Refreshes at the start of each block, where the text has become shorter, and every `refresh_period` rounds.

    The logits of a refresh serve the first decision after it.

    Args:
        refresh_period: rounds from one refresh to the next; None is the whole block, 1 is no cache at all.
    Raises:
        ConfigError: a block-causal model, which has an exact cache.
    """

    def __init__(self, setting: Setting, refresh_period: int | None) -> None:
        full = setting.denoiser.attention == "full"
        rule = "be none or block for a block-causal model (its exact cache; the others approximate full attention)"
        need(full, "cache", rule, type(self).__name__.removesuffix("Cache").lower())
        need(refresh_period is None or refresh_period >= 1, "refresh_period", "be at least 1", refresh_period)
        setting.store = setting.denoiser.new_cache(setting.canvas.length)
        self.period = refresh_period
        self.needs_left = setting.denoiser.needs_left
        self.block, self.length, self.since, self.storing = range(0), 0, 0, False

    def plans(self, canvas: Canvas, block: range) -> list[CanvasPass]:
        self.storing = self._due(canvas, block)
        if not self.storing:
            return [self.between(canvas, block)]
        self.block, self.length, self.since = block, canvas.length, canvas.round
        return [self.refresh(canvas)]

    def ahead(self, canvas: Canvas, block: range) -> CanvasPass | None:
        if self.storing or self._due(canvas, block):
            return None
        return self.between(canvas, block)

    def refresh(self, canvas: Canvas) -> CanvasPass:
        """The pass that stores."""
        return CanvasPass(np.arange(canvas.length), write=True)

    @abstractmethod
    def between(self, canvas: Canvas, block: range) -> CanvasPass:
        """A pass that reads."""

    def with_left(self, slots: Ints) -> Ints:
        """`slots` and, where the model needs them, their left neighbours; ascending."""
        return np.union1d(slots, slots[slots > 0] - 1) if self.needs_left else slots

    def _due(self, canvas: Canvas, block: range) -> bool:
        if block != self.block or canvas.length != self.length:
            return True
        return self.period is not None and canvas.round - self.since >= self.period


class BlockPrefixCache(RefreshedCache):
    """A block's first pass computes everything.

    The later ones compute the block and what follows it, and read the rest.

    Approximate: what comes before the block does not see what is written in it until the next block.

    Args:
        refresh_period: rounds until everything is computed again within a block; None is never.
    Source: Fast-dLLM (arXiv:2505.22618).
    """

    def __init__(self, setting: Setting, *, refresh_period: int | None = None) -> None:
        super().__init__(setting, refresh_period)

    def between(self, canvas: Canvas, block: range) -> CanvasPass:
        first = max(block.start - self.needs_left, 0)
        return CanvasPass(np.arange(first, canvas.length), np.arange(first))


class DualCache(RefreshedCache):
    """A block's first pass computes everything; the later ones compute the block only, and read both sides of it.

    Approximate: neither side sees what is written in the block until the next refresh.

    Args:
        refresh_period: rounds from one pass over everything to the next (ReCAP's groups: one full step, the others
            local); None refreshes at the start of a block only.
        recompute: what the other passes compute of the block: all of it ("block"), or what was masked at the last
            refresh ("masked": slots still masked, and those written since, whose states still settle).
    Source: Fast-dLLM (arXiv:2505.22618); ReCAP (arXiv:2505.19089) for refreshes by rounds and passes over masked slots
        only.
    """

    def __init__(
        self, setting: Setting, *, refresh_period: int | None = None, recompute: Literal["block", "masked"] = "block"
    ) -> None:
        super().__init__(setting, refresh_period)
        need(recompute in ("block", "masked"), "recompute", "be block or masked", recompute)
        self.masked_only = recompute == "masked"

    def between(self, canvas: Canvas, block: range) -> CanvasPass:
        slots = self.with_left(self._open(canvas, block))
        return CanvasPass(slots, np.setdiff1d(np.arange(canvas.length), slots, assume_unique=True))

    def _open(self, canvas: Canvas, block: range) -> Ints:
        slots: Ints = np.arange(block.start, block.stop)
        if self.masked_only:
            slots = slots[(canvas.status[slots] == Status.MASKED) | (canvas.born[slots] >= self.since)]
        return slots


class WindowCache(RefreshedCache):
    """A refresh stores what is written and the first masked slots; the passes between compute the active ones of these.

    With them they compute the slots written since the refresh, whose states still settle, and they read the rest of the
    window. Positions are those of the canvas, whatever is left out. An active slot beyond the window, where many slots
    are written between two refreshes, is computed all the same.

    The defaults are the authors' for LLaDA; for Dream they take window_slots 128 and score entropy.

    Args:
        active_slots: computed in every pass; None is all. The schedule takes the same.
        window_slots: masked slots that exist for the model, the active ones included; None is all.
        refresh_period: rounds from one refresh to the next; None refreshes at the start only.
        refresh: what a refresh computes: the "window" and what is written, or the whole "canvas", of which the window
            is read.
    Source: Window-Diffusion: Accelerating Diffusion Language Model Inference with Windowed Token Pruning and Caching
        (arXiv:2601.20332) and its authors' code. Where that code differs between models we take one way: the window is
        counted before the refresh's own commits (Dream's), and a refresh commits among the active slots like every
        other pass (LLaDA's may commit anywhere).
    """

    def __init__(
        self,
        setting: Setting,
        *,
        active_slots: int | None = 16,
        window_slots: int | None = 64,
        refresh_period: int | None = 32,
        refresh: Literal["window", "canvas"] = "window",
    ) -> None:
        super().__init__(setting, refresh_period)
        active = setting.canvas.length if active_slots is None else active_slots
        rule = f"be at least active_slots ({active_slots}), or None for all"
        need(window_slots is None or window_slots >= active, "window_slots", rule, window_slots)
        need(refresh in ("window", "canvas"), "refresh", "be window or canvas", refresh)
        self.active, self.window, self.whole = active_slots, window_slots, refresh == "canvas"
        self.kept = np.empty(0, np.int64)

    def refresh(self, canvas: Canvas) -> CanvasPass:
        dropped = canvas.masked()[self.window :] if self.window is not None else np.empty(0, np.int64)
        every = np.arange(canvas.length)
        self.kept = np.setdiff1d(every, dropped, assume_unique=True)
        return CanvasPass(every if self.whole else self.kept, write=True)

    def between(self, canvas: Canvas, block: range) -> CanvasPass:
        settling = np.flatnonzero((canvas.status == Status.COMMITTED) & (canvas.born >= self.since))
        slots = np.union1d(self.with_left(canvas.masked()[: self.active]), settling)
        return CanvasPass(slots, np.setdiff1d(self.kept, slots, assume_unique=True))
