"""Regular expressions and grammars as one kind of tree: character sets, sequences, choices, repetition, references to
rules.

A character set is a tuple of ranges of code points, both ends included, ascending and apart from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

Ranges = tuple[tuple[int, int], ...]
LAST: Final = 0x10FFFF


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; no parts at all is the empty text."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several; no parts at all matches nothing."""

    parts: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Star:
    """Any number of times, zero included."""

    inner: Expr


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times, where `high` is 2 or more."""

    inner: Expr
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule by name."""

    name: str


Expr = Chars | Seq | Alt | Star | Repeat | Ref
EMPTY: Final = Seq(())
NEVER: Final = Alt(())


@dataclass(frozen=True, slots=True)
class Grammar:
    """A context-free language; a regular one where no rule leads back to itself.

    Attributes:
        rules: name -> what it stands for; every `Ref` in them is a name of them.
        start: the rule of whole texts.
    """

    rules: Mapping[str, Expr]
    start: str


def sequence(*parts: Expr) -> Expr:
    """A sequence without sequences in it."""
    flat = [inner for part in parts for inner in (part.parts if isinstance(part, Seq) else (part,))]
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alternatives(*parts: Expr) -> Expr:
    """A choice without choices in it, each part once."""
    flat = dict.fromkeys(inner for part in parts for inner in (part.parts if isinstance(part, Alt) else (part,)))
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def optional(inner: Expr) -> Expr:
    """Once or not at all."""
    return alternatives(EMPTY, inner)


def repeat(inner: Expr, low: int, high: int | None) -> Expr:
    """`low` to `high` times; None is without end."""
    if high is None:
        return sequence(repeat(inner, low, low), Star(inner))
    if high <= 1:
        return EMPTY if high == 0 else inner if low == 1 else optional(inner)
    return Repeat(inner, low, high)


def unrolled(found: Repeat) -> Expr:
    """The same without `Repeat`."""
    return sequence(*(found.inner,) * found.low, *(optional(found.inner),) * (found.high - found.low))


def literal(text: str) -> Expr:
    """A text as it stands."""
    return sequence(*(Chars(((ord(sign), ord(sign)),)) for sign in text))


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ranges in any order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def other_characters(ranges: Ranges) -> Ranges:
    """All characters outside."""
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    return tuple((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2) if edges[i] + 1 < edges[i + 1])


def parts_of(expr: Expr) -> Iterator[Expr]:
    """An expression and everything in it."""
    stack = [expr]
    while stack:
        found = stack.pop()
        yield found
        if isinstance(found, Seq | Alt):
            stack.extend(found.parts)
        elif isinstance(found, Star | Repeat):
            stack.append(found.inner)


def references(expr: Expr) -> set[str]:
    """Names of rules in an expression."""
    return {found.name for found in parts_of(expr) if isinstance(found, Ref)}
