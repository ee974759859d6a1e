"""Deterministic automata over classes of characters.

Thompson's construction, subsets, Moore's partition; states from which nothing can be accepted are dropped, so that
"there is a next state" means "this can still become a match".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.grammar.expression import Alt, Chars, Expr, Ranges, Ref, Repeat, Seq, Star, unrolled

Table = NDArray[np.int32]
DEAD: Final = -1
MOST_STATES: Final = 20_000
"""Beyond it a constraint is rejected: tables over a vocabulary would not fit."""


@dataclass(frozen=True)
class Alphabet:
    """Classes of characters; class 0 is in no set of any expression.

    Attributes:
        starts: (k,) int64 ascending, first code point of each stretch.
        classes: (k,) int32, the class of each stretch.
    """

    starts: NDArray[np.int64]
    classes: Table

    @classmethod
    def of(cls, sets: Iterable[Ranges]) -> Alphabet:
        """The coarsest classes that tell apart what one of `sets` tells apart."""
        sets = list(dict.fromkeys(sets))
        starts = np.unique([0, *(edge for ranges in sets for low, high in ranges for edge in (low, high + 1))]).astype(
            np.int64
        )
        member = np.zeros((starts.size, len(sets)), np.bool_)
        for column, ranges in enumerate(sets):
            for low, high in ranges:
                member[np.searchsorted(starts, low) : np.searchsorted(starts, high + 1), column] = True
        names: dict[bytes, int] = {bytes(len(sets)): 0}
        classes = [names.setdefault(row.tobytes(), len(names)) for row in member]
        return cls(starts, np.asarray(classes, np.int32))

    @cached_property
    def size(self) -> int:
        """Classes, class 0 included."""
        return int(self.classes.max(initial=0)) + 1

    def encode(self, text: str) -> Table:
        """(n,) class of each character."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return self.classes[np.searchsorted(self.starts, codes, side="right") - 1]

    def within(self, ranges: Ranges) -> list[int]:
        """Classes of a set that is a union of classes."""
        classes: set[int] = set()
        for low, high in ranges:
            first, last = np.searchsorted(self.starts, low), np.searchsorted(self.starts, high + 1)
            classes.update(self.classes[first:last].tolist())
        return sorted(classes)


@dataclass(frozen=True)
class Dfa:
    """A minimal automaton; state 0 is the start; no states at all is the empty language.

    Attributes:
        table: (states, classes) int32, `DEAD` where nothing can match any more.
        accepts: (states,) bool.
    """

    table: Table
    accepts: NDArray[np.bool_]

    @classmethod
    def of(cls, expr: Expr, alphabet: Alphabet) -> Dfa:
        """The automaton of an expression without references.

        Raises:
            ConfigError: too many states.
        """
        nfa = _Nfa(alphabet)
        first, last = nfa.state(), nfa.state()
        nfa.add(expr, first, last)
        return _minimal(*_trimmed(*_subsets(nfa, first, last)))

    @cached_property
    def moves(self) -> list[dict[int, int]]:
        """Of each state, class -> next state, where something can match."""
        moves = list[dict[int, int]]()
        for row in self.table:
            signs = np.flatnonzero(row != DEAD)
            moves.append(dict(zip(signs.tolist(), row[signs].tolist(), strict=True)))
        return moves

    def run(self, classes: Table) -> int:
        """The state after a text of classes, or `DEAD`."""
        state = 0 if self.accepts.size else DEAD
        for sign in classes.tolist():
            if state == DEAD:
                break
            state = int(self.table[state, sign])
        return state

    def without_empty(self) -> Dfa:
        """The same language less the empty text."""
        if not self.accepts.size or not self.accepts[0]:
            return self
        table = np.vstack([self.table[:1], np.where(self.table == DEAD, DEAD, self.table + 1)])
        table[0] = np.where(table[0] == DEAD, DEAD, table[0] + 1)
        accepts = np.concatenate([[False], self.accepts])
        return _minimal(*_trimmed(table, accepts))


