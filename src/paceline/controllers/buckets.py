"""Which batch sizes and contexts share what was learned of them.

In: a number of sequences or tokens. Out: the number of its bucket. Not here: what is kept by bucket.
"""

from __future__ import annotations

_CONTEXT_STEP = 2


def batch_bucket(batch: int) -> int:
    """0 for a batch of 1, then one bucket per doubling: 2, 3-4, 5-8, ..."""
    return max(batch - 1, 0).bit_length()


def context_bucket(context: int) -> int:
    """0 below 256 tokens, then one bucket per factor of 4."""
    return max(context, 1).bit_length() // _CONTEXT_STEP if context >= 256 else 0
