"""A fixed number of speculative tokens in every step.

In: the number. Out: the same budget each time, shared by the drafters in their order. Not here: any estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.checking import need
from paceline.controllers.base import Signal, StepTimes
from paceline.controllers.words import fixed_words
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict


class FixedController:
    """Up to `num_speculative_tokens` nodes a step and sequence; what the first drafter leaves, the next may use.

    Args:
        num_speculative_tokens: most nodes of a step's tree, and most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a negative number of tokens.
    """

    name = "fixed"

    def __init__(self, num_speculative_tokens: int, *, disable_by_batch_size: int | None = None) -> None:
        need(num_speculative_tokens >= 0, "num_speculative_tokens", "be 0 or more", num_speculative_tokens)
        self.num_speculative_tokens = num_speculative_tokens
        self.disable_by_batch_size = disable_by_batch_size
        self._signals: Sequence[Signal] = ()
        self._off = False

    def plan(self, signals: Sequence[Signal]) -> None:
        """Remember the step's sequences."""
        self._signals = signals
        self._off = self.disable_by_batch_size is not None and len(signals) >= self.disable_by_batch_size

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """The nodes that earlier drafters left, no deeper than the sequence may still grow."""
        nodes = self.num_speculative_tokens - len(so_far)
        depth = min(self.num_speculative_tokens, self._signals[index].remaining - 1)
        return NO_BUDGET if self._off or nodes < 1 or depth < 1 else Budget(nodes, depth)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """All trees as they are: budgets already keep them within the number."""
        return list(trees)

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        """Nothing to learn."""

    def forget(self, key: int) -> None:
        """Nothing is kept per sequence."""

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, the policy in one line."""
        limit = self.disable_by_batch_size
        if index is not None:
            return fixed_words(self.num_speculative_tokens, len(self._signals), limit, self._signals[index].remaining)
        off = "" if limit is None else f", none from {limit} running sequences on"
        return f"fixed: {self.num_speculative_tokens} speculative tokens a step{off}"
