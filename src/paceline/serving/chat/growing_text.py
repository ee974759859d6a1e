"""A text that is read while it grows. What reads it is a generator that yields where it needs more text, so that the
same code reads a text that comes whole, in pieces or character by character, with the same result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from functools import lru_cache
from typing import Final, TypeVar

Found = TypeVar("Found")
Steps = Generator[None, None, Found]
"""Reads a growing text: yields where it needs more of it, and returns what it has found."""

Sink = Callable[[str], None]

BLANKS: Final = re.compile(r"\s*")
BREAKS: Final = re.compile(r"\n*")


class EndedError(Exception):
    """Raised where the text ends and something needed more of it."""


class MarkFinder:
    """Looks for texts in a growing text; none may begin with another one."""

    def __init__(self, *marks: str) -> None:
        self._longest = max(map(len, marks))
        self._whole = re.compile("|".join(map(re.escape, marks)))
        begun = [_begun(mark) for mark in marks if len(mark) > 1]
        self._begun = re.compile(f"(?:{'|'.join(begun)})\\Z") if begun else None

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Return where the first mark is at `at` or behind it, and which it is; "" and where one may begin, if there is
        none.
        """
        match = self._whole.search(text, at)
        if match is not None:
            return match.start(), match[0]
        begun = self._begun and self._begun.search(text, max(at, len(text) - self._longest + 1))
        return begun.start() if begun else len(text), ""

    def before(self, text: str, at: int) -> int:
        """Return from where on the first mark may be found in more text, where there is none at `at` or behind it."""
        return max(at, len(text) - self._longest + 1)


def _begun(mark: str) -> str:
    """Write a regular expression of what may be the beginning of a mark, but not all of it."""
    pattern = ""
    for sign in reversed(mark[:-1]):
        pattern = f"{re.escape(sign)}(?:{pattern})?" if pattern else re.escape(sign)
    return pattern


@lru_cache(maxsize=256)
def marks(*texts: str) -> MarkFinder:
    """Return what looks for these texts; it is made once."""
    return MarkFinder(*texts)


class Without:
    """Leaves marks out of a text that grows."""

    def __init__(self, left_out: Collection[str]) -> None:
        self._marks, self._held = marks(*sorted(left_out)) if left_out else None, ""

    def feed(self, text: str) -> str:
        """Return what more of the text shows; what may be the beginning of a mark is held back."""
        if self._marks is None:
            return text
        text, shown, at = self._held + text, "", 0
        while True:
            place, mark = self._marks.find(text, at)
            shown += text[at:place]
            at = place + len(mark)
            if not mark:
                self._held = text[at:]
                return shown

    def rest(self) -> str:
        """Return what was held back and is no mark."""
        rest, self._held = self._held, ""
        return rest


