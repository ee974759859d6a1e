"""Tokens that structured_outputs leaves no choice about, as drafts.

Where the constraint allows one token alone, as in the middle of a property's name, it is certain to be accepted. Where
some text must come that can be split into tokens in several ways, its usual tokens are likely.

Source: the fast-forward tokens of constrained decoding libraries (llguidance), here verified like any other draft.
"""

from __future__ import annotations

from paceline.drafters.base import Context
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import chain_tree
from paceline.tree import EMPTY_TREE, Budget, TokenTree


class GrammarDrafter(SingleDrafter[Context]):
    """Drafts what the constraint forces; nothing for requests without structured_outputs.

    Args:
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "grammar"

    def _begin(self, context: Context) -> Context | None:
        return context if context.forced is not None else None

    def fork(self, state: Context, context: Context) -> Context:
        return context

    def _propose(self, state: Context, budget: Budget) -> TokenTree:
        found = [] if state.forced is None else state.forced(self._steps(budget))
        return (
            chain_tree([token for token, _ in found], [chance for _, chance in found], self.index)
            if found
            else EMPTY_TREE
        )
