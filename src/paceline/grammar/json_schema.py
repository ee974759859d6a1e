"""JSON Schema as a grammar of the texts that satisfy it, for small schemas.

Every text of the grammar parses as JSON and satisfies the schema; not every such text is in the grammar. Objects hold
the declared properties in their order and no others, a blank may follow each colon and comma and stand nowhere else,
strings have no lone surrogates, numbers have 21 digits before their point at most, 22 behind it and 2 in the exponent,
and enumerated values are spelled as `json.dumps` does. What a schema may say is listed in `CHECKED`, per type; what is
not understood is rejected with an error that names it, not ignored, except words that only describe (`title`, `format`,
...). References within the schema may be recursive.

The meaning of words is that of JSON Schema 2020-12.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar.expression import (
    EMPTY,
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
    joined,
    literal,
    optional,
    other_characters,
    repeat,
    sequence,
)
from paceline.grammar.notation import ASCII_WORDS, parse_regex
from paceline.utils import shortened

TYPES: Final = ("object", "array", "string", "integer", "number", "boolean", "null")
CHECKED: Final[Mapping[str, tuple[str, ...]]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": (),
    "boolean": (),
    "null": (),
}
GENERAL: Final = ("type", "enum", "const", "anyOf", "$ref", "$defs", "definitions")
DESCRIBING: Final = (
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$id",
    "$comment",
    "format",
    "deprecated",
)
MOST_DIGITS, MOST_DECIMALS = 21, 22
"""Digits before and behind the point: as many as any double has that is written without an exponent, and more than any
64-bit integer.
"""

BLANK: Final = optional(literal(" "))
SPECIAL: Final[Ranges] = joined([(0, 31), (34, 34), (92, 92), (0xD800, 0xDFFF)])
PLAIN: Final = Chars(other_characters(SPECIAL))


def parse_json_schema(root: Any) -> Grammar:
    """The grammar of a schema, as `read` gives it.

    Raises:
        ConfigError: no valid schema, or one that says what grammars of this kind cannot.
        UnsatisfiableError: a schema with bounds that no value meets.
    """
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(root)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "the top"
        raise ConfigError(f"json_schema is not valid at {where}: {error.message}") from None
    maker = _Maker(root)
    start = maker.rule("#")
    return Grammar(maker.rules, start)


def read_json_schema(schema: Mapping[str, Any] | bool | str | Path) -> Any:
    """A schema given as an object, as JSON text, or as the path of a .json file.

    Raises:
        ConfigError: a file that cannot be read, or a text that is not JSON.
    """
    if not isinstance(schema, str | Path):
        return schema
    try:
        text = str(schema)
        if isinstance(schema, Path) or ("\n" not in text and text.endswith(".json")):
            text = Path(schema).read_text(encoding="utf-8")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"json_schema cannot be read ({error}); give an object, its JSON text or a .json file"
        ) from None


@cache
def _sign() -> Expr:
    pair = r"[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    escapes = parse_regex(rf'\\(?:["\\/bfnrt]|u(?:[0-9a-ceA-CEfF][0-9a-fA-F]{{3}}|[dD][0-7][0-9a-fA-F]{{2}}|{pair}))')
    return alternatives(PLAIN, escapes)


@cache
def _number() -> Expr:
    whole, broken = rf"[1-9][0-9]{{0,{MOST_DIGITS - 1}}}", rf"\.[0-9]{{1,{MOST_DECIMALS}}}"
    return parse_regex(rf"-?(?:0|{whole})(?:{broken})?(?:[eE][+-]?[0-9]{{1,2}})?")


def _spelled(value: Any) -> str:
    """A listed value as JSON.

    Raises:
        ConfigError: an infinite number or NaN in it, which JSON cannot write.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        rule = "which holds a number that JSON cannot write (infinite or NaN); list finite ones"
        raise ConfigError(f"json_schema lists the value {shortened(value)}, {rule}") from None


def _listed(low: str, parts: Sequence[Expr], high: str) -> Expr:
    return sequence(literal(low), *parts, literal(high))


COMMA: Final = sequence(literal(","), BLANK)


