"""Attention of PyTorch's operators on the CPU that keeps a row's bits: the prefix in chunks, the tree apart, merged by
log-sum-exp.

Chunk k holds the positions k * CHUNK .. (k + 1) * CHUNK - 1. A row at position t sees all chunks before its own as a
whole, and of its own, the last, what a small mask says. Each chunk is widened to float32 while it is in the processor's
cache, multiplied for all heads at once, and gives an output o, a maximum m and a sum l; o is merged from left to right
with weights l * exp(m - max m).

All rows whose positions lie in one chunk form a group. The slots of chunks before it are in the order of positions
unless the committed tokens end before the chunk of the group begins and a tree, not a chain, follows: then every row
beyond that border gets a group of its own, whose slots are gathered in the order of its own path. That happens at one
border in CHUNK positions.

A row has the same bits whatever tree or batch it is part of. That rests on two properties of float32 matrix
products, which `products_keep_order` checks on the machine at hand: in multiples of ROW_MULTIPLE rows, a row does not
depend on the others, and up to PIECE + SLACK summands are added in their order, so that zeros between them (nodes of
other branches) change nothing. So sums over the last chunk go piece by piece at fixed positions, and the sum of the
weights is a product with ones. Sources: online softmax (arXiv:1805.02867), FlashAttention-2 (arXiv:2307.08691), cascade
inference over shared prefixes (Ye et al.).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.attention.segments import Bools, Segment
from paceline.models.spec import AttentionShape
from paceline.models.state.window_slots import BLOCK, Ints

CHUNK = 512
"""Positions of a chunk: 2 MB of widened keys and values for 8 heads of 64, which stay in the second and third level
cache.
"""

PIECE, SLACK = 128, 64
"""Sums over the last chunk go on at multiples of PIECE positions; a piece that holds nodes is up to SLACK slots wider.
Products of that width add in order; wider ones need not.
"""

FAR = -1e30
"""Mask value: finite, so that a row that sees nothing of a chunk gives it the weight 0 and no NaN."""


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """Slots `start` .. `start + count - 1` of the arena, or the slots `index`.

    What its rows see of them as mask (n, count).
    """

    start: int
    count: int
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """Slots of the last part that are summed in one product.

    `within` (n, count) is 1 where the position belongs to the piece.
    """

    start: int
    count: int
    within: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that share their chunks: which of the fed rows, whole chunks, the last one, and the pieces of its sums."""

    rows: list[int]
    chunks: list[ChunkSlots]
    tail: ChunkSlots
    pieces: list[KeyPiece]


def plan_chunks(segment: Segment, window: int | None) -> list[RowGroup]:
    """Groups in which every fed row is once."""
    return ChunkPlanner(segment, window).groups()


