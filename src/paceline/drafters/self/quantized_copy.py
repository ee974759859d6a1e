"""The target drafts for itself with rounded weights: an int8 or int4 copy of it, made when it is loaded.

Decoding one row reads every weight once, so a copy of a half or a quarter of the bytes takes about that share of the
time, and its next token is nearly always the target's. It needs no other checkpoint and no training, but memory for
both; whether there is enough is decided before anything is read.

Source: weight-only quantisation as torchao's int8_weight_only and int4_weight_only; drafts from a quantised copy: QSpec
(arXiv:2410.11305), SpecMQuant (arXiv:2505.22179).
"""

from __future__ import annotations

from typing import Unpack

from paceline.config import QUANTIZATIONS
from paceline.drafters.base import DrafterArgs
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.vocab import trimmed_head
from paceline.errors import ConfigError
from paceline.utils import need


@with_growth_options
class QuantizedCopyDrafter(DraftModelDrafter):
    """Drafts with a copy of the target whose weights are rounded.

    Args:
        quantization: "int8" (the default) or "int4", or torchao's names for them, "int8_weight_only" and
            "int4_weight_only".
        draft_vocab_size, draft_vocab_file: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range; a target that is rounded so itself.
        OutOfMemoryError: no room for both.
        UnsupportedModelError: a target without a native runner.
    """

    name = "quantized_copy"
    learns = ""

    def __init__(
        self,
        args: DrafterArgs,
        *,
        quantization: str = "int8",
        draft_vocab_size: int | str | None = None,
        draft_vocab_file: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        known = isinstance(quantization, str) and quantization in QUANTIZATIONS
        need(known, "quantization of 'quantized_copy'", f"be one of {', '.join(QUANTIZATIONS)}", quantization)
        self._configure(args, growth)
        trimmed_head.check(draft_vocab_size, draft_vocab_file)
        if args.models is None:
            raise ConfigError("method 'quantized_copy' needs a target that was loaded from files")
        rows = self._rows(args, draft_vocab_size, draft_vocab_file)
        self._use(args.models.copy_of_target(quantization, head_rows=rows), "its copy")
