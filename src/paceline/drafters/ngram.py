"""Prompt lookup: where did the last few tokens stand before, and what came after them?

In: the text so far. Out: a chain of point proposals copied from it. Not here: text of other requests, any model.

The longest match of the last n tokens counts, n from `prompt_lookup_max` down to `prompt_lookup_min`, and of several places the
latest: on code and prose it is right more often than the earliest (1.31 against 1.29 tokens per step at n = 2..5, 1.44 against
1.38 at n = 1..5). A match that touches the end of the text goes on copying what it has copied itself, so that periodic text is
continued periodically. Every n-gram is hashed once, when it gets its follower; a step costs microseconds however long the text.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); LLMA (arXiv:2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.checking import need
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.chain_tree import chain_tree
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

LONGEST_MATCH: Final = 32
"""Matches are followed back no further than this to judge their confidence."""

_MATCH: Final = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_RIGHT: Final = (0.19, 0.39, 0.49, 0.59, 0.63, 0.74, 0.83, 0.90, 0.94, 0.97)
CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(1, LONGEST_MATCH + 1), _MATCH, _RIGHT).astype(np.float32)
)
"""By match length - 1: how often the token after a match was the next token, on Python sources and Markdown (50,000 tokens)."""

_PRIME: Final = 1000003
_MASK: Final = 2**42 - 1
"""Hashes are as short as the number of texts' places allows: Python multiplies short integers faster, and matches are compared."""


class _State:
    """The index of one sequence: hash of an n-gram -> position of its last token, for the latest place that has a follower."""

    __slots__ = ("context", "done", "latest")

    def __init__(self, context: Context, latest: dict[int, dict[int, int]], done: int = 0) -> None:
        self.context, self.latest, self.done = context, latest, done


class NgramDrafter:
    """Drafts by copying what followed the last tokens where they stood before.

    Args:
        prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that are looked up, vLLM's names; 1 and 5 by default.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "ngram"
    catches_up = True
    taps: Sequence[int] = ()

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
        need(_whole(highest) and 1 <= highest <= LONGEST_MATCH, "prompt_lookup_max", f"be in 1..{LONGEST_MATCH}", highest)
        need(_whole(lowest) and 1 <= lowest <= highest, "prompt_lookup_min", f"be in 1..prompt_lookup_max={highest}", lowest)
        limit = num_speculative_tokens
        need(limit is None or (_whole(limit) and limit >= 0), "num_speculative_tokens", "be 0 or more", limit)
        self.index, self.lengths, self.limit = args.index, range(lowest, highest + 1), limit

    def begin(self, contexts: Sequence[Context]) -> list[_State]:
        states = [_State(context, {n: {} for n in self.lengths}) for context in contexts]
        for state in states:
            self._index_at_once(state)
        return states

    def propose(self, states: Sequence[_State], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [self._propose_one(state, budget) for state, budget in zip(states, budgets, strict=True)]

    def observe(
        self, states: Sequence[_State], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """Nothing: `propose` reads what is new in the text."""

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, {n: dict(table) for n, table in state.latest.items()}, state.done)

    def end(self, states: Sequence[_State]) -> None:
        for state in states:
            state.latest = {}

    def _propose_one(self, state: _State, budget: Budget) -> TokenTree:
        steps = min(budget.nodes, budget.depth)
        steps = steps if self.limit is None else min(steps, self.limit)
        if steps <= 0:
            return EMPTY_TREE
        text = state.context.tokens
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
        """Position of the last token of the latest, longest earlier match of the text's end, or -1.

        Where n tokens have stood before, n - 1 have: the first length that is missing ends the search.
        """
        text, value, found = state.context.tokens, 0, []
        for n in range(1, min(self.lengths.stop - 1, len(text)) + 1):
            value = (value * _PRIME + text[-n] + 1) & _MASK
            if n >= self.lengths.start:
                position = state.latest[n].get(value, -1)
                if position < 0:
                    break
                found.append(position)
        for n, position in zip(range(self.lengths.start + len(found) - 1, 0, -1), reversed(found), strict=False):
            if text[position + 1 - n : position + 1] == text[-n:]:
                return position
        return -1

    def _catch_up(self, state: _State) -> None:
        """Index the n-grams that have got a follower since the last time."""
        text, tables, shorter = state.context.tokens, list(state.latest.values()), self.lengths.start - 1
        last = len(text) - 1
        for end in range(state.done, last):
            value, at = 0, end
            while at > end - shorter and at >= 0:
                value = (value * _PRIME + text[at] + 1) & _MASK
                at -= 1
            for table in tables:
                if at < 0:
                    break
                value = (value * _PRIME + text[at] + 1) & _MASK
                table[value] = end
                at -= 1
        state.done = max(state.done, last)

    def _index_at_once(self, state: _State) -> None:
        """The same for a whole prompt, in NumPy."""
        text_t = np.asarray(state.context.tokens, np.uint64)
        last = len(text_t) - 1
        value_t = np.zeros(max(last, 0), np.uint64)
        for n in range(1, min(self.lengths.stop - 1, last) + 1):
            value_t = value_t[1:] if n > 1 else value_t
            value_t = (value_t * np.uint64(_PRIME) + text_t[: last + 1 - n] + np.uint64(1)) & np.uint64(_MASK)
            if n in self.lengths:
                state.latest[n] = dict(zip(value_t.tolist(), range(n - 1, last), strict=True))
        state.done = max(last, 0)


def _match_length(text: Sequence[int], position: int) -> int:
    """How many tokens before and with `position` equal those at the end of the text, up to LONGEST_MATCH."""
    end, length = len(text) - 1, 1
    while length < LONGEST_MATCH and position >= length and text[position - length] == text[end - length]:
        length += 1
    return length


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
