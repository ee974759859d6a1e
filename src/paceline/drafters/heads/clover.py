"""Clover: heads as Medusa's on one state, to which an attention decoder adds the tokens of a path one after the other.

Source: Clover: regressive lightweight speculative decoding with sequential knowledge (arXiv:2405.00263).
"""

from __future__ import annotations

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.prefix_drafter import PrefixDrafter
from paceline.models.runners import CloverHead


@with_growth_options
class CloverDrafter(PrefixDrafter):
    """Drafts with Clover's heads that were trained for the target.

    Args:
        model: as for `medusa`.
        draft_context: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "clover"
    heads = CloverHead
