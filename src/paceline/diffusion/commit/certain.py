"""Every slot whose distribution is narrow enough: dParallel's rule.

In: entropies of one round. Out: the slots at or below a bar. Not here: training that makes a model certain of many
slots at once (recipes/bundled_diffusion/dparallel.py).
Source: dParallel: Learnable Parallel Decoding for dLLMs (arXiv:2509.26488).
"""

from __future__ import annotations

from paceline.diffusion.base import Step
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints


class Certain:
    """All eligible slots with an entropy of at most `entropy_threshold`; the loop writes the best where none has.

    Args:
        entropy_threshold: nats, of the clean distribution; 0.5, and 0.45 to 0.5 for Dream in the paper. Below 0 it
            writes a slot a round.
    """

    stateless = True

    def __init__(self, setting: Setting, *, entropy_threshold: float = 0.5) -> None:
        del setting
        self.threshold = entropy_threshold

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        entropy = step.predictions.entropy[step.predictions.rows(step.eligible)]
        return step.eligible[entropy <= self.threshold]