class GrowingText:
    """Holds a text of which the beginning is there, and reads in it.

    Attributes:
        text: what has come, from what is remembered on.
        at: where in it the reading is.
        last: no more will come.
        cut: something cut it off: a stop text, or a limit.
    """

    def __init__(self) -> None:
        self.text, self.at, self.last, self.cut = "", 0, False, False
        self._start = 0

    def grow(self, text: str, *, last: bool, cut: bool) -> None:
        """Add more of the text; what was forgotten goes."""
        self.text = self.text[self._start :] + text
        self.at, self._start = self.at - self._start, 0
        self.last, self.cut = last, cut

    @property
    def taken(self) -> str:
        """Tells what was read since the last `forget`."""
        return self.text[self._start : self.at]

    def forget(self) -> str:
        """Let go of what was read, which has been dealt with, and return it."""
        taken, self._start = self.taken, self.at
        return taken

    def to_end(self) -> None:
        """Read all that is there."""
        self.at = len(self.text)

    def more(self) -> Steps[None]:
        """Wait for more of the text.

        Raises:
            EndedError: there is none.
        """
        if self.last:
            raise EndedError
        yield

    def blanks(self, signs: re.Pattern[str] = BLANKS) -> Steps[str]:
        """Read and return what the pattern matches, which may be nothing, as far as it goes."""
        blanks = ""
        while True:
            match = signs.match(self.text, self.at)
            blanks += match[0] if match is not None else ""
            self.at = match.end() if match is not None else self.at
            if self.at < len(self.text) or self.last:
                return blanks
            yield

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read and return what the pattern matches, up to a character that is there and does not belong to it.

        Raises:
            EndedError: there is no such character.
        """
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match is not None else self.at
            if end < len(self.text):
                run, self.at = self.text[self.at : end], end
                return run
            yield from self.more()

    def literal(self, *options: str) -> Steps[str]:
        """Read and return the longest of these that comes next; "" where none does.

        Raises:
            EndedError: the text ends before that is clear.
        """
        while True:
            rest = self.text[self.at : self.at + max(map(len, options))]
            if not any(len(longer) > len(rest) and longer.startswith(rest) for longer in options):
                option = max((begun for begun in options if rest.startswith(begun)), key=len, default="")
                self.at += len(option)
                return option
            yield from self.more()

    def until(self, *options: str, most: int | None = None) -> Steps[tuple[str, str]]:
        """Read up to the first of these and behind it; returns what is before it, and which it is.

        Args:
            most: characters that may be before it; where there are more, "" is found.
        Raises:
            EndedError: the text ends before.
        """
        looked, signs = 0, marks(*options)
        while True:
            place, mark = signs.find(self.text, self.at + looked)
            before = place - self.at
            if most is not None and before > most:
                return "", ""
            if mark:
                before_mark, self.at = self.text[self.at : place], place + len(mark)
                return before_mark, mark
            looked = signs.before(self.text, self.at + looked) - self.at
            yield from self.more()

    def flow(self, sink: Sink, *options: str) -> Steps[str]:
        """Hand the text on as it comes, up to the first of these, which is read and returned; "" at the text's end.

        What was read before is forgotten, and the mark is remembered.
        """
        self.forget()
        signs = marks(*options) if options else None
        while True:
            place, mark = signs.find(self.text, self.at) if signs else (len(self.text), "")
            self._hand(sink, len(self.text) if self.last and not mark else place)
            self.at += len(mark)
            if mark or self.last:
                return mark
            yield

    def _hand(self, sink: Sink, end: int) -> None:
        self.at = end
        if text := self.forget():
            sink(text)

    def json(self, sink: Sink, *ends: str, depth: int = 0) -> Steps[bool]:
        """Hand a JSON object or array on as it comes, to the bracket that closes it.

        Args:
            ends: marks outside of strings that end it too, and are not read.
            depth: brackets that are open already.
        Returns:
            Whether it was closed.
        Raises:
            EndedError: the text ends before.
        """
        self.forget()
        brackets = Brackets(*ends, depth=depth)
        while True:
            self._hand(sink, brackets.reach(self.text, self.at, last=self.last))
            if brackets.closed or brackets.marked:
                return brackets.closed
            yield from self.more()


class Brackets:
    """Finds the bracket that closes a JSON object or array in a growing text.

    Args:
        ends: marks that end it as well, outside of strings.
        depth: brackets that are open at the start.
    Attributes:
        closed, marked: the bracket, or one of the marks, was found.
    """

    SIGNS: Final = re.compile(r'[{}\[\]"\\<]')

    def __init__(self, *ends: str, depth: int = 0) -> None:
        self._ends, self._depth, self._quoted = ends, depth, False
        self.closed = self.marked = False

    def reach(self, text: str, at: int, *, last: bool) -> int:
        """Return how far the object or array goes in a text that is read up to `at`; not behind what more text may
        change.
        """
        while (sign := self.SIGNS.search(text, at)) is not None:
            place, character = sign.start(), sign[0]
            if character == "\\" and place + 1 == len(text) and not last:
                return place
            if character == "<" and not self._quoted and self._ended(text, place, last=last):
                return place
            at = min(place + 1 + (character == "\\"), len(text))
            self._count(character)
            if self.closed:
                return at
        return len(text)

    def _count(self, sign: str) -> None:
        if sign == '"':
            self._quoted = not self._quoted
        elif not self._quoted and sign in "{}[]":
            self._depth += 1 if sign in "{[" else -1
            self.closed = self._depth == 0

    def _ended(self, text: str, place: int, *, last: bool) -> bool:
        """Tell whether a mark is there, or may come to be."""
        self.marked = any(text.startswith(mark, place) for mark in self._ends)
        rest = text[place:] if len(text) - place < max(map(len, self._ends), default=0) else "\n"
        return self.marked or (not last and any(mark.startswith(rest) for mark in self._ends))
