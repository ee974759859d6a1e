"""Medusa: heads on the target's last state guess the tokens that follow the next one, each for itself.

The state is that of the token before the root: its own next token is the root, which is known, so that head 0 guesses
the first draft. All heads read the same state; a node of a tree has the chances of its depth, whatever its path.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from paceline.drafters.heads.last_state import LastStateDrafter
from paceline.models.heads import MedusaHead


class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa's heads that were trained for the target.

    Args:
        model: folder or hub id of the heads.
        num_speculative_tokens: most levels to draft; None leaves it to the budget. There are no more than heads.
        draft_sample_method: above temperature 0, "probabilistic" draws from the heads' distributions, "greedy" takes
            their most likely tokens. By default it draws, but for requests with a seed of their own.
        tree_policy, tree_width, tree_threshold, speculative_token_tree: how trees grow, as of `draft_model`. Where none
            of them is given, chains; under controller "ppd", which is the one where medusa is named alone, the static
            trees that it finds best for what was accepted and measured.
    Raises:
        ConfigError: a value outside its range, no heads.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that does not give what the heads need, or that scores no trees where some are grown.
    """

    name = "medusa"
    heads = MedusaHead
    follows_shapes = True
