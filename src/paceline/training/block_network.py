"""Layers over blocks of rows that can be trained: a block's rows see each other both ways, and in each layer keys and
values that are made of the target's states. Weights are named as a Qwen3's.

Axes: t = tokens of a row of texts, m = blocks, s = rows of a block, d = hidden size, h = heads, g = key-value heads,
e = dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.training.layer import Keys, RMSNorm, TrainableDecoderLayer, turned


class BlockLayer(TrainableDecoderLayer):
    """A decoder layer of Qwen3's form over blocks."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, hidden)
        eps = layer.get("rms_norm_eps") or 1e-6
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn.update({name: RMSNorm(self.head_dim, eps) for name in ("q_norm", "k_norm")})

    def queries(self, projected: Tensor, positions: Tensor) -> Tensor:
        return turned(self.self_attn["q_norm"](self._parted(projected)), self._turn(positions))

    def keys(self, keys: Tensor, values: Tensor, positions: Tensor) -> Keys:
        return turned(self.self_attn["k_norm"](self._parted(keys)), self._turn(positions)), self._parted(values)

    def run(self, x: Tensor, context: Tensor, places: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """(m, s, d) states behind the layer.

        Args:
            x: (m, s, d). context: (t, d) made of the target's states, which no norm of the layer goes over.
            places: positions (t,) of the text's tokens and (m, s) of the blocks' rows.
            visible: (m, t) bool, which tokens all rows of a block see.
        """
        known = self.read(context[None], places[0][None])[1]
        q, own = self.read(self.input_layernorm(x), places[1])
        return self.finish(x, self.attend_both(q, known, own, visible))

    def attend_both(self, q: Tensor, known: Keys, own: Keys, visible: Tensor) -> Tensor:
        """(m, s, d) attention of queries (m, h, s, e) over keys and values (1, g, t, e), as far as visible (m, t), and
        over all of the block's own (m, g, s, e).
        """
        m, h, s, e = q.shape
        each = h // self.groups
        grouped = (q * self.head_dim**-0.5).reshape(m, self.groups, each * s, e)
        of_text = (grouped @ known[0].transpose(-1, -2)).float().masked_fill(~visible[:, None, None], float("-inf"))
        shares = torch.cat((of_text, (grouped @ own[0].transpose(-1, -2)).float()), -1).softmax(-1).to(q.dtype)
        count = visible.shape[1]
        mixed = (shares[..., :count] @ known[1] + shares[..., count:] @ own[1]).reshape(m, h, s, e)
        attended: Tensor = self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        return attended


@dataclass(frozen=True, slots=True)
class Blocks:
    """Says where blocks lie in one row of texts.

    Attributes:
        anchors: (m,) places of their first tokens. size: rows of a block.
        documents, positions: (t,) of the row's tokens.
    """

    anchors: Tensor
    size: int
    documents: Tensor
    positions: Tensor

    def visible(self) -> Tensor:
        """(m, t) bool: which tokens the rows of a block see, those of its document before its anchor."""
        same = self.documents == self.documents[self.anchors][:, None]
        return same & (torch.arange(len(self.positions), device=self.anchors.device) < self.anchors[:, None])

    def rows(self) -> Tensor:
        """(m, s) positions of the blocks' rows."""
        return self.positions[self.anchors][:, None] + torch.arange(self.size, device=self.anchors.device)

    def run(self, layers: nn.ModuleList, context: Tensor, first: Tensor, mask: Tensor) -> Tensor:
        """(m, s, d) states behind `BlockLayer`s.

        Args:
            context: (t, d) made of the target's states. first: (m, d) embeddings of the anchors' tokens.
            mask: (d,) that of the mask token.
        """
        x = torch.cat((first[:, None], mask.expand(len(first), self.size - 1, -1)), 1)
        places, visible = (self.positions, self.rows()), self.visible()
        for layer in layers:
            x = cast(BlockLayer, layer).run(x, context, places, visible)
        return x
