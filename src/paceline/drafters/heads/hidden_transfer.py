"""Hidden transfer: linear maps make states of tokens to come of those of middle layers; the later layers refine them.

The pseudo state of the token i places behind an input enters before a layer of its own, made of the input's state there
by a map of its own, at the position of that token. From there on it sees the text, the input with its ancestors and the
pseudo states before it; what the target makes of it guesses the token behind.

Source: Parallel decoding via hidden transfer for lossless large language model acceleration (arXiv:2404.12022).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Unpack

from torch.nn import functional as F

from paceline.drafters.base import DrafterArgs
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.row_guesses import LevelRows, RowGuessDrafter, check_rows
from paceline.models import AddedRows


@with_growth_options
class HiddenTransferDrafter(RowGuessDrafter):
    """Drafts with maps between states that were trained for the target.

    Args:
        model: folder or hub id of the maps.
        pseudo_rows: pseudo states beside the tree of a sequence in a scoring pass, at most; 0 drafts nothing.
    Raises:
        ConfigError: a value outside its range, no maps.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that scores no rows beside a tree, or no trees where some are grown.
    """

    name = "hidden_transfer"

    def __init__(
        self, args: DrafterArgs, *, model: str | None = None, pseudo_rows: int = 16, **growth: Unpack[GrowthOptions]
    ) -> None:
        check_rows("pseudo_rows", pseudo_rows)
        config, weights = self._load(args, model, pseudo_rows, growth)
        self.layers = [tap + 1 for tap in config.taps]
        self.maps = [
            (weights[f"transfers.{level}.weight"], weights.get(f"transfers.{level}.bias"))
            for level in range(self.levels)
        ]

    def _rows(self, rows: Sequence[LevelRows]) -> Sequence[AddedRows]:
        stages = []
        for level, (weight, bias) in enumerate(self.maps):
            nodes, after = [one.nodes[level] for one in rows], [one.after[level] for one in rows]
            if any(nodes):
                make = partial(F.linear, weight=weight, bias=bias)
                stages.append(AddedRows(self.layers[level], nodes, after, make))
        return stages
