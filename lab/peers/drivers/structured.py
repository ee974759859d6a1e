"""What drivers of structured-output libraries share: a schema is compiled, texts are followed token by token, and masks
are handed out for a model in another process.

The open message holds `tokens` (hexadecimal bytes of each token, empty for special ones) and `ends` (end tokens).
Seconds are of the processor, all threads together, so that what else runs on the machine counts little. A token's
seconds are those of finding what may come next, forbidding the rest in a row of float32 logits by the library's own
function (NumPy where it has none without a compiler), and taking the token.
"""

from base64 import b64encode
from collections.abc import Callable
from time import process_time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
FORBIDDEN = np.float32(-np.inf)


class Matcher(Protocol):
    """A text so far, under one schema."""

    def mask(self, row_v: Row) -> None:
        """Set the logits of tokens that must not come next to minus infinity."""

    def take(self, token: int) -> None:
        """Append a token that `mask` left."""


class Library(Protocol):
    """What a driver module provides.

    Attributes:
        version, settings: as in `wire.Driver`.
    """

    version: str
    settings: dict[str, Any]

    def compile(self, schema: str) -> Callable[[], Matcher]:
        """What starts texts under a schema, given as JSON; any exception says that it cannot be used."""


class StructuredDriver:
    """Answers the wire for one library.

    Args:
        library: made from the open message.
        request: the open message.
    """

    def __init__(self, library: Library, request: dict[str, Any]) -> None:
        self.version, self.settings = library.version, library.settings
        self._library, self._ends = library, list(request["ends"])
        self._row = np.zeros(len(request["tokens"]), np.float32)
        self._start: Callable[[], Matcher] | None = None
        self._matcher: Matcher | None = None

    def compile(self, schema: str) -> dict[str, Any]:
        """Compile, and find the first mask: `seconds` of both, `first` of the mask alone, `error` or None."""
        self._start, begin = None, process_time()
        try:
            start = self._library.compile(schema)
            made = process_time()
            start().mask(self._empty_row())
        except Exception as error:
            return {
                "seconds": None,
                "first": None,
                "error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300],
            }
        self._start, end = start, process_time()
        return {"seconds": end - begin, "first": end - made, "error": None}

    def follow(self, texts: list[list[int]]) -> dict[str, Any]:
        """Whether the compiled schema lets each text through, to its end; `seconds` of each token that was taken."""
        seconds: list[float] = []
        return {"accepted": [self._accepts(text, seconds) for text in texts], "seconds": seconds}

    def _accepts(self, text: list[int], seconds: list[float]) -> bool:
        assert self._start is not None
        matcher = self._start()
        for token in text:
            row, begin = self._empty_row(), process_time()
            matcher.mask(row)
            if row[token] == FORBIDDEN:
                return False
            matcher.take(token)
            seconds.append(process_time() - begin)
        row = self._empty_row()
        matcher.mask(row)
        return bool((row[self._ends] != FORBIDDEN).any())

    def begin(self) -> dict[str, Any]:
        """Start a text that a model writes."""
        assert self._start is not None
        self._matcher = self._start()
        return {}

    def allowed(self, taken: list[int]) -> dict[str, Any]:
        """What may follow once these tokens are taken, too: `mask`, a bit a token, lowest first, in base 64."""
        assert self._matcher is not None
        for token in taken:
            self._matcher.take(token)
        row = self._empty_row()
        self._matcher.mask(row)
        return {"mask": b64encode(np.packbits(row != FORBIDDEN, bitorder="little").tobytes()).decode()}

    def _empty_row(self) -> Row:
        self._row.fill(0)
        return self._row


def token_bytes(request: dict[str, Any]) -> list[bytes]:
    """Of the open message."""
    return [bytes.fromhex(text) for text in request["tokens"]]


def forbid(row_v: Row, words: npt.NDArray[np.int32]) -> None:
    """Apply a mask of 32 tokens a word, lowest bit first."""
    row_v[np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row_v)] == 0] = FORBIDDEN
