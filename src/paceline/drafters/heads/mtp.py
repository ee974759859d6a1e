"""Multi-token prediction: the module that a model was trained with drafts, from the model's own states.

Chains and trees of several tokens go on from the module's own states, as EAGLE's do; what was drafted leaves its cache
again, and the target's states of committed tokens take its place.

Source: DeepSeek-V3 Technical Report (arXiv:2412.19437); FastMTP: accelerating LLM inference with enhanced multi-token
prediction (arXiv:2509.18362).
"""

from __future__ import annotations

import logging
from typing import Unpack

from paceline.drafters.base import DrafterArgs, Models
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.drafters.vocab import trimmed_head
from paceline.models import Runner
from paceline.models.runners import FeatureHead, load_mtp_head
from paceline.utils import need

logger = logging.getLogger("paceline")


@with_growth_options
class MtpDrafter(EagleDrafter):
    """Drafts with the target's module for multi-token prediction, or with one that was trained for the target.

    Of several modules the first drafts all tokens. `tree_policy` "eagle2" makes EAGLE-2's trees.

    Args:
        model: folder or hub id of a checkpoint with a module, or of a head of `paceline train mtp`; None is the
            target's own checkpoint.
        draft_context: as for `eagle`.
        draft_vocab_size, draft_vocab_file: as for `draft_model`, of a module of a checkpoint.
    Raises:
        ConfigError: a value outside its range, no checkpoint.
        CheckpointError: a checkpoint without a module, or a module for another model.
        CapabilityError: a target that does not give what the module needs, or that scores no trees where some are
            grown.
        UnsupportedModelError: a module whose layers are not implemented.
    """

    name = "mtp"
    learns = ""

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_context: int | None = 1024,
        draft_vocab_size: int | str | None = None,
        draft_vocab_file: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        trimmed_head.check(draft_vocab_size, draft_vocab_file)
        self._cut, self._was_cut = (draft_vocab_size, draft_vocab_file), False
        own = None if args.models is None else str(args.models.folder)
        super().__init__(args, model=own if model is None else model, draft_context=draft_context, **growth)
        rule = "be left out for a trained head, which has a vocabulary of its own"
        need(self._was_cut or self._cut == (None, None), "draft_vocab_size", rule, draft_vocab_size)

    def _load(self, name: str, target: Runner, args: DrafterArgs) -> FeatureHead:
        return load_mtp_head(
            name, target, tokenizer=args.fingerprint, kept=lambda share: self._kept(args.models, args.vocab_size, share)
        )

    def _kept(self, models: Models | None, vocab_size: int, share: float) -> list[int] | None:
        """The tokens that a module drafts, None for all, where the head is so much of what a drafted token reads."""
        if models is None:
            return None
        self._was_cut, (size, file) = True, self._cut
        cut = trimmed_head.cut_head(size, file, models, vocab_size, share=share)
        if cut.words:
            self.note = cut.words
            logger.info("%s: %s", self.name, cut.words)
        return cut.tokens
