"""Llama 4 and others: `[name(key=value, ...), ...]`, calls as Python writes them with literals as values, at the start
of the answer or behind a mark. They are read with JSON's words beside Python's.

In the grammar, parameters come in the order of the schema, those that are not required may be left out, and none is
added. What a text may hold is what means the same in Python and in JSON. Numbers are JSON's, which are Python's too, so
their limits are enforced; other keywords than those below are rejected where a function is strict, and ignored where it
is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, Final

from paceline.grammar import spelled
from paceline.serving.api_errors import ApiError
from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening
from paceline.serving.chat.blocks import add_call, read_ending
from paceline.serving.chat.grammar_rules import GrammarRules, literal, one_of
from paceline.serving.chat.growing_text import EndedError, GrowingText, Steps
from paceline.serving.chat.message_parts import MessageParts
from paceline.serving.chat.parameters import NUMBER, OBJECT, REAL, TYPES, WHOLE, Parameters, Schema
from paceline.serving.chat.values import keywords
from paceline.serving.protocol import Function

BEGIN, END = "<|python_start|>", "<|python_end|>"
"""These marks are around calls, at times."""

CALLED: Final = re.compile(r"\s*\[\s*([A-Za-z_][A-Za-z0-9_.-]*)\(")
"""It matches up to the name of a call that begins without a mark."""

NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")
SIGNS: Final = re.compile(r"[()\[\]{}\"'\\]")

LITERALS: Final = (
    f"WHOLE: {WHOLE}\nREAL: {REAL}"
    r"""
