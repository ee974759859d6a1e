"""Which symbols of a grammar lie between which places of a canvas: the compiled part of the emptiness test.

In: tables of a `Lexicon` and a `Cfg`, what each slot holds. Out: a chart of bits, filled in place. Not here: what a
full chart says (`emptiness`).

A place is a slot's left edge, `slot * width`, or a join inside the token of a slot, `slot * width + width - 1 - join`;
since joins within a join have lower numbers, places ascend from left to right. Bit q of `chart[p, A]` says that symbol
A derives a text that the slots from place p to place q can hold. Rows are filled from the right, so that whatever
begins further right is known: A at p reaches wherever C reaches from a q that B at p reaches, if A -> B C. What is new
at p is taken up until nothing is new (left recursion included), a worklist over (p, A, q) as in Constrained Decoding of
Diffusion LLMs with Context-Free Grammars (arXiv:2508.10111), a word of 64 places at a time."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.grammar.automaton import DEAD, Table
from paceline.grammar.lexing import Lexicon, Lists
from paceline.utils import compiled

Bits = NDArray[np.uint64]
Flags = NDArray[np.bool_]
MASKED: Final = -1
"""What a slot holds that may hold anything; other slots hold the kind of their token, a row of `Lexicon.steps`."""


class Tables(NamedTuple):
    """A lexicon's arrays, as compiled code takes them; `*_at` are offsets of lists of pairs."""

    width: int
    starts: Table
    accepts: Flags
    terminal: Table
    steps: Table
    ends_at: Table
    ends: Table
    join_steps: Table
    inner_at: Table
    inner: Table
    any_steps_at: Table
    any_steps: Table
    any_ends_at: Table
    any_ends: Table
    pairs_at: Table
    pairs: Table
    units_at: Table
    units: Table

    @classmethod
    def of(cls, lexicon: Lexicon) -> Tables:
        """Rules are listed by their first symbol: B -> (A, C) and B -> (A, 0)."""
        cfg = lexicon.cfg
        pairs = Lists.of(cfg.size, [(b, a, c) for a, b, c in cfg.pairs.tolist()])
        units = Lists.of(cfg.size, [(b, a, 0) for a, b in cfg.units.tolist()])
        listed = (lexicon.inner, lexicon.any_steps, lexicon.any_ends, pairs, units)
        return cls(
            lexicon.joins + 1,
            lexicon.starts,
            lexicon.accepts,
            lexicon.terminal,
            lexicon.steps,
            lexicon.ends.offsets,
            lexicon.ends.items,
            lexicon.join_steps,
            *(array for lists in listed for array in (lists.offsets, lists.items)),
        )


class Desk(NamedTuple):
    """What is worked on, and room to work in.

    Attributes:
        kinds: (n,) int32, what each slot holds, see `MASKED`.
        chart: (n * width + 1, symbols, words) uint64; the last place is the end of the canvas.
        now, soon: (q,) bool, states at a slot's edges.
        active: (joins,) bool, joins that occur in a slot.
        fresh: (symbols, words) uint64, bits of a row that no rule has seen.
        taken, found: (words,) uint64.
    """

    tables: Tables
    kinds: Table
    chart: Bits
    now: Flags
    soon: Flags
    active: Flags
    fresh: Bits
    taken: Bits
    found: Bits

    @classmethod
    def of(cls, tables: Tables, length: int, symbols: int) -> Desk:
        """For a canvas of `length` masked slots."""
        places, states = length * tables.width + 1, tables.accepts.size
        words = (places + 63) // 64
        return cls(
            tables,
            np.full(length, MASKED, np.int32),
            np.zeros((places, symbols, words), np.uint64),
            np.zeros(states, np.bool_),
            np.zeros(states, np.bool_),
            np.zeros(tables.width - 1, np.bool_),
            np.zeros((symbols, words), np.uint64),
            np.zeros(words, np.uint64),
            np.zeros(words, np.uint64),
        )


@compiled
def fill(desk: Desk, first: int, last: int) -> None:
    """Fill the rows of slots `first` .. `last` - 1; those further right are filled."""
    width = desk.tables.width
    for slot in range(last - 1, first - 1, -1):
        _mark(desk.tables, desk.kinds[slot], desk.active)
        for k in range(width - 1, -1, -1):
            if k and not desk.active[width - 1 - k]:
                continue
            row = desk.chart[slot * width + k]
            row[:] = 0
            _terminals(desk, slot, k, row)
            _close(desk, row)


