"""A grammar of characters as llguidance's grammar of lexemes, with the same texts.

The library's lexer takes the longest match among the lexemes that may come, so that texts are lost where a shorter one
was meant. Here as much of a grammar as is regular becomes a lexeme, whatever terminals it was written in: inside of
one, any way to match counts. Where a lexeme might then run on over what follows another, the one that runs on is taken
apart, down to single characters where need be: of those none runs on. So no text is lost, and nothing is refused
because its terminals overlap.

Whether one runs on is asked of automata, and by the first byte of the character that follows, since the lexer reads
bytes. Bounds of repetition above `MOST_COUNTED` count as none there, which may take apart more than is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from paceline.errors import ConfigError
from paceline.grammar.automaton import DEAD, Alphabet, Dfa
from paceline.grammar.cfg import arden, recursive_rules
from paceline.grammar.expression import (
    EMPTY,
    LAST,
    NEVER,
    Alt,
    Chars,
    Expr,
    Grammar,
    Ranges,
    Ref,
    Repeat,
    Seq,
    Star,
    alternatives,
    optional,
    parts_of,
    references,
    repeat,
    sequence,
)
from paceline.grammar.gbnf import is_gbnf, parse_gbnf
from paceline.grammar.neighbours import Neighbours, any_of
from paceline.grammar.notation import parse_ebnf

MOST_COUNTED: Final = 4
MOST_PARTS: Final = 200_000
"""Parts of a rule once the regular rules that it uses stand in their places."""

SCALARS: Final = ((0, 0xD7FF), (0xE000, 0x10FFFF))
"""Code points that UTF-8 can write."""


NATIVE: Final = "%llguidance"
"""A grammar that begins so is in the library's notation."""


def is_native(text: str) -> bool:
    """Whether a grammar is written for the library's lexer, which takes the longest match."""
    return text.lstrip().startswith(NATIVE)


def library_text(text: str) -> str:
    """A grammar in the library's notation, of one in GBNF or Lark's.

    Raises:
        ConfigError: no valid grammar, one that no text belongs to, or whose rules stand for too much.
    """
    if is_native(text):
        return text
    try:
        return of_characters(parse_gbnf(text) if is_gbnf(text) else _lark(text))
    except RecursionError:
        raise ConfigError("the grammar is nested too deeply; give parts of it names of their own") from None


def _lark(text: str) -> Grammar:
    try:
        return parse_ebnf(text)
    except ConfigError as error:
        native = f", or begin it with {NATIVE} {{}} for that of llguidance" if str(error).endswith(" notation") else ""
        raise ConfigError(f"{error}{native}") from None


def of_characters(grammar: Grammar) -> str:
    """A language of characters in the library's notation.

    Raises:
        ConfigError: no text belongs to it, or its rules stand for too much.
    """
    rules = _productive(grammar)
    folded = _Folding(rules, grammar.start)
    while more := folded.running_on():
        folded.apart |= more
        folded.fold()
    return _written(folded)


def _productive(grammar: Grammar) -> dict[str, Expr]:
    """The rules that the start reaches, without what never comes to an end."""
    rules = {name: _writable(expr) for name, expr in grammar.rules.items()}
    fine: set[str] = set()
    order, before = list(rules), -1
    while before < len(fine):  # in either direction: rules use those behind them, or those before
        before, order = len(fine), order[::-1]
        for name in order:
            if name not in fine and _ends(rules[name], fine):
                fine.add(name)
    if grammar.start not in fine:
        raise ConfigError(f"the grammar allows no text at all: rule {grammar.start!r} never comes to an end")
    kept = {name: _without(rules[name], fine) for name in rules if name in fine}
    reached, queue = {grammar.start}, [grammar.start]
    for name in queue:
        queue += sorted(references(kept[name]) - reached)
        reached |= references(kept[name])
    return {name: expr for name, expr in kept.items() if name in reached}


def _writable(expr: Expr) -> Expr:
    """Without surrogates, which no text has."""
    match expr:
        case Chars(ranges):
            return Chars(_common(ranges, SCALARS))
        case Seq(parts):
            return sequence(*map(_writable, parts))
        case Alt(parts):
            return alternatives(*map(_writable, parts))
        case Star(inner):
            return Star(_writable(inner))
        case Repeat(inner, low, high):
            return Repeat(_writable(inner), low, high)
    return expr


def _common(first: Ranges, second: Ranges) -> Ranges:
    shared = ((max(a, c), min(b, d)) for a, b in first for c, d in second)
    return tuple((low, high) for low, high in shared if low <= high)


