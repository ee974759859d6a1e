"""Attention of PyTorch's operators on the CPU that keeps a row's bits: the prefix in chunks, the tree apart, merged by
log-sum-exp.

In: one sequence's part of a pass, its cache (keys and values of the fed rows written already), query rows. Out:
attention output.
Not here: the faster form whose bits may depend on other rows (models.decoder.tree_attention), the plan of chunks
(models.decoder.attention_chunks), other devices (models.cuda.fixed_shape_attention).

Chunk k holds the positions k * CHUNK .. (k + 1) * CHUNK - 1. A row at position t sees all chunks before its own as a
whole, and of its own, the last, what a small mask says. Each chunk is widened to float32 while it is in the processor's
cache, multiplied for all heads at once, and gives an output o, a maximum m and a sum l; o is merged from left to right
with weights l * exp(m - max m).

A row has the same bits whatever tree or batch it is part of. That rests on two properties of float32 matrix
products, which `products_keep_order` checks on the machine at hand: in multiples of LEAST rows, a row does not depend
on the others, and up to PIECE + SLACK summands are added in their order, so that zeros between them (nodes of other
branches) change nothing. So sums over the last chunk go piece by piece at fixed positions, and the sum of the weights
is a product with ones. Sources: online softmax (arXiv:1805.02867), FlashAttention-2 (arXiv:2307.08691), cascade
inference over shared prefixes (Ye et al.).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from paceline.models.decoder.attention_chunks import CHUNK, PIECE, SLACK, Group, Part, plan

if TYPE_CHECKING:
    from paceline.models.decoder.segments import Segment
    from paceline.models.decoder.tree_attention import AttentionShape

LEAST = 4
"""Rows come in multiples of this: some other numbers take another matrix product, with other bits."""

ONES = 16
"""Columns of ones that sum the weights: with one column, some shapes take a dot product with another order."""


class Workspace:
    """Float32 room for one chunk of keys and values; grows on demand, shared by all passes of a model."""

    def __init__(self) -> None:
        self._kv = torch.empty(0, 0, 0)
        self._ones = torch.ones(1, PIECE + SLACK, ONES)

    def widen(self, part: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 keys (h, d, s) and values (h, s, d) of slots (s, 2 h, d); float32 slots are not copied."""
        if part.dtype is not torch.float32:
            slots, width, dim = part.shape
            if len(self._kv) < slots or self._kv.shape[1:] != part.shape[1:]:
                self._kv = torch.empty(max(slots, CHUNK), width, dim)
            part = self._kv.narrow(0, 0, slots).copy_(part)
        by_head = part.transpose(0, 1)
        return by_head.narrow(0, 0, kv_heads).transpose(1, 2), by_head.narrow(0, kv_heads, kv_heads)

    def ones(self, heads: int, slots: int) -> torch.Tensor:
        """(heads, slots, ONES)."""
        if self._ones.shape[1] < slots:
            self._ones = torch.ones(1, 2 * slots, ONES)
        return self._ones.narrow(1, 0, slots).expand(heads, slots, ONES)


