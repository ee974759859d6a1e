"""Differential attention: what a second query reads is subtracted from what a first one reads.

Heads come in pairs. Query heads 2i and 2i + 1 read keys of their own, those of the heads 2j and 2j + 1, and both read
the values of the two, side by side:

    a_s = softmax(scale * q_(2i+s) k_(2j+s)^T) [v_2j, v_(2j+1)]        s = 0, 1
    output = (1 - c) norm(a_0 - (e^(l_0 . m_0) - e^(l_1 . m_1) + c) a_1),    c = 0.8 - 0.6 e^(-0.3 layer)

A pair of keys side by side is one key here, and a query is filled up with zeros where the other key of the pair stands:
so it is plain attention with half as many heads of twice the size, over the same bytes.

Source: Differential Transformer (arXiv:2410.05258), as Phi-4-mini-flash has it (arXiv:2507.06607).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch

from paceline.models.layers.linear import make_norm
from paceline.models.layers.own_weights import OwnWeights
from paceline.models.spec import AttentionShape

NORM_EPS: Final = 1e-5
"""Of the norm of what is left, whatever those of layers have."""


class DifferentialHeads:
    """The heads of one layer.

    Args:
        shape: of the pairs.
        layer: its number, by which the share of what is subtracted begins.

    Attributes:
        queries, outputs: shapes of what the projections before and behind attention know, for the order of heads.
    """

    def __init__(self, shape: AttentionShape, layer: int, weights: OwnWeights) -> None:
        self.queries = replace(shape, head_dim=shape.head_dim // 2)
        self.outputs = replace(shape, groups=shape.groups // 2)
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        first, second = weights.take("lambdas").unflatten(0, (2, 2)).prod(1).sum(-1).exp().tolist()
        self._subtracted, self._left = first - second + start, 1.0 - start
        self._shape, self._norm = shape, make_norm(weights.take("heads_norm.weight"), NORM_EPS)

    def filled(self, projected: torch.Tensor) -> torch.Tensor:
        """(r, g * h, d), or with keys and values (r, g * h + 2 * h, d), of what the projection gives.

        Args:
            projected: (r, g * h * d / 2), or (r, g * h * d / 2 + 2 * h * d), heads in the order of `head_order`.
        """
        shape, rows, half = self._shape, len(projected), self.queries.head_dim
        queries, keys = projected.tensor_split([shape.heads * half], 1)
        keys = keys.reshape(rows, -1, shape.head_dim)
        out = projected.new_zeros(rows, shape.heads + keys.shape[1], shape.head_dim)
        out[:, shape.heads :] = keys
        places = out[:, : shape.heads].view(rows, shape.groups // 2, 2, shape.kv_heads, 2, half)
        queries = queries.reshape(rows, shape.groups // 2, 2, shape.kv_heads, half)
        for one in range(2):
            places[:, :, one, :, one] = queries[:, :, one]
        return out

    def difference(self, attended: torch.Tensor) -> torch.Tensor:
        """(r, g * h * d / 2) of what the heads have read (r, g * h * d)."""
        shape = self._shape
        pairs = attended.view(len(attended), shape.groups // 2, 2, shape.kv_heads, shape.head_dim)
        left = torch.sub(pairs[:, :, 0], pairs[:, :, 1], alpha=self._subtracted)
        return self._norm(left).mul_(self._left).flatten(1)
