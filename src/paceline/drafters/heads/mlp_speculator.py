"""MLP speculator: a small state goes from head to head, takes up each drafted token, and predicts the one behind it.

Source: Accelerating production LLMs with combined token/embedding speculators (arXiv:2404.19124).
"""

from __future__ import annotations

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.last_state import LastStateDrafter
from paceline.models.heads import MLPSpeculatorHead


@with_growth_options
class MLPSpeculatorDrafter(LastStateDrafter):
    """Drafts with the heads of an MLP speculator ("accelerator") that was trained for the target.

    Args:
        model: as for `medusa`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "mlp_speculator"
    learns = "mlp_speculator"
    heads = MLPSpeculatorHead
