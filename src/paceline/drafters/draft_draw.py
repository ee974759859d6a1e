"""One token from a row of probabilities in memory, compiled: by inversion, over sums of blocks.

In: a row of float32, tokens taken out of it, a number in [0, 1). Out: a token. Not here: where the number comes from, rows on other
devices (`draft_rows`, whose `draw_anywhere` is the readable form of this).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.drafters.compiled import compiled

BLOCK = 64

Row = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int64]


@compiled
def among(removed: Tokens, token: int) -> bool:
    """Whether a token was removed; they are few."""
    for one in removed:  # noqa: SIM110  # numba compiles no generators
        if one == token:
            return True
    return False


@compiled
def block_sum(row_v: Row, removed: Tokens, first: int, stop: int) -> float:
    """Sum of row_v[first:stop] without the removed tokens, in float64."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = first + (stop - first) // 4 * 4
    for i in range(first, whole, 4):
        a += np.float64(row_v[i])
        b += np.float64(row_v[i + 1])
        c += np.float64(row_v[i + 2])
        d += np.float64(row_v[i + 3])
    for i in range(whole, stop):
        a += np.float64(row_v[i])
    for token in removed:
        if first <= token < stop:  # a difference of sums would be rounded twice: sum up again
            a, b, c, d = 0.0, 0.0, 0.0, 0.0
            for i in range(first, stop):
                if not among(removed, i):
                    a += np.float64(row_v[i])
            break
    return (a + b) + (c + d)


@compiled
def draw_row(row_v: Row, removed: Tokens, luck: float) -> tuple[int, float]:
    """A token from `norm(row_v with removed set to 0)`: the first whose cumulative sum exceeds luck times the whole.

    Args:
        row_v: (v,) float32, contiguous, none below 0. removed: int64 tokens. luck: in [0, 1).
    Returns:
        The token, -1 where nothing is left, and the sum of what is left; NaN where the row holds NaN.
    """
    size, whole = len(row_v), 0.0
    sums = np.empty((size + BLOCK - 1) // BLOCK, np.float64)
    for block in range(len(sums)):
        sums[block] = block_sum(row_v, removed, block * BLOCK, min((block + 1) * BLOCK, size))
        whole += sums[block]
    if not whole > 0.0:
        return -1, whole
    goal, height, found = luck * whole, 0.0, -1
    for block in range(len(sums)):
        if height + sums[block] <= goal and block + 1 < len(sums):
            height += sums[block]
            continue
        for i in range(block * BLOCK, min((block + 1) * BLOCK, size)):
            if row_v[i] > 0.0 and not among(removed, i):
                found = i
                height += np.float64(row_v[i])
                if height > goal:
                    return found, whole
    return (found if found >= 0 else last_left(row_v, removed)), whole


@compiled
def last_left(row_v: Row, removed: Tokens) -> int:
    """The last token with any probability that was not removed: where rounding leaves the goal beyond all sums."""
    for i in range(len(row_v) - 1, -1, -1):
        if row_v[i] > 0.0 and not among(removed, i):
            return i
    return -1