def _ends(expr: Expr, fine: set[str]) -> bool:
    """Whether it has a text, by the rules that are known to have one."""
    match expr:
        case Chars(ranges):
            return bool(ranges)
        case Seq(parts):
            return all(_ends(part, fine) for part in parts)
        case Alt(parts):
            return any(_ends(part, fine) for part in parts)
        case Repeat(inner, low, _):
            return low == 0 or _ends(inner, fine)
        case Ref(name):
            return name in fine
    return True


def _without(expr: Expr, fine: set[str]) -> Expr:
    """Without parts that have no text."""
    match expr:
        case Seq(parts):
            return sequence(*(_without(part, fine) for part in parts))
        case Alt(parts):
            return alternatives(*(_without(part, fine) for part in parts if _ends(part, fine)))
        case Star(inner):
            return Star(_without(inner, fine)) if _ends(inner, fine) else EMPTY
        case Repeat(inner, low, high):
            return Repeat(_without(inner, fine), low, high) if _ends(inner, fine) else EMPTY
    return expr


class _Folding:
    """Folds rules over characters into rules over lexemes.

    Attributes:
        apart: regular expressions that are no lexemes, but made of some.
        rules: name -> its expression, in which a `Ref` is a rule or a place of a lexeme.
        lexemes: the regular expressions that are lexemes, or were before they were taken apart.
        places: of lexemes -> which one; no rule has such a name.
    """

    def __init__(self, rules: Mapping[str, Expr], start: str) -> None:
        self.start = start
        self.whole = {name: arden(name, expr) for name, expr in rules.items()}
        self.recursive = recursive_rules(self.whole)
        self.whole = {name: self._loops(expr) for name, expr in self.whole.items()}
        self.resolved: dict[str, Expr] = {}
        self.sizes: dict[str, int] = {}
        for name in self.whole.keys() - self.recursive:
            self._size(name)
        self.alphabet = Alphabet.of(
            part.ranges for expr in self.whole.values() for part in parts_of(expr) if isinstance(part, Chars)
        )
        self.leads = _leads(self.alphabet)
        self.lexemes: list[Expr] = []
        self.numbers: dict[Expr, int] = {}
        self.automata: dict[int, Dfa] = {}
        self.known: dict[tuple[int, int], tuple[bool, int]] = {}
        self.apart: set[Expr] = set()
        self.fold()

    def fold(self) -> None:
        """Make rules and lexemes, with what is to be taken apart."""
        self.places: dict[str, int] = {}
        kept = self.recursive | {self.start}
        self.rules = {name: self._folded(expr) for name, expr in self.whole.items() if name in kept}

    def running_on(self) -> set[Expr]:
        """Lexemes that may run on over what follows another one where both may begin."""
        around = Neighbours(self.rules, list(self.places), self.start)
        lexemes = list(self.places.values())
        where = dict.fromkeys(lexemes, 0)  # places of each, as bits
        for place, lexeme in enumerate(lexemes):
            where[lexeme] |= 1 << place
        begins = {lexeme: self._lead(self._dfa(lexeme), 0) for lexeme in where}
        longer = [lexeme for lexeme in where if not isinstance(self.lexemes[lexeme], Chars)]
        meeting = {
            lexeme: any_of(where[other] for other in where if self._together(lexeme, other)[0]) for lexeme in where
        }
        beside = around.beside([meeting[lexeme] for lexeme in lexemes])
        running = set[int]()
        for lexeme, near, after in set(zip(lexemes, beside, around.after, strict=True)):
            following = any_of(begins[other] for other in where if where[other] & after)
            running |= {
                other for other in longer if near & where[other] and self._together(lexeme, other)[1] & following
            }
        return {self.lexemes[lexeme] for lexeme in running}

    def _together(self, first: int, second: int) -> tuple[bool, int]:
        """Whether there is a text of both, and the bytes that may go on in the other behind a text of `first`."""
        if (first, second) not in self.known:
            self.known[first, second] = self._product(self._dfa(first), self._dfa(second))
        return self.known[first, second]

    def _product(self, first: Dfa, second: Dfa) -> tuple[bool, int]:
        reached, queue = set[tuple[int, int]](), [(0, 0)]
        for a, b in queue:
            mine, its = first.moves[a], second.moves[b]
            more = {(mine[sign], its[sign]) for sign in mine.keys() & its.keys()} - reached
            reached |= more
            queue += more
        ended = [b for a, b in reached if first.accepts[a]]
        bits = 0
        for b in ended:
            bits |= self._lead(second, b)
        return any(second.accepts[b] for b in ended), bits

    def _regular(self, expr: Expr) -> bool:
        return not references(expr) & self.recursive

    def _loops(self, expr: Expr) -> Expr:
        """(a|b)* as a* (b a*)* where only a is regular, so that all of a stands in one place."""
        match expr:
            case Alt(parts):
                return alternatives(*map(self._loops, parts))
            case Seq(parts):
                return self._sequence_of_loops(parts)
            case Star(inner) if not self._regular(inner):
                plain, rest = self._split(inner)
                return sequence(Star(plain), Star(sequence(rest, Star(plain)))) if plain != NEVER else Star(rest)
            case Repeat(inner, low, high) if not self._regular(inner):
                return Repeat(self._loops(inner), low, high)
        return expr

    def _sequence_of_loops(self, parts: Sequence[Expr]) -> Expr:
        """The same of a sequence; (a|b)+ is (a a*|b a*) (b a*)*."""
        loops: list[Expr] = []
        left = list(parts)
        while left:
            part = left.pop(0)
            if isinstance(part, Alt) and left[:1] == [Star(part)] and not self._regular(part):
                plain, rest = self._split(part)
                if plain != NEVER:
                    left.pop(0)
                    again = sequence(rest, Star(plain))
                    loops += [alternatives(sequence(plain, Star(plain)), again), Star(again)]
                    continue
            loops.append(self._loops(part))
        return sequence(*loops)

    def _split(self, expr: Expr) -> tuple[Expr, Expr]:
        """What is regular of a choice, and what is not."""
        parts = expr.parts if isinstance(expr, Alt) else (expr,)
        plain = [part for part in parts if self._regular(part)]
        return alternatives(*plain), alternatives(*(self._loops(part) for part in parts if part not in plain))

    def _size(self, name: str) -> int:
        """Parts of a regular rule with all rules in their places."""
        if name not in self.sizes:
            parts = list(parts_of(self.whole[name]))
            size = len(parts) + sum(self._size(part.name) for part in parts if isinstance(part, Ref))
            if size > MOST_PARTS:
                raise ConfigError(f"the grammar's rule {name!r} stands for over {MOST_PARTS} parts; write it shorter")
            self.sizes[name] = size
        return self.sizes[name]

    def resolve(self, expr: Expr) -> Expr:
        """Replace the references of a regular expression by what they stand for."""
        match expr:
            case Ref(name):
                if name not in self.resolved:
                    self.resolved[name] = self.resolve(self.whole[name])
                return self.resolved[name]
            case Seq(parts):
                return sequence(*map(self.resolve, parts))
            case Alt(parts):
                return alternatives(*map(self.resolve, parts))
            case Star(inner):
                return Star(self.resolve(inner))
            case Repeat(inner, low, high):
                return Repeat(self.resolve(inner), low, high)
        return expr

    def _folded(self, expr: Expr) -> Expr:
        """An expression over lexemes."""
        if self._regular(expr):
            return self._lexeme(expr)
        match expr:
            case Seq(parts):
                groups = [(plain, list(some)) for plain, some in groupby(parts, self._regular)]
                return sequence(
                    *(
                        part
                        for plain, some in groups
                        for part in ([self._folded(sequence(*some))] if plain else map(self._folded, some))
                    )
                )
            case Alt():
                plain, _ = self._split(expr)
                rest = [self._folded(part) for part in expr.parts if not self._regular(part)]
                return alternatives(*([] if plain == NEVER else [self._folded(plain)]), *rest)
            case Star(inner):
                return Star(self._folded(inner))
            case Repeat(inner, low, high):
                return Repeat(self._folded(inner), low, high)
        return expr

    def _lexeme(self, expr: Expr) -> Expr:
        """What stands for a regular expression."""
        if expr in self.apart:
            return self._taken_apart(expr)
        if expr not in self.numbers:
            self.numbers[expr] = len(self.lexemes)
            self.lexemes.append(expr)
        if not self._dfa(self.numbers[expr]).accepts.size:
            return EMPTY
        place = Ref(f" {len(self.places)}")  # no notation allows a blank in a name
        self.places[place.name] = self.numbers[expr]
        return optional(place) if _nullable(self.resolve(expr)) else place

    def _taken_apart(self, expr: Expr) -> Expr:
        match expr:
            case Ref(name):
                return self._lexeme(self.whole[name])
            case Seq(parts):
                return sequence(*map(self._lexeme, parts))
            case Alt(parts):
                return alternatives(*map(self._lexeme, parts))
            case Star(inner):
                return Star(self._lexeme(inner))
            case Repeat(inner, low, high):
                return Repeat(self._lexeme(inner), low, high)
        raise AssertionError("a character runs on over nothing")

    def _dfa(self, lexeme: int) -> Dfa:
        if lexeme not in self.automata:
            expr = _uncounted(self.resolve(self.lexemes[lexeme]))
            self.automata[lexeme] = Dfa.of(expr, self.alphabet).without_empty()
        return self.automata[lexeme]

    def _lead(self, dfa: Dfa, state: int) -> int:
        """First bytes of what may go on in a state, as bits."""
        lead = 0
        for sign in np.flatnonzero(dfa.table[state] != DEAD).tolist():
            lead |= self.leads[sign]
        return lead


