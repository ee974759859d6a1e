"""Texts whose characters remember, through whatever a template does with them, that they came from outside.

A prompt is made of a chat template's own marks and of texts that others wrote; only the former may be special tokens.
In a `Tracked` text every character that a token may be spelled with is replaced by a stand-in: the same character
65,536 * 15 code points further on, in a plane for private use. Stand-ins go through cuts, joins, formats and JSON like
any other character, and what is printed in the end shows which is whose. Tests and methods of a `Tracked` text see it
as it was written, so that a template takes the same way as for the text itself. White space, quotes, backslashes and
control characters are left as they are, since JSON and templates treat them in a way of their own.

What knows nothing of this (methods that are not here) works on the stand-ins: it may find nothing, but loses none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

PLANE: Final = 0x0F
OFFSET: Final = PLANE << 16
NEUTRAL: Final = (*map(chr, range(33)), '"', "\\", "\x7f")
RUN: Final = re.compile(r'[\U000f0000-\U000fffff][\x00-\x20"\\\x7f\U00010000-\U0010ffff]*')
"""From a stand-in to the next character that a template wrote."""

BLANK: Final = "\x7f"
"""In place of what came from outside; no token is spelled with it."""

AWAY: Final = bytes(byte or PLANE for byte in range(256))
BACK: Final = bytes(0 if byte == PLANE else byte for byte in range(256))


def replaced(text: str) -> str:
    """The text in stand-ins."""
    wide = bytearray(text.encode("utf-32-le", "surrogatepass"))
    wide[2::4] = wide[2::4].translate(AWAY)
    plain_text = wide.decode("utf-32-le")
    for char in NEUTRAL:
        if char in text:
            plain_text = plain_text.replace(chr(ord(char) + OFFSET), char)
    return plain_text


def restored(text: str) -> str:
    """A text as it was, its stand-ins replaced by what they stand for."""
    if text.isascii():
        return text
    wide = bytearray(text.encode("utf-32-le", "surrogatepass"))
    wide[2::4] = wide[2::4].translate(BACK)
    return wide.decode("utf-32-le", "surrogatepass")


def blanked(text: str) -> str:
    """What is not from outside, at its place."""
    return RUN.sub(lambda match: BLANK * len(match[0]), text)


class Tracked(str):
    """A text in stand-ins that is tested and cut as the text it stands for.

    Args:
        text: in stand-ins.
        plain: what it stands for; None works it out, where it is asked for.
    """

    __slots__ = ("_known",)
    _known: str | None

    def __new__(cls, text: str, plain: str | None = None) -> Tracked:
        tracked_text = super().__new__(cls, text)
        tracked_text._known = plain
        return tracked_text

    @property
    def _plain(self) -> str:
        if self._known is None:
            self._known = restored(str.__str__(self))
        return self._known

    @classmethod
    def of(cls, text: str) -> str:
        """A text from outside."""
        return cls(replaced(text), text) if text and not text.isspace() else text

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return replaced(repr(self._plain))

    def __hash__(self) -> int:
        return hash(self._plain)

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == _plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._plain != _plain(other))

    def __lt__(self, other: str) -> bool:
        return self._plain < str(_plain(other))

    def __gt__(self, other: str) -> bool:
        return self._plain > str(_plain(other))

    def __le__(self, other: str) -> bool:
        return self._plain <= str(_plain(other))

    def __ge__(self, other: str) -> bool:
        return self._plain >= str(_plain(other))

    def __contains__(self, part: object) -> bool:
        return _plain(part) in self._plain

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: Any) -> Tracked:
        return Tracked(super().__getitem__(key), self._plain[key])

    def __add__(self, other: str) -> Tracked:
        return Tracked(super().__add__(other))

    def __radd__(self, other: str) -> Tracked:
        return Tracked(str.__add__(other, self))

    def __mul__(self, times: Any) -> Tracked:
        return Tracked(super().__mul__(times), self._plain * times)

    __rmul__ = __mul__

    def strip(self, chars: str | None = None, /) -> Tracked:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Tracked:
        return self[len(self) - len(self._plain.lstrip(_plain(chars))) :]

    def rstrip(self, chars: str | None = None, /) -> Tracked:
        return self[: len(self._plain.rstrip(_plain(chars)))]

    def removeprefix(self, prefix: str, /) -> Tracked:
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Tracked:
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._pieces(self._plain.split(_plain(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._pieces(self._plain.rsplit(_plain(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._pieces(self._plain.splitlines(True), "")
        ends = self._plain.splitlines(keepends)
        return [line[: len(end)] for line, end in zip(lines, ends, strict=True)]

    def _pieces(self, pieces: Iterable[str], gap: str | None) -> list[str]:
        """Pieces of the plain text as pieces of this one; they lie `gap` apart, or (None) any white space."""
        parts, start = list[str](), 0
        for piece in pieces:
            start = self._plain.index(piece, start) if gap is None else start
            parts.append(self[start : start + len(piece)])
            start += len(piece) + len(gap or "")
        return parts

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parts(self._plain.partition(_plain(sep)))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parts(self._plain.rpartition(_plain(sep)))

    def _parts(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        first, middle, last = self._pieces(parts, "")
        return first, middle, last

    def replace(self, old: str, new: str, count: Any = -1, /) -> Tracked:
        if not old:
            return Tracked(super().replace(old, new, count))
        return Tracked(str.join(new, self.split(old, count)))


def _plain(value: Any) -> Any:
    """What a text stands for; another value as it is."""
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value._plain if isinstance(value, Tracked) else value


def _asked(name: str) -> Callable[..., Any]:
    """A method that asks something of the plain text."""
    method = getattr(str, name)

    def ask(self: Tracked, *arguments: Any) -> Any:
        return method(self._plain, *map(_plain, arguments))

    return ask


def _changed(name: str) -> Callable[..., Any]:
    """A method that writes characters in another case."""
    method = getattr(str, name)

    def change(self: Tracked) -> str:
        plain: str = method(self._plain)
        if len(plain) != len(self):
            return Tracked(method(str.__str__(self)))
        marked = replaced(plain)
        pairs = zip(str.__iter__(self), marked, plain, strict=True)
        return Tracked("".join(new if OFFSET <= ord(old) < OFFSET + 65536 else char for old, new, char in pairs), plain)

    return change


ASKED: Final = ("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalnum", "isalpha", "isascii")
ASKED_TOO: Final = ("isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "istitle", "isupper")
for _name in (*ASKED, *ASKED_TOO):
    setattr(Tracked, _name, _asked(_name))
for _name in ("upper", "lower", "title", "capitalize", "swapcase", "casefold"):
    setattr(Tracked, _name, _changed(_name))


def tracked(value: Any) -> Any:
    """A value of plain JSON types with every text in it as one from outside, names of fields too."""
    if isinstance(value, str):
        return Tracked.of(value)
    if isinstance(value, dict):
        return {Tracked.of(key): tracked(item) for key, item in value.items()}
    return [tracked(item) for item in value] if isinstance(value, list) else value


def joined(parts: Iterable[str]) -> str:
    """Texts as one, which is tracked where one of them is."""
    known = list(parts)
    text = "".join(known)
    return Tracked(text) if any(isinstance(part, Tracked) for part in known) else text
