r"""Regular expressions in Python's notation, and grammars in Lark's, an EBNF with regular expressions for terminals, as
expression trees.

Python's own parser reads the pattern, so that notation and meaning are those of `re`. What is no regular expression in
the strict sense (backreferences, lookarounds, boundaries, atomic groups, possessive repetition) is rejected with an
error that names it; lazy repetition matches the same texts as greedy. `^`, `\A` and `$`, `\Z` mean nothing at the ends
of the pattern and are rejected elsewhere. The flags `i`, `s` and `x` hold.

Lark reads the notation of grammars (rules, templates, repetition, `%import`, `%ignore`). Its priorities and the order
of alternatives mean nothing here: they choose between parses, and the question is only whether there is one. Terminals
match as in Lark's `dynamic_complete` lexer, in any way that leads to a parse. `%ignore` allows its terminals before,
between and after others.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.errors import ConfigError
from paceline.grammar.expression import (
    LAST,
    NEVER,
    Chars,
    Expr,
    Grammar,
    Ranges,
    Ref,
    Star,
    alternatives,
    joined,
    other_characters,
    repeat,
    sequence,
)

if TYPE_CHECKING:
    from lark import Lark
    from lark.lexer import TerminalDef

PARSER: Any = importlib.import_module("re._parser")  # the parse tree has no public name since sre_parse was deprecated

IRREGULAR = {
    "AT": "an anchor or boundary inside",
    "ASSERT": "a lookaround",
    "ASSERT_NOT": "a negative lookaround",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "possessive repetition",
}

MOST_FOLDED = 1024
"""Characters of a set whose upper and lower cases are looked for one by one."""


ASCII_WORDS: Final = 1 << 30
"""A flag beside those of `re`: digits and letters of words, but not spaces, are ASCII alone, as in ECMA-262."""


def parse_regex(pattern: str, flags: int = 0) -> Expr:
    """Parse a pattern into an expression.

    Args:
        flags: `ASCII_WORDS` or none.
    Raises:
        ConfigError: no valid pattern, or no regular language.
    """
    try:
        tree = PARSER.parse(pattern)
        nodes = _without_anchors(list(tree))
        return _sequence(nodes, tree.state.flags | flags, pattern)
    except re.error as error:
        raise ConfigError(f"regex {pattern!r} is not valid: {error}") from None
    except (RecursionError, OverflowError):
        raise ConfigError(f"regex {pattern[:60]!r}... is nested or repeated too much; write it shorter") from None


def _without_anchors(nodes: list[Any]) -> list[Any]:
    def anchor(node: Any, names: tuple[str, ...]) -> bool:
        return str(node[0]) == "AT" and str(node[1]) in names

    while nodes and anchor(nodes[0], ("AT_BEGINNING", "AT_BEGINNING_STRING")):
        nodes = nodes[1:]
    while nodes and anchor(nodes[-1], ("AT_END", "AT_END_STRING")):
        nodes = nodes[:-1]
    return nodes


def _sequence(nodes: Sequence[Any], flags: int, pattern: str) -> Expr:
    return sequence(*(_node(str(op), value, flags, pattern) for op, value in nodes))


def _node(op: str, value: Any, flags: int, pattern: str) -> Expr:
    if op in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
        return Chars(_characters(op, value, flags, pattern))
    if op in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, inner = value
        most = None if high is PARSER.MAXREPEAT else int(high)
        return repeat(_sequence(inner, flags, pattern), int(low), most)
    if op == "BRANCH":
        return alternatives(*(_sequence(branch, flags, pattern) for branch in value[1]))
    if op == "SUBPATTERN":
        _, added, dropped, inner = value
        return _sequence(inner, (flags | added) & ~dropped, pattern)
    if op == "FAILURE":
        return NEVER
    what = IRREGULAR.get(op, op.lower())
    raise ConfigError(f"regex {pattern!r} uses {what}, which no finite automaton can follow; write it without")


def _characters(op: str, value: Any, flags: int, pattern: str) -> Ranges:
    if op == "ANY":
        return ((0, LAST),) if flags & re.DOTALL else other_characters(((10, 10),))
    if op == "IN":
        return _set(value, flags, pattern)
    ranges = _folded(((value, value),), flags, pattern)
    return other_characters(ranges) if op == "NOT_LITERAL" else ranges


def _set(items: Sequence[Any], flags: int, pattern: str) -> Ranges:
    ranges: list[tuple[int, int]] = []
    negated = False
    for kind, value in items:
        match str(kind):
            case "NEGATE":
                negated = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case "CATEGORY":
                only_words = bool(flags & ASCII_WORDS) and not str(value).endswith("SPACE")
                ranges.extend(_category(str(value), only_words or bool(flags & re.ASCII)))
            case other:
                raise ConfigError(f"regex {pattern!r} uses {other.lower()} in a set; write the characters out")
    merged = _folded(joined(ranges), flags, pattern)
    return other_characters(merged) if negated else merged


def _folded(ranges: Ranges, flags: int, pattern: str) -> Ranges:
    if not flags & re.IGNORECASE:
        return ranges
    if sum(high - low + 1 for low, high in ranges) > MOST_FOLDED:
        raise ConfigError(
            f"regex {pattern!r} ignores case in a set of over {MOST_FOLDED} characters; write both cases out"
        )
    return joined(
        pair for low, high in ranges for code in range(low, high + 1) for pair in _cases(code, bool(flags & re.ASCII))
    )


@lru_cache(maxsize=1)
def _everything() -> str:
    return "".join(map(chr, range(LAST + 1)))


def _matching(pattern: str, flags: int) -> Ranges:
    return joined((m.start(), m.end() - 1) for m in re.finditer(f"(?:{pattern})+", _everything(), flags))


@lru_cache(maxsize=4096)
def _cases(code: int, ascii_only: bool) -> Ranges:
    """Characters that `re` takes for this one when it ignores case."""
    flags = re.IGNORECASE | (re.ASCII if ascii_only else 0)
    return _matching(re.escape(chr(code)), flags)


@lru_cache(maxsize=16)
def _category(name: str, ascii_only: bool) -> Ranges:
    sign = {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w"}
    flags = re.ASCII if ascii_only else 0
    if "NOT_" in name:
        return other_characters(_category(name.replace("NOT_", ""), ascii_only))
    return _matching(sign[name], flags)


LAZY_STRING: Final = r".*?(?<!\\)(\\\\)*?"
"""Inside of Lark's `common.ESCAPED_STRING`: as lazy matching means it, but no regular expression in the strict
sense.
"""

STRICT_STRING: Final = r'(?:[^"\\\n]|\\.)*'

SUFFIXES: Final = (".lark", ".ebnf")


def read_ebnf(grammar: str | Path) -> tuple[str, Path | None]:
    """The text of a grammar, given as such or as a path to a .lark or .ebnf file, and the folder of its imports.

    Raises:
        ConfigError: a file that cannot be read.
    """
    if isinstance(grammar, str) and not ("\n" not in grammar and grammar.endswith(SUFFIXES)):
        return grammar, None
    path = Path(grammar)
    try:
        return path.read_text(encoding="utf-8"), path.parent
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"grammar {str(path)!r} cannot be read ({error}); give the path of a Lark grammar, or its text"
        ) from None


def parse_ebnf(text: str, start: str = "start", folder: Path | None = None) -> Grammar:
    """Parse a grammar in Lark's notation into rules.

    Args:
        start: rule of whole texts.
        folder: where imports are looked for.
    Raises:
        ConfigError: no valid grammar, no such rule, or a terminal that is no regular expression.
    """
    lark = _read_by_lark(text, start, folder)
    used = {symbol.name for rule in lark.rules for symbol in rule.expansion if symbol.is_term} | set(lark.ignore_tokens)
    terminals = {terminal.name: _terminal(terminal) for terminal in lark.terminals if terminal.name in used}
    if missing := sorted(used - terminals.keys()):
        raise ConfigError(f"the grammar declares {missing[0]} without saying what it matches; define it")
    blank = alternatives(*(terminals[name] for name in lark.ignore_tokens)) if lark.ignore_tokens else NEVER
    between = Star(blank) if lark.ignore_tokens else sequence()
    rules: dict[str, Expr] = {f" {name}": expr for name, expr in terminals.items()} | {" between": between}
    for rule in lark.rules:
        symbols = (
            sequence(Ref(f" {s.name}"), Ref(" between")) if s.is_term else Ref(str(s.name)) for s in rule.expansion
        )
        rules[str(rule.origin.name)] = alternatives(
            *_alternatives(rules.get(str(rule.origin.name))), sequence(*symbols)
        )
    return Grammar({**rules, " text": sequence(Ref(" between"), Ref(start))}, " text")


def _read_by_lark(text: str, start: str, folder: Path | None) -> Lark:
    from lark import Lark

    paths = [str(folder)] * bool(folder)
    try:
        return Lark(text, start=start, parser="earley", lexer="dynamic", maybe_placeholders=False, import_paths=paths)
    except RecursionError:
        raise ConfigError("the grammar is nested too deeply; give parts of it names of their own") from None
    except Exception as error:  # Lark's own errors, those of `re` and `regex`, assertions about wrong directives
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"the grammar is not valid: {reason.strip()}; write it in Lark's notation") from None


def _alternatives(known: Expr | None) -> list[Expr]:
    return [] if known is None else [known]


def _terminal(terminal: TerminalDef) -> Expr:
    pattern = terminal.pattern.to_regexp()
    try:
        return parse_regex(pattern.replace(LAZY_STRING, STRICT_STRING))
    except ConfigError as error:
        raise ConfigError(f"terminal {terminal.name} of the grammar: {error}") from None