def _nullable(expr: Expr) -> bool:
    match expr:
        case Seq(parts):
            return all(map(_nullable, parts))
        case Alt(parts):
            return any(map(_nullable, parts))
        case Repeat(inner, low, _):
            return low == 0 or _nullable(inner)
    return isinstance(expr, Star)


def _uncounted(expr: Expr) -> Expr:
    """A larger language of few states: what is repeated often may be repeated more often, or less."""
    match expr:
        case Seq(parts):
            return sequence(*map(_uncounted, parts))
        case Alt(parts):
            return alternatives(*map(_uncounted, parts))
        case Star(inner):
            return Star(_uncounted(inner))
        case Repeat(inner, low, high):
            uncounted = _uncounted(inner)
            return Repeat(uncounted, low, high) if high <= MOST_COUNTED else repeat(uncounted, min(low, 1), None)
    return expr


def _leads(alphabet: Alphabet) -> list[int]:
    """The first bytes of the characters of each class, as bits."""
    leads = [0] * alphabet.size
    ends = [*(alphabet.starts[1:] - 1).tolist(), LAST]
    for low, high, sign in zip(alphabet.starts.tolist(), ends, alphabet.classes.tolist(), strict=True):
        for byte in range(_lead_byte(low), _lead_byte(high) + 1):
            leads[sign] |= 1 << byte
    return leads