class ChunkPlanner:
    """Cuts the rows of a segment into groups that attend to the same chunks."""

    def __init__(self, segment: Segment, window: int | None) -> None:
        self.segment, self.window = segment, window
        self.length, self.slots = segment.cache.length, segment.slots
        self.positions: Ints = segment.depths + self.length
        self.at: Ints = self.positions[segment.done :]
        self.visible = segment.visible(window)

    def groups(self) -> list[RowGroup]:
        chunks, groups = (self.at // CHUNK).tolist(), list[RowGroup]()
        for k in sorted(set(chunks)):
            rows = [row for row, chunk in enumerate(chunks) if chunk == k]
            if self.segment.tree is None or k * CHUNK <= self.length:
                groups.append(self._shared(rows, k))
            else:
                groups.extend(self._alone(row, k) for row in rows)
        return groups

    def _shared(self, rows: list[int], k: int) -> RowGroup:
        """Rows that see chunks 0 .. k - 1, whose slots are in the order of positions, and some of all slots behind."""
        stop = -(-(self.length + self.slots) // BLOCK) * BLOCK
        begin = k * CHUNK
        committed, skipped = np.arange(begin, self.length), max(begin - self.length, 0)
        spare = np.full(stop - self.length - self.slots, -1)
        keys = np.concatenate([committed, self.positions[skipped:], spare])
        near, own = committed >= self.visible.first[rows, None], self.visible.inputs[rows, skipped:]
        seen = np.concatenate([near, own, np.zeros((len(rows), len(spare)), np.bool_)], 1)
        return RowGroup(rows, *self._parts(rows, k, self._slots(stop), seen), self.pieces(begin, keys, rows))

    def _slots(self, stop: int) -> Ints | None:
        """Those of the positions before `stop`; None where they follow each other."""
        cache = self.segment.cache
        return None if cache.in_order(self.window) else cache.slots_of_kind(0, stop, self.window)

    def _alone(self, row: int, k: int) -> RowGroup:
        """One row with all its keys gathered in the order of its path."""
        path = np.flatnonzero(self.segment.sees[self.segment.done + row])
        slots = self.segment.cache.slots_of_kind(0, self.length + self.slots, self.window)
        slots = np.concatenate([slots[: self.length], slots[self.length + path]])
        own, stop = len(slots), -(-len(slots) // BLOCK) * BLOCK
        slots = np.concatenate([slots, np.full(stop - own, slots[-1])])
        keys = np.arange(k * CHUNK, stop)
        seen = (keys >= self.visible.first[row]) & (keys < own)
        pieces = [KeyPiece(at, min(PIECE, len(keys) - at)) for at in range(0, len(keys), PIECE)]
        return RowGroup([row], *self._parts([row], k, slots, seen[None]), pieces)

    def _parts(self, rows: list[int], k: int, slots: Ints | None, seen: Bools) -> tuple[list[ChunkSlots], ChunkSlots]:
        """Whole chunks before chunk k, and the rest, of which rows see `seen`; `slots` None stands for a contiguous
        sequence.
        """
        chunks, first = [], self.visible.first[rows, None]
        for begin in range(self.first_chunk(rows, k) * CHUNK, k * CHUNK, CHUNK):
            near = None if begin >= first.max() else np.arange(begin, begin + CHUNK) >= first
            chunks.append(self._part(begin, CHUNK, slots, near))
        return chunks, self._part(k * CHUNK, seen.shape[1], slots, seen)

    def first_chunk(self, rows: Sequence[int], k: int) -> int:
        return min(k, int(self.visible.first[rows].min()) // CHUNK)

    def _part(self, start: int, count: int, slots: Ints | None, seen: Bools | None) -> ChunkSlots:
        mask = None
        if seen is not None and not seen.all():
            mask = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), FAR)
        if slots is None:
            return ChunkSlots(self.segment.cache.base + start, count, None, mask)
        part_slots = slots[start : start + count]
        adjacent = bool((np.diff(part_slots) == 1).all())
        return ChunkSlots(int(part_slots[0]), count, None if adjacent else torch.from_numpy(part_slots), mask)

    def pieces(self, begin: int, keys: Ints, rows: Sequence[int]) -> list[KeyPiece]:
        """Slots of [lo, lo + PIECE) for each border lo: by number if they are in order, all slots of nodes with a
        factor if not.
        """
        if self.segment.tree is None or self.positions.max() // PIECE == self.length // PIECE:
            edges = [*range(0, len(keys), PIECE)]
            if self.segment.tree is not None:
                edges = edges[: (self.length - begin) // PIECE + 1]
            return [KeyPiece(a, (edges[i + 1] if i + 1 < len(edges) else len(keys)) - a) for i, a in enumerate(edges)]
        return self._pieces_of_tree(begin, keys, rows)

    def _pieces_of_tree(self, begin: int, keys: Ints, rows: Sequence[int]) -> list[KeyPiece]:
        pieces, known = [], self.length - begin
        last = int(self.at[list(rows)].max()) - begin
        for lo in range(0, last + 1, PIECE):
            if lo + PIECE <= known:
                pieces.append(KeyPiece(lo, PIECE))
                continue
            start = min(lo, known)
            part_keys = keys[start:]
            inside = (part_keys >= begin + lo) & (part_keys < begin + lo + PIECE)
            within = torch.from_numpy(inside.astype(np.float32)).expand(len(rows), len(part_keys))
            pieces.append(KeyPiece(start, len(part_keys), within))
        return pieces


ROW_MULTIPLE = 4
"""Rows come in multiples of this: some other numbers take another matrix product, with other bits."""

ONES = 16
"""Columns of ones that sum the weights: with one column, some shapes take a dot product with another order."""


class StrictWorkspace:
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


class StrictAttention:
    """The attention of one sequence's rows in one pass.

    Args:
        shape: what all layers share.
        work: room for widened chunks.
        segment: the sequence, whose keys and values of fed rows are in the cache when `attend` is called.
    """

    __slots__ = ("_count", "_plans", "_shape", "_work")

    def __init__(self, shape: AttentionShape, work: StrictWorkspace, segment: Segment) -> None:
        self._shape, self._work, self._count = shape, work, segment.rows
        self._plans = [plan_chunks(segment, window) for window in shape.windows]

    def attend(
        self, layer: int, qkv: torch.Tensor, cached: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(n, g * h * d) in the dtype of `qkv` (n, g * h + 2 * h, d).

        `cached` (slots, 2 * h, d) is the layer's arena; `sinks` (h, g): see
        `models.attention.tree_attention.AttentionStep`.
        """
        shape, n = self._shape, self._count
        groups = self._plans[shape.kind_of[layer]]
        queries = (
            qkv.narrow(1, 0, shape.heads).view(n, shape.groups, shape.kv_heads, shape.head_dim).permute(2, 0, 1, 3)
        )
        if len(groups) == 1:
            return self._group(groups[0], queries, cached, sinks).to(qkv.dtype).view(n, -1)
        out = torch.empty(n, shape.heads * shape.head_dim, dtype=qkv.dtype, device=qkv.device)
        for group in groups:
            group_out = self._group(group, queries[:, group.rows], cached, sinks)
            out[group.rows] = group_out.to(qkv.dtype).view(len(group.rows), -1)
        return out

    def _group(
        self, group: RowGroup, queries: torch.Tensor, cached: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """(n, g, h, d) float32 for queries (h, n, g, d)."""
        heads, n, per, dim = queries.shape
        rows, parts = -(-n * per // ROW_MULTIPLE) * ROW_MULTIPLE, len(group.chunks) + 1
        q = torch.zeros(heads, rows, dim) if rows > n * per else torch.empty(heads, rows, dim)
        q.narrow(1, 0, n * per).view(queries.shape).copy_(queries)
        q.mul_(self._shape.scale)
        most, top = torch.empty(2, parts, heads, rows, 1).unbind(0)
        outs = [self.whole(q, part, cached, most[i], top[i]) for i, part in enumerate(group.chunks)]
        outs.append(self.pieced(q, group, cached, most[-1], top[-1]))
        peak = most.amax(0)
        weights = most.sub_(peak).exp_().div_(top)
        merged = outs[0].mul_(weights[0])
        for i in range(1, parts):
            merged.addcmul_(outs[i], weights[i])
        whole = weights.cumsum(0)[-1]
        if sinks is not None:
            whole = whole + (sinks_of_rows(sinks, rows) - peak).exp_()
        merged.div_(whole)
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

    def _values(self, part: ChunkSlots, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = cached.narrow(0, part.start, part.count) if part.index is None else cached.index_select(0, part.index)
        return self._work.widen(slots, self._shape.kv_heads)

    def whole(
        self, q: torch.Tensor, part: ChunkSlots, cached: torch.Tensor, most: torch.Tensor, top: torch.Tensor
    ) -> torch.Tensor:
        """Normalised output of one part; writes its maximum and the largest weight, which is 1 / l."""
        keys, values = self._values(part, cached)
        scores = self._scores(q, keys, part.mask)
        torch.amax(scores, -1, keepdim=True, out=most)
        weights = torch.softmax(scores, -1)
        torch.amax(weights, -1, keepdim=True, out=top)
        return torch.bmm(weights, values)

    def pieced(
        self, q: torch.Tensor, group: RowGroup, cached: torch.Tensor, most: torch.Tensor, top: torch.Tensor
    ) -> torch.Tensor:
        """The same for the last part, with sums that go on at fixed positions."""
        keys, values = self._values(group.tail, cached)
        scores = self._scores(q, keys, group.tail.mask)
        weights = scores.sub_(torch.amax(scores, -1, keepdim=True, out=most)).exp_()
        out, total = q.new_zeros(q.shape), q.new_zeros(len(q), q.shape[1], ONES)
        for piece in group.pieces:
            part_weights = weights.narrow(2, piece.start, piece.count)
            if piece.within is not None:
                part_weights = part_weights.clone()
                self._by_row(part_weights, piece.within).mul_(piece.within.unsqueeze(1))
            out.baddbmm_(part_weights, values.narrow(1, piece.start, piece.count))
            total.baddbmm_(part_weights, self._work.ones(len(q), piece.count))
        total = total.narrow(2, 0, 1)
        torch.reciprocal(total, out=top)
        return out.div_(total)


def sinks_of_rows(sinks: torch.Tensor, rows: int) -> torch.Tensor:
    """(h, rows, 1) of sinks (h, g), for queries folded into rows (n, g) and spare ones behind them."""
    return sinks.repeat(1, -(-rows // sinks.shape[1]))[:, :rows, None]


@functools.cache
def products_keep_order(kv_heads: int, head_dim: int) -> bool:
    """Whether float32 matrix products of these sizes have the two properties of the module's docstring here."""
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
