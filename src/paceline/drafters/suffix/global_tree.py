"""The global suffix tree: texts of past requests, the oldest forgotten first.

In: a finished request's tokens. Out: a suffix tree over the latest requests, bounded in requests and tokens; arrays to
keep on
disk. Not here: the tree of a running request, drafting.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from paceline.drafters.common.tables import Arrays
from paceline.drafters.suffix.nodes import Ints
from paceline.drafters.suffix.tree import SuffixTree

LEAST_WASTE: Final = 4096
"""Tokens of forgotten texts that are left lying before the rest is moved."""


class SuffixCache:
    """The latest texts of one tenant in a suffix tree.

    Args:
        depth: of the tree.
        max_requests, max_tokens: most texts, and most tokens of all of them; of a longer text the end is kept.
        vocab_size: token ids that are read from a file must lie below.
    """

    def __init__(self, depth: int, max_requests: int, max_tokens: int, vocab_size: int) -> None:
        self.tree = SuffixTree(depth)
        self.max_requests, self.max_tokens, self.vocab_size = max_requests, max_tokens, vocab_size
        self.lengths: deque[int] = deque()
        self.first = 0

    @property
    def tokens(self) -> int:
        """Tokens that are kept."""
        return self.tree.size - self.first

    def add(self, tokens: Ints) -> None:
        """Keep a text, and forget the oldest ones beyond the limits; an empty text is nothing."""
        tokens = tokens[-self.max_tokens :] if self.max_tokens else tokens[:0]
        if not len(tokens) or not self.max_requests:
            return
        while self.lengths and (len(self.lengths) >= self.max_requests or self.tokens + len(tokens) > self.max_tokens):
            self.forget()
        if self.first > max(LEAST_WASTE, self.tokens):
            self.tree.shift(self.first)
            self.first = 0
        self.tree.insert(tokens)
        self.lengths.append(len(tokens))

    def forget(self) -> None:
        """Take the oldest text out of the tree."""
        length = self.lengths.popleft()
        self.tree.remove(self.first, self.first + length)
        self.first += length

    def to_arrays(self) -> Arrays:
        """The texts: `tokens` (n,) int32 and `lengths` (requests,) int64, oldest first."""
        return {
            "tokens": self.tree.arrays.text[self.first : self.tree.size].copy(),
            "lengths": np.array(self.lengths, np.int64),
        }

    def read_arrays(self, arrays: Arrays) -> None:
        """Add what `to_arrays` gave; raises ValueError if it does not fit."""
        tokens, lengths = arrays["tokens"], arrays["lengths"]
        for name, array, dtype in (("tokens", tokens, np.int32), ("lengths", lengths, np.int64)):
            if array.ndim != 1 or array.dtype != dtype:
                raise ValueError(
                    f"{name} must be one row of {np.dtype(dtype)}, got {array.dtype} of shape {array.shape}"
                )
        outside = len(lengths) > 0 and not 1 <= int(lengths.min()) <= int(lengths.max()) <= len(tokens)
        if outside or int(lengths.sum()) != len(tokens):
            raise ValueError(f"the lengths of {len(lengths)} texts do not add up to {len(tokens)} tokens")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"token ids must lie in 0..{self.vocab_size - 1}")
        for text in np.split(tokens, np.cumsum(lengths)[:-1]) if len(lengths) else ():
            self.add(text.astype(np.int32))