def _lead_byte(code: int) -> int:
    if code < 0x80:
        return code
    return 0xC0 | code >> 6 if code < 0x800 else 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18


def _written(folded: _Folding) -> str:
    """In llguidance's notation."""
    names = {name: f"r{number}" for number, name in enumerate(folded.rules)}
    names |= {name: f"T{lexeme}" for name, lexeme in folded.places.items()}
    lines = [f"{NATIVE} {{}}", f"start: {names[folded.start]}"]
    lines += [f"{names[name]}: {_rule(expr, names)}" for name, expr in folded.rules.items()]
    used = sorted(set(folded.places.values()))
    lines += [f"T{lexeme}: /{_regex(folded.resolve(folded.lexemes[lexeme]))}/" for lexeme in used]
    return "\n".join(lines) + "\n"


def _rule(expr: Expr, names: Mapping[str, str]) -> str:
    match expr:
        case Ref(name):
            return names[name]
        case Seq(parts):
            return " ".join(_rule(part, names) for part in parts) if parts else '""'
        case Alt(parts):
            return f"({' | '.join(_rule(part, names) for part in parts)})"
        case Star(inner):
            return f"({_rule(inner, names)})*"
        case Repeat(inner, low, high):
            return f"({_rule(inner, names)}){{{low},{high}}}"
    raise AssertionError("characters are lexemes")


def _regex(expr: Expr) -> str:
    """In the notation of Rust."""
    match expr:
        case Chars(ranges):
            spelled = "".join(_sign(low) if low == high else f"{_sign(low)}-{_sign(high)}" for low, high in ranges)
            return spelled if len(ranges) == 1 and ranges[0][0] == ranges[0][1] else f"[{spelled}]"
        case Seq(parts):
            return "".join(map(_regex, parts))
        case Alt(parts):
            return f"(?:{'|'.join(map(_regex, parts))})"
        case Star(inner):
            return f"(?:{_regex(inner)})*"
        case Repeat(inner, low, high):
            return f"(?:{_regex(inner)}){{{low},{high}}}"
    raise AssertionError("references are resolved")


def spelled(text: str) -> str:
    """The expression of one text, in the notation of Rust."""
    return "".join(_sign(ord(sign)) for sign in text)


def _sign(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\x{{{code:x}}}"
