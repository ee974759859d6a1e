"""Whether a canvas can still become a text of a grammar, and one text that it can become.

The question is put exactly, slot by slot: is there a token for every masked slot such that the tokens together write a
text of the grammar? A slot holds one token, so a gap of k slots is k tokens, no more and no less; a token that ends the
text closes it, and only such tokens may follow. Emptiness of the intersection with gaps of any length, as in
Constrained Decoding of Diffusion LLMs with Context-Free Grammars (arXiv:2508.10111), would accept canvases whose gaps
are too short to be completed. Here a canvas that passes can be completed as it is; if it passes after every token
written, the last one completes it.

The chart is filled by compiled code. A position is a slot's left edge, `slot * width`, or a join inside the token of a
slot, `slot * width + width - 1 - join`; since joins within a join have lower numbers, positions ascend from left to
right. Bit q of `chart[p, A]` says that symbol A derives a text that the slots from position p to position q can hold.
Rows are filled from the right, so that whatever begins further right is known: A at p reaches wherever C reaches from a
q that B at p reaches, if A -> B C. What is new at p is taken up until nothing is new (left recursion included), a
worklist over (p, A, q) as in Constrained Decoding of Diffusion LLMs with Context-Free Grammars (arXiv:2508.10111), a
word of 64 positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.grammar.automaton import DEAD, Table
from paceline.grammar.lexing import Lexicon, Lists
from paceline.utils import compiled, part_of_compiled

Bits = NDArray[np.uint64]

Flags = NDArray[np.bool_]

MASKED: Final = -1
"""What a slot holds that may hold anything; other slots hold the kind of their token, a row of `Lexicon.steps`."""


class LexiconArrays(NamedTuple):
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
    def of(cls, lexicon: Lexicon) -> LexiconArrays:
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


class ChartWorkspace(NamedTuple):
    """What is worked on, and room to work in.

    Attributes:
        kinds: (n,) int32, what each slot holds, see `MASKED`.
        chart: (n * width + 1, symbols, words) uint64; the last position is the end of the canvas.
        now, soon: (q,) bool, states at a slot's edges.
        active: (joins,) bool, joins that occur in a slot.
        fresh: (symbols, words) uint64, bits of a row that no rule has seen.
        taken, ends: (words,) uint64.
    """

    tables: LexiconArrays
    kinds: Table
    chart: Bits
    now: Flags
    soon: Flags
    active: Flags
    fresh: Bits
    taken: Bits
    ends: Bits

    @classmethod
    def of(cls, tables: LexiconArrays, length: int, symbols: int) -> ChartWorkspace:
        """For a canvas of `length` masked slots."""
        positions, states = length * tables.width + 1, tables.accepts.size
        words = (positions + 63) // 64
        return cls(
            tables,
            np.full(length, MASKED, np.int32),
            np.zeros((positions, symbols, words), np.uint64),
            np.zeros(states, np.bool_),
            np.zeros(states, np.bool_),
            np.zeros(tables.width - 1, np.bool_),
            np.zeros((symbols, words), np.uint64),
            np.zeros(words, np.uint64),
            np.zeros(words, np.uint64),
        )


@compiled
def fill(workspace: ChartWorkspace, first: int, last: int) -> None:
    """Fill the rows of slots `first` .. `last` - 1; those further right are filled."""
    width = workspace.tables.width
    for slot in range(last - 1, first - 1, -1):
        _mark(workspace.tables, workspace.kinds[slot], workspace.active)
        for k in range(width - 1, -1, -1):
            if k and not workspace.active[width - 1 - k]:
                continue
            row = workspace.chart[slot * width + k]
            row[:] = 0
            _terminals(workspace, slot, k, row)
            _close(workspace, row)


@part_of_compiled
def _mark(tables: LexiconArrays, kind: int, active: Flags) -> None:
    """Joins that occur in a slot."""
    active[:] = kind == MASKED
    if kind != MASKED:
        for i in range(tables.ends_at[kind], tables.ends_at[kind + 1]):
            active[tables.ends[i, 1]] = True
        for join in range(tables.width - 2, -1, -1):
            if active[join]:
                for i in range(tables.inner_at[join], tables.inner_at[join + 1]):
                    active[tables.inner[i, 1]] = True


@part_of_compiled
def _set(row: Bits, symbol: int, position: int) -> None:
    row[symbol, position >> 6] |= np.uint64(1) << np.uint64(position & 63)


@part_of_compiled
def _terminals(workspace: ChartWorkspace, slot: int, k: int, row: Bits) -> None:
    """Set a bit for every terminal and every position where it may end that begins at position (slot, k)."""
    tables, now, width = workspace.tables, workspace.now, workspace.tables.width
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
    while alive and slot < workspace.kinds.size:
        alive = _cross(workspace, slot, row)
        for state in range(now.size):
            now[state] = workspace.soon[state]
        slot += 1


@part_of_compiled
def _land(tables: LexiconArrays, states: Table, row: Bits, edge: int, now: Flags) -> bool:
    """Take up states at a slot's edge, terminals that end there included."""
    alive = False
    for i in range(states.size):
        state = states[i]
        if state != DEAD:
            now[state] = alive = True
            if tables.accepts[state]:
                _set(row, tables.terminal[state], edge)
    return alive


