"""Prompts for the requests of a trace: lengths that fit the model, token ids of these lengths."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.utils import Arrival


def fit_arrivals(arrivals: Sequence[Arrival], max_context: int) -> tuple[list[Arrival], float]:
    """The arrivals with lengths scaled by one factor, at most 1, so that the longest fits the context; and the
    factor.
    """
    longest = max(arrival.input_length + arrival.output_length for arrival in arrivals)
    scale = min(1.0, (max_context - 2) / longest)
    if scale == 1.0:
        return list(arrivals), 1.0
    return [
        Arrival(a.time, max(1, int(a.input_length * scale)), max(1, int(a.output_length * scale))) for a in arrivals
    ], scale


def trace_prompts(arrivals: Sequence[Arrival], text: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Token ids of each arrival's length, cut from `text` at different places (repeated where it is too short)."""
    base = [token % vocab_size for token in text]
    made = []
    for number, arrival in enumerate(arrivals):
        start = (number * 997) % len(base)
        turned = base[start:] + base[:start]
        made.append((turned * (arrival.input_length // len(base) + 1))[: arrival.input_length])
    return made
