"""LUD: a model that was fine-tuned to predict a whole lexical unit in one pass, from placeholders behind the text.

Placeholders stand behind the inputs of a scoring pass, as PPD's prompt tokens do, and all of them are the embedding of
one token. The one i places behind an input says a guess of the token i + 1 places on. Their keys and values leave the
cache behind the pass; what was guessed is read as real tokens in the next one. There it is verified, so that the text
is the fine-tuned model's own; with `"acceptance_method": "lexical_units"`, as in the paper, it stands where the model
was sure enough of it.

Source: Decoding at the speed of thought: harnessing parallel decoding of lexical units for LLMs (arXiv:2405.15208).
"""

from __future__ import annotations

from typing import Unpack

from paceline.drafters.base import DrafterArgs
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.ppd import PPDDrafter
from paceline.drafters.heads.row_guesses import check_rows


@with_growth_options
class LudDrafter(PPDDrafter):
    """Drafts with placeholders, for which the target was fine-tuned.

    Args:
        model: folder or hub id of the placeholder, which is the folder `head` in that of the fine-tuned model.
        placeholder_rows: rows of placeholders beside the tree of a sequence in a scoring pass, at most; 0 drafts
            nothing.
    Raises:
        ConfigError: a value outside its range, no placeholder.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that scores no rows beside a tree, or no trees where some are grown.
    """

    name = "lud"

    def __init__(
        self, args: DrafterArgs, *, model: str | None = None, placeholder_rows: int = 16,
        **growth: Unpack[GrowthOptions],
    ) -> None:  # fmt: skip
        check_rows("placeholder_rows", placeholder_rows)
        _, weights = self._load(args, model, placeholder_rows, growth)
        self.prompts = weights["placeholder"].expand(self.levels, 1, -1)
