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
    """Make a sequence without sequences in it."""
    flat = [inner for part in parts for inner in (part.parts if isinstance(part, Seq) else (part,))]
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alternatives(*parts: Expr) -> Expr:
    """A choice without choices in it, each part once."""
    flat = dict.fromkeys(inner for part in parts for inner in (part.parts if isinstance(part, Alt) else (part,)))
    return next(iter(flat)) if len(flat) == 1 else Alt(tuple(flat))


def optional(inner: Expr) -> Expr:
    """Make an expression that stands once or not at all."""
    return alternatives(EMPTY, inner)


def repeat(inner: Expr, low: int, high: int | None) -> Expr:
    """`low` to `high` times; None is without end."""
    if high is None:
        return sequence(repeat(inner, low, low), Star(inner))
    if high <= 1:
        return EMPTY if high == 0 else inner if low == 1 else optional(inner)
    return Repeat(inner, low, high)


def unrolled(repeat: Repeat) -> Expr:
    """Write a `Repeat` out as a sequence."""
    return sequence(*(repeat.inner,) * repeat.low, *(optional(repeat.inner),) * (repeat.high - repeat.low))


def literal(text: str) -> Expr:
    """Make an expression of a text as it stands."""
    return sequence(*(Chars(((ord(sign), ord(sign)),)) for sign in text))


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The union of ranges in any order."""
    union: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if union and low <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        else:
            union.append((low, high))
    return tuple(union)


def other_characters(ranges: Ranges) -> Ranges:
    """Find all characters outside of ranges."""
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    return tuple((edges[i] + 1, edges[i + 1] - 1) for i in range(0, len(edges), 2) if edges[i] + 1 < edges[i + 1])


def parts_of(expr: Expr) -> Iterator[Expr]:
    """Walk through an expression and everything in it."""
    stack = [expr]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, Seq | Alt):
            stack.extend(part.parts)
        elif isinstance(part, Star | Repeat):
            stack.append(part.inner)


def references(expr: Expr) -> set[str]:
    """Find the names of rules in an expression."""
    return {part.name for part in parts_of(expr) if isinstance(part, Ref)}
