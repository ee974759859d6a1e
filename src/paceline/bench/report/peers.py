"""What a document says of other engines: how our settings do beside them, in turns of the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.utils import Estimate, bootstrap, median_ratio

Record = Mapping[str, Any]


def peer_ratio(ours: Record, theirs: Record) -> Estimate | None:
    """Median over groups of our tokens per second over theirs in the same repeat, with its 95 % interval.

    A group is what ran as one batch, a prompt at batch size 1: prompts of one batch share their seconds and are one
    measurement.

    Returns:
        None where one of them has no speed, or no group in common that both decoded in every repeat.
    """
    if ours["tokens_per_second"] is None or theirs["tokens_per_second"] is None:
        return None
    a, b = _rates(ours), _rates(theirs)
    groups = [group for group in a if group in b and all(a[group]) and all(b[group])]
    repeats = min((min(len(a[group]), len(b[group])) for group in groups), default=0)
    if not repeats:
        return None
    columns = [np.array([table[group][:repeats] for group in groups], float) for table in (a, b)]
    return bootstrap([columns[0] / columns[1]], median_ratio)


def _rates(record: Record) -> dict[int, list[float]]:
    """Tokens per second by group, a value per repeat; 0 where a prompt of it failed."""
    tokens: dict[tuple[int, int], float] = {}
    seconds: dict[tuple[int, int], float] = {}
    for row in record["rows"]:
        key = row["group"], row["repeat"]
        tokens[key] = tokens.get(key, 0.0) + row["tokens"] if not row["error"] else -np.inf
        seconds[key] = row["seconds"]
    rates: dict[int, list[float]] = {}
    for (group, repeat), count in sorted(tokens.items()):
        rates.setdefault(group, []).append(max(0.0, count) / seconds[group, repeat] if seconds[group, repeat] else 0.0)
    return rates


def fastest_setting(records: Sequence[Record]) -> Record | None:
    """The one with the highest tokens per second, of those that have a speed."""
    known = [record for record in records if record["tokens_per_second"] is not None]
    return max(known, key=lambda record: float(record["tokens_per_second"]["value"]), default=None)
