"""Sentences that several controllers share, for the log and for explanations."""

from __future__ import annotations

from typing import Final

LAST_TOKEN: Final = "Nothing is drafted: this is the last token."
NO_DRAFTER: Final = "Nothing is drafted: there is no drafter."
ZERO_TOKENS: Final = "Nothing is drafted: 0 speculative tokens are plain decoding."


def too_many(running: int, limit: int | None) -> str:
    """Why nothing is drafted for so many sequences at once."""
    return f"Nothing is drafted: {count(running, 'sequence')} at once, and disable_by_batch_size is {limit}."


def none_from(limit: int | None) -> str:
    """The end of a policy in one line, where it has a `disable_by_batch_size`."""
    return "" if limit is None else f", none from {limit} running sequences on"


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 node, 2 nodes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
