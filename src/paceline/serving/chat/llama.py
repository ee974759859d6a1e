"""Llama 3: JSON objects with `parameters` that begin the answer, without a mark or behind one that begins programs,
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from paceline.grammar import spelled
from paceline.serving.chat.base import AllowedCalls, CallFormat, Calls, Opening, as_json, schema_of
from paceline.serving.chat.blocks import NAMED, json_parts, read_objects
from paceline.serving.chat.grammar_rules import ANY_BLANKS, GrammarRules
from paceline.serving.protocol import Function

TAG: Final = "<|python_tag|>"


def _write(calls: Calls) -> str:
    return "; ".join(as_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def _openings(rules: GrammarRules, calls: AllowedCalls) -> Iterator[Opening]:
    """Yield how calls begin: each with its own name, since no mark tells them from other JSON."""
    tag = TAG if rules.silent(TAG) else ""
    for function in calls.functions:
        if calls.beside_json:
            yield Opening(rules.json(_call_schema(function), strict=calls.strict_of(function)))
            continue
        key = json_parts("", ",", '"parameters"', ":", "")
        rest = rules.rule(f'{key} {calls.arguments(rules, function)} BLANK? "}}"')
        named = ("{", '"name"', ":", f'"{function.name}"')
        text = ANY_BLANKS.join(map(spelled, named))
        yield Opening(rest, start=json_parts(*named), text=text, tag=tag)
        yield Opening(f'{rest} BLANK? "]"', text=rf"\[{ANY_BLANKS}{text}", loose=True)


def _call_schema(function: Function) -> dict[str, Any]:
    """Return the JSON schema of a whole call; definitions are where references look for them."""
    schema = schema_of(function)
    moved: dict[str, Any] = {key: schema.pop(key) for key in ("$defs", "definitions") if key in schema}
    properties = {"name": {"const": function.name}, "parameters": schema}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **moved,
    }


LLAMA3_JSON: Final = CallFormat(
    signs=(r'\{"name": [^{}"]{1,64}, "parameters": ',),
    begins=(TAG,),
    read=partial(read_objects, end=""),
    write=_write,
    openings=_openings,
    opens="{[",
    named=NAMED,
    ambiguous=(TAG,),
)
