"""Medusa: heads on the target's last state guess the tokens that follow the next one, each for itself.

The state is that of the token before the root: its own next token is the root, which is known, so that head 0 guesses
the first draft. All heads read the same state; a node of a tree has the chances of its depth, whatever its path.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.last_state import LastStateDrafter
from paceline.models.heads import MedusaHead


@with_growth_options
class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa's heads that were trained for the target.

    Where no option says how trees grow, it drafts chains; under controller "ppd", which is the one where medusa is
    named alone, the static trees that it finds best for what was accepted and measured.

    Args:
        model: folder or hub id of the heads.
    Raises:
        ConfigError: a value outside its range, no heads.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that does not give what the heads need, or that scores no trees where some are grown.
    """

    name = "medusa"
    learns = "medusa"
    heads = MedusaHead
    follows_shapes = True
