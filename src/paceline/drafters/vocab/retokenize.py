"""One text in the tokens of two vocabularies: the target's tokens, as they come, in those of a draft model.

In: the target's tokens of a sequence. Out: the draft's tokens of the same text. Not here: which tokens both share
(`vocabularies`), drafting.

A text is cut into pieces at places that depend on nothing but the text before them: before a single space that follows
LEAST characters or more, or after MOST. A piece that is closed is encoded once; the open one, at most MOST characters,
is encoded again whenever it grows. So a prompt is encoded once, every step looks back a bounded way, and what comes out
does not depend on the steps in which the text came in. Bytes that do not end a character yet wait. Special tokens
become the draft's own of the same name, others are left out.

Where tokenizers begin every text with a space of their own, pieces are handed over without theirs; which do is found
out by trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from paceline.models.loading import token_bytes

if TYPE_CHECKING:
    from paceline.models.loading import Tokenizer

LEAST: Final = 64
MOST: Final = 256
"""Characters of a piece."""

INCOMPLETE: Final = 3
"""Most bytes of a character that lacks its end."""


def encoder_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Encodes a text that continues another one, without special tokens."""

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def spaceless(text: str) -> list[int]:
        return plain(text[1:] if text[:1] == " " and text[1:2] not in ("", " ") else text)

    whole, first = plain("one two"), plain("one")
    if whole != first + plain(" two") and whole == first + plain("two"):
        return spaceless
    return plain


def whole_characters(data: bytes) -> int:
    """How many bytes from the start hold no character that lacks its end."""
    for back in range(1, min(INCOMPLETE, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # begins a character of 2 to 4 bytes
            wanted = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if wanted > back else len(data)
        if byte < 0x80:
            break
    return len(data)


def cut_of(text: str, start: int = 0) -> int | None:
    """Where the first piece of an open text ends, None where it does not yet; `start`: characters already looked at."""
    for at in range(max(start, LEAST), min(len(text) - 1, MOST)):
        if text[at] == " " and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return MOST if len(text) > MOST else None


class Retokenizer:
    """From one vocabulary to another; serves many sequences.

    Args:
        specials: ids of special tokens -> ids of the other vocabulary.
    Attributes:
        prefix: the start token that the other tokenizer puts before a text, if any; the source's own takes its place.
    """

    def __init__(self, source: Tokenizer, other: Tokenizer, specials: Mapping[int, int]) -> None:
        self.written, self.specials = token_bytes(source), specials
        self.encode = encoder_of(other)
        start = other.encode("", add_special_tokens=True)
        self.prefix = start[:1] if start and start[0] == other.bos_id else []

    def open(self) -> Reading:
        """A text of which nothing was read."""
        return Reading(self)


class Reading:
    """One text as it is read.

    Attributes:
        done: the other vocabulary's tokens of what is closed; they do not change.
        tail: text of the open piece. pending: bytes behind it that do not end a character.
        read: tokens of the source that were read.
    """

    __slots__ = ("_by", "_open", "done", "pending", "read", "tail")

    def __init__(self, by: Retokenizer) -> None:
        self._by = by
        self.done, self.tail, self.pending, self.read = list[int](), "", b"", 0
        self._open: list[int] | None = []

    def copy(self) -> Reading:
        """The same text, to be read on another way."""
        other = Reading(self._by)
        other.done, other.tail, other.pending, other.read = list(self.done), self.tail, self.pending, self.read
        other._open = None
        return other

    @property
    def open(self) -> list[int]:
        """The other vocabulary's tokens of the open piece."""
        if self._open is None:
            self._open = self._by.encode(self.tail) if self.tail else []
        return self._open

    def follow(self, tokens: Sequence[int]) -> None:
        """Read what `tokens`, the whole text, has beyond what was read."""
        written, specials, prefix = self._by.written, self._by.specials, self._by.prefix
        if not self.read and tokens and [specials.get(tokens[0])] != prefix:
            self.done = list(prefix)
        for token in tokens[self.read :]:
            data = written[token] if token < len(written) else None
            if data is not None:
                self.pending += data
                continue
            self._take(len(self.pending))
            self._close(len(self.tail))
            if token in specials:
                self.done.append(specials[token])
        self.read = len(tokens)
        self._take(whole_characters(self.pending))

    def _take(self, count: int) -> None:
        """Make text of the first bytes that wait."""
        if count:
            start = len(self.tail)
            self.tail, self.pending = self.tail + self.pending[:count].decode("utf-8", "replace"), self.pending[count:]
            self._open = None
            while (cut := cut_of(self.tail, start - 1)) is not None:
                self._close(cut)
                start = 0

    def _close(self, count: int) -> None:
        """Close the first characters of the open piece."""
        if count:
            self.done += self._by.encode(self.tail[:count])
            self.tail, self._open = self.tail[count:], None
