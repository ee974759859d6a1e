"""Noise on the ranking: slots are drawn without replacement instead of taken best first.

In: scores. Out: scores / alg_temp plus Gumbel noise; the best n of these are n draws without replacement from the
softmax of scores / alg_temp. Not here: noise on tokens (temperature).
Source: `alg_temp` of Dream 7B: Diffusion Large Language Models (arXiv:2508.15487).
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import Step
from paceline.diffusion.canvas import Floats
from paceline.diffusion.commit.time_grid import uniform
from paceline.diffusion.setting import Setting
from paceline.utils import need


class OrderNoise:
    """For rules that take a number of slots; a threshold on such scores means nothing.

    Args:
        alg_temp: temperature of the order; 0 takes the best slots.
    """

    stateless = True

    def __init__(self, setting: Setting, *, alg_temp: float = 0.0) -> None:
        need(alg_temp >= 0, "alg_temp", "be at least 0", alg_temp)
        self.temperature, self.seed = alg_temp, setting.seed

    def modify(self, step: Step) -> Floats:
        """See `base.Modifier`."""
        if self.temperature == 0:
            return step.scores
        u = uniform(self.seed, step.canvas.round, step.canvas.length, purpose=3)[step.eligible]
        return step.scores / self.temperature - np.log(-np.log(np.clip(u, 1e-300, 1 - 1e-16)))
