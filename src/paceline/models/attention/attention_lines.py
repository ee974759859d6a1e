"""Attention along lines: of a chunk of the prompt, each head reads some columns (keys) and some diagonals (distances).

What a head attends to lies, for the most part, on few such lines. They are found from a sample of the chunk's queries:
lines are taken in the order of the attention that lies on them, until together they hold a wanted share of it.

Axes: h = kv heads, g = query heads of each, r = sampled rows, n = rows, s = positions, d = head dim.
Source: LoopServe: An Adaptive Dual-phase LLM Inference Acceleration System for Multi-Turn Dialogues (arXiv:2507.13681).
"""

from __future__ import annotations

import torch

from paceline.models.attention.tree_attention import attention
from paceline.models.spec import AttentionShape


def shares_of(
    queries: torch.Tensor, places: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """(h, g, r, s) float32: what each query attends to.

    Args:
        queries: (r, g, h, d) at positions `places` (r,). keys: (h, s, d) at positions `seen` (s,).
    """
    scores = torch.einsum("rghd,hsd->hgrs", queries.float(), keys.float()).mul_(shape.scale)
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    return scores.masked_fill_(seen > places[:, None], -torch.inf).softmax(-1)


def lines_of(shares: torch.Tensor, places: torch.Tensor, coverage: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest lines, by falling attention, that hold a share of it; a row's own position is always among them.

    Args:
        shares: (..., r, s) of rows at positions `places` (r,); 0 behind them.
    Returns:
        (..., s) bool: columns by position, and diagonals by distance.
    """
    positions = shares.shape[-1]
    distances = (places[:, None] - torch.arange(positions, device=places.device)).clamp_(min=0)
    by_distance = distances.flatten().expand(*shares.shape[:-2], -1)
    diagonals = shares.new_zeros(*shares.shape[:-2], positions).scatter_add_(-1, by_distance, shares.flatten(-2))
    diagonals[..., 0] = torch.inf
    order = torch.cat((shares.sum(-2), diagonals), -1).argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order).scatter_(
        -1, order, torch.arange(2 * positions, device=order.device).expand_as(order)
    )
    of_columns, of_distances = ranks.split(positions, -1)
    first = torch.minimum(
        of_columns.unsqueeze(-2).expand(shares.shape),
        of_distances.gather(-1, by_distance).view(shares.shape),
    )
    held = torch.zeros_like(ranks, dtype=torch.float64).scatter_add_(-1, first.flatten(-2), shares.flatten(-2).double())
    taken = (held.cumsum(-1) < coverage * shares.double().sum((-1, -2))[..., None]).sum(-1, keepdim=True) + 1
    return of_columns < taken, of_distances < taken


def attend_along(
    lines: tuple[torch.Tensor, torch.Tensor],
    queries: torch.Tensor,
    keys_values: tuple[torch.Tensor, torch.Tensor],
    shape: AttentionShape,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """(n, g * h * d) attention of the last n positions along lines (h, g, s).

    Keys on no line of a kv head are not read.

    Args:
        queries: (n, g, h, d). keys_values: (h, s, d) each. sinks: see `AttentionStep`.
    """
    rows, groups, kv_heads, head_dim = queries.shape
    keys, values = keys_values
    positions = keys.shape[1]
    seen = torch.arange(positions, device=keys.device)
    distances = seen[positions - rows :, None] - seen
    out = queries.new_empty(rows, groups, kv_heads, head_dim)
    for head in range(kv_heads):
        columns, diagonals = (part[head] for part in lines)
        read = columns.unsqueeze(1) | diagonals[:, distances.clamp(min=0)]
        read &= distances >= 0
        places = read.flatten(0, 1).any(0).nonzero().squeeze(1)
        mask = queries.new_zeros(groups * rows, len(places))
        mask.masked_fill_(~read.flatten(0, 1)[:, places], -torch.inf)
        asked = queries[:, :, head].transpose(0, 1).reshape(1, 1, groups * rows, head_dim)
        own = None if sinks is None else sinks[head].repeat_interleave(rows)[None, :, None]
        mixed = attention(
            asked, keys[head, places][None, None], values[head, places][None, None], mask, shape, sinks=own
        )
        out[:, :, head] = mixed.view(groups, rows, head_dim).transpose(0, 1)
    return out.reshape(rows, groups * kv_heads * head_dim)
