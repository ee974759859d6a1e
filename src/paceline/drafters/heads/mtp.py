"""Multi-token prediction: the module that a model was trained with drafts, from the model's own states.

Chains and trees of several tokens go on from the module's own states, as EAGLE's do; what was drafted leaves its cache
again, and the target's states of committed tokens take its place.

Source: DeepSeek-V3 Technical Report (arXiv:2412.19437); FastMTP: accelerating LLM inference with enhanced multi-token
prediction (arXiv:2509.18362).
"""

from __future__ import annotations

from typing import Unpack

from paceline.drafters.base import DrafterArgs
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.models import Runner
from paceline.models.runners import FeatureHead, load_mtp_head


@with_growth_options
class MtpDrafter(EagleDrafter):
    """Drafts with the target's module for multi-token prediction, or with one that was trained for the target.

    Of several modules the first drafts all tokens. `tree_policy` "eagle2" makes EAGLE-2's trees.

    Args:
        model: folder or hub id of a checkpoint with a module, or of a head of `paceline train mtp`; None is the
            target's own checkpoint.
        draft_context: as for `eagle`.
    Raises:
        ConfigError: a value outside its range, no checkpoint.
        CheckpointError: a checkpoint without a module, or a module for another model.
        CapabilityError: a target that does not give what the module needs, or that scores no trees where some are
            grown.
        UnsupportedModelError: a module whose layers are not implemented.
    """

    name = "mtp"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_context: int | None = 1024,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        own = None if args.models is None else str(args.models.folder)
        super().__init__(args, model=own if model is None else model, draft_context=draft_context, **growth)

    def _load(self, name: str, target: Runner, args: DrafterArgs) -> FeatureHead:
        return load_mtp_head(name, target, tokenizer=args.fingerprint)
