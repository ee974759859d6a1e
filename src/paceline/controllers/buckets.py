"""Which batch sizes and contexts share what was learned of them, and what is known of one size says of another.

In: a number of sequences or tokens. Out: the number of its bucket; how steps of two sizes compare. Not here: what a bucket keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

_CONTEXT_STEP = 2


def batch_bucket(batch: int) -> int:
    """0 for a batch of 1, then one bucket per doubling: 2, 3-4, 5-8, ..."""
    return max(batch - 1, 0).bit_length()


def context_bucket(context: int) -> int:
    """0 below 256 tokens, then one bucket per factor of 4."""
    return max(context, 1).bit_length() // _CONTEXT_STEP if context >= 256 else 0


def plain_ratio(size: int, seen: int, table: Sequence[float]) -> float:
    """Seconds of a plain step of `size` sequences for each second of one of `seen`.

    Args:
        table: seconds of a step by rows.
    """
    last = len(table) - 1
    return table[min(size, last)] / table[min(seen, last)]
