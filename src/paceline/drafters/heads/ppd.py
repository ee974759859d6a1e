"""Parallel prompt decoding: trained prompt tokens behind the inputs of a scoring pass guess what comes further on.

Prompt token i stands i places behind an input, where the target reads an embedding that was trained in place of a
token's, and says a guess of the token i + 1 places on. Each may have several embeddings, *virtual tokens*, which do not
see each other: virtual token j sees virtual token j of the prompt tokens before it, and the guesses are averaged.

Source: Hardware-Aware Parallel Prompt Decoding for memory-efficient acceleration of LLM inference (arXiv:2405.18628).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Unpack

import torch

from paceline.drafters.base import DrafterArgs
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.row_guesses import LevelRows, RowGuessDrafter, check_rows
from paceline.models import AddedRows


@with_growth_options
class PPDDrafter(RowGuessDrafter):
    """Drafts with prompt tokens that were trained for the target.

    Args:
        model: folder or hub id of the prompt tokens.
        prompt_rows: rows of prompt tokens beside the tree of a sequence in a scoring pass, at most; 0 drafts nothing.
    Raises:
        ConfigError: a value outside its range, no prompt tokens.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that scores no rows beside a tree, or no trees where some are grown.
    """

    name = "ppd"

    def __init__(
        self, args: DrafterArgs, *, model: str | None = None, prompt_rows: int = 16, **growth: Unpack[GrowthOptions]
    ) -> None:
        check_rows("prompt_rows", prompt_rows)
        _, weights = self._load(args, model, prompt_rows, growth)
        self.prompts = weights["prompts"]

    def _rows(self, rows: Sequence[LevelRows]) -> Sequence[AddedRows]:
        kinds = [
            (level, row % self.copies) for one in rows for level, own in enumerate(one.nodes) for row in range(len(own))
        ]
        levels, copies = torch.tensor(kinds, device=self.prompts.device).T
        made = self.prompts[levels, copies]
        nodes, after = [list(chain(*one.nodes)) for one in rows], [list(chain(*one.after)) for one in rows]
        return (AddedRows(0, nodes, after, lambda states: made),)
