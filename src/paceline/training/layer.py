"""A decoder layer that can be trained, with weights named as a Llama's: RMSNorm, rotary attention, gated MLP.

Axes: b = rows, t = tokens, m = places of queries, h = heads, g = key-value heads, e = dimensions of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.training.batches import Batch

Keys = tuple[Tensor, Tensor]
"""Keys and values (b, g, t, e)."""


class RMSNorm(nn.Module):
    """Norms states: x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight


class AttentionLayer(nn.Module):
    """Causal attention, of which the caller norms what it reads and adds what it makes.

    Args:
        layer: `HeadConfig.layer`. hidden: size of the states. inputs: width of what attention reads.
    """

    def __init__(self, layer: Mapping[str, Any], hidden: int, inputs: int) -> None:
        super().__init__()
        self.heads = layer["num_attention_heads"]
        self.groups = layer.get("num_key_value_heads") or self.heads
        self.head_dim = layer.get("head_dim") or hidden // self.heads
        self.theta = layer.get("rope_theta") or 10000.0
        queries, keys = self.heads * self.head_dim, self.groups * self.head_dim
        sizes = {"q_proj": (inputs, queries), "k_proj": (inputs, keys), "v_proj": (inputs, keys),
                 "o_proj": (queries, hidden)}  # fmt: skip
        self.self_attn = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def read(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Keys]:
        """Queries (b, h, t, e), keys and values of inputs (b, t, inputs)."""
        q, k, v = (self.self_attn[name](x) for name in ("q_proj", "k_proj", "v_proj"))
        return self.queries(q, positions), self.keys(k, v, positions)

    def queries(self, projected: Tensor, positions: Tensor) -> Tensor:
        """(b, h, m, e) of (b, m, h * e)."""
        return turned(self._parted(projected), self._turn(positions))

    def keys(self, keys: Tensor, values: Tensor, positions: Tensor) -> Keys:
        """Of (b, t, g * e) each."""
        return turned(self._parted(keys), self._turn(positions)), self._parted(values)

    def attend(self, q: Tensor, first: Keys, more: Sequence[Keys], visible: Tensor) -> Tensor:
        """(b, m, hidden) attention of queries (b, h, m, e) over `first`, as far as visible (b, m, t), and over each of
        `more` (b, g, m, e) at the query's own place alone.
        """
        b, h, m, e = q.shape
        each, t = h // self.groups, visible.shape[-1]
        grouped = (q * self.head_dim**-0.5).reshape(b, self.groups, each * m, e)
        scores = (grouped @ first[0].transpose(-1, -2)).float().view(b, self.groups, each, m, t)
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        alone = grouped.view(b, self.groups, each, m, e)
        at_own_place = [(alone * keys[:, :, None]).sum(-1, dtype=torch.float32) for keys, _ in more]
        top = torch.stack([scores.detach().amax(-1), *(score.detach() for score in at_own_place)]).amax(0)
        shares, at_own_place = (scores - top[..., None]).exp(), [(score - top).exp() for score in at_own_place]
        total = shares.sum(-1)
        mixed = (shares.view(b, self.groups, each * m, t).to(q.dtype) @ first[1]).view_as(alone)
        for weight, (_, values) in zip(at_own_place, more, strict=True):
            total, mixed = total + weight, mixed + weight[..., None].to(q.dtype) * values[:, :, None]
        mixed = (mixed / total[..., None]).to(q.dtype).reshape(b, h, m, e)
        attended: Tensor = self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        return attended

    def _parted(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        dims = torch.arange(0, self.head_dim, 2, device=positions.device) / self.head_dim
        angle = positions[:, None, :, None] * self.theta**-dims
        return angle.cos(), angle.sin()


class TrainableDecoderLayer(AttentionLayer):
    """Attention and MLP, each with what it reads added to it."""

    def __init__(self, layer: Mapping[str, Any], hidden: int, inputs: int) -> None:
        super().__init__(layer, hidden, inputs)
        inner = layer["intermediate_size"]
        sizes = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.post_attention_layernorm = RMSNorm(hidden, layer.get("rms_norm_eps") or 1e-6)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """(b, t, hidden) states behind the layer."""
        x = x + attended
        y = self.post_attention_layernorm(x)
        states: Tensor = x + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))
        return states


class PrefixLayer(TrainableDecoderLayer):
    """A layer over the target's states of a text, which adds nothing at first."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, layer.get("rms_norm_eps") or 1e-6)
        with torch.no_grad():
            for part in (self.self_attn["o_proj"], self.mlp["down_proj"]):
                cast(nn.Linear, part).weight.zero_()

    def forward(self, batch: Batch) -> Tensor:
        """(b, t, hidden) what it makes of the states behind the target's final norm."""
        q, keys = self.read(self.input_layernorm(batch.final), batch.positions)
        return self.finish(batch.final, self.attend(q, keys, (), batch.visible()))


def turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of (b, h, t, e); pairs are (i, i + e / 2)."""
    cos, sin = (part.to(x.dtype) for part in turn)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
