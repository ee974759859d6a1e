"""What drafters share that guess from the text, without a model that a batch would go through at once.

In: contexts, budgets. Out: states and trees, sequence by sequence. Not here: any method (one file each).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.draft_options import limit_of
from paceline.tree import EMPTY_TREE, Budget, TokenTree

S = TypeVar("S")


class TextDrafter(Drafter, Generic[S]):
    """Base of these drafters: nothing is learned from scores and nothing held, unless they say so.

    Args:
        args: of the drafter.
        num_speculative_tokens: most nodes or levels to propose, as the method has it; None leaves it to the budget.
    Attributes:
        index, vocab_size: as in `args`.
        limit: `num_speculative_tokens`, or UNLIMITED.
        chains_only: the target scores no branches.
    Raises:
        ConfigError: a negative number.
    """

    catches_up = True

    def __init__(self, args: DrafterArgs, num_speculative_tokens: int | None = None) -> None:
        self.limit = limit_of(num_speculative_tokens)
        self.index, self.vocab_size = args.index, args.vocab_size
        self.chains_only = args.target is not None and not args.target.capabilities.trees

    @abstractmethod
    def _begin(self, context: Context) -> S | None:
        """The state of a new sequence; None where there will be nothing to say."""

    @abstractmethod
    def fork(self, state: S, context: Context) -> S:
        """A state for a copy of the sequence."""

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        return [self._begin(context) for context in contexts]

    def _steps(self, budget: Budget) -> int:
        """Tokens of a chain within the budget and `limit`."""
        return min(budget.nodes, budget.depth, self.limit)


class SingleDrafter(TextDrafter[S]):
    """Base of those that draft for one sequence at a time."""

    @abstractmethod
    def _propose(self, state: S, budget: Budget) -> TokenTree:
        """A tree for one sequence; nodes and levels of the budget and `limit` are above 0."""

    def propose(self, states: Sequence[S], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [
            self._propose(state, budget) if min(budget.nodes, budget.depth, self.limit) > 0 else EMPTY_TREE
            for state, budget in zip(states, budgets, strict=True)
        ]
