"""Request traces: when requests arrived, how long their prompts and outputs were, read from JSONL or CSV.

Whole numbers under `timestamp` are milliseconds, as in the Mooncake traces (arXiv:2407.00079); every other time is in
seconds. Columns may also be called arrival_time, prompt_tokens, output_tokens, or as in the Azure traces
(arXiv:2311.18677) TIMESTAMP (a date), ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv as csv_module
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline.errors import PromptError

NAMES = {
    "timestamp": ("timestamp", "arrival_time", "arrived_at", "time"),
    "input_length": ("input_length", "prompt_tokens", "input_tokens", "contexttokens", "prompt_length"),
    "output_length": ("output_length", "output_tokens", "generatedtokens", "completion_tokens"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the first one, tokens of its prompt, tokens to generate."""

    time: float
    input_length: int
    output_length: int


def parse_trace(text: str, name: str, *, csv: bool = False) -> list[Arrival]:
    """The arrivals in a file's text, in the order of their times; the first one is at 0.

    Raises:
        PromptError: no rows, or one without the three columns.
    """
    try:
        lines = [line for line in text.splitlines() if line.strip()]
        rows: list[Any] = list(csv_module.DictReader(lines)) if csv else [json.loads(line) for line in lines]
    except (ValueError, RecursionError, csv_module.Error) as error:
        raise PromptError(f"{name!r} is not a trace ({error}); give JSONL or CSV with {', '.join(NAMES)}") from None
    if not rows:
        raise PromptError(f"no requests in {name!r}; give at least one row")
    arrivals = [_arrival(row, name, number) for number, row in enumerate(rows, 1)]
    start = min(time for time, _, _ in arrivals)
    whole = all(isinstance(row, Mapping) and str(row.get("timestamp", "")).isdecimal() for row in rows)
    unit = 1000.0 if whole else 1.0
    return sorted((Arrival((t - start) / unit, i, o) for t, i, o in arrivals), key=lambda arrival: arrival.time)


def _arrival(row: object, name: str, number: int) -> tuple[float, int, int]:
    if not isinstance(row, Mapping):
        raise PromptError(f"{name!r} row {number} is not an object; give {', '.join(NAMES)}")
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    try:
        time = _time(_column(lower, "timestamp"))
        lengths = [int(float(_column(lower, column))) for column in ("input_length", "output_length")]
    except (ValueError, TypeError, KeyError) as error:
        raise PromptError(f"{name!r} row {number} is not a request ({error}); give {', '.join(NAMES)}") from None
    if min(lengths) < 1 or not math.isfinite(time):
        raise PromptError(
            f"{name!r} row {number} must have finite times and lengths of 1 or more, got {time}, {lengths}"
        )
    return time, lengths[0], lengths[1]


def _column(row: Mapping[str, Any], name: str) -> Any:
    for known in NAMES[name]:
        if row.get(known) is not None:
            return row[known]
    raise KeyError(f"no column {name}")


def _time(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        return datetime.fromisoformat(str(value)).timestamp()
