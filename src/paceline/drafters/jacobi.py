"""Jacobi decoding: the target's own answers to a wrong guess are the next guess.

In: the text, and the logits at every node of the last step. Out: a chain of point proposals. Not here: any table, any second model.

The guess for the next tokens is scored as a chain. Where it fails, the rows behind the failure still say what the target would
write there if the guess had been right; these answers, moved on by the tokens that were committed, are the next guess. Each step
is one Jacobi iteration of the system y_i = argmax p(. | y_<i), whose only fixed point is the greedy text, so at least one more
token is right after every step. A guess begins as tokens drawn from the text.

Source: Accelerating transformer inference for translation via parallel decoding (arXiv:2305.10427); lookahead decoding
(arXiv:2402.02057), of which this is the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from paceline.checking import integer
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.chain_tree import chain_tree
from paceline.tree.token_tree import EMPTY_TREE, ROOT, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

FIRST: Final = 0.3
AFTER: Final = 0.6
"""Confidence of the first token, and of the others after a right one; the controller calibrates both."""


class _State:
    """One sequence's guess: tokens after the root."""

    __slots__ = ("context", "guess", "random")

    def __init__(self, context: Context, guess: Sequence[int], random: Random) -> None:
        self.context, self.guess, self.random = context, list(guess), random


class JacobiDrafter:
    """Drafts with the target's answers to its last guess.

    Args:
        num_speculative_tokens: length of the guess; None leaves it to the budget.
    Raises:
        ConfigError: a negative length.
    """

    name = "jacobi"
    keeps_trajectory = True
    taps: Sequence[int] = ()

    def __init__(self, args: DrafterArgs, *, num_speculative_tokens: int | None = None) -> None:
        if num_speculative_tokens is not None:
            integer("num_speculative_tokens", num_speculative_tokens, 0)
        self.index, self.limit, self.vocab_size = args.index, num_speculative_tokens, args.vocab_size

    def begin(self, contexts: Sequence[Context]) -> list[_State]:
        return [_State(context, (), Random(context.seed)) for context in contexts]

    def propose(self, states: Sequence[_State], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [self._propose_one(state, budget) for state, budget in zip(states, budgets, strict=True)]

    def _propose_one(self, state: _State, budget: Budget) -> TokenTree:
        steps = min(budget.nodes, budget.depth)
        steps = steps if self.limit is None else min(steps, self.limit)
        if steps <= 0:
            return EMPTY_TREE
        missing = steps - len(state.guess)
        if missing > 0:
            state.guess += state.random.choices(state.context.tokens, k=missing)
        return chain_tree(state.guess[:steps], [FIRST, *[AFTER] * (steps - 1)], self.index)

    def observe(
        self, states: Sequence[_State], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            nodes = own_path(tree, state.guess)[len(verdict.path) :] if scores is not None else []
            if scores is None or not nodes:
                state.guess = []
                continue
            rows = scores.of(i)[[node + 1 for node in nodes], : self.vocab_size]
            state.guess = rows.argmax(-1).tolist()

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, state.guess, Random(context.seed))

    def end(self, states: Sequence[_State]) -> None:
        """Nothing is held."""


def own_path(tree: TokenTree, tokens: Sequence[int]) -> list[int]:
    """The nodes of a (merged) tree along these tokens from the root, as far as they are there."""
    at = {key: node for node, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    found, node = [], ROOT
    for token in tokens:
        following = at.get((node, token))
        if following is None:
            break
        found.append(following)
        node = following
    return found
