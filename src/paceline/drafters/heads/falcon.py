"""Falcon: EAGLE's layer behind an LSTM, which drafts k tokens in each pass (heads.semi_autoregressive).

Source: Falcon: faster and parallel inference of large language models through enhanced semi-autoregressive drafting and
custom-designed decoding tree (arXiv:2412.12639).
"""

from __future__ import annotations

from paceline.drafters.base import Context
from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.heads.semi_autoregressive import SemiAutoregressiveDrafts, UnitState
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models.state import NativeCache


@with_growth_options
class FalconDrafter(EagleDrafter):
    """Drafts with a head that predicts several tokens in each pass, and goes on from its own states.

    Nodes of a tree that are as deep below the last token of a pass have one distribution, whatever is between.

    Args:
        model, draft_context, draft_device: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "falcon"
    learns = ""
    heads = ("falcon",)
    drafting = SemiAutoregressiveDrafts
    follows_shapes = True

    def _new(self, context: Context, cache: NativeCache, states: TappedStates) -> UnitState:
        return UnitState(context, cache, states, self.head.unit)

    @property
    def row_bytes(self) -> int:
        """Logits of several tokens come from each pass."""
        return 4 * self.vocab_size
