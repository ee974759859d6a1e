"""Which slots each row's attention is summed over, in which order: chunks at fixed positions, then the last one with a
mask.

In: one sequence's part of a pass. Out: groups of rows that share their chunks. Not here: arithmetic
    (models.decoder.strict_attention).

All rows whose positions lie in one chunk form a group. The slots of chunks before it are in the order of positions
unless the committed tokens end before the chunk of the group begins and a tree, not a chain, follows: then every row
beyond that border gets a group of its own, whose slots are gathered in the order of its own path. That happens at one
border in CHUNK positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.decoder.cache import BLOCK
from paceline.models.decoder.segments import Segment

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

Index = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int, int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Part:
    """Slots `start` .. `start + count - 1` of the arena, or the slots `index`; what its rows see of them as mask (n,
    count).
    """

    start: int
    count: int
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Slots of the last part that are summed in one product; `within` (n, count) is 1 where the position belongs to the
    piece.
    """

    start: int
    count: int
    within: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that share their chunks: which of the fed rows, whole chunks, the last one, and the pieces of its sums."""

    rows: list[int]
    chunks: list[Part]
    tail: Part
    pieces: list[Piece]


def plan(segment: Segment, window: int | None) -> list[Group]:
    """Groups in which every fed row is once."""
    return _Planner(segment, window).groups()


class _Planner:
    def __init__(self, segment: Segment, window: int | None) -> None:
        self.segment, self.window = segment, window
        self.length, self.inputs, self.done = segment.cache.length, segment.inputs, segment.done
        depths = np.arange(self.inputs) if segment.depths is None else segment.depths
        self.positions: Index = self.length + depths
        self.sees: Bools = np.tri(self.inputs, dtype=np.bool_) if segment.sees is None else segment.sees

    def groups(self) -> list[Group]:
        at = self.positions[self.done :]
        everyone = list(range(self.done, self.inputs))
        found = []
        for k in sorted(set((at // CHUNK).tolist())):
            rows = [i for i in everyone if self.positions[i] // CHUNK == k]
            if self.segment.sees is None or k * CHUNK <= self.length:
                found.append(self._shared(rows, k))
            else:
                found.extend(self._alone(row, k) for row in rows)
        return found

    def _shared(self, rows: list[int], k: int) -> Group:
        """Rows that see chunks 0 .. k - 1, whose slots are in the order of positions, and some of all slots behind."""
        stop = -(-(self.length + self.inputs) // BLOCK) * BLOCK
        begin = k * CHUNK
        keys = np.full(stop - begin, -1)
        known = max(self.length - begin, 0)
        keys[:known] = np.arange(begin, begin + known)
        skipped = max(begin - self.length, 0)
        nodes = np.arange(skipped, self.inputs)
        keys[known : known + len(nodes)] = self.positions[nodes]
        seen = np.zeros((len(rows), stop - begin), np.bool_)
        seen[:, :known] = True
        seen[:, known : known + len(nodes)] = self.sees[rows][:, nodes]
        slots = None if self.segment.cache.base >= 0 else self.segment.cache.slot_index(0, stop)
        parts = self._parts(rows, k, slots, keys, seen)
        return Group([row - self.done for row in rows], *parts, self._pieces(begin, keys, rows))

    def _alone(self, row: int, k: int) -> Group:
        """One row with all its keys gathered in the order of its path."""
        ancestors = np.flatnonzero(self.sees[row])
        slots = self.segment.cache.slot_index(0, self.length + self.inputs)
        slots = np.concatenate([slots[: self.length], slots[self.length + ancestors]])
        stop = -(-len(slots) // BLOCK) * BLOCK
        keys = np.arange(k * CHUNK, stop)
        keys[len(slots) - k * CHUNK :] = -1
        slots = np.concatenate([slots, np.full(stop - len(slots), slots[-1])])
        pieces = [Piece(at, min(PIECE, len(keys) - at)) for at in range(0, len(keys), PIECE)]
        return Group([row - self.done], *self._parts([row], k, slots, keys, (keys >= 0)[None]), pieces)

    def _parts(self, rows: list[int], k: int, slots: Index | None, keys: Index, seen: Bools) -> tuple[list[Part], Part]:
        """Whole chunks before chunk k, and the rest with its mask; `slots` None stands for a contiguous sequence."""
        chunks = []
        for begin in range(self._first_chunk(rows, k) * CHUNK, k * CHUNK, CHUNK):
            near = None if self.window is None else self._near(rows, np.arange(begin, begin + CHUNK))
            chunks.append(self._part(begin, CHUNK, slots, near))
        near = self._near(rows, keys)
        return chunks, self._part(k * CHUNK, len(keys), slots, seen if near is None else seen & near)

    def _first_chunk(self, rows: Sequence[int], k: int) -> int:
        if self.window is None:
            return 0
        return min(k, max(0, int(self.positions[list(rows)].min()) - self.window + 1) // CHUNK)

    def _near(self, rows: Sequence[int], keys: Index) -> Bools | None:
        """(n, keys) which keys lie in the window of a row; None if all do."""
        if self.window is None:
            return None
        near: Bools = keys[None] > self.positions[list(rows)][:, None] - self.window
        return None if near.all() else near

    def _part(self, start: int, count: int, slots: Index | None, seen: Bools | None) -> Part:
        mask = None
        if seen is not None and not seen.all():
            mask = torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), FAR)
        if slots is None:
            return Part(self.segment.cache.base + start, count, None, mask)
        own = slots[start : start + count]
        adjacent = bool((np.diff(own) == 1).all())
        return Part(int(own[0]), count, None if adjacent else torch.from_numpy(own), mask)

    def _pieces(self, begin: int, keys: Index, rows: Sequence[int]) -> list[Piece]:
        """Slots of [lo, lo + PIECE) for each border lo: by number if they are in order, all slots of nodes with a
        factor if not.
        """
        if self.segment.sees is None or self.positions.max() // PIECE == self.length // PIECE:
            edges = [*range(0, len(keys), PIECE)]
            if self.segment.sees is not None:
                edges = edges[: (self.length - begin) // PIECE + 1]
            return [Piece(a, (edges[i + 1] if i + 1 < len(edges) else len(keys)) - a) for i, a in enumerate(edges)]
        return self._torn(begin, keys, rows)

    def _torn(self, begin: int, keys: Index, rows: Sequence[int]) -> list[Piece]:
        pieces, known = [], self.length - begin
        last = int(self.positions[list(rows)].max()) - begin
        for lo in range(0, last + 1, PIECE):
            if lo + PIECE <= known:
                pieces.append(Piece(lo, PIECE))
                continue
            start = min(lo, known)
            own = keys[start:]
            inside = (own >= begin + lo) & (own < begin + lo + PIECE)
            within = torch.from_numpy(inside.astype(np.float32)).expand(len(rows), len(own))
            pieces.append(Piece(start, len(own), within))
        return pieces
