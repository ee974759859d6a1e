"""P-EAGLE: an EAGLE-3 that drafts all tokens in one pass, from masks behind the text (heads.parallel_drafts).

Source: P-EAGLE: parallel-drafting EAGLE with scalable training (arXiv:2602.01469); vLLM's `parallel_drafting` of method
"eagle3".
"""

from __future__ import annotations

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.parallel_drafts import ParallelDrafts


@with_growth_options
class PEagleDrafter(EagleDrafter):
    """Drafts with a head that reads several of the target's layers and predicts all tokens of a draft in one pass.

    Every node of a tree has the distribution of its depth, whatever its path. More tokens than the head was trained for
    may be drafted, and are right less often.

    Args:
        model, draft_context, draft_device: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "p_eagle"
    learns = ""
    heads = ("p_eagle",)
    drafting = ParallelDrafts

    @property
    def row_bytes(self) -> int:
        """All logits come from one pass."""
        return 4 * self.vocab_size
