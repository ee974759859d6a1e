"""Hydra: heads as Medusa's, each of which reads the tokens that were drafted before it along its path.

Source: Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109).
"""

from __future__ import annotations

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.last_state import LastStateDrafter
from paceline.drafters.heads.prefix_drafter import PrefixDrafter
from paceline.models.heads import HydraHead
from paceline.models.runners import HydraPlusHead


@with_growth_options
class HydraDrafter(LastStateDrafter):
    """Drafts with Hydra's heads that were trained for the target.

    Args:
        model: as for `medusa`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "hydra"
    learns = "hydra"
    heads = HydraHead
    follows_shapes = True


@with_growth_options
class HydraPlusDrafter(PrefixDrafter):
    """Hydra++: the heads begin with what a decoder layer makes of the target's states of the whole text.

    Args:
        model: as for `medusa`.
        draft_context: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "hydra++"
    learns = "hydra++"
    heads = HydraPlusHead
