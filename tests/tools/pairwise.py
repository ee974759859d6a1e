"""Few rows in which every pair of values of any two factors occurs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[str, Any, str, Any]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    """All pairs of values in a row."""
    return {(a, row[a], b, row[b]) for a, b in combinations(row, 2)}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows that cover all pairs, each the first of those that cover the most new ones around a pair that is still
    missing.

    Values must be hashable.
    """
    names = list(factors)
    missing = {(a, x, b, y) for a, b in combinations(names, 2) for x, y in product(factors[a], factors[b])}
    for pair in sorted(missing, key=repr):
        if pair not in missing:
            continue
        a, x, b, y = pair
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                row[name] = max(factors[name], key=lambda value, name=name: _gain(row, name, value, missing, names))
        ordered = {name: row[name] for name in names}
        missing -= pairs_of(ordered)
        yield ordered


def _gain(row: Mapping[str, Any], name: str, value: Any, missing: set[Pair], names: Sequence[str]) -> int:
    def key(other: str) -> Pair:
        first = names.index(other) < names.index(name)
        return (other, row[other], name, value) if first else (name, value, other, row[other])

    return sum(key(other) in missing for other in row)
