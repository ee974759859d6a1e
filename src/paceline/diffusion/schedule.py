"""Which block of a text is being worked on, and which of its masked slots may be written in a round."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2

import numpy as np

from paceline.diffusion.base import Schedule, Setting
from paceline.diffusion.canvas import Canvas
from paceline.models import Denoiser, Ints
from paceline.utils import need


def whole_blocks(prompt: int, tokens: int, denoiser: Denoiser, block_length: int | None = None) -> int:
    """Slots after a prompt for so many tokens, rounded up to whole blocks.

    Args:
        block_length: under full attention; a block-causal model has blocks of its own, which count from the first slot
            of the prompt.
    """
    causal = denoiser.attention == "block"
    unit, before = (denoiser.block_length if causal else block_length) or 1, prompt if causal else 0
    return -(-(before + tokens) // unit) * unit - before


class BlockSchedule(Schedule):
    """Blocks of any lengths from left to right; the leftmost with a masked slot is the current one.

    Attributes:
        edges: (blocks + 1,) first slots of the blocks, and the end of the last; set by the schedule.
    """

    edges: Ints

    def index(self, slots: Ints) -> Ints:
        """The number of the block that each slot is in, from 0."""
        return np.clip(np.searchsorted(self.edges, slots, side="right") - 1, 0, self.edges.size - 2)

    def block(self, canvas: Canvas) -> range:
        masked = canvas.masked()
        first = masked[:1] if masked.size else np.asarray([canvas.length - 1])
        number = int(self.index(first)[0])
        return range(int(self.edges[number]), min(int(self.edges[number + 1]), canvas.length))

    def eligible(self, canvas: Canvas) -> Ints:
        block = self.block(canvas)
        return canvas.masked(block.start, block.stop)


class Blocks(BlockSchedule):
    """The leftmost block with a masked slot is the current one.

    Blocks count from the end of the prompt; in a block-causal model from the first slot of the canvas, as the model's
    own do, so that the first may begin with the end of the prompt.

    Args:
        block_length: slots of a block; None takes the model's, or the whole text for a model without blocks.
    Attributes:
        whole: the text is one block because nobody says otherwise.
    Raises:
        ConfigError: a length below 1, blocks that do not divide the text, or are not those of a block-causal model.
    Source: Large Language Diffusion Models (arXiv:2502.09992); Block Diffusion (arXiv:2503.09573).
    """

    def __init__(self, setting: Setting, *, block_length: int | None = None) -> None:
        rule = "be at least 1 (None takes the default)"
        need(block_length is None or block_length >= 1, "block_length", rule, block_length)
        canvas, denoiser = setting.canvas, setting.denoiser
        causal = denoiser.attention == "block"
        origin = 0 if causal else canvas.start
        slots = canvas.length - origin
        block = denoiser.block_length if causal and denoiser.block_length else slots
        self.whole = not causal and block_length is None
        self.length = block if block_length is None else block_length
        if causal:
            rule = f"divide the model's block length {block} (attention is causal between its blocks)"
            need(block % self.length == 0, "block_length", rule, self.length)
        rule = f"divide the {slots} slots of the text; choose a divisor, or another length"
        need(slots % self.length == 0, "block_length", rule, self.length)
        self.edges = np.arange(origin, canvas.length + 1, self.length)


class BlocksAhead(Blocks):
    """As `Blocks`, but masked slots of the next `look_ahead` blocks may be written too.

    A slot there needs a prediction: policies that compute only the current block, and block-causal models, have none to
    give unless they are told to compute more.

    Args:
        block_length: see `Blocks`.
        look_ahead: further blocks; 0 is `Blocks`.
    Source: the cross-block part of From Bits to Rounds (arXiv:2511.21103).
    """

    def __init__(self, setting: Setting, *, block_length: int | None = None, look_ahead: int = 1) -> None:
        super().__init__(setting, block_length=block_length)
        need(look_ahead >= 0, "look_ahead", "be at least 0", look_ahead)
        self.further = look_ahead

    def eligible(self, canvas: Canvas) -> Ints:
        block = self.block(canvas)
        return canvas.masked(block.start, min(block.start + (1 + self.further) * self.length, canvas.length))


class HeldBlocks(Blocks):
    """As `Blocks`; while `held` is set, that block is the current one, with nothing eligible once it is full.

    Attributes:
        held: the block that is being edited, or None; set by the rule that edits.
    Source: LLaDA2.1: Speeding Up Text Diffusion via Token Editing (arXiv:2602.08676).
    """

    stateless = False

    def __init__(self, setting: Setting, *, block_length: int | None = None) -> None:
        super().__init__(setting, block_length=block_length)
        self.held: range | None = None

    def block(self, canvas: Canvas) -> range:
        if self.held is None or self.held.start >= canvas.length:
            return super().block(canvas)
        return range(self.held.start, min(self.held.stop, canvas.length))


PROGRESSION = (4, 8, 16, 32, 64)


class ProgressiveBlocks(BlockSchedule):
    """Blocks of the lengths given, from left to right, the last length repeated.

    The last block is cut at the end of the text.

    TDAR grows the block in training, from 4 to 64; this is the same progression within a text: short blocks where it
    begins, long ones once it is under way.

    Args:
        block_lengths: one at least; None is 4, 8, 16, 32, 64, in a block-causal model cut at the borders of its blocks,
            which those that are given may not cross.
    Raises:
        ConfigError: no length, one below 1, a block across a border of a block-causal model.
    Source: TDAR (arXiv:2602.09555).
    """

    def __init__(self, setting: Setting, *, block_lengths: Sequence[int] | None = None) -> None:
        lengths = list(PROGRESSION if block_lengths is None else block_lengths)
        rule = "be one length or more, each at least 1"
        need(bool(lengths) and min(lengths) >= 1, "block_lengths", rule, lengths)
        causal = setting.denoiser.attention == "block"
        block = setting.denoiser.block_length if causal else None
        edges = [0 if causal else setting.canvas.start]
        while edges[-1] < setting.canvas.length:
            edge = edges[-1] + lengths[min(len(edges) - 1, len(lengths) - 1)]
            border = (edges[-1] // block + 1) * block if block and block_lengths is None else edge
            edges.append(min(edge, border))
        edges[-1] = setting.canvas.length
        self.edges = np.asarray(edges, np.int64)
        if block:
            crosses = self.edges[:-1] // block != (self.edges[1:] - 1) // block
            rule = f"make blocks that do not cross the model's, of {block} slots each"
            need(not crosses.any(), "block_lengths", rule, lengths)


def ascending_rounds(slots: int) -> int:
    """Rounds of the ascending step schedule for a text: floor(log2), at least one."""
    return max(1, int(log2(max(1, slots))))


class AscendingBlocks(BlockSchedule):
    """Blocks for it: from the right, one of each large power of two, written in a round each; what is left on the left
    takes the small powers.

    Args:
        ascending_blocks: how many blocks, the left one included; 1 is the whole text, None is 4 or fewer, as many as
            there are rounds.
    Raises:
        ConfigError: more blocks than rounds, a block-causal model.
    """

    def __init__(self, setting: Setting, *, ascending_blocks: int | None = None) -> None:
        masked = setting.canvas.masked()
        rounds = ascending_rounds(masked.size)
        ascending_blocks = min(4, rounds) if ascending_blocks is None else ascending_blocks
        rule = f"lie in 1..{rounds}, the rounds for {masked.size} slots"
        need(1 <= ascending_blocks <= rounds, "ascending_blocks", rule, ascending_blocks)
        rule = "see the whole text for blocks that grow by powers of two"
        need(setting.denoiser.attention == "full", "the model's attention", rule, setting.denoiser.attention)
        first = rounds - ascending_blocks + 1
        counts = [2**s - 1 for s in range(first, rounds)]
        starts = [setting.canvas.start, *(int(masked[c]) for c in counts)]
        self.edges = np.asarray([*starts, setting.canvas.length], np.int64)


class SlidingSchedule(Schedule):
    """The first masked slots are open; they slide to the right as slots are written. The text is one block.

    Args:
        active_slots: how many are open; None is all of them.
    Source: Window-Diffusion (arXiv:2601.20332).
    """

    def __init__(self, setting: Setting, *, active_slots: int | None = 16) -> None:
        need(active_slots is None or active_slots >= 1, "active_slots", "be at least 1, or None for all", active_slots)
        self.active = active_slots

    def block(self, canvas: Canvas) -> range:
        return range(canvas.start, canvas.length)

    def eligible(self, canvas: Canvas) -> Ints:
        return canvas.masked()[: self.active]
