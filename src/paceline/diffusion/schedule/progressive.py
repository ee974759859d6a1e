"""Blocks of growing length: short ones where a text begins, long ones once it is under way.

In: block lengths. Out: the current block, the masked slots in it. Not here: which of them are written.
Source: TDAR (arXiv:2602.09555) grows the block in training, from 4 to 64; this is the same progression within a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.diffusion.schedule.edged_blocks import EdgedBlocks
from paceline.diffusion.setting import Setting
from paceline.utils import need


class Progressive(EdgedBlocks):
    """Blocks of the lengths given, from left to right, the last length repeated; the last block is cut at the end of
    the text.

    Args:
        block_lengths: one at least. In a block-causal model no block may cross a border of its blocks.
    Raises:
        ConfigError: no length, one below 1, a block across a border of a block-causal model.
    """

    stateless = True

    def __init__(self, setting: Setting, *, block_lengths: Sequence[int] = (4, 8, 16, 32, 64)) -> None:
        lengths = [int(length) for length in block_lengths]
        need(
            bool(lengths) and min(lengths) >= 1,
            "block_lengths",
            "be one length or more, each at least 1",
            list(block_lengths),
        )
        causal = setting.denoiser.attention == "block"
        edges = [0 if causal else setting.canvas.start]
        while edges[-1] < setting.canvas.length:
            edges.append(edges[-1] + lengths[min(len(edges) - 1, len(lengths) - 1)])
        edges[-1] = setting.canvas.length
        self.edges = np.asarray(edges, np.int64)
        if causal and setting.denoiser.block_length:
            own = setting.denoiser.block_length
            crosses = self.edges[:-1] // own != (self.edges[1:] - 1) // own
            rule = f"make blocks that do not cross the model's, of {own} slots each"
            need(not crosses.any(), "block_lengths", rule, list(block_lengths))
