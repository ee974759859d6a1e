"""Dream's time grid: the number of slots written follows noise levels that fall evenly from 1 to almost 0.

In round i of S, with noise t before it and s after it, int(masked * (1 - s / t)) of the masked slots are written, all
of them in the last round.

In: scores. Out: the best slots, or slots drawn independently. Not here: noise on the ranking (`order_noise`).
Source: Dream 7B: Diffusion Large Language Models (arXiv:2508.15487).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Floats
from paceline.diffusion.commit.quota import checked_steps
from paceline.diffusion.progress import BlockProgress, rounds_of_text, whole_text
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints

SMALLEST = 1e-3
"""Noise level at the end of the grid."""


def grid(steps: int) -> Floats:
    """(steps + 1,) noise levels, falling."""
    return np.linspace(1.0, SMALLEST, steps + 1)


class TimeGrid:
    """Each block runs through the grid once. A round writes one slot at least: where the released sampler would write
    none (its very first, with a round for each slot), nothing would change but the cost.

    Args:
        denoising_steps: rounds for a block; None is a round for each of its slots.
    Raises:
        ConfigError: more rounds than a block has slots.
    """

    stateless = True

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
        """See `base.Commit`."""
        return step.ranked[: self.number(BlockProgress.of(step))]


class Independent:
    """Every masked slot is written with probability 1 - s / t on its own (Dream's "origin"), all of them in the last
    round.

    A round may write nothing. With sampled tokens and an exact model this is the reverse process itself, whose error
    vanishes with the number of rounds.

    Args:
        denoising_steps: rounds for the text, which is decoded as one block, at most 16 for each slot; None is a round
        for each.
    Raises:
        ConfigError: fewer rounds than one or more than 16 for each slot, a schedule of several blocks.
    """

    stateless = True
    waits = True

    def __init__(self, setting: Setting, *, denoising_steps: int | None = None) -> None:
        slots = whole_text(setting, "independent slots")
        self.steps, self.seed = rounds_of_text(denoising_steps, slots), setting.seed

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        done = step.canvas.round
        if done >= self.steps - 1:
            return step.eligible
        levels = grid(self.steps)
        drawn = uniform(self.seed, done, step.canvas.length)[step.eligible]
        written: Ints = step.eligible[drawn < 1 - levels[done + 1] / levels[done]]
        return written


def uniform(seed: int, round_: int, length: int, purpose: int = 2) -> Floats:
    """(length,) numbers in [0, 1) keyed by seed, round and purpose: a slot's number does not depend on what else is
    decoded.
    """
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, (purpose << 61) + round_], np.uint64)  # a list would become floats
    return np.random.Generator(np.random.Philox(key=key)).random(length)
