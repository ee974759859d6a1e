"""The tables of a pass over roots and their trees, filled by plain stores: what a decoding step costs beside its arithmetic.

In: sequences that lie in one piece, roots with chains or trees behind them. Out: the rows of models.kernels.frame that describe
them. Not here: windows, scattered sequences (models.kernels.visible, models.kernels.fused).

A small model's pass takes as long as a hundred small NumPy operations. So single numbers go through memoryviews, and what runs on
(slots, positions) is copied from one long row of integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.models.kernels import frame as at
from paceline.models.kernels.program import ROWS, Table
from paceline.models.kernels.visible import SPARE, Ints, address

if TYPE_CHECKING:
    from paceline.models.cache import NativeCache
    from paceline.tree.token_tree import TokenTree

_ROWS, _SCALE, _HEAD_ROWS, _LOGITS = (offset // at.FIELD for offset in (at.ROWS, at.SCALE, at.HEAD_ROWS, at.LOGITS))
_SEEN = at.SEEN_FIELDS // at.FIELD
_SLOTS, _PLACES, _PICKED = ROWS, 2 * ROWS, 3 * ROWS

LISTED = ROWS * (ROWS + 1) // 2
"""Most slots in the lists of one pass: no row sees more of its own than the rows up to it."""


def _integers(array: Ints) -> memoryview[int]:
    return array.reshape(-1).data.cast("B").cast("q")


class QuickRows:
    """Writes into the tables of a `FusedDecoder`.

    Args:
        frame: of a pass. rows: (4, ROWS) sources, slots, places, rows of the head. seen: (1, ROWS, 4), the only kind of window.
        best: (ROWS,) best tokens. scale: the factor on the embeddings of tokens.

    Attributes:
        version: of the arena, as `lay` saw it; -1 before. reach: positions and slots below it can be described.
    """

    def __init__(self, frame: Table, rows: Ints, seen: Ints, best: Ints, scale: float) -> None:
        self._frame, self._rows, self._seen, self._best = map(_integers, (frame.fields, rows, seen, best))
        self._floats: memoryview[float] = frame.fields.reshape(-1).data.cast("B").cast("f")
        self._factor = float(scale)
        self._run, self._start = _integers(np.zeros(0, np.int64)), 0
        self._listed: Ints = np.zeros(LISTED + SPARE, np.int64)
        self._lists = address(self._listed)
        self.version, self.reach = -1, 0

    def lay(self, version: int, start: int, reach: int) -> None:
        """Remember the address of the list of all slots, and have a run of `reach` integers at hand."""
        self._run, self._start, self.version, self.reach = _integers(np.arange(reach)), start, version, reach
        self._listed[:] = 0  # what is read behind a list must be a slot that there is

    def place(self, row: int, cache: NativeCache, source: int, depth: int) -> bool:
        """Describe a row that is input `depth` (0 the root) of a chain behind a sequence; False if that does not lie in one piece.

        Args:
            source: address of its embedding.
        """
        base, length = cache.base, cache.length
        if base < 0:
            return False
        start, rows, entry = self._start + 8 * base, self._rows, row * _SEEN
        rows[row], rows[_SLOTS + row], rows[_PLACES + row], rows[_PICKED + row] = source, base + length + depth, length + depth, row
        self._seen[entry], self._seen[entry + 1] = start, length
        self._seen[entry + 2], self._seen[entry + 3] = start + 8 * length, depth + 1
        return True

    def count(self, rows: int) -> None:
        """How many rows are described."""
        self._frame[_ROWS], self._floats[2 * _SCALE] = rows, self._factor

    def aim(self, picked: int, logits: int) -> None:
        """How many rows the head takes, and where their logits go."""
        self._frame[_HEAD_ROWS], self._frame[_LOGITS] = picked, logits

    def best(self, count: int) -> list[int]:
        """The best tokens that the pass has found."""
        return self._best[:count].tolist()

    def fill(
        self, caches: Sequence[NativeCache], roots: Sequence[int], trees: Sequence[TokenTree], embedded: int, row_bytes: int
    ) -> int:
        """Describe one row per root and node, the head taking all; returns their number, or 0 where this form does not fit.

        Args:
            embedded: address of the embedding of token 0. row_bytes: from one token's to the next.
        """
        row, listed, rows, seen, run, entry = 0, 0, self._rows, self._seen, self._run, 0
        for cache, root, tree in zip(caches, roots, trees, strict=True):
            tokens, base, length = tree.tokens, cache.base, cache.length
            inputs = 1 + len(tokens)
            if base < 0 or row + inputs > ROWS:
                return 0
            list_start = self._start + 8 * base
            own = list_start + 8 * length
            rows[row] = embedded + row_bytes * root
            if inputs == 1:
                rows[_SLOTS + row], rows[_PLACES + row] = base + length, length
            else:
                for i, token in enumerate(tokens.tolist(), row + 1):
                    rows[i] = embedded + row_bytes * token
                rows[_SLOTS + row : _SLOTS + row + inputs] = run[base + length : base + length + inputs]
                rows[_PLACES + row : _PLACES + row + inputs] = run[length : length + inputs]
            for count in range(1, inputs + 1):
                seen[entry], seen[entry + 1], seen[entry + 2], seen[entry + 3] = list_start, length, own, count
                entry += _SEEN
            if inputs > 2 and not tree.is_chain:
                listed = self._part(tree, row, base, length, listed)
            row += inputs
        rows[_PICKED : _PICKED + row] = run[:row]
        self.count(row)
        return row

    def _part(self, tree: TokenTree, row: int, base: int, length: int, listed: int) -> int:
        """Give the nodes of a tree with branches, whose root is `row`, their places and lists of their own.

        Args:
            base: first slot of the sequence. length: its tokens. listed: slots in the lists of the rows before.
        Returns:
            slots in the lists, those of this tree included.
        """
        slot = base + length
        paths, rows, seen, entry = [[slot]], self._rows, self._seen, row * _SEEN
        for node, (parent, depth) in enumerate(zip(tree.parents.tolist(), tree.depths.tolist(), strict=True), start=1):
            paths.append([*paths[parent + 1], slot + node])
            rows[_PLACES + row + node] = length + depth
        flat = [slot for path in paths for slot in path]
        self._listed[listed : listed + len(flat)] = flat
        for path in paths:
            seen[entry + 2], seen[entry + 3] = self._lists + 8 * listed, len(path)
            listed, entry = listed + len(path), entry + _SEEN
        return listed