@part_of_compiled
def _cross(workspace: ChartWorkspace, slot: int, row: Bits) -> bool:
    """From states at a slot's left edge to those at its right edge, terminals that end in the slot included."""
    tables, now, soon, kind = workspace.tables, workspace.now, workspace.soon, workspace.kinds[slot]
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


@part_of_compiled
def _close(workspace: ChartWorkspace, row: Bits) -> None:
    """Apply rules at one position until nothing is new."""
    tables, fresh, taken, ends = workspace.tables, workspace.fresh, workspace.taken, workspace.ends
    for symbol in range(row.shape[0]):
        for w in range(taken.size):
            fresh[symbol, w] = row[symbol, w]
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
                _follow(workspace.chart, tables.pairs[i, 1], taken, ends)
                _add(row, fresh, tables.pairs[i, 0], ends)


@part_of_compiled
def _follow(chart: Bits, symbol: int, taken: Bits, ends: Bits) -> None:
    """Places where `symbol` may end that begins at one of `taken`."""
    ends[:] = 0
    for w in range(taken.size):
        bits, position = taken[w], w << 6
        while bits:
            if bits & np.uint64(1):
                for v in range(w, taken.size):
                    ends[v] |= chart[position, symbol, v]
            bits >>= np.uint64(1)
            position += 1


@part_of_compiled
def _add(row: Bits, fresh: Bits, symbol: int, ends: Bits) -> None:
    for w in range(ends.size):
        new = ends[w] & ~row[symbol, w]
        row[symbol, w] |= new
        fresh[symbol, w] |= new


CLOSED: Final = -2
"""What a slot holds whose token ends the text."""

UNFIT: Final = -3
"""What a slot holds whose token fits nowhere."""

MOST_BYTES: Final = 2**31

Position = tuple[int, int]
"""A slot and a position in it, see `chart`: 0 is its left edge."""