@compiled
def _mark(tables: Tables, kind: int, active: Flags) -> None:
    """Joins that occur in a slot."""
    active[:] = kind == MASKED
    if kind != MASKED:
        for i in range(tables.ends_at[kind], tables.ends_at[kind + 1]):
            active[tables.ends[i, 1]] = True
        for join in range(tables.width - 2, -1, -1):
            if active[join]:
                for i in range(tables.inner_at[join], tables.inner_at[join + 1]):
                    active[tables.inner[i, 1]] = True


@compiled
def _set(row: Bits, symbol: int, place: int) -> None:
    row[symbol, place >> 6] |= np.uint64(1) << np.uint64(place & 63)


@compiled
def _terminals(desk: Desk, slot: int, k: int, row: Bits) -> None:
    """Set a bit for every terminal and every place where it may end that begins at place (slot, k)."""
    tables, now, width = desk.tables, desk.now, desk.tables.width
    now[:] = False
    if k:
        join, last = width - 1 - k, (slot + 1) * width - 1
        for i in range(tables.inner_at[join], tables.inner_at[join + 1]):
            _set(row, tables.inner[i, 0], last - tables.inner[i, 1])
        alive = _land(tables, tables.join_steps[join], row, (slot + 1) * width, now)
        slot += 1
    else:
        alive = tables.starts.size > 0
        for b in range(tables.starts.size):
            now[tables.starts[b]] = True
    while alive and slot < desk.kinds.size:
        alive = _cross(desk, slot, row)
        now[:] = desk.soon
        slot += 1


@compiled
def _land(tables: Tables, states: Table, row: Bits, edge: int, now: Flags) -> bool:
    """Take up states at a slot's edge, terminals that end there included."""
    alive = False
    for i in range(states.size):
        state = states[i]
        if state != DEAD:
            now[state] = alive = True
            if tables.accepts[state]:
                _set(row, tables.terminal[state], edge)
    return alive


@compiled
def _cross(desk: Desk, slot: int, row: Bits) -> bool:
    """From states at a slot's left edge to those at its right edge, terminals that end in the slot included."""
    tables, now, soon, kind = desk.tables, desk.now, desk.soon, desk.kinds[slot]
    alive, width, edge = False, tables.width, slot * tables.width
    soon[:] = False
    for state in range(now.size):
        if not now[state]:
            continue
        if kind == MASKED:
            for i in range(tables.any_ends_at[state], tables.any_ends_at[state + 1]):
                _set(row, tables.terminal[state], edge + width - 1 - tables.any_ends[i, 0])
            low, high = tables.any_steps_at[state], tables.any_steps_at[state + 1]
            if _land(tables, tables.any_steps[low:high, 0], row, edge + width, soon):
                alive = True
        elif _land(tables, tables.steps[kind, state : state + 1], row, edge + width, soon):
            alive = True
    if kind != MASKED:
        for i in range(tables.ends_at[kind], tables.ends_at[kind + 1]):
            state = tables.ends[i, 0]
            if now[state]:
                _set(row, tables.terminal[state], edge + width - 1 - tables.ends[i, 1])
    return alive


@compiled
def _close(desk: Desk, row: Bits) -> None:
    """Apply rules at one place until nothing is new."""
    tables, fresh, taken, found = desk.tables, desk.fresh, desk.taken, desk.found
    fresh[:] = row
    again = True
    while again:
        again = False
        for symbol in range(row.shape[0]):
            some = False
            for w in range(taken.size):
                taken[w] = fresh[symbol, w]
                fresh[symbol, w] = 0
                some = some or taken[w] != 0
            if not some:
                continue
            again = True
            for i in range(tables.units_at[symbol], tables.units_at[symbol + 1]):
                _add(row, fresh, tables.units[i, 0], taken)
            for i in range(tables.pairs_at[symbol], tables.pairs_at[symbol + 1]):
                _follow(desk.chart, tables.pairs[i, 1], taken, found)
                _add(row, fresh, tables.pairs[i, 0], found)


@compiled
def _follow(chart: Bits, symbol: int, taken: Bits, found: Bits) -> None:
    """Places where `symbol` may end that begins at one of `taken`."""
    found[:] = 0
    for w in range(taken.size):
        bits, place = taken[w], w << 6
        while bits:
            if bits & np.uint64(1):
                for v in range(w, taken.size):
                    found[v] |= chart[place, symbol, v]
            bits >>= np.uint64(1)
            place += 1


@compiled
def _add(row: Bits, fresh: Bits, symbol: int, found: Bits) -> None:
    for w in range(found.size):
        new = found[w] & ~row[symbol, w]
        row[symbol, w] |= new
        fresh[symbol, w] |= new
