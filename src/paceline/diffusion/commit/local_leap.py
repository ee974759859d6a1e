"""LocalLeap: near a slot the model is sure of, a lower bar is enough.

Slots at or above the anchor threshold are anchors. Within a small radius of any anchor a slot is written from a relaxed
threshold on, elsewhere from the anchor threshold on; without an anchor only the best slot is written.

In: scores of one round. Out: the slots to write. Not here: anchors of earlier rounds, which play no part.
Source: Accelerating Diffusion LLM Inference via Local Determinism Propagation (arXiv:2510.07081), with a flat radius.
"""

from __future__ import annotations

import numpy as np

from paceline.diffusion.base import NONE, Step
from paceline.diffusion.setting import Setting
from paceline.models.denoiser import Ints
from paceline.utils import need


class LocalLeap:
    """Two thresholds, the lower one within `anchor_radius` slots of an anchor of the same round.

    Args:
        confidence_threshold: of an anchor; above 1 it is the static baseline.
        relaxed_threshold: near an anchor; equal to the other, it is the threshold rule.
        anchor_radius: slots to either side.
    Raises:
        ConfigError: a negative radius, a relaxed threshold above that of anchors.
    """

    stateless = True

    def __init__(
        self,
        setting: Setting,
        *,
        confidence_threshold: float = 0.9,
        relaxed_threshold: float = 0.75,
        anchor_radius: int = 4,
    ) -> None:
        del setting
        need(anchor_radius >= 0, "anchor_radius", "be at least 0", anchor_radius)
        rule = f"be at most confidence_threshold ({confidence_threshold})"
        need(relaxed_threshold <= confidence_threshold, "relaxed_threshold", rule, relaxed_threshold)
        self.sure, self.relaxed, self.radius = confidence_threshold, relaxed_threshold, anchor_radius

    def choose(self, step: Step) -> Ints:
        """See `base.Commit`."""
        anchors = step.eligible[step.scores >= self.sure]
        if not anchors.size:
            return NONE
        after = np.searchsorted(anchors, step.eligible)
        left = step.eligible - anchors[np.maximum(after - 1, 0)]
        right = anchors[np.minimum(after, anchors.size - 1)] - step.eligible
        near = np.minimum(np.abs(left), np.abs(right)) <= self.radius
        return step.eligible[step.scores >= np.where(near, self.relaxed, self.sure)]