class Fillings:
    """All texts of a grammar that a canvas can become.

    Args:
        length: slots.
        closes: a text may end before the last slot, with tokens that end a text in the rest.
    Raises:
        ConfigError: a canvas too long for the grammar and the vocabulary.
    """

    def __init__(self, lexicon: Lexicon, length: int, *, closes: bool) -> None:
        self.lexicon, self.length, self.closes = lexicon, length, closes
        self.held = np.full(length, MASKED, np.int32)
        self.width = lexicon.joins + 1
        size = (length * self.width + 1) ** 2 // 8 * lexicon.cfg.size
        if size > MOST_BYTES:
            rule = f"a table of {size / 2**30:.1f} GiB; shorten the canvas or simplify the grammar"
            raise ConfigError(f"a canvas of {length} slots would need {rule}")
        self.desk = ChartWorkspace.of(LexiconArrays.of(lexicon), length, lexicon.cfg.size)
        self.kinds, self.chart = self.desk.kinds, self.desk.chart
        self.stale = length

    def put(self, slot: int, kind: int) -> None:
        """What a slot holds: the kind of its token, `MASKED`, `CLOSED` or `UNFIT`."""
        self.held[slot] = kind
        shown = kind if kind >= 0 else MASKED
        if shown != self.kinds[slot]:
            self.kinds[slot] = shown
            self.stale = max(self.stale, slot + 1)

    @property
    def possible(self) -> bool:
        """Whether there is any text."""
        return self.end is not None

    @property
    def end(self) -> int | None:
        """Slots of the shortest text, or None."""
        ends = self._ends()
        if not ends:
            return None
        if self.lexicon.cfg.nullable and ends.start == 0:
            return 0
        if self.stale:
            fill(self.desk, 0, 1 if self.lexicon.cfg.lone else self.stale)
            self.stale = 0
        return next((end for end in ends if self._has(self.lexicon.cfg.start, (0, 0), (end, 0))), None)

    def _ends(self) -> range:
        """Slots at whose left edge the text may end, as far as tokens that end it say."""
        closed = np.flatnonzero(self.held == CLOSED)
        stop = int(closed[0]) if closed.size else self.length
        written = np.flatnonzero(self.held[:stop] != MASKED)
        if (self.held == UNFIT).any() or (self.held[stop:] >= 0).any():
            return range(0)
        low = int(written[-1]) + 1 if written.size else 0
        return range(low if self.closes else stop, stop + 1)

    def _has(self, symbol: int, start: Position, end: Position) -> bool:
        bit = end[0] * self.width + end[1]
        return bool(
            self.chart[start[0] * self.width + start[1], symbol, bit >> 6] >> np.uint64(bit & 63) & np.uint64(1)
        )

    def example(self) -> list[int | None]:
        """The shortest text, as a token for every slot that is masked; None at slots that hold one and after its end.

        There must be one (`possible`).
        """
        end = self.end
        assert end is not None, "no text at all"
        tokens: list[int | None] = [None] * self.length
        if end:
            for terminal, start, stop in self._derivation(self.lexicon.cfg.start, (0, 0), (end, 0)):
                self._spell(terminal, start, stop, tokens)
        return tokens

    def _derivation(self, symbol: int, start: Position, end: Position) -> list[tuple[int, Position, Position]]:
        """Terminals with their positions, from left to right."""
        terminals, stack = [], [(symbol, start, end)]
        while stack:
            symbol, start, end = stack.pop()
            terminal, split = self._explain(symbol, start, end)
            if split is None:
                terminals.append((terminal, start, end))
            else:
                left, middle, right = split
                stack += [(right, middle, end), (left, start, middle)]
        return terminals

    def _explain(self, symbol: int, start: Position, end: Position) -> tuple[int, tuple[int, Position, int] | None]:
        """A terminal, or two symbols and where they meet, that make up a symbol between two positions."""
        cfg = self.lexicon.cfg
        alike = [symbol]
        for equal in alike:
            if equal < len(cfg.terminals):
                return equal, None
            for _, left, right in cfg.pairs[cfg.pairs[:, 0] == equal].tolist():
                for middle in self._positions(left, start, end):
                    if self._has(right, middle, end):
                        return equal, (left, middle, right)
            units = cfg.units[cfg.units[:, 0] == equal, 1].tolist()
            alike += [unit for unit in units if unit not in alike and self._has(unit, start, end)]
        raise AssertionError("a bit without a reason")

    def _positions(self, symbol: int, start: Position, end: Position) -> Iterator[Position]:
        """Where a symbol that begins at `start` may end, up to `end`."""
        width = self.width
        row = self.chart[start[0] * width + start[1], symbol]
        bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        return ((int(bit) // width, int(bit) % width) for bit in bits if bit <= end[0] * width + end[1])

    def _spell(self, terminal: int, start: Position, end: Position, tokens: list[int | None]) -> None:
        """Choose tokens at the masked slots of a terminal; that of a slot it begins within is chosen already."""
        slot = start[0] + (start[1] > 0)
        if start[1] and end[1] and start[0] == end[0]:
            return
        begin = (
            int(self.lexicon.join_steps[self._join(start), terminal])
            if start[1]
            else int(self.lexicon.starts[terminal])
        )
        levels: list[dict[int, tuple[int, int]]] = [{begin: (DEAD, DEAD)}]
        for at in range(slot, end[0]):
            following: dict[int, tuple[int, int]] = {}
            for state in levels[-1]:
                for target, witness in self._steps(at, state):
                    following.setdefault(target, (state, witness))
            levels.append(following)
        state = self._last(levels[-1], end, tokens)
        for at in range(end[0] - 1, slot - 1, -1):
            state, witness = levels[at - slot + 1][state]
            self._choose(tokens, at, witness)

    def _last(self, states: dict[int, tuple[int, int]], end: Position, tokens: list[int | None]) -> int:
        """A state in which the terminal ends at `end`, and the token of a slot that it ends within."""
        if not end[1]:
            return next(state for state in states if self.lexicon.accepts[state])
        for state in states:
            for join, witness in self._cuts(end[0], state):
                if join == self._join(end):
                    self._choose(tokens, end[0], witness)
                    return state
        raise AssertionError("a bit without a reason")

    def _join(self, position: Position) -> int:
        return self.width - 1 - position[1]

    def _choose(self, tokens: list[int | None], slot: int, witness: int) -> None:
        if self.kinds[slot] == MASKED:
            tokens[slot] = witness

    def _steps(self, slot: int, state: int) -> list[tuple[int, int]]:
        """Next states and witnesses."""
        kind = int(self.kinds[slot])
        if kind == MASKED:
            return self.lexicon.any_steps.at(state)
        target = int(self.lexicon.steps[kind, state])
        return [] if target == DEAD else [(target, DEAD)]

    def _cuts(self, slot: int, state: int) -> list[tuple[int, int]]:
        """Joins and witnesses."""
        kind = int(self.kinds[slot])
        if kind == MASKED:
            return self.lexicon.any_ends.at(state)
        return [(join, DEAD) for at, join in self.lexicon.ends.at(kind) if at == state]