class _Nfa:
    """Thompson's automaton: silent steps and steps on classes."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.silent: list[list[int]] = []
        self.steps: list[list[tuple[list[int], int]]] = []
        self.known: dict[Ranges, list[int]] = {}

    def state(self) -> int:
        if len(self.silent) > 4 * MOST_STATES:
            raise ConfigError(
                f"the constraint needs more than {MOST_STATES} states; bound its repetitions or texts lower"
            )
        self.silent.append([])
        self.steps.append([])
        return len(self.silent) - 1

    def add(self, expr: Expr, first: int, last: int) -> None:
        """Lay an expression between two states."""
        match expr:
            case Chars(ranges):
                if ranges not in self.known:
                    self.known[ranges] = self.alphabet.within(ranges)
                self.steps[first].append((self.known[ranges], last))
            case Seq(parts):
                for part in parts:
                    following = self.state()
                    self.add(part, first, following)
                    first = following
                self.silent[first].append(last)
            case Alt(parts):
                for part in parts:
                    self.add(part, first, last)
            case Star(inner):
                middle, end = self.state(), self.state()
                self.silent[first].append(middle)
                self.add(inner, middle, end)
                self.silent[end].append(middle)
                self.silent[middle].append(last)
            case Repeat():
                self.add(unrolled(expr), first, last)
            case Ref(name):
                raise AssertionError(f"a reference to {name!r} is left")

    def closure(self, state: int) -> int:
        """Find the states that are reached without reading, as bits."""
        reached, stack = 1 << state, [state]
        while stack:
            for following in self.silent[stack.pop()]:
                if not reached >> following & 1:
                    reached |= 1 << following
                    stack.append(following)
        return reached


def _subsets(nfa: _Nfa, first: int, last: int) -> tuple[Table, NDArray[np.bool_]]:
    reading = sum(1 << state for state, steps in enumerate(nfa.steps) if steps) | 1 << last
    closures: dict[int, int] = {}

    def closure(state: int) -> int:
        if state not in closures:
            closures[state] = nfa.closure(state) & reading
        return closures[state]

    numbers = {closure(first): 0}
    queue, rows = list(numbers), []
    for subset in queue:
        reached = [0] * nfa.alphabet.size
        for state in _bits(subset):
            for classes, target in nfa.steps[state]:
                for sign in classes:
                    reached[sign] |= closure(target)
        for following in dict.fromkeys(reached):
            if following and following not in numbers:
                numbers[following] = len(numbers)
                queue.append(following)
        if len(numbers) > MOST_STATES:
            raise ConfigError(
                f"the constraint needs more than {MOST_STATES} states; bound its repetitions or texts lower"
            )
        rows.append([numbers[following] if following else DEAD for following in reached])
    accepts = [bool(subset >> last & 1) for subset in queue]
    return np.asarray(rows, np.int32), np.asarray(accepts, np.bool_)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _trimmed(table: Table, accepts: NDArray[np.bool_]) -> tuple[Table, NDArray[np.bool_]]:
    """Without states that are not reached or from which nothing is accepted."""
    live = accepts.copy()
    while True:
        more = live | (live[table] & (table != DEAD)).any(axis=1)
        if (more == live).all():
            break
        live = more
    reached = np.zeros_like(live)
    queue = [0] if live[0] else []
    reached[queue] = True
    while queue:
        following = {int(s) for s in table[queue.pop()] if s != DEAD and live[s] and not reached[s]}
        reached[list(following)] = True
        queue.extend(following)
    numbers = np.where(reached, np.cumsum(reached) - 1, DEAD).astype(np.int32)
    kept = table[reached]
    return np.where(kept == DEAD, DEAD, numbers[kept]).astype(np.int32), accepts[reached]


def _minimal(table: Table, accepts: NDArray[np.bool_]) -> Dfa:
    """Moore's partition: states are equal while nothing tells them apart."""
    labels = accepts.astype(np.int32)
    count = len(np.unique(labels))
    while accepts.size:
        seen = np.concatenate([labels[:, None], np.where(table == DEAD, DEAD, labels[table])], axis=1)
        names: dict[bytes, int] = {}
        labels = np.asarray([names.setdefault(row.tobytes(), len(names)) for row in seen], np.int32)
        if len(names) == count:
            break
        count = len(names)
    _, first = np.unique(labels, return_index=True)
    return Dfa(np.where(table[first] == DEAD, DEAD, labels[table[first]]).astype(np.int32), accepts[first])
