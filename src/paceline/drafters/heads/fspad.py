"""FSPAD: an EAGLE head that samples the target's state by the token that was chosen, in a space of more dimensions, and
whose next state is not the vector that its logits are made of (models.runners.feature_head).

Source: Boosting lossless speculative decoding via feature sampling and partial alignment distillation
(arXiv:2408.15562).
"""

from __future__ import annotations

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.eagle import EagleDrafter


@with_growth_options
class FspadDrafter(EagleDrafter):
    """Drafts with such a head that was trained for the target, by the trees of EAGLE-2 where no other policy is named.

    Args:
        model, draft_context, draft_device: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "fspad"
    learns = ""
    heads = ("fspad",)
    usual_policy = "eagle2"
