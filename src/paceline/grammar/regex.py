"""Regular expressions in Python's notation, as expression trees.

In: a pattern. Out: an `Expr` without references, of the texts that `re.fullmatch` accepts. Not here: automata.

Python's own parser reads the pattern, so that notation and meaning are those of `re`. What is no regular expression in
the strict sense (backreferences, lookarounds, boundaries, atomic groups, possessive repetition) is refused by name;
lazy repetition matches the same texts as greedy. `^`, `\\A` and `$`, `\\Z` mean nothing at the ends of the pattern and
are refused elsewhere. The flags `i`, `s` and `x` hold."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from paceline.errors import ConfigError
from paceline.grammar.expression import (
    LAST,
    NEVER,
    Chars,
    Expr,
    Ranges,
    alternatives,
    joined,
    other_characters,
    repeat,
    sequence,
)

PARSER: Any = importlib.import_module("re._parser")  # the parse tree has no public name since sre_parse was deprecated
REFUSED = {
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


def parse_regex(pattern: str, flags: int = 0) -> Expr:
    """The tree of a pattern.

    Args:
        flags: of `re`, besides those in the pattern.
    Raises:
        ConfigError: no valid pattern, or no regular language.
    """
    try:
        tree = PARSER.parse(pattern, flags)
        nodes = _without_anchors(list(tree))
        return _sequence(nodes, tree.state.flags, pattern)
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
    raise ConfigError(
        f"regex {pattern!r} uses {REFUSED.get(op, op.lower())}, which no finite automaton can follow; write it without"
    )


def _characters(op: str, value: Any, flags: int, pattern: str) -> Ranges:
    if op == "ANY":
        return ((0, LAST),) if flags & re.DOTALL else other_characters(((10, 10),))
    if op == "IN":
        return _set(value, flags, pattern)
    found = _folded(((value, value),), flags, pattern)
    return other_characters(found) if op == "NOT_LITERAL" else found


def _set(items: Sequence[Any], flags: int, pattern: str) -> Ranges:
    found: list[tuple[int, int]] = []
    negated = False
    for kind, value in items:
        match str(kind):
            case "NEGATE":
                negated = True
            case "LITERAL":
                found.append((value, value))
            case "RANGE":
                found.append(value)
            case "CATEGORY":
                found.extend(_category(str(value), bool(flags & re.ASCII)))
            case other:
                raise ConfigError(f"regex {pattern!r} uses {other.lower()} in a set; write the characters out")
    merged = _folded(joined(found), flags, pattern)
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
