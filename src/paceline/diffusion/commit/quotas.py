"""A number of slots is written in each round, the best of them or slots drawn by chance: the static baseline, the
ascending step schedule, and the time grid of noise levels that fall evenly from 1 to almost 0.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import BlockProgress, Commit, Setting, Step
from paceline.diffusion.canvas import Floats
from paceline.diffusion.predictions import uniform
from paceline.diffusion.schedule import AscendingBlocks, Blocks, ascending_rounds
from paceline.models import Ints
from paceline.utils import need


def checked_steps(setting: Setting, denoising_steps: int | None) -> int | None:
    """Rounds for a block, if it has so many slots; where the text is one block by default, at most its slots.

    Raises:
        ConfigError: a block of a length that was chosen, or is the model's, has fewer.
    """
    size = len(setting.first_block())
    if denoising_steps is not None and isinstance(setting.schedule, Blocks) and setting.schedule.whole:
        denoising_steps = min(denoising_steps, size)
    rule = f"lie in 1..{size}, the slots of a block (each round writes one at least)"
    need(denoising_steps is None or 1 <= denoising_steps <= size, "denoising_steps", rule, denoising_steps)
    return denoising_steps


class QuotaCommit(Commit):
    """The masked slots of a block are shared out evenly over its rounds, the first rounds taking what is left over.

    Args:
        denoising_steps: rounds for a full block; None is a round for each slot, one slot at a time. A block that begins
            with fewer masked slots takes the same number of rounds, or as many as it has slots, as does a text that is
            one block for want of a `block_length`.
    Raises:
        ConfigError: more rounds than a block has slots.
    Source: Large Language Diffusion Models (arXiv:2502.09992).
    """

    def __init__(self, setting: Setting, *, denoising_steps: int | None = None) -> None:
        self.steps = checked_steps(setting, denoising_steps)

    def number(self, step: Step) -> int:
        """How many slots this round writes, by what the block's earlier rounds have written."""
        if self.steps is None:
            return 1
        progress = step.progress
        base, more = divmod(progress.slots, self.steps)
        return max(1, base + (progress.done < more))

    def choose(self, step: Step) -> Ints:
        return step.ranked[: self.number(step)]


class AscendingCommit(Commit):
    """Round s of S = floor(log2 G) writes 2^s slots, the last round the rest.

    Of the whole text, or of the blocks made for it.

    Raises:
        ConfigError: other blocks, which the last round would write at once.
    Source: Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer
        Decoding Step (arXiv:2509.23924).
    """

    def __init__(self, setting: Setting) -> None:
        if not isinstance(setting.schedule, AscendingBlocks):
            setting.whole_text("the ascending schedule")
        self.rounds = ascending_rounds(setting.canvas.masked().size)

    def choose(self, step: Step) -> Ints:
        if step.canvas.round >= self.rounds - 1:
            return step.eligible
        return step.ranked[: 2**step.canvas.round]


SMALLEST = 1e-3
"""Noise level at the end of the grid."""


def grid(steps: int) -> Floats:
    """(steps + 1,) noise levels, falling."""
    return np.linspace(1.0, SMALLEST, steps + 1)


class TimeGridCommit(Commit):
    """In round i of S, with noise t before it and s after it, int(masked * (1 - s / t)) of the masked slots are
    written, all of them in the last round.

    Each block runs through the grid once. A round writes one slot at least: where the released sampler would write
    none (its very first, with a round for each slot), nothing would change but the cost.

    Args:
        denoising_steps: rounds for a block; None is a round for each of its slots.
    Raises:
        ConfigError: more rounds than a block has slots.
    Source: Dream 7B: Diffusion Large Language Models (arXiv:2508.15487).
    """

    def __init__(self, setting: Setting, *, denoising_steps: int | None = None) -> None:
        self.steps = checked_steps(setting, denoising_steps)

    def number(self, progress: BlockProgress) -> int:
        """Slots of this round."""
        steps = self.steps or progress.slots
        if progress.done >= steps - 1:
            return progress.masked
        levels = grid(steps)
        return max(1, int(progress.masked * (1 - levels[progress.done + 1] / levels[progress.done])))

    def choose(self, step: Step) -> Ints:
        return step.ranked[: self.number(step.progress)]


class IndependentCommit(Commit):
    """Every masked slot is written independently with probability 1 - s / t (Dream's "origin"), all in the last round.

    A round may write nothing. With sampled tokens and an exact model this is the reverse process itself, whose error
    vanishes with the number of rounds.

    Args:
        denoising_steps: rounds for the text, which is decoded as one block, at most 16 for each slot; None is a round
            for each.
    Raises:
        ConfigError: fewer rounds than one or more than 16 for each slot, a schedule of several blocks.
    Source: Dream 7B (arXiv:2508.15487).
    """

    waits = True

    def __init__(self, setting: Setting, *, denoising_steps: int | None = None) -> None:
        self.steps, self.seed = setting.rounds_of_text(denoising_steps, "independent slots"), setting.seed

    def choose(self, step: Step) -> Ints:
        done = step.canvas.round
        if done >= self.steps - 1:
            return step.eligible
        levels = grid(self.steps)
        drawn = uniform(self.seed, done, step.canvas.length, purpose=2)[step.eligible]
        written: Ints = step.eligible[drawn < 1 - levels[done + 1] / levels[done]]
        return written


class ConfidentCommit(TimeGridCommit):
    """Slots whose clean probability exceeds the threshold; where none does, the scheduled number by the base order.

    That number comes from the share of slots still masked, not from the round: the grid is walked from there until it
    asks for one slot at least. The last round writes everything, so that a block takes `denoising_steps` rounds at
    most.

    Args:
        confidence_threshold: above 1 it is the scheduled sampler.
        denoising_steps: most rounds for a block; None is a round for each of its slots.
    Source: Dimple: Discrete Diffusion Multimodal Large Language Model with Parallel Decoding (arXiv:2505.16990).
    """

    def __init__(
        self, setting: Setting, *, confidence_threshold: float = 0.95, denoising_steps: int | None = None
    ) -> None:
        super().__init__(setting, denoising_steps=denoising_steps)
        self.threshold = confidence_threshold

    def number(self, progress: BlockProgress) -> int:
        """Slots of a round in which none is sure."""
        steps = self.steps or progress.slots
        levels, share = grid(steps), progress.masked / max(1, progress.slots)
        later = np.flatnonzero(levels < share)
        for i in range(max(int(later[0]) if later.size else steps, progress.done + 1), steps):
            wanted = int(progress.masked * (1 - levels[i] / share))
            if wanted >= 1:
                return wanted
        return progress.masked

    def choose(self, step: Step) -> Ints:
        progress = step.progress
        if progress.done >= (self.steps or progress.slots) - 1:
            return step.eligible
        sure = step.eligible[step.predictions.confidence_at(step.eligible) > self.threshold]
        return sure if sure.size else step.ranked[: self.number(progress)]