class SplitAttention:
    """The attention of one sequence's rows in one pass.

    Args:
        shape: what all layers share.
        work: room for widened chunks.
        segment: the sequence, whose keys and values of fed rows are in the cache when `attend` is called.
    """

    __slots__ = ("_count", "_plans", "_shape", "_work")

    def __init__(self, shape: AttentionShape, work: Workspace, segment: Segment) -> None:
        self._shape, self._work, self._count = shape, work, segment.rows
        self._plans = [plan(segment, window) for window in shape.windows]

    def attend(self, layer: int, qkv: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """(n, g * h * d) in the dtype of `qkv` (n, g * h + 2 * h, d); `cached` (slots, 2 * h, d) is the layer's
        arena.
        """
        shape, n = self._shape, self._count
        groups = self._plans[shape.kind_of[layer]]
        queries = (
            qkv.narrow(1, 0, shape.heads).view(n, shape.groups, shape.kv_heads, shape.head_dim).permute(2, 0, 1, 3)
        )
        if len(groups) == 1:
            return self._group(groups[0], queries, cached).to(qkv.dtype).view(n, -1)
        out = torch.empty(n, shape.heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        for group in groups:
            out[group.rows] = self._group(group, queries[:, group.rows], cached).to(qkv.dtype).view(len(group.rows), -1)
        return out

    def _group(self, group: Group, queries: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """(n, g, h, d) float32 for queries (h, n, g, d)."""
        heads, n, per, dim = queries.shape
        rows, parts = -(-n * per // LEAST) * LEAST, len(group.chunks) + 1
        q = torch.zeros(heads, rows, dim) if rows > n * per else torch.empty(heads, rows, dim)
        q.narrow(1, 0, n * per).view(queries.shape).copy_(queries)
        q.mul_(self._shape.scale)
        most, top = torch.empty(2, parts, heads, rows, 1).unbind(0)
        outs = [self._whole(q, part, cached, most[i], top[i]) for i, part in enumerate(group.chunks)]
        outs.append(self._pieced(q, group, cached, most[-1], top[-1]))
        weights = most.sub_(most.amax(0)).exp_().div_(top)
        merged = outs[0].mul_(weights[0])
        for i in range(1, parts):
            merged.addcmul_(outs[i], weights[i])
        merged.div_(weights.cumsum(0)[-1])
        return merged.narrow(1, 0, n * per).view(queries.shape).permute(1, 2, 0, 3).contiguous()

    def _scores(self, q: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        scores = torch.bmm(q, keys)
        if (cap := self._shape.softcap) is not None:
            scores.div_(cap).tanh_().mul_(cap)
        if mask is not None:
            self._by_row(scores, mask).add_(mask.unsqueeze(1))
        return scores

    def _by_row(self, folded: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """View (h, n, g, s) of (h, rows, s), without spare rows."""
        n, width = mask.shape
        return folded.narrow(1, 0, n * self._shape.groups).view(len(folded), n, self._shape.groups, width)

    def _values(self, part: Part, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = cached.narrow(0, part.start, part.count) if part.index is None else cached.index_select(0, part.index)
        return self._work.widen(slots, self._shape.kv_heads)

    def _whole(
        self, q: torch.Tensor, part: Part, cached: torch.Tensor, most: torch.Tensor, top: torch.Tensor
    ) -> torch.Tensor:
        """Normalised output of one part; writes its maximum and the largest weight, which is 1 / l."""
        keys, values = self._values(part, cached)
        scores = self._scores(q, keys, part.mask)
        torch.amax(scores, -1, keepdim=True, out=most)
        weights = torch.softmax(scores, -1)
        torch.amax(weights, -1, keepdim=True, out=top)
        return torch.bmm(weights, values)

    def _pieced(
        self, q: torch.Tensor, group: Group, cached: torch.Tensor, most: torch.Tensor, top: torch.Tensor
    ) -> torch.Tensor:
        """The same for the last part, with sums that go on at fixed positions."""
        keys, values = self._values(group.tail, cached)
        scores = self._scores(q, keys, group.tail.mask)
        weights = scores.sub_(torch.amax(scores, -1, keepdim=True, out=most)).exp_()
        out, total = q.new_zeros(q.shape), q.new_zeros(len(q), q.shape[1], ONES)
        for piece in group.pieces:
            own = weights.narrow(2, piece.start, piece.count)
            if piece.within is not None:
                own = own.clone()
                self._by_row(own, piece.within).mul_(piece.within.unsqueeze(1))
            out.baddbmm_(own, values.narrow(1, piece.start, piece.count))
            total.baddbmm_(own, self._work.ones(len(q), piece.count))
        total = total.narrow(2, 0, 1)
        torch.reciprocal(total, out=top)
        return out.div_(total)


@functools.cache
def products_keep_order(kv_heads: int, head_dim: int) -> bool:
    """Whether float32 matrix products on this machine have the two properties of the module's docstring, for these
    sizes.
    """
    generator = torch.Generator().manual_seed(0)

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator)

    slots = rand(CHUNK, 2 * kv_heads, head_dim).transpose(0, 1)
    keys, values = slots[:kv_heads].transpose(1, 2), slots[kv_heads:]
    q, weights = rand(kv_heads, 68, head_dim), rand(kv_heads, 68, CHUNK)
    many, same = (torch.bmm(q, keys), torch.bmm(weights, values)), True
    for rows in (4, 8, 12, 20, 36):
        few = torch.bmm(q[:, :rows].contiguous(), keys), torch.bmm(weights[:, :rows].contiguous(), values)
        same &= all(torch.equal(a, b[:, :rows]) for a, b in zip(few, many, strict=True))
        same &= _holes_are_nothing(rows, values, rand, generator)
    return same


def _holes_are_nothing(
    rows: int, values: torch.Tensor, rand: Callable[..., torch.Tensor], generator: torch.Generator
) -> bool:
    heads, _, dim = values.shape
    ones, same = torch.ones(1, PIECE + SLACK, ONES).expand(heads, -1, -1), True
    for used in (1, 16, 100, PIECE):
        for width in (PIECE, PIECE + SLACK):
            place = torch.randperm(width, generator=generator)[:used].sort().values
            close, apart = rand(heads, rows, -(-used // 16) * 16), torch.zeros(heads, rows, width)
            close[:, :, used:], apart[:, :, place] = 0.0, close[:, :, :used]
            moved = values[:, :width].clone()
            moved[:, place] = values[:, :used]
            before = rand(heads, rows, dim)
            a, b = torch.baddbmm(before, close, values[:, : close.shape[2]]), torch.baddbmm(before, apart, moved)
            same &= torch.equal(a, b) and torch.equal(
                torch.bmm(close, ones[:, : close.shape[2]]), torch.bmm(apart, ones[:, :width])
            )
    return same
