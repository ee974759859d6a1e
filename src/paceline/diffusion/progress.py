"""How far decoding has come, and how far it would go at the fixed pace: what ramps and time grids are counted in.

In: a setting before the first round, a step. Out: numbers of rounds and slots. Not here: any rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Canvas, Status
from paceline.diffusion.setting import Setting
from paceline.utils import need

MOST_ROUNDS = 16
"""Most rounds for each slot, of methods that may take more rounds than slots; each is a pass, and more of them gain
nothing.
"""


def total_rounds(setting: Setting, steps: int | None) -> int:
    """Rounds of the static baseline over the whole text: `steps` for each block, or as many as the block has masked
    slots.

    Args:
        steps: `denoising_steps`; None is a round for each slot.
    Raises:
        ConfigError: fewer than one round.
    """
    assert setting.schedule is not None
    need(steps is None or steps >= 1, "denoising_steps", "be at least 1", steps)
    canvas, rounds = setting.canvas.copy(), 0
    while canvas.masked().size:
        block = setting.schedule.block(canvas)
        slots = canvas.masked(block.start, block.stop)
        rounds += min(steps or slots.size, slots.size)
        canvas.status[slots] = Status.COMMITTED
    return max(1, rounds)


@dataclass(frozen=True, slots=True)
class BlockProgress:
    """Of the current block.

    Attributes:
        done: rounds that have written into it.
        slots: that decoding fills in it, written ones included.
        masked: of them.
    """

    done: int
    slots: int
    masked: int

    @classmethod
    def of(cls, step: Step) -> BlockProgress:
        """Read off the canvas."""
        part = slice(step.block.start, step.block.stop)
        status, born = step.canvas.status[part], step.canvas.born[part]
        written, masked = status == Status.COMMITTED, int((status == Status.MASKED).sum())
        return cls(np.unique(born[written]).size, int(written.sum()) + masked, masked)


def whole_text(setting: Setting, method: str) -> int:
    """The number of slots to fill, for a method that works on the whole text at once.

    Raises:
        ConfigError: a schedule of several blocks.
    """
    assert setting.schedule is not None
    masked = setting.canvas.masked()
    block = setting.schedule.block(setting.canvas)
    one = not masked.size or (block.start <= masked[0] and masked[-1] < block.stop)
    rule = f"be that of the whole text for {method}, which may write anywhere (leave it out)"
    need(one, "block_length", rule, len(block))
    return int(masked.size)


def rounds_of_text(steps: int | None, slots: int) -> int:
    """Rounds of a method that decodes the whole text at once, whose rounds may be more than its slots.

    Args:
        steps: `denoising_steps`; None is a round for each slot.
        slots: to fill.
    Raises:
        ConfigError: fewer than one round, or more than `MOST_ROUNDS` for each slot.
    """
    most = MOST_ROUNDS * max(1, slots)
    rule = f"lie in 1..{most}, at most {MOST_ROUNDS} rounds for each of the {slots} slots to fill"
    need(steps is None or 1 <= steps <= most, "denoising_steps", rule, steps)
    return steps or max(1, slots)


def end_tokens(canvas: Canvas, setting: Setting) -> tuple[int, ...]:
    """Tokens that end a text: the canvas', or the model's where it names none."""
    return canvas.eos_token_ids or tuple(setting.denoiser.eos_token_ids)
