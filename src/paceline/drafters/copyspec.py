"""CopySpec: what followed the last tokens where they stood first in the history?

In: the text so far, prompt and output. Out: a chain of point proposals copied from it. Not here: text of other requests, a draft
model for where nothing is found (name one beside it: `"method": ["copyspec", "draft_model"]`).

All grams of `copyspec_gamma` tokens are hashed as they get a follower, so the gram at the end of the text never finds itself; the
first place of a gram is kept for good, and its tokens are compared before they are believed. Where the paper and its code leave
room: gamma is 3, as in all of its evaluation scripts (its decoder class alone says 5), and it stays so near the limit of tokens
(there the reference shortens it, to grams that nobody has indexed); a copy that reaches the end of the text goes on with what it
has copied itself, where the reference stops short.

Source: CopySpec: Speculative Copy-and-Paste (arXiv:2502.08923).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.checking import integer
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.chain_tree import chain_tree
from paceline.drafters.text import SingleDrafter
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget

LONGEST_GRAM: Final = 32
LONGEST_MATCH: Final = 32
"""Matches are followed back no further than this to judge their confidence."""

_MATCH: Final = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32)
_RIGHT: Final = (0.2, 0.36, 0.5, 0.6, 0.66, 0.7, 0.72, 0.76, 0.85, 0.86, 0.88, 0.91)
CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(1, LONGEST_MATCH + 1), _MATCH, _RIGHT).astype(np.float32)
)
"""By match length - 1: how often the copied token was the next token, on Python sources and Markdown (94,000 tokens, gamma 3; the
values for 1 and 2 are extrapolated)."""

_PRIME: Final = 1000003
_MASK: Final = 2**42 - 1


class _State:
    """The index of one sequence: hash of a gram -> position of its last token, for the first place that has a follower."""

    __slots__ = ("context", "done", "first")

    def __init__(self, context: Context, first: dict[int, int], done: int = 0) -> None:
        self.context, self.first, self.done = context, first, done


class CopySpecDrafter(SingleDrafter[_State]):
    """Drafts by copying what followed the last tokens where they stood first.

    Args:
        copyspec_gamma: how many tokens must match, 1..32.
        num_speculative_tokens: most tokens to copy at a time, within the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "copyspec"

    def __init__(self, args: DrafterArgs, *, copyspec_gamma: int = 3, num_speculative_tokens: int = 10) -> None:
        integer("copyspec_gamma", copyspec_gamma, 1, LONGEST_GRAM)
        super().__init__(args, num_speculative_tokens)
        self.gamma = copyspec_gamma

    def _begin(self, context: Context) -> _State:
        state = _State(context, {})
        self._index_at_once(state)
        return state

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, dict(state.first), state.done)

    def end(self, states: Sequence[_State]) -> None:
        for state in states:
            state.first = {}

    def _propose(self, state: _State, budget: Budget) -> TokenTree:
        text, steps = state.context.tokens, self._steps(budget)
        if state.done < len(text) - 1:
            self._catch_up(state)
        position = self._match(state)
        if position < 0:
            return EMPTY_TREE
        match = _match_length(text, position)
        tokens = text[position + 1 : position + 1 + steps]
        period = len(text) - 1 - position
        while len(tokens) < steps:
            tokens.append(tokens[len(tokens) - period])
        confidence = [CONFIDENCE[min(match + i, LONGEST_MATCH) - 1] for i in range(steps)]
        return chain_tree(tokens, confidence, self.index)

    def _match(self, state: _State) -> int:
        """Position of the last token of the first place of the text's last `gamma` tokens, or -1."""
        text, value = state.context.tokens, 0
        if len(text) <= self.gamma:
            return -1
        tail = text[-self.gamma :]
        for token in tail:
            value = (value * _PRIME + token + 1) & _MASK
        position = state.first.get(value, -1)
        return position if position >= 0 and text[position + 1 - self.gamma : position + 1] == tail else -1

    def _catch_up(self, state: _State) -> None:
        """Index the grams that have got a follower since the last time."""
        text, first, gamma = state.context.tokens, state.first, self.gamma
        last = len(text) - 1
        for end in range(max(state.done, gamma - 1), last):
            value = 0
            for token in text[end + 1 - gamma : end + 1]:
                value = (value * _PRIME + token + 1) & _MASK
            first.setdefault(value, end)
        state.done = max(state.done, last)

    def _index_at_once(self, state: _State) -> None:
        """The same for a whole prompt, in NumPy."""
        text_t = np.asarray(state.context.tokens, np.uint64)
        last, gamma = len(text_t) - 1, self.gamma
        grams = last - gamma + 1
        if grams > 0:
            value_t = np.zeros(grams, np.uint64)
            for offset in range(gamma):
                value_t = (value_t * np.uint64(_PRIME) + text_t[offset : offset + grams] + np.uint64(1)) & np.uint64(_MASK)
            state.first = dict(zip(value_t[::-1].tolist(), range(last - 1, gamma - 2, -1), strict=True))
        state.done = max(last, 0)


def _match_length(text: Sequence[int], position: int) -> int:
    """How many tokens before and with `position` equal those at the end of the text, up to LONGEST_MATCH."""
    end, length = len(text) - 1, 1
    while length < LONGEST_MATCH and position >= length and text[position - length] == text[end - length]:
        length += 1
    return length
