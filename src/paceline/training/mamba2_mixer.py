"""A Mamba-2 mixer that can be trained, and that begins as the attention whose place it takes.

Each head has queries, keys and values of its own (C, B and x). Without the softmax, attention is such a recurrence in
which nothing decays; the softmax's denominator, the sum of all weights, is what the norm of a head makes up for: one of
a head's values is the same for every token, so that what is read of it is that sum, and it is the largest of them.

Axes: b = rows, t = tokens, d = hidden size, h = heads, n = dimensions of a head, c = channels of the convolution.

Sources: Mamba-2 (arXiv:2405.21060); The Mamba in the Llama (arXiv:2408.15237), whose mixers begin with the maps of
queries, keys and values.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.state import Recurrence, read_of

FORGOTTEN: Final = 50.0
"""What a document's first token adds to the decay: e^-50 is left of the documents before it."""

ONE, HALF, UNIT_STEP = 1.278465, 0.738835, 0.541325
"""Numbers whose silu is 1 and 0.5, and one whose softplus is 1."""

DECAYS: Final = (1.0, 2.0**-9)
"""Of the first head and of the last at first, per token; those between are spaced evenly by their logarithms."""


class TrainableMamba2(nn.Module):
    """Mixes the tokens of documents that do not see each other; weights have the names of transformers' Mamba-2.

    Its shape is a `Mamba2Spec` with as many groups as heads, biases on all maps, and the gate before the norm.

    Args:
        hidden: size of the states that are read and given, and of all heads together. heads: how many.
        taps: of the convolution. eps: of the norm.
    """

    def __init__(self, hidden: int, heads: int, *, taps: int, eps: float) -> None:
        super().__init__()
        self.heads, self.eps = heads, eps
        self.in_proj = nn.Linear(hidden, 4 * hidden + heads)
        self.conv1d = nn.Conv1d(3 * hidden, 3 * hidden, taps, groups=3 * hidden)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.zeros(heads)) for _ in range(3))
        self.norm = nn.ParameterDict({"weight": torch.ones(hidden)})
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """(b, t, d) of normed states x (b, t, d).

        Args:
            positions: (b, t) int64, of each token in its document.
        """
        mixed: Tensor = self.out_proj(self.read(x, positions))
        return mixed

    def read(self, x: Tensor, positions: Tensor) -> Tensor:
        """(b, t, d) float32, gated and normed, before the map behind; arguments as above."""
        hidden = x.shape[-1]
        gate, columns, steps = self.in_proj(x).float().split([hidden, 3 * hidden, self.heads], -1)
        with torch.autocast(x.device.type, enabled=False):
            columns = F.silu(self._convolved(columns, positions))
            values, keys, queries = (part.unflatten(-1, (self.heads, -1)) for part in columns.chunk(3, -1))
            steps = F.softplus(steps + self.dt_bias)
            decays = -steps * self.A_log.exp() - FORGOTTEN * (positions == 0)[..., None]
            read = self._recurred(queries, keys, values * steps[..., None], decays) + self.D[:, None] * values
            read = read * F.silu(gate).view_as(read)
            normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + self.eps)
            weighed: Tensor = normed.flatten(2) * self.norm["weight"]
            return weighed

    def _convolved(self, columns: Tensor, positions: Tensor) -> Tensor:
        """(b, t, c): each token's column and those before it in its document, weighed and summed."""
        weights, tokens = self.conv1d.weight[:, 0], columns.shape[1]
        assert self.conv1d.bias is not None
        found: Tensor = columns * weights[:, -1] + self.conv1d.bias
        for back in range(1, weights.shape[1]):
            before = F.pad(columns, (0, 0, back, 0))[:, :tokens] * (positions >= back)[..., None]
            found = found + before * weights[:, -1 - back]
        return found

    def _recurred(self, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor) -> Tensor:
        """(b, t, h, n) that each token reads by queries (b, t, h, n); decays are (b, t, h)."""
        heads = [part.transpose(0, 1).flatten(1, 2) for part in (queries, keys, values, decays[..., None])]
        by_row: Tensor = read_of(Recurrence(*heads)).unflatten(1, (len(queries), -1))
        return by_row.transpose(0, 1)

    @torch.no_grad()
    def begin_as(self, maps: tuple[Tensor, Tensor, Tensor, Tensor], norm: Tensor) -> None:
        """Take over what attention does, but for its softmax and its positions. The last value of each head is given up
        for the one that is the same for every token.

        Args:
            maps: weights (h * n, d) of queries, (g * n, d) of keys and of values for g heads that divide h, and (d,
                h * n) behind. norm: weights (d,) of the norm before them.
        """
        heads, hidden = self.heads, len(norm)
        size = hidden // heads
        queries, keys, values = (_by_head(weight, heads, size) for weight in maps[:3])
        usual = (values * norm).flatten(1).norm(dim=1)[:, None, None]
        behind = maps[3].unflatten(1, (heads, size)) * usual[:, 0] * size**-0.5
        values = values / usual
        values[:, -1], behind[:, :, -1] = 0.0, 0.0
        weights = [torch.zeros(hidden, hidden), *(part.flatten(0, 1) for part in (values, keys, queries))]
        scale = torch.tensor([1.0, 1.0, size**-0.25, size**-0.25]).repeat_interleave(hidden)
        self.in_proj.weight.copy_(torch.cat([torch.cat(weights) * scale[:, None], torch.zeros(heads, hidden)]))
        self.in_proj.bias.zero_()[:hidden] = ONE
        self.conv1d.weight.zero_()[:, :, -1] = 1.0
        assert self.conv1d.bias is not None
        self.conv1d.bias.zero_()[:hidden].view(heads, size)[:, -1] = HALF
        self.dt_bias.fill_(UNIT_STEP)
        self.A_log.copy_(torch.linspace(math.log(DECAYS[0]), math.log(DECAYS[1]), heads))
        self.out_proj.weight.copy_(behind.flatten(1))
        self.out_proj.bias.zero_()


def _by_head(weight: Tensor, heads: int, size: int) -> Tensor:
    """(h, n, d) of (g * n, d), heads that share one following each other."""
    parts: Tensor = weight.unflatten(0, (-1, size))
    return parts.repeat_interleave(heads // len(parts), 0)
