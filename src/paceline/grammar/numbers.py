"""Numbers in JSON come to an end: without this they may have digits for ever, and a model that repeats itself writes
them until its tokens are used up.

A number is cut off by the mask: once it has `MOST` characters, tokens that would make it longer are forbidden, unless
nothing else is allowed (it has no digit behind its point yet, or the schema wants more). Zeros alone are forbidden even
then, where another digit may stand: a number above 0 could be 0.000 for ever. That the output is inside of a
number is read off the mask, too: nothing but what a number goes on with, or what may follow one in JSON, is allowed.
So texts, and what a schema lists, are never cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

MOST: Final = 40
"""Characters of a number: what Python and JavaScript write for any double or 64-bit integer has 27 at most, a signed
integer of 128 bits 40.
"""

SIGNS: Final = b"0123456789+-.eE"
BEHIND: Final = b" \t\n\r,]})<"
"""What may stand behind a number; a tag, where it is an argument between tags."""

Mask = npt.NDArray[np.bool_]


class Numbers:
    """What the tokens of a vocabulary do to a number that a text ends with.

    Args:
        written: bytes of each token; None or none for those that are no text.
    """

    def __init__(self, written: Sequence[bytes | None]) -> None:
        texts = [text or b"" for text in written]
        leads = [len(text) - len(text.lstrip(SIGNS)) for text in texts]
        self._leads, self._leads_v = leads, np.asarray(leads, np.int32)
        self._tails = [len(text) - len(text.rstrip(SIGNS)) for text in texts]
        self._sizes = [len(text) for text in texts]
        self._longest = max(leads, default=0)
        self._zeros_v = np.asarray([text != b"" and not text.strip(b"0") for text in texts], np.bool_)
        self._other_v = np.asarray([text[:1] != b"" and text[0] not in SIGNS + BEHIND for text in texts], np.bool_)

    def after(self, size: int, token: int) -> int:
        """Characters of the number at the end of a text that ended with `size` of them before the token."""
        if token >= len(self._sizes):
            return 0
        return size + self._sizes[token] if self._tails[token] == self._sizes[token] else self._tails[token]

    def too_long(self, size: int, token: int) -> bool:
        """Whether a token makes a number longer than `MOST`."""
        return token < len(self._leads) and 0 < self._leads[token] > MOST - size

    def cut(self, allowed_v: Mask, size: int) -> Mask:
        """What is allowed behind a number of `size` characters.

        Args:
            allowed_v: (v,) what the schema allows; padded ids may follow the vocabulary's.
        """
        if size + self._longest <= MOST:
            return allowed_v
        count = min(allowed_v.size, self._leads_v.size)
        inner, leads_v = allowed_v[:count], self._leads_v[:count]
        longer = inner & (leads_v > max(0, MOST - size))
        if not longer.any() or (inner & self._other_v[:count]).any():
            return allowed_v
        for left_v in (~longer, ~self._zeros_v[:count]):
            rest = allowed_v.copy()
            rest[:count] &= left_v
            if rest.any():
                return rest
        return allowed_v
