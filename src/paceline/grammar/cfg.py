"""Context-free grammars over automata: as much of a grammar as is regular becomes terminals, the rest binary rules.

A rule that only leads back to itself at its left or right end is repetition (Arden's lemma) and becomes part of an
automaton, as does every rule that no recursion is left in, and every stretch between two recursive rules. A regular
expression is a grammar of a single terminal. The language is that of the characters: a text belongs to it if there is
any way to cut it into terminals. A lexer that takes the longest match first would miss some of these ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar.automaton import Alphabet, Dfa, Table
from paceline.grammar.expression import (
    EMPTY,
    Alt,
    Chars,
    Expr,
    Grammar,
    Ref,
    Repeat,
    Seq,
    Star,
    alternatives,
    parts_of,
    references,
    sequence,
    unrolled,
)

Symbol = Expr | str
"""A terminal as its expression, a rule as its name."""


@dataclass(frozen=True, slots=True)
class Cfg:
    """Holds a grammar in normal form, as tables of rules over terminals.

    Symbols 0 .. terminals - 1 are terminals, the others rules; none derives the empty text.

    Attributes:
        alphabet: of all terminals.
        terminals: automata of non-empty texts.
        size: symbols.
        start: symbol of whole texts.
        nullable: the empty text belongs to the language too.
        pairs: (k, 3) int32, A -> B C.
        units: (u, 2) int32, A -> B.
    """

    alphabet: Alphabet
    terminals: tuple[Dfa, ...]
    size: int
    start: int
    nullable: bool
    pairs: Table
    units: Table

    @classmethod
    def of(cls, grammar: Grammar) -> Cfg:
        """Normalise a grammar.

        Raises:
            UnsatisfiableError: its language is empty.
            ConfigError: its automata would be too large, or its rules are nested too deeply.
        """
        try:
            return cls._of(grammar)
        except RecursionError:
            raise ConfigError("the constraint is nested too deeply; lower its bounds on repetition") from None

    @classmethod
    def _of(cls, grammar: Grammar) -> Cfg:
        rules = _Lowering(grammar).rules
        terminals = list(
            dict.fromkeys(s for bodies in rules.values() for body in bodies for s in body if not isinstance(s, str))
        )
        alphabet = Alphabet.of(
            part.ranges for terminal in terminals for part in parts_of(terminal) if isinstance(part, Chars)
        )
        automata: dict[Symbol, Dfa] = {terminal: Dfa.of(terminal, alphabet) for terminal in terminals}
        empty: set[Symbol] = {terminal for terminal, dfa in automata.items() if dfa.accepts.size and dfa.accepts[0]}
        automata = {terminal: dfa.without_empty() for terminal, dfa in automata.items()}
        rules = _binary(rules)
        empty |= _nullable(rules, empty)
        rules = _without_empty(rules, empty)
        rules = _productive(rules, {terminal for terminal, dfa in automata.items() if dfa.accepts.size})
        if not rules.get(grammar.start) and grammar.start not in empty:
            raise UnsatisfiableError(
                f"the constraint allows no text at all: rule {grammar.start!r} never comes to an end"
            )
        return _numbered(rules, automata, alphabet, grammar.start, grammar.start in empty)

    @property
    def lone(self) -> bool:
        """Whether the language is regular: every text is a single terminal."""
        return not self.pairs.size


Rules = dict[str, list[tuple[Symbol, ...]]]


class _Lowering:
    """Turns expressions into rules over maximal regular stretches."""

    def __init__(self, grammar: Grammar) -> None:
        self.exprs = {name: arden(name, expr) for name, expr in grammar.rules.items()}
        self.recursive = recursive_rules(self.exprs)
        self.resolved: dict[str, Expr] = {}
        self.rules: Rules = {}
        waiting = [grammar.start]
        while waiting:
            name = waiting[-1]
            self.rules[name] = []
            self.rules[name] = self._bodies(self.exprs[name])
            used = (symbol for bodies in self.rules.values() for body in bodies for symbol in body)
            waiting = [symbol for symbol in used if isinstance(symbol, str) and symbol not in self.rules]

    def _bodies(self, expr: Expr) -> list[tuple[Symbol, ...]]:
        if self._regular(expr):
            resolved = self._resolve(expr)
            return [() if resolved == EMPTY else (resolved,)]
        match expr:
            case Ref(name):
                return [(name,)]
            case Alt(parts):
                plain = [part for part in parts if self._regular(part)]
                bodies = self._bodies(alternatives(*plain)) if plain else []
                return bodies + [body for part in parts if not self._regular(part) for body in self._bodies(part)]
            case Star(inner):
                name = self._fresh()
                self.rules[name] = [(), *((*body, name) for body in self._bodies(inner))]
                return [(name,)]
            case Repeat():
                return self._bodies(unrolled(expr))
            case Seq(parts):
                return [self._sequence(parts)]
        raise AssertionError("a character is regular")

    def _sequence(self, parts: tuple[Expr, ...]) -> tuple[Symbol, ...]:
        body: list[Symbol] = []
        stretch: list[Expr] = []
        for part in (*parts, None):
            if part is not None and self._regular(part):
                stretch.append(part)
                continue
            if stretch and (resolved := self._resolve(sequence(*stretch))) != EMPTY:
                body.append(resolved)
            stretch = []
            if part is not None:
                bodies = self._bodies(part)
                if len(bodies) == 1:
                    body.extend(bodies[0])
                else:
                    body.append(name := self._fresh())
                    self.rules[name] = bodies
        return tuple(body)

    def _fresh(self) -> str:
        name = f" {len(self.rules)}"  # no notation allows a blank in a name
        self.rules[name] = []
        return name

    def _regular(self, expr: Expr) -> bool:
        return not references(expr) & self.recursive

    def _resolve(self, expr: Expr) -> Expr:
        """Without references, all of which are regular."""
        match expr:
            case Ref(name):
                if name not in self.resolved:
                    self.resolved[name] = self._resolve(self.exprs[name])
                return self.resolved[name]
            case Seq(parts):
                return sequence(*map(self._resolve, parts))
            case Alt(parts):
                return alternatives(*map(self._resolve, parts))
            case Star(inner):
                return Star(self._resolve(inner))
            case Repeat(inner, low, high):
                return Repeat(self._resolve(inner), low, high)
        return expr


def arden(name: str, expr: Expr) -> Expr:
    """X = a | X b is a b*, and X = a | b X is b* a."""
    parts = expr.parts if isinstance(expr, Alt) else (expr,)
    recursive = [part for part in parts if name in references(part)]
    plain = alternatives(*(part for part in parts if part not in recursive))
    for side in (0, -1):
        rests = [_beside(part, name, side) for part in recursive]
        if recursive and all(rest is not None and name not in references(rest) for rest in rests):
            again = Star(alternatives(*(rest for rest in rests if rest is not None)))
            return sequence(plain, again) if side == 0 else sequence(again, plain)
    return expr


def _beside(part: Expr, name: str, side: int) -> Expr | None:
    """What is left of a sequence without the reference at its end; None where it has none there."""
    parts = part.parts if isinstance(part, Seq) else (part,)
    if not parts or parts[side] != Ref(name):
        return None
    return sequence(*(parts[1:] if side == 0 else parts[:-1]))


def recursive_rules(exprs: dict[str, Expr]) -> set[str]:
    """Find the names from which recursion is reached."""
    left = {name: references(expr) & exprs.keys() for name, expr in exprs.items()}
    users: dict[str, list[str]] = {name: [] for name in exprs}
    for name, used in left.items():
        for symbol in used:
            users[symbol].append(name)
    queue = [name for name, used in left.items() if not used]
    for done in queue:  # rules whose references are all resolved, from the last ones on
        for name in users[done]:
            left[name].discard(done)
            if not left[name]:
                queue.append(name)
    return left.keys() - set(queue)


def _binary(rules: Rules) -> Rules:
    """Bodies of two symbols at most; equal rests share a rule."""
    binary: Rules = {}
    shared: dict[tuple[Symbol, ...], str] = {}

    def rest(body: tuple[Symbol, ...]) -> str:
        if body not in shared:
            shared[body] = name = f" rest {len(shared)}"
            binary[name] = [body if len(body) == 2 else (body[0], rest(body[1:]))]
        return shared[body]

    for name, bodies in rules.items():
        binary[name] = [body if len(body) <= 2 else (body[0], rest(body[1:])) for body in dict.fromkeys(bodies)]
    return binary


def _nullable(rules: Rules, empty: set[Symbol]) -> set[Symbol]:
    nullable = set(empty)
    while more := {
        name for name, bodies in rules.items() if name not in nullable and any(set(b) <= nullable for b in bodies)
    }:
        nullable |= more
    return nullable


def _without_empty(rules: Rules, empty: set[Symbol]) -> Rules:
    shorter: Rules = {}
    for name, bodies in rules.items():
        kept = [body for body in bodies if body]
        for first, second in [body for body in bodies if len(body) == 2]:
            kept += [(second,)] * (first in empty) + [(first,)] * (second in empty)
        shorter[name] = [body for body in dict.fromkeys(kept) if body != (name,)]
    return shorter


def _productive(rules: Rules, terminals: Iterable[Symbol]) -> Rules:
    """Without symbols that never come to an end."""
    fine: set[Symbol] = set(terminals)
    while more := {name for name, bodies in rules.items() if name not in fine and any(set(b) <= fine for b in bodies)}:
        fine |= more
    return {name: [body for body in bodies if set(body) <= fine] for name, bodies in rules.items() if name in fine}


def _numbered(rules: Rules, automata: dict[Symbol, Dfa], alphabet: Alphabet, start: str, nullable: bool) -> Cfg:
    """Numbers in place of symbols, for those that the start reaches."""
    reached: dict[Symbol, None] = {start: None}
    queue: list[Symbol] = [start]
    for symbol in queue:
        for body in rules.get(symbol, []) if isinstance(symbol, str) else []:
            queue.extend(s for s in body if s not in reached)
            reached.update(dict.fromkeys(body))
    terminals = [symbol for symbol in reached if not isinstance(symbol, str)]
    order = [*terminals, *(symbol for symbol in reached if isinstance(symbol, str))]
    number = {symbol: i for i, symbol in enumerate(order)}
    bodies = [(name, body) for name in reached if isinstance(name, str) for body in rules.get(name, [])]
    pairs = [(number[name], number[body[0]], number[body[1]]) for name, body in bodies if len(body) == 2]
    units = [(number[name], number[body[0]]) for name, body in bodies if len(body) == 1]
    return Cfg(
        alphabet,
        tuple(automata[terminal] for terminal in terminals),
        len(order),
        number[start],
        nullable,
        np.asarray(pairs, np.int32).reshape(-1, 3),
        np.asarray(units, np.int32).reshape(-1, 2),
    )