COMMA: /, ?/
COLON: /: ?/
STRING: /"([^"\\\x00-\x1f]|\\["'\\nrt]){0,4096}"|'([^'\\\x00-\x1f]|\\["'\\nrt]){0,4096}'/
any_key: STRING
any: STRING | REAL | "True" | "False" | "None" | any_list | any_dict
any_list: "[" (any (COMMA any)*)? "]"
any_dict: "{" (STRING COLON any (COMMA STRING COLON any)*)? "}"
"""
)


def _read(text: GrowingText, parts: MessageParts, mark: str) -> Steps[bool]:
    """Read a list of calls, each whole; behind a mark there may be one without a list."""
    yield from text.blanks()
    if not (yield from text.literal("[")) and not mark:
        return False
    while True:
        yield from text.blanks()
        if not (yield from read_call(text, parts)):
            return False
        try:
            yield from text.blanks()
            if (yield from text.literal(",", "]", END)) != ",":
                yield from read_ending(text, END)
                return True
        except EndedError:
            text.to_end()
            return True
        text.forget()


def read_call(text: GrowingText, parts: MessageParts) -> Steps[bool]:
    """Read one call as a whole; returns whether it is one."""
    name = yield from text.run(NAME)
    if not parts.knows(name) or not (yield from text.literal("(")):
        return False
    written = yield from _call_end(text)
    try:
        arguments = keywords(written)
    except ValueError:
        return False
    return add_call(text, parts, name, arguments)


def _call_end(text: GrowingText) -> Steps[str]:
    """Read up to the parenthesis that closes a call, and behind it; returns what is before.

    Raises:
        EndedError: there is none.
    """
    depth, quote, length = 1, "", 0
    while depth:
        sign = SIGNS.search(text.text, text.at + length)
        if sign is None or (not text.last and _unclear(text.text, sign.start(), quote)):
            length = (len(text.text) if sign is None else sign.start()) - text.at
            yield from text.more()
            continue
        character = sign[0]
        if character in "\"'" and quote in ("", character, 3 * character):
            character = (
                3 * character if quote != character and text.text.startswith(3 * character, sign.start()) else character
            )
            quote = character if not quote else "" if quote == character else quote
        elif not quote:
            depth += {"(": 1, "[": 1, "{": 1, "\\": 0}.get(character, -1)
        length = sign.start() - text.at + len(character) + (character == "\\")
    inner = text.text[text.at : text.at + length - 1]
    text.at += length
    return inner


def _unclear(text: str, place: int, quote: str) -> bool:
    """Tell whether what comes next decides what this sign is: one that it quotes, or three quotes in a row."""
    rest = text[place : place + 3]
    if rest[0] == "\\":
        return len(rest) == 1
    return len(rest) < 3 and rest == len(rest) * rest[0] and rest[0] in "\"'" and quote in ("", 3 * rest[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """Says how values are written, as grammars; there are rules `any`, WHOLE and REAL besides.

    Attributes:
        text: of any text. words: of true, false and null.
        comma: between values. equals, colon: between the name of a parameter or of a dict's value and the value.
        key, inner_key: of such a name; `key` may raise an ApiError. value: of one value.
    """

    text: str
    words: tuple[str, str, str]
    comma: str
    equals: str
    colon: str
    key: Callable[[str], str]
    inner_key: Callable[[str], str]
    value: Callable[[Any], str]


class LiteralArguments(Parameters):
    """Writes the parameters of one function as rules.

    Args:
        strict: of a function that does not say whether it is.
    Attributes:
        text: what is between the brackets of a call.
    Raises:
        ApiError: a name that cannot be written, or what cannot be enforced.
    """

    def __init__(self, function: Function, rules: GrammarRules, notation: Notation, *, strict: bool) -> None:
        super().__init__(function, strict=strict)
        self._rules, self._notation = rules, notation
        self._known: dict[str, str] = {}
        self.limit(self.whole, OBJECT | {"type"})
        self.text = self._members(self.whole, notation.equals, notation.key)

    def _value(self, schema: Schema) -> str:
        """Return the grammar of a literal of this schema."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise self.wrong("must be schemas that something satisfies")
        if (values := self.listed(schema)) is not None:
            return self._one_of([self._notation.value(value) for value in values])
        if (target := schema.get("$ref")) is not None:
            self.limit(schema, frozenset(("$ref",)))
            return self._referred(target)
        if (choices := self.choices(schema)) is not None:
            return self._one_of([self._value(choice) for choice in choices])
        kinds = self.kinds(schema)
        self.limit(schema, frozenset(("type",)).union(*(TYPES[kind] for kind in kinds)))
        return self._one_of([self._of_kind(kind, schema) for kind in kinds]) if kinds else "any"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        """Return the grammar of a literal of one type."""
        if kind in ("number", "integer"):
            limits = {key: schema[key] for key in NUMBER & schema.keys()}
            name = "WHOLE" if kind == "integer" else "REAL"
            return self._rules.rule(f"%json {json.dumps({'type': kind, **limits})}") if limits else name
        if kind == "object":
            return self._dict(schema)
        if kind == "array":
            return self._list(schema)
        true, false, null = self._notation.words
        return {"string": self._notation.text, "boolean": f"({true} | {false})", "null": null}[kind]

    def _one_of(self, values: Sequence[str]) -> str:
        if not values:
            raise self.wrong("must be schemas that something satisfies")
        return one_of(values)

    def _referred(self, target: str) -> str:
        """Return the rule of a definition, which may refer to itself."""
        if target not in self._known:
            schema = self.find(target)
            name = self._known[target] = self._rules.name()
            self._rules.rule(self._value(schema), name=name)
        return self._known[target]

    def _list(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self._value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = f"{item} ({self._notation.comma} {item}){times}"
        return self._rules.rule(f'"[" {body if least else f"({body})?"} "]"')

    def _dict(self, schema: Mapping[str, Any]) -> str:
        if not schema.get("properties"):
            more = schema.get("additionalProperties", True)
            if more is False:
                return '"{}"'
            member = f"any_key {self._notation.colon} {self._value(more)}"
            return self._rules.rule(f'"{{" ({member} ({self._notation.comma} {member})*)? "}}"')
        return self._rules.rule(f'"{{" {self._members(schema, self._notation.colon, self._notation.inner_key)} "}}"')

    def _members(self, schema: Schema, sign: str, spell: Callable[[str], str]) -> str:
        """Return the grammar of the names and values of an object, in their order.

        Args:
            sign: between both.
            spell: writes a name.
        """
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        if missing := sorted(required - properties.keys()):
            raise self.wrong(f"require {missing[0]!r}, which is not among their properties")
        first, later = "", ""  # of what is left, where nothing was written yet, and behind something
        for name in reversed(properties):
            member = f"{spell(name)} {sign} {self._value(properties[name])}"
            begun = f"{member} {later}"
            first = self._rules.rule(begun if name in required else f"({begun} | {first})" if first else f"({begun})?")
            comma = self._notation.comma
            later = self._rules.rule(f"{comma} {begun}" if name in required else f"({comma} {member})? {later}")
        return first


def _key(name: str) -> str:
    _check_name(name, [name])
    return literal(name)


def _literal(value: Any) -> str:
    return literal(repr(value))


PYTHON: Final = Notation(
    text="STRING",
    words=('"True"', '"False"', '"None"'),
    comma="COMMA",
    equals='"="',
    colon="COLON",
    key=_key,
    inner_key=_literal,
    value=_literal,
)


def _check_name(name: str, parts: Sequence[str]) -> None:
    if not all(part.isidentifier() and not iskeyword(part) for part in parts):
        why = f"{name!r} is no name in Python, in which this model writes calls; tool_choice cannot be enforced"
        raise ApiError(why, param="tools")


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Write one call."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _write(calls: Calls) -> str:
    return f"[{', '.join(call_text(*call) for call in calls)}]"


def call_grammars(rules: GrammarRules, calls: AllowedCalls) -> dict[str, str]:
    """Add what literals need, and return the grammar of what is between the brackets of a call, by function."""
    rules.add(LITERALS)
    for function in calls.functions:
        _check_name(function.name, function.name.split("."))
    return {
        function.name: LiteralArguments(function, rules, PYTHON, strict=calls.strict).text
        for function in calls.functions
    }


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    """Yield how calls begin: as a list that begins the answer with a name, or behind a mark."""
    arguments = call_grammars(rules, calls)
    call = rules.rule(one_of(f'"{name}(" {text} ")"' for name, text in arguments.items()))
    more = f"(COMMA {call})*" if calls.many else ""
    for name, text in arguments.items():
        yield Opening(f'{text} ")" {more} "]"', start=f'"[" "{name}("', text=spelled(f"[{name}("))
    if rules.silent(BEGIN):
        yield Opening(rf'"[" {call} {more} "]" {rules.mark(END)}', mark=BEGIN, loose=True)


PYTHONIC: Final = CallFormat(
    signs=(r"\[func_name1\(",),
    begins=(BEGIN,),
    marks=(END,),
    read=_read,
    write=_write,
    openings=_openings,
    opens="[",
    named=CALLED,
)
