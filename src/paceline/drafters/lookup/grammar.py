"""Tokens that structured_outputs leaves no choice about, as drafts.

Where the constraint allows one token alone, as in the middle of a property's name, it is certain to be accepted. Where
some text must come that can be split into tokens in several ways, its usual tokens are likely.

Source: the fast-forward tokens of constrained decoding libraries (llguidance), here verified like any other draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafters.base import Context
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import chain_tree
from paceline.tree import EMPTY_TREE, Budget, TokenTree


@dataclass(frozen=True, slots=True)
class Constrained:
    """A sequence with a constraint, which the context asks."""

    context: Context


class GrammarDrafter(SingleDrafter[Constrained]):
    """Drafts what the constraint forces; nothing for requests without structured_outputs.

    Args:
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "grammar"

    def _begin(self, context: Context) -> Constrained | None:
        return Constrained(context) if context.forced is not None else None

    def fork(self, state: Constrained, context: Context) -> Constrained:
        return Constrained(context)

    def _propose(self, state: Constrained, budget: Budget) -> TokenTree:
        forced = [] if state.context.forced is None else state.context.forced(self._steps(budget))
        return (
            chain_tree([token for token, _ in forced], [chance for _, chance in forced], self.index)
            if forced
            else EMPTY_TREE
        )
