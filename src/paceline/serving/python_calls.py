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

from paceline.serving.grammar_rules import Rules, literal, one_of
from paceline.serving.protocol import ApiError, Function
from paceline.serving.tool_parameters import NUMBER, OBJECT, TYPES, Parameters, Schema

LITERALS: Final = r"""
COMMA: /, ?/
COLON: /: ?/
STRING: /"([^"\\\x00-\x1f]|\\["'\\nrt]){0,4096}"|'([^'\\\x00-\x1f]|\\["'\\nrt]){0,4096}'/
WHOLE: /-?(0|[1-9][0-9]{0,17})/
REAL: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/
any: STRING | REAL | "True" | "False" | "None" | any_list | any_dict
any_list: "[" (any (COMMA any)*)? "]"
any_dict: "{" (STRING COLON any (COMMA STRING COLON any)*)? "}"
"""


class PythonArguments(Parameters):
    """The parameters of one function as rules, which need `LITERALS`.

    Args:
        strict: of a function that does not say whether it is.
    Attributes:
        text: what is between the brackets of a call.
    Raises:
        ApiError: a name that is none in Python, or what cannot be enforced.
    """

    def __init__(self, function: Function, rules: Rules, *, strict: bool) -> None:
        super().__init__(function, strict=strict)
        self._rules = rules
        self._known: dict[str, str] = {}
        _check_name(function.name, function.name.split("."))
        self.limit(self.whole, OBJECT | {"type"})
        self.text = self._members(self.whole, '"="', _key)

    def _value(self, schema: Schema) -> str:
        """What a literal of this schema may be."""
        if schema is True or schema == {}:
            return "any"
        if not isinstance(schema, Mapping):
            raise self.wrong("must be schemas that something satisfies")
        if (values := self.listed(schema)) is not None:
            return self._one_of([literal(repr(one)) for one in values])
        if (target := schema.get("$ref")) is not None:
            self.limit(schema, frozenset(("$ref",)))
            return self._referred(target)
        if (choices := self.choices(schema)) is not None:
            return self._one_of([self._value(one) for one in choices])
        kinds = self.kinds(schema)
        self.limit(schema, frozenset(("type",)).union(*(TYPES[kind] for kind in kinds)))
        return self._one_of([self._of_kind(kind, schema) for kind in kinds]) if kinds else "any"

    def _of_kind(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind in ("number", "integer"):
            limits = {key: schema[key] for key in NUMBER & schema.keys()}
            name = "WHOLE" if kind == "integer" else "REAL"
            return self._rules.rule(f"%json {json.dumps({'type': kind, **limits})}") if limits else name
        if kind == "object":
            return self._dict(schema)
        if kind == "array":
            return self._list(schema)
        return {"string": "STRING", "boolean": '("True" | "False")', "null": '"None"'}[kind]

    def _one_of(self, values: Sequence[str]) -> str:
        if not values:
            raise self.wrong("must be schemas that something satisfies")
        return one_of(values)

    def _referred(self, target: str) -> str:
        """The rule of a definition, which may refer to itself."""
        if target not in self._known:
            found = self.find(target)
            name = self._known[target] = self._rules.name()
            self._rules.rule(self._value(found), name=name)
        return self._known[target]

    def _list(self, schema: Mapping[str, Any]) -> str:
        item, least, most = self._value(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = f"{item} (COMMA {item}){times}"
        return self._rules.rule(f'"[" {body if least else f"({body})?"} "]"')

    def _dict(self, schema: Mapping[str, Any]) -> str:
        if not schema.get("properties"):
            more = schema.get("additionalProperties", True)
            if more is False:
                return '"{}"'
            value = self._value(more)
            return self._rules.rule(f'"{{" (STRING COLON {value} (COMMA STRING COLON {value})*)? "}}"')
        return self._rules.rule(f'"{{" {self._members(schema, "COLON", repr)} "}}"')

    def _members(self, schema: Schema, sign: str, spell: Any) -> str:
        """Names and values of an object, in their order.

        Args:
            sign: between both.
            spell: writes a name.
        """
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        if missing := sorted(required - properties.keys()):
            raise self.wrong(f"require {missing[0]!r}, which is not among their properties")
        first, later = "", ""  # of what is left, where nothing was written yet, and behind something
        for name in reversed(properties):
            one = f"{literal(spell(name))} {sign} {self._value(properties[name])}"
            begun = f"{one} {later}"
            first = self._rules.rule(begun if name in required else f"({begun} | {first})" if first else f"({begun})?")
            later = self._rules.rule(f"COMMA {begun}" if name in required else f"(COMMA {one})? {later}")
        return first


def _key(name: str) -> str:
    _check_name(name, [name])
    return name


def _check_name(name: str, parts: Sequence[str]) -> None:
    if not all(part.isidentifier() and not iskeyword(part) for part in parts):
        why = f"{name!r} is no name in Python, in which this model writes calls; tool_choice cannot be enforced"
        raise ApiError(why, param="tools")
