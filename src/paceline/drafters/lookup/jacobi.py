"""Jacobi decoding: the target's own answers to a wrong guess are the next guess.

The guess for the next tokens is scored as a chain. Where it fails, the rows behind the failure still say what the
target would write there if the guess had been right; these answers, moved on by the tokens that were committed, are the
next guess. Each step is one Jacobi iteration of the system y_i = argmax p(. | y_<i), whose only fixed point is the
greedy text, so at least one more token is right after every step. A guess begins as tokens drawn from the text.

Source: Accelerating transformer inference for translation via parallel decoding (arXiv:2305.10427); lookahead decoding
(arXiv:2402.02057), of which this is the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from paceline.drafters.base import Context
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_state import along
from paceline.tree import Budget, Scores, TokenTree, Verdict

FIRST: Final = 0.3
AFTER: Final = 0.6
"""Confidence of the first token, and of the others after a right one; the controller calibrates both."""


class JacobiState:
    """One sequence's guess: tokens behind the first `end` of the text."""

    __slots__ = ("context", "end", "guess", "random")

    def __init__(self, context: Context, guess: Sequence[int] = (), end: int = 0) -> None:
        self.context, self.guess, self.end, self.random = context, list(guess), end, Random(context.seed)


class JacobiDrafter(SingleDrafter[JacobiState]):
    """Drafts with the target's answers to its last guess.

    Args:
        num_speculative_tokens: length of the guess; None leaves it to the budget.
    Raises:
        ConfigError: a negative length.
    """

    name = "jacobi"
    catches_up = True
    keeps_trajectory = True

    def _begin(self, context: Context) -> JacobiState:
        return JacobiState(context)

    def _propose(self, state: JacobiState, budget: Budget) -> TokenTree:
        steps = self._steps(budget)
        if state.end != len(state.context.tokens):  # it is about another position in the text
            state.guess, state.end = [], len(state.context.tokens)
        missing = steps - len(state.guess)
        if missing > 0:
            state.guess += state.random.choices(state.context.tokens, k=missing)
        return chain_tree(state.guess[:steps], [FIRST, *[AFTER] * (steps - 1)], self.index)

    def observe(
        self,
        states: Sequence[JacobiState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            current, state.end = state.end + len(verdict.tokens) == len(state.context.tokens), len(state.context.tokens)
            path = along(tree.tokens.tolist(), tree.parents.tolist(), state.guess) if current else []
            nodes = path[len(verdict.path) :]
            if scores is None or not nodes:
                state.guess = []
                continue
            rows = scores.of(i)[[node + 1 for node in nodes], : self.vocab_size]
            state.guess = rows.argmax(-1).tolist()

    def fork(self, state: JacobiState, context: Context) -> JacobiState:
        return JacobiState(context, state.guess, state.end)
