"""A fixed number of slots a round: the static baseline.

In: scores. Out: the best slots. Not here: scores.
Source: Large Language Diffusion Models (arXiv:2502.09992).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Status
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


def checked_steps(setting: Setting, denoising_steps: int | None) -> int | None:
    """Rounds for a block, if it has so many slots.

    Raises:
        ConfigError: it has fewer.
    """
    assert setting.schedule is not None
    size = len(setting.schedule.block(setting.canvas))
    rule = f"lie in 1..{size}, the slots of a block (each round writes one at least)"
    need(denoising_steps is None or 1 <= denoising_steps <= size, "denoising_steps", rule, denoising_steps)
    return denoising_steps


class Quota:
    """The masked slots of a block are shared out evenly over its rounds, the first rounds taking what is left over.

    Args:
        denoising_steps: rounds for a full block; None is a round for each slot, one slot at a time. A block that begins
            with fewer masked slots takes the same number of rounds, or as many as it has slots.
    Raises:
        ConfigError: more rounds than a block has slots.
    """

    stateless = True

    def __init__(self, setting: Setting, *, denoising_steps: int | None = None) -> None:
        self.steps = checked_steps(setting, denoising_steps)

    def number(self, step: Step) -> int:
        """How many slots this round writes, by what the block's earlier rounds have written."""
        if self.steps is None:
            return 1
        part = slice(step.block.start, step.block.stop)
        status, born = step.canvas.status[part], step.canvas.born[part]
        written = status == Status.COMMITTED
        done = np.unique(born[written]).size
        base, more = divmod(int(written.sum() + (status == Status.MASKED).sum()), self.steps)
        return max(1, base + (done < more))

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        return step.ranked[: self.number(step)]
