"""The target's states of a text's tokens, as a head gets them: of the prompt's end, then of each scoring pass.

At any time they are known of all tokens but the last, the root, whose state comes with the next pass. Where some were
missed they begin anew behind the gap: a head then sees less of the text, and nothing wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.drafters.base import Context
from paceline.tree import Scores, Verdict


def of_prompt(context: Context, taps: Sequence[int], most: int | None, like: torch.Tensor) -> torch.Tensor:
    """(n, taps * hidden) states of the prompt's last tokens but the very last, `most` of them at most.

    Args:
        like: (0, taps * hidden), where there are none.
    """
    if not all(layer in context.taps for layer in taps):
        return like
    states = joined([context.taps[layer] for layer in taps])
    return states if most is None else states[max(0, len(states) - most) :].clone()


def of_pass(scores: Scores | None, index: int, verdict: Verdict, taps: Sequence[int]) -> torch.Tensor | None:
    """(1 + path, taps * hidden) states of the root and the accepted nodes of sequence `index`; None if not given."""
    if scores is None or not all(layer in scores.taps for layer in taps):
        return None
    root = scores.rows[index]
    if not verdict.path:
        return joined([scores.taps[layer][root : root + 1] for layer in taps])
    rows = torch.tensor([root, *(root + 1 + node for node in verdict.path)], device=scores.logits.device)
    return joined([scores.taps[layer].index_select(0, rows) for layer in taps])


def joined(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n, taps * hidden) of states (n, hidden) of each tap."""
    return states[0] if len(states) == 1 else torch.cat(list(states), 1)


class TappedStates:
    """Those of one sequence that were not used up.

    Attributes:
        first: position in the text of the first of them. count: how many there are.
    """

    __slots__ = ("_parts", "count", "first")

    def __init__(self, first: int, states: torch.Tensor) -> None:
        self.first, self.count = first, len(states)
        self._parts = [states]

    def add(self, states: torch.Tensor) -> None:
        """Add the states of the next tokens."""
        self._parts.append(states)
        self.count += len(states)

    def all(self) -> torch.Tensor:
        """Give all of them, (count, taps * hidden)."""
        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        return self._parts[0]

    def drop(self, count: int) -> None:
        """Drop the first `count`, which are used up."""
        if count:
            self._parts = [self.all()[count:].clone()]
            self.first, self.count = self.first + count, self.count - count

    def copy(self) -> TappedStates:
        """The same states, for another text that begins as this one."""
        return TappedStates(self.first, self.all())