class _Maker:
    """Rules of one schema, each made when it is first asked for."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.rules: dict[str, Expr] = {}

    def rule(self, pointer: str) -> str:
        """Give the name of the rule for a reference, which is made when it is first met."""
        if pointer not in self.rules:
            self.rules[pointer] = NEVER
            self.rules[pointer] = self.value(self._find(pointer))
        return pointer

    def _find(self, pointer: str) -> Any:
        if pointer != "#" and not pointer.startswith("#/"):
            raise ConfigError(f"json_schema refers to {pointer!r}; only references within it (#/...) are followed")
        node = self.root
        for step in pointer.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(node, Mapping) or name not in node:
                raise ConfigError(
                    f"json_schema refers to {pointer!r}, which is not in it; write the schema out in one piece"
                )
            node = node[name]
        return node

    def anything(self) -> Expr:
        """Make the expression of any JSON value."""
        if " any" not in self.rules:
            self.rules[" any"] = NEVER
            value = Ref(" any")
            pair = sequence(self.string({}), literal(":"), BLANK, value)
            scalars = (self.string({}), _number(), *map(literal, ("true", "false", "null")))
            self.rules[" any"] = alternatives(
                *scalars, _listed("[", [_chain([value])], "]"), _listed("{", [_chain([pair])], "}")
            )
        return Ref(" any")

    def value(self, schema: Any) -> Expr:
        """Make the expression of the texts of a schema's values."""
        if isinstance(schema, bool):
            return self.anything() if schema else NEVER
        if "enum" in schema or "const" in schema:
            return self._listed_values(schema)
        types = schema.get("type", TYPES)
        types = (types,) if isinstance(types, str) else tuple(types)
        _check_words(schema, types)
        if "$ref" in schema or "anyOf" in schema:
            return self._elsewhere(schema)
        if not any(word in schema for kind in types for word in CHECKED[kind]) and set(types) >= set(TYPES) - {
            "integer"
        }:
            return self.anything()
        makers = {"object": self.object, "array": self.array, "string": self.string, "integer": integers}
        kinds = [kind for kind in types if not (kind == "integer" and "number" in types)]
        fixed = {
            "number": _number(),
            "boolean": alternatives(literal("true"), literal("false")),
            "null": literal("null"),
        }
        return alternatives(*(fixed[kind] if kind in fixed else makers[kind](schema) for kind in kinds))

    def _elsewhere(self, schema: Mapping[str, Any]) -> Expr:
        beside = [word for word in schema if word not in (*DESCRIBING, "$defs", "definitions")]
        if len(beside) > 1:
            raise ConfigError(f"json_schema has {beside[0]!r} beside {beside[1]!r}; write what both mean in one place")
        if "$ref" in schema:
            return Ref(self.rule(schema["$ref"]))
        return alternatives(*map(self.value, schema["anyOf"]))

    def _listed_values(self, schema: Mapping[str, Any]) -> Expr:
        from jsonschema import Draft202012Validator

        whole = {**schema, "$defs": self.root.get("$defs", {})} if isinstance(self.root, Mapping) else schema
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        fine = [value for value in values if Draft202012Validator(whole).is_valid(value)]
        if not fine:
            raise UnsatisfiableError(f"json_schema lists values {values!r} of which none satisfies the rest of it")
        return alternatives(*(literal(_spelled(value)) for value in fine))

    def object(self, schema: Mapping[str, Any]) -> Expr:
        """Declared properties in order, those not required at will.

        Any properties where none is declared and others may come.
        """
        declared = schema.get("properties", {})
        required = set(schema.get("required", ()))
        more = schema.get("additionalProperties", True)
        if unknown := sorted(required - declared.keys()):
            raise ConfigError(f"json_schema requires {unknown[0]!r} without declaring it; add it to properties")
        if not declared and more is not False:
            pair = sequence(self.string({}), literal(":"), BLANK, self.value(more))
            return _listed("{", [_chain([pair])], "}")
        pairs = [(name in required, self._pair(name, inner)) for name, inner in declared.items()]
        return _listed("{", [_members(pairs)], "}")

    def _pair(self, name: str, schema: Any) -> Expr:
        return sequence(literal(json.dumps(name, ensure_ascii=False)), literal(":"), BLANK, self.value(schema))

    def array(self, schema: Mapping[str, Any]) -> Expr:
        """First items one by one, then as many others as lengths allow."""
        first = [self.value(inner) for inner in schema.get("prefixItems", ())]
        rest = self.value(schema.get("items", True))
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        if rest == NEVER:
            high = min(len(first), high if high is not None else len(first))
        if high is not None and low > high:
            raise UnsatisfiableError(f"json_schema requires at least {low} and at most {int(high)} items")
        return _listed("[", [_chain(first, rest, low, None if high is None else int(high))], "]")

    def string(self, schema: Mapping[str, Any]) -> Expr:
        """Within bounds of length, or of a pattern."""
        low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
        if high is not None and low > high:
            raise UnsatisfiableError(
                f"json_schema requires a string of at least {low} and at most {int(high)} characters"
            )
        if "pattern" in schema:
            if low or high is not None:
                raise ConfigError("json_schema has 'pattern' beside a length; write the length into the pattern")
            return _listed('"', [_pattern(schema["pattern"])], '"')
        return _listed('"', [repeat(_sign(), low, None if high is None else int(high))], '"')


def _check_words(schema: Mapping[str, Any], types: Sequence[str]) -> None:
    known = {word for kind in types for word in CHECKED[kind]} | {*GENERAL, *DESCRIBING}
    if "number" in types:
        known -= set(CHECKED["integer"])
    harmless = {word for words in CHECKED.values() for word in words} - set(CHECKED["integer"])
    for word in schema:
        if word not in known | harmless:
            raise ConfigError(
                f"json_schema uses {word!r}, which is not supported here; supported are {', '.join(sorted(known))}"
            )


