"""What the tokens of a vocabulary do to the terminals of a grammar.

The automata of all terminals stand side by side; a state belongs to one terminal. Inside a terminal a token is a
function on states. A token may also end a terminal and begin others: it is then cut at a *join*. What matters of a join
is only what can follow it, the rest of the token; rests that no terminal tells apart are one join. So a token is, for
each state it is met in, a next state, or a set of joins, or both, and a join is for each terminal that may begin there
a next state at the token's end, or a further join. With this no lexing is listed and none is left out: tails, heads,
terminals inside others, and texts that two terminals match.

Many tokens do the same (letters in a string); tables have a row for each kind, `row_of` says which. For a masked slot,
which may hold any token, rows are merged, and for every step one token that makes it is kept as its witness.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import ConfigError
from paceline.grammar.automaton import DEAD, Table
from paceline.grammar.cfg import Cfg

BROKEN = "\ufffd"
"""Stands for bytes that are no character by themselves; such tokens are never allowed."""
MOST_JOINS = 4096


@dataclass(frozen=True, slots=True)
class Lists:
    """Lists of pairs, one list for each key: pairs of key k are `items[offsets[k] : offsets[k + 1]]`.

    Attributes:
        offsets: (keys + 1,) int32.
        items: (n, 2) int32.
    """

    offsets: Table
    items: Table

    @classmethod
    def of(cls, keys: int, triples: Sequence[tuple[int, int, int]]) -> Lists:
        """From (key, first, second) in any order."""
        rows = np.asarray(sorted(set(triples)), np.int32).reshape(-1, 3)
        offsets = np.searchsorted(rows[:, 0], np.arange(keys + 1)).astype(np.int32)
        return cls(offsets, np.ascontiguousarray(rows[:, 1:]))

    def at(self, key: int) -> list[tuple[int, int]]:
        """Give the pairs of a key."""
        return [(int(a), int(b)) for a, b in self.items[self.offsets[key] : self.offsets[key + 1]]]


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Tables of one grammar and one vocabulary. States are numbered across terminals.

    Attributes:
        cfg: the grammar.
        row_of: (v,) int32, the kind of each token; `DEAD` for those that fit nowhere.
        starts: (b,) int32, first state of each terminal.
        accepts: (q,) bool.
        terminal: (q,) int32, whose state it is.
        steps: (rows, q) int32, next state at the token's end, or `DEAD`.
        ends: kind -> (state, join): in this state the token ends the terminal and goes on from the join.
        join_steps: (joins, b) int32, state at the token's end if the terminal begins at the join, or `DEAD`.
        inner: join -> (terminal, join): the terminal begins and ends within the token.
        any_steps: state -> (next state, witness), over all tokens.
        any_ends: state -> (join, witness), over all tokens.
    """

    cfg: Cfg
    row_of: Table
    starts: Table
    accepts: np.ndarray[tuple[int], np.dtype[np.bool_]]
    terminal: Table
    steps: Table
    ends: Lists
    join_steps: Table
    inner: Lists
    any_steps: Lists
    any_ends: Lists

    @property
    def joins(self) -> int:
        """Kinds of rests of tokens."""
        return int(self.join_steps.shape[0])

    @classmethod
    def of(cls, cfg: Cfg, texts: Sequence[str | None]) -> Lexicon:
        """Make the tables for a vocabulary.

        Args:
            texts: what each token writes; None or "" for those that are never to be used (special tokens).
        Raises:
            ConfigError: a grammar that cuts the vocabulary's tokens in too many ways.
        """
        union = _Union.of(cfg)
        spelled = _spelled(cfg, texts)
        words = sorted(spelled, key=lambda word: (len(word), spelled[word][0]))
        steps, cuts = _run(words, union, inside=not cfg.lone)
        joins = _Joins(cfg, union)
        ends: list[set[tuple[int, int]]] = [set() for _ in words]
        for row, at, state in cuts:
            if joins.follows(state, join := joins.of(words[row][at:])):
                ends[row].add((state, join))
        kept, kind_of = _kinds(steps, ends)
        row_of = np.full(len(texts), DEAD, np.int32)
        for row, word in enumerate(words):
            row_of[spelled[word]] = kind_of[row]
        witness = np.asarray([spelled[words[row]][0] for row in kept], np.int32)
        steps = steps[kept]
        cut = [(kind, s, j) for kind, row in enumerate(kept) for s, j in ends[row]]
        any_ends = {(s, j): int(witness[kind]) for kind, s, j in reversed(cut)}
        states = union.accepts.size
        return cls(
            cfg,
            row_of,
            union.starts,
            union.accepts,
            union.terminal,
            steps,
            Lists.of(len(kept), cut),
            np.asarray(joins.rows, np.int32).reshape(len(joins.rows), len(cfg.terminals)),
            Lists.of(len(joins.rows), joins.inner),
            Lists.of(states, _any(steps, witness)),
            Lists.of(states, [(s, j, w) for (s, j), w in any_ends.items()]),
        )


