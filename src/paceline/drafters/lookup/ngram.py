"""Prompt lookup: where did the last few tokens occur before, and what came after them?

The longest match of the last n tokens counts, n from `prompt_lookup_max` down to `prompt_lookup_min`, and of several
positions the latest: on code and prose it is right more often than the earliest (1.31 against 1.29 tokens per step at n
= 2..5, 1.44 against 1.38 at n = 1..5). A match that touches the end of the text goes on copying what it has copied
itself, so that periodic text is continued periodically. Every n-gram is indexed once, when it gets its follower; a step
costs microseconds however long the text.

What the encoder of an encoder-decoder model has read counts as text before the prompt.

The index is shared with other drafters that copy from the text: where each n-gram occurred last, or first. The table is
open-addressed. A slot holds the position of an n-gram's last token and its length, and the text itself says which
n-gram that is: so n-grams with equal hashes are told apart.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); LLMA (arXiv:2304.04487).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SingleDrafter
from paceline.drafters.common.chains import chain_tree
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import compiled, integer, part_of_compiled

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Pair = tuple[int, int]

LONGEST_MATCH: Final = 32
"""Matches are followed back no further than this to estimate their confidence."""

_SHIFT: Final = 6
_LENGTH: Final = 63
_PRIME: Final = np.uint64(1000003)
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_HIGH: Final = np.uint64(32)


def empty(entries: int) -> Longs:
    """A table with room for so many n-grams, at most half full."""
    return np.full(1 << max(2 * entries - 1, 1).bit_length(), -1, np.int64)


@part_of_compiled
def _slot_of(text: Ints, end: int, n: int, value: np.uint64, table: Longs) -> np.int64:
    """The slot that holds the n-gram which ends at `end`, or the free one where it belongs."""
    mask = len(table) - 1
    slot = np.int64((value * _MIX) >> _HIGH) & mask
    while table[slot] >= 0:
        if table[slot] & _LENGTH == n:
            position, i = table[slot] >> _SHIFT, 0
            while i < n and text[position - i] == text[end - i]:
                i += 1
            if i == n:
                return slot
        slot = (slot + 1) & mask
    return slot


@compiled
def index_ngrams(text: Ints, span: Pair, lengths: Pair, keep: bool, table: Longs) -> None:
    """Remember the n-grams of lengths low..high whose last token is at first..stop - 1, with their last position or, to
    `keep`, their first.
    """
    low, high = lengths
    for end in range(span[0], span[1]):
        value = np.uint64(0)
        for n in range(1, min(high, end + 1) + 1):
            value = value * _PRIME + np.uint64(text[end + 1 - n]) + np.uint64(1)
            if n >= low:
                slot = _slot_of(text, end, n, value, table)
                if table[slot] < 0 or not keep:
                    table[slot] = (end << _SHIFT) | n


@compiled
def longest_match(text: Ints, size: int, lengths: Pair, table: Longs) -> int:
    """Where the last token of the longest earlier match of the end of text[:size] is, or -1.

    Where n tokens occurred before, n - 1 did: the first length that is missing ends the search.
    """
    low, high = lengths
    place, value = -1, np.uint64(0)
    for n in range(1, min(high, size) + 1):
        value = value * _PRIME + np.uint64(text[size - n]) + np.uint64(1)
        if n >= low:
            entry = table[_slot_of(text, size - 1, n, value, table)]
            if entry < 0:
                break
            place = entry >> _SHIFT
    return place


@compiled
def draft(text: Ints, span: Pair, lengths: Pair, keep: bool, table: Longs, out: Longs) -> int:  # noqa: PLR0917 - compiled code has no keyword arguments
    """Index what got a follower, then copy what followed the best match.

    Args:
        span: tokens that were indexed before; tokens of the text.
        lengths: least and greatest n. keep: copy from the first position, not the last.
        out: (steps,) the copied tokens; a match that touches the end goes on copying what it has copied itself.
    Returns:
        Tokens that match, at most LONGEST_MATCH; 0 where nothing does.
    """
    first, size = span
    index_ngrams(text, (first, size - 1), lengths, keep, table)
    position = longest_match(text, size, lengths, table)
    if position < 0:
        return 0
    for i in range(len(out)):
        at = position + 1 + i
        out[i] = text[at] if at < size else out[at - size]
    match = 1
    while match < LONGEST_MATCH and position >= match and text[position - match] == text[size - 1 - match]:
        match += 1
    return match


class Copies:
    """The index of one sequence: its text as far as it was read, and where its n-grams occurred.

    Args:
        lengths: least and greatest n. keep: n-grams keep their first position.
    """

    __slots__ = ("_done", "_size", "_table", "_text", "context", "keep", "lengths")

    def __init__(self, context: Context, lengths: Pair, *, keep: bool = False) -> None:
        self.context, self.lengths, self.keep = context, lengths, keep
        self._text, self._table = np.zeros(0, np.int32), empty(0)
        self._size = self._done = 0  # tokens read; tokens whose n-grams are in the table
        self._read()
        index_ngrams(self._text, (0, self._size - 1), lengths, keep, self._table)
        self._done = max(self._size - 1, 0)

    def draft(self, steps: int) -> tuple[list[int], int]:
        """So many tokens that followed the best match, and how many tokens match, at most LONGEST_MATCH.

        0 where nothing does.
        """
        self._read()
        drafted, first = np.empty(steps, np.int64), self._done
        self._done = max(self._size - 1, 0)
        match = draft(self._text, (first, self._size), self.lengths, self.keep, self._table, drafted)
        return drafted.tolist(), match

    def fork(self, context: Context) -> Copies:
        """The same for a copy of the sequence."""
        other = Copies.__new__(Copies)
        other.context, other.lengths, other.keep = context, self.lengths, self.keep
        other._text, other._table = self._text.copy(), self._table.copy()
        other._size, other._done = self._size, self._done
        return other

    def _read(self) -> None:
        """Take over the new tokens of the text, behind its source; make room for it and its n-grams."""
        count, size, (low, high) = self.context.length_with_source, self._size, self.lengths
        if count > len(self._text):
            text = np.zeros(max(2 * count, 256), np.int32)
            text[:size] = self._text[:size]
            self._text, self._table = text, empty(len(text) * (high - low + 1))
            self._done = 0
        if count > size:
            self._text[size:count] = self.context.with_source(size)
            self._size = count


class CopyDrafter(SingleDrafter[Copies]):
    """Base of drafters that copy what followed the text's last tokens where they occurred before.

    Attributes:
        lengths: least and greatest number of tokens that are looked up. keep_first: at their first position, not the
            last.
        sure: by match length - 1, the chance of the token that followed; each copied token lengthens the match.
    """

    keep_first: bool = False
    sure: Sequence[float]

    def __init__(self, args: DrafterArgs, lengths: Pair, num_speculative_tokens: int | None) -> None:
        super().__init__(args, num_speculative_tokens)
        self.lengths = lengths

    def _begin(self, context: Context) -> Copies:
        return Copies(context, self.lengths, keep=self.keep_first)

    def fork(self, state: Copies, context: Context) -> Copies:
        return state.fork(context)

    def _propose(self, state: Copies, budget: Budget) -> TokenTree:
        tokens, match = state.draft(steps := self._steps(budget))
        if not match:
            return EMPTY_TREE
        chances = [self.sure[min(i, LONGEST_MATCH) - 1] for i in range(match, match + steps)]
        return chain_tree(tokens, chances, self.index)


_MATCH: Final = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_RIGHT: Final = (0.19, 0.39, 0.49, 0.59, 0.63, 0.74, 0.83, 0.90, 0.94, 0.97)
MATCH_CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(1, LONGEST_MATCH + 1), _MATCH, _RIGHT).astype(np.float32)
)
"""By match length - 1: how often the token after a match was the next token, on Python sources and Markdown (50,000
tokens).
"""


class NgramDrafter(CopyDrafter):
    """Drafts by copying what followed the last tokens where they occurred before.

    Args:
        prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that are looked up, vLLM's names; 1 and 5 by
            default.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name, sure = "ngram", MATCH_CONFIDENCE

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
        super().__init__(args, (lowest, highest), num_speculative_tokens)
