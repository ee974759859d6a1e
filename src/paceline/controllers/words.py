"""Sentences that several policies share, for the log and for explanations."""

from __future__ import annotations


def fixed_words(number: int, running: int, limit: int | None, remaining: int) -> str:
    """The fixed policy on one sequence.

    Args:
        number: speculative tokens a step.
        running: sequences of the step.
        limit: no drafts at or above this number of them; None sets no limit.
        remaining: tokens that may still come.
    """
    if limit is not None and running >= limit:
        return f"Nothing is drafted: {count(running, 'sequence')} at once, and disable_by_batch_size is {limit}."
    if number == 0:
        return "Nothing is drafted: 0 speculative tokens are plain decoding."
    if remaining <= 1:
        return "Nothing is drafted: this is the last token."
    cut = (
        f", at most {count(remaining - 1, 'level')} since {remaining} tokens may still come"
        if remaining <= number
        else ""
    )
    return f"The number is fixed: up to {count(number, 'node')} in every step{cut}."


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 node, 2 nodes."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