@dataclass(frozen=True, slots=True)
class _Union:
    """All automata side by side; the last row of `table` is the dead state."""

    table: Table
    accepts: np.ndarray[tuple[int], np.dtype[np.bool_]]
    starts: Table
    terminal: Table

    @classmethod
    def of(cls, cfg: Cfg) -> _Union:
        sizes = [dfa.accepts.size for dfa in cfg.terminals]
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        dead = int(starts[-1])
        shifted = [
            np.where(dfa.table == DEAD, dead, dfa.table + low)
            for dfa, low in zip(cfg.terminals, starts[:-1], strict=True)
        ]
        table = np.vstack([*shifted, np.full((1, cfg.alphabet.size), dead)]).astype(np.int32)
        accepts = np.concatenate([*(dfa.accepts for dfa in cfg.terminals), np.zeros(0, np.bool_)])
        return cls(table, accepts, starts[:-1], np.repeat(np.arange(len(sizes)), sizes).astype(np.int32))


def _spelled(cfg: Cfg, texts: Sequence[str | None]) -> dict[str, list[int]]:
    """Tokens by their texts, each spelled with a character a class; without those that have a character of no class."""
    spelled: dict[str, list[int]] = {}
    for token, text in enumerate(texts):
        if text and BROKEN not in text:
            classes = cfg.alphabet.encode(text)
            if classes.all():
                spelled.setdefault("".join(map(chr, classes)), []).append(token)
    return spelled


def _kinds(steps: Table, ends: Sequence[set[tuple[int, int]]]) -> tuple[list[int], list[int]]:
    """First row of each kind, kind of each row: equal in all they do; `DEAD` for rows that do nothing."""
    kept: list[int] = []
    known: dict[tuple[bytes, frozenset[tuple[int, int]]], int] = {}
    kinds = []
    for row, row_ends in enumerate(ends):
        key = (steps[row].tobytes(), frozenset(row_ends))
        if key not in known and (row_ends or (steps[row] != DEAD).any()):
            known[key] = len(kept)
            kept.append(row)
        kinds.append(known.get(key, DEAD))
    return kept, kinds


def _run(words: list[str], union: _Union, inside: bool) -> tuple[Table, list[tuple[int, int, int]]]:
    """Every word from every state; where terminals may end inside it, as (row, characters read, state it was met
    in).
    """
    dead = union.table.shape[0] - 1
    ending = np.append(union.accepts, False)
    current = np.tile(np.arange(dead, dtype=np.int32), (len(words), 1))
    sizes = np.asarray([len(word) for word in words], np.int64)
    cuts: list[tuple[int, int, int]] = []
    for at in range(int(sizes.max(initial=0))):
        rows = np.flatnonzero(sizes > at)
        signs = np.asarray([ord(words[row][at]) for row in rows.tolist()], np.int64)
        current[rows] = union.table[current[rows], signs[:, None]]
        more = rows[sizes[rows] > at + 1] if inside else rows[:0]
        which, states = np.nonzero(ending[current[more]])
        cuts += zip(more[which].tolist(), [at + 1] * which.size, states.tolist(), strict=True)
    return np.where(current == dead, DEAD, current).astype(np.int32), cuts


