"""Prompt lookup: where did the last few tokens stand before, and what came after them?

In: the text so far. Out: a chain of point proposals copied from it. Not here: text of other requests, any model.

The longest match of the last n tokens counts, n from `prompt_lookup_max` down to `prompt_lookup_min`, and of several places the
latest: on code and prose it is right more often than the earliest (1.31 against 1.29 tokens per step at n = 2..5, 1.44 against
1.38 at n = 1..5). A match that touches the end of the text goes on copying what it has copied itself, so that periodic text is
continued periodically. Every n-gram is indexed once, when it gets its follower; a step costs microseconds however long the text.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); LLMA (arXiv:2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.checking import integer
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.chain_tree import chain_tree
from paceline.drafters.ngram_table import LONGEST_MATCH, Ints, Longs, draft, empty, index
from paceline.drafters.text import SingleDrafter
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget

_MATCH: Final = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_RIGHT: Final = (0.19, 0.39, 0.49, 0.59, 0.63, 0.74, 0.83, 0.90, 0.94, 0.97)
CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(1, LONGEST_MATCH + 1), _MATCH, _RIGHT).astype(np.float32)
)
"""By match length - 1: how often the token after a match was the next token, on Python sources and Markdown (50,000 tokens)."""

_SURE: Final = CONFIDENCE + CONFIDENCE[-1:] * 1024
"""The same for every token of a draft: each copied one lengthens the match."""


class _State:
    """The index of one sequence: its text as far as it was read, and where its n-grams stood last."""

    __slots__ = ("context", "done", "size", "table", "text")

    def __init__(self, context: Context, text: Ints, table: Longs) -> None:
        self.context, self.text, self.table = context, text, table
        self.size = self.done = 0  # tokens read; tokens whose n-grams are in the table


class NgramDrafter(SingleDrafter[_State]):
    """Drafts by copying what followed the last tokens where they stood before.

    Args:
        prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that are looked up, vLLM's names; 1 and 5 by default.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "ngram"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        highest = max(5, prompt_lookup_min or 1) if prompt_lookup_max is None else prompt_lookup_max
        lowest = 1 if prompt_lookup_min is None else prompt_lookup_min
        integer("prompt_lookup_max", highest, 1, LONGEST_MATCH)
        integer("prompt_lookup_min", lowest, 1, highest)
        super().__init__(args, num_speculative_tokens)
        self.lengths, self._span = range(lowest, highest + 1), (lowest, highest)

    def _begin(self, context: Context) -> _State:
        state = _State(context, np.zeros(0, np.int32), empty(0))
        self._read(state)
        index(state.text, (0, state.size - 1), self._span, state.table)
        state.done = max(state.size - 1, 0)
        return state

    def fork(self, state: _State, context: Context) -> _State:
        other = _State(context, state.text.copy(), state.table.copy())
        other.size, other.done = state.size, state.done
        return other

    def end(self, states: Sequence[_State]) -> None:
        for state in states:
            state.text, state.table = state.text[:0], empty(0)

    def _propose(self, state: _State, budget: Budget) -> TokenTree:
        self._read(state)
        found, first = np.empty(steps := self._steps(budget), np.int64), state.done
        state.done = max(state.size - 1, 0)
        match = draft(state.text, (first, state.size), self._span, state.table, found)
        return chain_tree(found.tolist(), _SURE[match - 1 : match - 1 + steps], self.index) if match else EMPTY_TREE

    def _read(self, state: _State) -> None:
        """Take over the new tokens of the text; make room for it and its n-grams."""
        tokens, size = state.context.tokens, state.size
        count = len(tokens)
        if count > len(state.text):
            text = np.zeros(max(2 * count, 256), np.int32)
            text[:size] = state.text[:size]
            state.text, state.table = text, empty(len(text) * len(self.lengths))
            state.done = 0
        if count > size:
            state.text[size:count] = tokens[size:]
            state.size = count
