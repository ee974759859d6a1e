"""A few of an encoder-decoder target's own decoder layers, trained further, draft on what its encoder has read.

A draft model that needs no encoder of its own: its attention to the source reads the target's keys and values. All else
is as for `draft_model`.

Source: Distil-Whisper: robust knowledge distillation via large-scale pseudo labelling (arXiv:2311.00430).
"""

from __future__ import annotations

from typing import Unpack, cast

from paceline.config import NOT_QUANTIZED, QUANTIZATIONS
from paceline.drafters.base import DrafterArgs
from paceline.drafters.common.bases import model_of
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.models import Runner
from paceline.utils import choice


@with_growth_options
class EncDecDraftDrafter(DraftModelDrafter):
    """Drafts with decoder layers that attend to the target's own sources.

    Args:
        model: folder or hub id of what `paceline train encdec_draft` has written for the target.
        quantization: "int8", "int4" or "none": how the draft's matrices are rounded, or torchao's names for them. None
            is as the target's are.
    Raises:
        ConfigError: a value outside its range, no folder.
        CapabilityError: a target without an encoder.
        CheckpointError: no such draft, or one for another model.
    """

    name = "encdec_draft"
    learns = ""

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        quantization: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        known = (NOT_QUANTIZED, *QUANTIZATIONS)
        choice("quantization of 'encdec_draft'", quantization, known, optional=True)
        self._configure(args, growth)
        model, models = model_of(args, self.name, model)
        draft = models.on_sources_of(cast(Runner, args.target), model, quantization=quantization)
        self.source_bytes = draft.source_bytes
        self._use(cast(Runner, draft), repr(model))

    def held_bytes(self, tokens: int) -> int:
        return self.source_bytes
