"""Our settings over a peer's, or a peer's over ours, from one document: paired by prompt and repeat.

In: a document's cells and peers. Out: ratios of tokens per second with their intervals. Not here: measuring (`bench.against`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.bench import stats
from paceline.bench.comparison import rates

Record = Mapping[str, Any]


def ratio(ours: Record, theirs: Record) -> stats.Estimate | None:
    """Median over prompts of our tokens per second over theirs in the same repeat, with its 95 % interval.

    Returns:
        None where one of them has no speed, or no prompt in common that both decoded in every repeat.
    """
    if ours["tokens_per_second"] is None or theirs["tokens_per_second"] is None:
        return None
    a, b = rates(ours), rates(theirs)
    names = [name for name in a if name in b and all(a[name]) and all(b[name])]
    repeats = min((min(len(a[name]), len(b[name])) for name in names), default=0)
    if not repeats:
        return None
    columns = [np.array([table[name][:repeats] for name in names], float) for table in (a, b)]
    return stats.bootstrap([columns[0] / columns[1]], stats.median_ratio)


def fastest(found: Sequence[Record]) -> Record | None:
    """The one with the highest tokens per second, of those that have a speed."""
    known = [one for one in found if one["tokens_per_second"] is not None]
    return max(known, key=lambda one: float(one["tokens_per_second"]["value"]), default=None)
