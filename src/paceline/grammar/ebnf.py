"""Grammars in Lark's notation, an EBNF with regular expressions for terminals.

In: the text of a grammar, or the path of a file. Out: a `Grammar`. Not here: parsing texts.

Lark reads the notation (rules, templates, repetition, `%import`, `%ignore`). Its priorities and the order of
alternatives mean nothing here: they choose between parses, and the question is only whether there is one. Terminals
match as in Lark's `dynamic_complete` lexer, in any way that leads to a parse. `%ignore` allows its terminals before,
between and after others.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.errors import ConfigError
from paceline.grammar import regex
from paceline.grammar.expression import NEVER, Expr, Grammar, Ref, Star, alternatives, sequence

if TYPE_CHECKING:
    from lark.lexer import TerminalDef

LAZY_STRING: Final = r".*?(?<!\\)(\\\\)*?"
"""Inside of Lark's `common.ESCAPED_STRING`: as lazy matching means it, but no regular expression in the strict
sense.
"""
STRICT_STRING: Final = r'(?:[^"\\\n]|\\.)*'
SUFFIXES: Final = (".lark", ".ebnf")


def read_ebnf(grammar: str | Path) -> tuple[str, Path | None]:
    """The text of a grammar given as such or as a path that ends in .lark or .ebnf, and the folder that its imports
    count from.

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
    """The rules of a grammar.

    Args:
        start: rule of whole texts.
        folder: where imports are looked for.
    Raises:
        ConfigError: no valid grammar, no such rule, or a terminal that is no regular expression.
    """
    from lark import Lark

    try:
        found = Lark(
            text,
            start=start,
            parser="earley",
            lexer="dynamic",
            maybe_placeholders=False,
            import_paths=[str(folder)] * bool(folder),
        )
    except Exception as error:  # Lark's own errors, those of `re` and `regex`, assertions about wrong directives
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"the grammar is not valid: {reason.strip()}; write it in Lark's notation") from None
    used = {symbol.name for rule in found.rules for symbol in rule.expansion if symbol.is_term} | set(
        found.ignore_tokens
    )
    terminals = {terminal.name: _terminal(terminal) for terminal in found.terminals if terminal.name in used}
    if missing := sorted(used - terminals.keys()):
        raise ConfigError(f"the grammar declares {missing[0]} without saying what it matches; define it")
    blank = alternatives(*(terminals[name] for name in found.ignore_tokens)) if found.ignore_tokens else NEVER
    between = Star(blank) if found.ignore_tokens else sequence()
    rules: dict[str, Expr] = {}
    for rule in found.rules:
        symbols = (sequence(terminals[s.name], between) if s.is_term else Ref(str(s.name)) for s in rule.expansion)
        rules[str(rule.origin.name)] = alternatives(
            *_alternatives(rules.get(str(rule.origin.name))), sequence(*symbols)
        )
    return Grammar({**rules, " text": sequence(between, Ref(start))}, " text")


def _alternatives(known: Expr | None) -> list[Expr]:
    return [] if known is None else [known]


def _terminal(terminal: TerminalDef) -> Expr:
    pattern = terminal.pattern.to_regexp()
    try:
        return regex.parse_regex(pattern.replace(LAZY_STRING, STRICT_STRING))
    except ConfigError as error:
        raise ConfigError(f"terminal {terminal.name} of the grammar: {error}") from None
