"""Results of libraries of structured outputs as figures: shares with their intervals, medians of seconds.

Seconds are compared on the schemas that every library compiles, as a library that gives up on the hard ones would
otherwise look quick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from lab.structured.measure import FREE, Found, MeasuredSet
from lab.structured.sets import Case
from paceline.utils import wilson

Rows = Sequence[tuple[Case, Mapping[str, Found]]]
KINDS: Final = 5
"""Most frequent errors that are kept."""

WORDS: Final = 100
"""Characters of them."""


def summarize_set(found: MeasuredSet) -> dict[str, Any]:
    """Figures of one set.

    Returns:
        cases; found, elsewhere, unsound and doubtful, see `SchemaSet` and `MeasuredSet`; common: schemas that all
        libraries compile; `libraries`: name -> figures, see `_figures`.
    """
    names = list(dict.fromkeys(name for _, row in found.rows for name in row))
    bound = [name for name in names if name != FREE]
    common = [row for row in found.rows if all(row[1][name].declared for name in bound)]
    return {
        "cases": len(found.rows),
        "found": found.of.found,
        "elsewhere": found.of.elsewhere,
        "unsound": found.unsound,
        "doubtful": found.doubtful,
        "common": len(common),
        "libraries": {name: _figures(name, found, common) for name in names},
    }


def _figures(name: str, found: MeasuredSet, common: Rows) -> dict[str, Any]:
    """Of one library on one set.

    Returns:
        declared, empirical, true: shares, None where nothing was asked; compliance: of the first two; unfinished:
        outputs that reached the most tokens; lenient: cases of which it lets an invalid value through, narrow: cases of
        which it rejects a valid one; `compile` and `first` (seconds to the first mask, and of the mask alone),
        `token` (seconds of one): medians and high quantiles, of the schemas in common; `compile_own`: of all that it
        compiles; errors: the most frequent, with their counts.
    """
    mine, free = [row[name] for _, row in found.rows], name == FREE
    tried = [] if free else [row[name] for case, row in found.rows if case.decides]
    compiled, shared = [one for one in tried if one.declared], [row[name] for _, row in common]
    declared = None if free else _share(mine, lambda one: one.declared)
    empirical = _share(mine, lambda one: bool(one.satisfies)) if found.of.asked else None
    return {
        "declared": declared,
        "empirical": empirical,
        "compliance": empirical["value"] / declared["value"] if empirical and declared and declared["right"] else None,
        "true": _share(tried, lambda one: one.true),
        "unfinished": sum(one.finish == "length" for one in mine),
        "lenient": sum(any(one.passed) for one in compiled),
        "narrow": sum(not all(one.accepted) for one in compiled),
        "compile": _quantiles(one.compile for one in shared),
        "first": _quantiles(one.first for one in shared),
        "token": _quantiles(second for one in shared for second in one.seconds),
        "compile_own": _quantiles(one.compile for one in mine),
        "errors": _errors(mine),
    }


def summarize_answers(found: Mapping[str, Sequence[Found]]) -> dict[str, Any]:
    """Of the questions: name -> shares of answers of the form that was asked for, and of right ones; unfinished."""
    return {
        name: {
            "parsed": _share(answers, lambda one: bool(one.satisfies)),
            "right": _share(answers, lambda one: all(one.accepted)),
            "unfinished": sum(one.finish == "length" for one in answers),
        }
        for name, answers in found.items()
    }


def _share(found: Sequence[Found], holds: Callable[[Found], bool]) -> dict[str, Any] | None:
    return wilson(sum(map(holds, found)), len(found)) if found else None


def _quantiles(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Median, 95 % and 99 % quantile, and how many there are; None of none."""
    kept = [one for one in seconds if one is not None]
    if not kept:
        return None
    p50, p95, p99 = (float(one) for one in np.quantile(kept, [0.5, 0.95, 0.99]))
    return {"p50": p50, "p95": p95, "p99": p99, "n": len(kept)}


def _errors(found: Sequence[Found]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in found:
        if one.error:
            counts[one.error[:WORDS]] = counts.get(one.error[:WORDS], 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:KINDS])