def _members(pairs: Sequence[tuple[bool, Expr]]) -> Expr:
    """Pairs in order with commas between those that are there: one of them is the first, if any."""
    later = [sequence(COMMA, pair) if needed else optional(sequence(COMMA, pair)) for needed, pair in pairs]
    firsts = [sequence(pair, *later[i + 1 :]) for i, (_, pair) in enumerate(pairs)]
    needed = next((i for i, (needed, _) in enumerate(pairs) if needed), None)
    return alternatives(EMPTY, *firsts) if needed is None else alternatives(*firsts[: needed + 1])


def _chain(first: Sequence[Expr], rest: Expr | None = None, low: int = 0, high: int | None = None) -> Expr:
    """Items with commas between them, `low` to `high` of them; without `rest` the one given is repeated."""
    items = list(first) if rest is not None else []
    rest = first[0] if rest is None else rest
    most = max(low, len(items), 1) if high is None else high
    items = (items + [rest] * most)[:most]
    tail: Expr = EMPTY if high is not None else Star(sequence(COMMA, rest))
    for i in range(len(items) - 1, -1, -1):
        tail = sequence(COMMA, items[i], tail) if i else sequence(items[i], tail)
        tail = tail if i < low else optional(tail)
    return tail


def _pattern(pattern: str) -> Expr:
    """Strings in which a pattern is found; characters that JSON escapes are left out.

    Its notation is Python's, but with ECMA-262's digits and words.
    """
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if inner.endswith("$") and not inner.endswith("\\$") else inner
    before = EMPTY if pattern.startswith("^") else Star(PLAIN)
    after = EMPTY if pattern.endswith("$") and not pattern.endswith("\\$") else Star(PLAIN)
    return sequence(before, _within(parse_regex(f"(?:{inner})", ASCII_WORDS)), after)


def _within(expr: Expr) -> Expr:
    """The same expression over characters that a JSON string spells as they are."""
    match expr:
        case Chars(ranges):
            return Chars(other_characters(joined([*other_characters(ranges), *SPECIAL])))
        case Seq(parts):
            return Seq(tuple(map(_within, parts)))
        case Alt(parts):
            return Alt(tuple(map(_within, parts)))
        case Star(inner):
            return Star(_within(inner))
        case Repeat(inner, low, high):
            return Repeat(_within(inner), low, high)
    return expr


DIGIT: Final = Chars(((48, 57),))
FIRST: Final = Chars(((49, 57),))


def integers(schema: Mapping[str, Any]) -> Expr:
    """Integers from `minimum` to `maximum` (or beyond `exclusiveMinimum`, below `exclusiveMaximum`), none of which need
    be given.

    Raises:
        UnsatisfiableError: no integer lies between.
        ConfigError: an infinite bound, or NaN.
    """
    rounded = {
        "minimum": math.ceil,
        "maximum": math.floor,
        "exclusiveMinimum": lambda bound: math.floor(bound) + 1,
        "exclusiveMaximum": lambda bound: math.ceil(bound) - 1,
    }
    for word in rounded:
        if not math.isfinite(schema.get(word, 0)):
            raise ConfigError(
                f"json_schema: {word} must be a finite number, got {schema[word]!r}; leave it out for no bound"
            )
    bounds = {word: make(schema[word]) for word, make in rounded.items() if word in schema}
    lows, highs = ([value for word, value in bounds.items() if end in word.lower()] for end in ("minimum", "maximum"))
    low, high = max(lows, default=None), min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise UnsatisfiableError(f"json_schema requires an integer from {low} to {high}; there is none")
    if low is None and high is None:
        return sequence(optional(literal("-")), _from(0, None))
    positive = NEVER if high is not None and high < 0 else _from(max(low or 0, 0), high)
    negative = (
        NEVER
        if low is not None and low >= 0
        else _from(max(-(high if high is not None else -1), 1), None if low is None else -low)
    )
    return alternatives(positive, sequence(literal("-"), negative)) if negative != NEVER else positive


def _from(low: int, high: int | None) -> Expr:
    """Integers from `low`, 0 or more, to `high`; None is none that has more digits than `low` and `MOST_DIGITS`."""
    if high is None:
        size = len(str(low))
        return alternatives(_from(low, 10**size - 1), sequence(FIRST, repeat(DIGIT, size, max(size, MOST_DIGITS - 1))))
    parts = []
    for size in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        if least <= most:
            parts.append(_between(str(least), str(most)))
    return alternatives(*parts)


def _between(low: str, high: str) -> Expr:
    """Digit strings of one length, in order."""
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return sequence(literal(low[0]), _between(low[1:], high[1:]))
    rest = len(low) - 1
    parts = [
        sequence(literal(low[0]), _between(low[1:], "9" * rest)),
        sequence(literal(high[0]), _between("0" * rest, high[1:])),
    ]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(sequence(Chars(((ord(low[0]) + 1, ord(high[0]) - 1),)), repeat(DIGIT, rest, rest)))
    return alternatives(*parts)
