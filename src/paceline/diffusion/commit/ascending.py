"""The ascending step schedule: twice as many slots in each round, so that a text of G slots takes log2 G rounds.

In: scores. Out: 1, 2, 4, ... of the best slots; all that is left in the last round. Not here: scores.
Source: Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer Decoding
Step (arXiv:2509.23924).
"""

from __future__ import annotations

from math import log2

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.progress import whole_text
from paceline.diffusion.schedule.edged_blocks import EdgedBlocks
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


def rounds_of(slots: int) -> int:
    """Rounds for a text: floor(log2), at least one."""
    return max(1, int(log2(max(1, slots))))


class Ascending:
    """Round s of S = floor(log2 G) writes 2^s slots, the last round the rest: of the whole text, or of the blocks made
    for it.

    Raises:
        ConfigError: other blocks, which the last round would write at once.
    """

    stateless = True

    def __init__(self, setting: Setting) -> None:
        if not isinstance(setting.schedule, AscendingBlocks):
            whole_text(setting, "the ascending schedule")
        self.rounds = rounds_of(setting.canvas.masked().size)

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        if step.canvas.round >= self.rounds - 1:
            return step.eligible
        return step.ranked[: 2**step.canvas.round]


class AscendingBlocks(EdgedBlocks):
    """Blocks for it: from the right, one of each large power of two, written in a round each; what is left on the left
    takes the small powers.

    Args:
        ascending_blocks: how many blocks, the left one included; 1 is the whole text.
    Raises:
        ConfigError: more blocks than rounds, a block-causal model.
    """

    stateless = True

    def __init__(self, setting: Setting, *, ascending_blocks: int = 4) -> None:
        masked = setting.canvas.masked()
        rounds = rounds_of(masked.size)
        rule = f"lie in 1..{rounds}, the rounds for {masked.size} slots"
        need(1 <= ascending_blocks <= rounds, "ascending_blocks", rule, ascending_blocks)
        rule = "see the whole text for blocks that grow by powers of two"
        need(setting.denoiser.attention == "full", "the model's attention", rule, setting.denoiser.attention)
        first = rounds - ascending_blocks + 1
        counts = [0, *(2**s - 1 for s in range(first, rounds))] if ascending_blocks > 1 else [0]
        starts = [setting.canvas.start, *(int(masked[c]) for c in counts[1:])]
        self.edges = np.asarray([*starts, setting.canvas.length], np.int64)
