"""Logits processors as users write them, which depend on the text so far, and a rule that asks them along wrong
paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.sampling.logit_rules import Processors


def unlike_the_last(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """The last token becomes unlikely, its neighbour likely; in place, as many are written."""
    if output:
        logits[output[-1]] -= 3.0
        logits[(output[-1] + 1) % len(logits)] += 2.0 + len(output) % 2
    return logits


def by_all_tokens(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A token that all tokens so far decide becomes likely."""
    return torch.where(torch.arange(len(logits)) == (sum(prompt) + sum(output)) % len(logits), logits + 2.5, logits)


def at_the_root(rule: Processors, rows_rv: torch.Tensor, paths: Sequence[Sequence[int]], generated: Any) -> None:
    """`Processors.apply`, wrong on purpose: every node gets the root's text."""
    for row in range(len(rows_rv)):
        rule.process(rows_rv[row], list(generated))