def _any(steps: Table, witness: Table) -> list[tuple[int, int, int]]:
    """(state, next state, token) over all kinds; the token is that of the first kind, the shortest."""
    triples: list[tuple[int, int, int]] = []
    first = np.full(steps.shape[1], DEAD, np.int32)
    for state in range(steps.shape[1]):
        alive = np.flatnonzero(steps[:, state] != DEAD)[::-1]
        first[steps[alive, state]] = witness[alive]  # of equal targets the last one written stays
        targets = np.unique(steps[alive, state])
        triples += zip([state] * targets.size, targets.tolist(), first[targets].tolist(), strict=True)
    return triples


@dataclass(slots=True)
class _Joins:
    """Groups rests of tokens by what they can do."""

    cfg: Cfg
    union: _Union
    rows: list[tuple[int, ...]] = field(default_factory=list)
    inner: list[tuple[int, int, int]] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    numbers: dict[tuple[tuple[int, ...], frozenset[tuple[int, int]]], int] = field(default_factory=dict)
    begins: list[set[int]] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)

    def of(self, rest: str) -> int:
        """The join before a rest of a token; `DEAD` if nothing can follow."""
        if rest in self.known:
            return self.known[rest]
        dead = self.union.table.shape[0] - 1
        ending = np.append(self.union.accepts, False)
        states = self.union.starts.copy()
        inner: set[tuple[int, int]] = set()
        for at, sign in enumerate(rest, 1):
            states = self.union.table[states, ord(sign)]
            if at < len(rest):
                joins = [(b, self.of(rest[at:])) for b in np.flatnonzero(ending[states]).tolist()]
                inner |= {(b, join) for b, join in joins if join != DEAD and self.begins[join] & self._after(b)}
        row = tuple(int(state) if state != dead else DEAD for state in states)
        self.known[rest] = DEAD
        if inner or any(state != DEAD for state in row):
            self.known[rest] = self._number(row, frozenset(inner))
        return self.known[rest]

    def _number(self, row: tuple[int, ...], inner: frozenset[tuple[int, int]]) -> int:
        key = (row, inner)
        if key not in self.numbers:
            if len(self.rows) >= MOST_JOINS:
                rule = (
                    "cuts the tokens of this vocabulary in too many ways; write it with fewer terminals, or more "
                    "fixed text"
                )
                raise ConfigError(f"the grammar {rule}")
            self.numbers[key] = len(self.rows)
            self.rows.append(row)
            self.inner += [(self.numbers[key], b, join) for b, join in inner]
            self.begins.append({b for b, state in enumerate(row) if state != DEAD} | {b for b, _ in inner})
        return self.numbers[key]

    def follows(self, state: int, join: int) -> bool:
        """Whether what begins at a join may come after the terminal of a state."""
        return join != DEAD and bool(self.begins[join] & self._after(int(self.union.terminal[state])))

    def _after(self, terminal: int) -> set[int]:
        if not self.after:
            self.after = _neighbours(self.cfg)
        return self.after[terminal]


def _neighbours(cfg: Cfg) -> list[set[int]]:
    """Terminals that may stand right after each terminal."""
    heads = [{symbol} if symbol < len(cfg.terminals) else set() for symbol in range(cfg.size)]
    tails = [set(head) for head in heads]
    changed = True
    while changed:
        before = sum(map(len, heads)) + sum(map(len, tails))
        for a, b in cfg.units.tolist():
            heads[a] |= heads[b]
            tails[a] |= tails[b]
        for a, b, c in cfg.pairs.tolist():
            heads[a] |= heads[b]
            tails[a] |= tails[c]
        changed = sum(map(len, heads)) + sum(map(len, tails)) > before
    after: list[set[int]] = [set() for _ in cfg.terminals]
    for _, b, c in cfg.pairs.tolist():
        for terminal in tails[b]:
            after[terminal] |= heads[c]
    return after
