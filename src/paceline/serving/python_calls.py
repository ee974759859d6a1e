"""The grammar of calls as Python writes them: `[name(key=value, ...), ...]`, with literals as values.

Parameters come in the order of the schema, those that are not required may be left out, and none is added. What a text
may hold is what means the same in Python and in JSON. Numbers are JSON's, which are Python's too, so their limits are
enforced; other keywords than those below are rejected where a function is strict, and ignored where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any, Final

from paceline.serving.protocol import ApiError, Function

IDLE: Final = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated")
)
"""Keywords that ask for nothing."""

OBJECT: Final = frozenset(("properties", "required", "additionalProperties"))
NUMBER: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
ARRAY: Final = frozenset(("items", "minItems", "maxItems"))
TYPES: Final[Mapping[str, frozenset[str]]] = {
    "object": OBJECT,
    "array": ARRAY,
    "number": NUMBER,
    "integer": NUMBER,
    "string": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""Types and their keywords."""

LITERALS: Final = r"""
COMMA: /, ?/
COLON: /: ?/
TEXT: /"([^"\\\x00-\x1f]|\\["'\\nrt]){0,4096}"|'([^'\\\x00-\x1f]|\\["'\\nrt]){0,4096}'/
WHOLE: /-?(0|[1-9][0-9]{0,17})/
REAL: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/
any: TEXT | REAL | "True" | "False" | "None" | any_list | any_dict
any_list: "[" (any (COMMA any)*)? "]"
any_dict: "{" (TEXT COLON any (COMMA TEXT COLON any)*)? "}"
"""

Schema = Any


def python_grammar(functions: Sequence[Function], *, parallel: bool, strict: bool) -> str:
    """In llguidance's notation: a list of one call, or of several.

    Args:
        strict: functions that do not say so are.
    Raises:
        ApiError: a name that is none in Python, or what cannot be enforced.
    """
    rules, calls = [], []
    for number, one in enumerate(functions):
        _check_name(one.name, one.name.split("."))
        made = _Rules(f"f{number}", one.name, one.parameters or {}, strict if one.strict is None else one.strict)
        made.limit(made.whole, OBJECT | {"type"})
        arguments = made.members(made.whole, '"="', _key)
        calls.append(f'{_text(f"{one.name}(")} {arguments} ")"')
        rules += made.rules
    more = " (COMMA call)*" if parallel else ""
    return "\n".join(["%llguidance {}", f'start: "[" call{more} "]"', f"call: {' | '.join(calls)}", *rules, LITERALS])


class _Rules:
    """Rules of one function.

    Args:
        prefix: of their names.
    Attributes:
        whole: the schema of its parameters.
    """

    def __init__(self, prefix: str, function: str, whole: Schema, strict: bool) -> None:
        self.rules: list[str] = []
        self.whole, self._prefix, self._function, self._strict = whole, prefix, function, strict
        self._known: dict[str, str] = {}

    def _rule(self, body: str) -> str:
        """A new rule with this body."""
        name = f"{self._prefix}_{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def limit(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        """Reject, or leave, keywords that are not among these."""
        if self._strict and (unknown := sorted(schema.keys() - known - IDLE)):
            why = f"{json.dumps(unknown)} cannot be enforced in this model's format of calls"
            raise ApiError(f"function {self._function}: {why}; leave it out, or strict", param="tools")

    def _wrong(self, why: str) -> ApiError:
        return ApiError(f"the parameters of function {self._function} {why}", param="tools")

    def value(self, schema: Schema) -> str:
        """What a literal of this schema may be."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise self._wrong("must be schemas that something satisfies")
        for key in ("enum", "const"):
            if key in schema:
                self.limit(schema, frozenset((key, "type")))
                values = schema[key] if key == "enum" else [schema[key]]
                return self._one_of([_text(repr(one)) for one in values])
        if "$ref" in schema:
            self.limit(schema, frozenset(("$ref",)))
            return self._referred(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self.limit(schema, frozenset(("anyOf",)))
                return self._one_of([self.value(one) for one in schema[key]])
        return self._of_type(schema)

    def _of_type(self, schema: Mapping[str, Any]) -> str:
        given = schema.get("type", "object" if "properties" in schema else [])
        kinds = [given] if isinstance(given, str) else given
        if unknown := [kind for kind in kinds if kind not in TYPES]:
            raise self._wrong(f"have a type {unknown[0]!r}, which is none of JSON Schema")
        self.limit(schema, frozenset(("type",)).union(*(TYPES[kind] for kind in kinds)))
        return self._one_of([self._of_kind(kind, schema) for kind in kinds]) if kinds else "any"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in ("number", "integer"):
            limits = {key: schema[key] for key in NUMBER & schema.keys()}
            name = "WHOLE" if kind == "integer" else "REAL"
            return self._rule(f"%json {json.dumps({'type': kind, **limits})}") if limits else name
        if kind == "object":
            return self._dict(schema)
        if kind == "array":
            return self._list(schema)
        return {"string": "TEXT", "boolean": '("True" | "False")', "null": '"None"'}[kind]

    def _one_of(self, values: Sequence[str]) -> str:
        if not values:
            raise self._wrong("must be schemas that something satisfies")
        return f"({' | '.join(values)})"

    def _referred(self, target: str) -> str:
        """The rule of a definition, which may refer to itself."""
        if target not in self._known:
            name = self._known[target] = f"{self._prefix}_d{len(self._known)}"
            found: Any = self.whole
            for part in target.removeprefix("#").split("/")[1:]:
                found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            if found is None or not target.startswith("#"):
                raise self._wrong(f"refer to {target!r}, which is not there")
            body = self.value(found)
            self.rules.append(f"{name}: {body}")
        return self._known[target]

    def _list(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self.value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = f"{item} (COMMA {item}){times}"
        return self._rule(f'"[" {body if least else f"({body})?"} "]"')

    def _dict(self, schema: Mapping[str, Any]) -> str:
        if not schema.get("properties"):
            more = schema.get("additionalProperties", True)
            if more is False:
                return '"{}"'
            value = self.value(more)
            return self._rule(f'"{{" (TEXT COLON {value} (COMMA TEXT COLON {value})*)? "}}"')
        return self._rule(f'"{{" {self.members(schema, "COLON", repr)} "}}"')

    def members(self, schema: Schema, sign: str, spell: Any) -> str:
        """Names and values of an object, in their order.

        Args:
            sign: between both.
            spell: writes a name.
        """
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        if missing := sorted(required - properties.keys()):
            raise self._wrong(f"require {missing[0]!r}, which is not among their properties")
        first, later = "", ""  # of what is left, where nothing was written yet, and behind something
        for name in reversed(properties):
            one = f"{_text(spell(name))} {sign} {self.value(properties[name])}"
            begun = f"{one} {later}"
            first = self._rule(begun if name in required else f"({begun} | {first})" if first else f"({begun})?")
            later = self._rule(f"COMMA {begun}" if name in required else f"(COMMA {one})? {later}")
        return first


def _key(name: str) -> str:
    _check_name(name, [name])
    return name


def _check_name(name: str, parts: Sequence[str]) -> None:
    if not all(part.isidentifier() and not iskeyword(part) for part in parts):
        why = f"{name!r} is no name in Python, in which this model writes calls; tool_choice cannot be enforced"
        raise ApiError(why, param="tools")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
