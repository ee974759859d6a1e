"""The grammar that makes a model write function calls in the format of its family."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from paceline.grammar import bounded_json
from paceline.serving.protocol import ApiError, Tool
from paceline.serving.python_calls import python_grammar
from paceline.serving.tool_formats import FORMATS


def calls_grammar(
    tools: Sequence[Tool], format_name: str, *, only: str | None, parallel: bool, strict: bool = False
) -> str:
    """In llguidance's notation: one or more calls of these functions and nothing else.

    Args:
        only: the function that is to be called; None leaves the choice.
        strict: functions that do not say so are; of others, what cannot be enforced of their parameters is ignored.
    Raises:
        ApiError: no such function, or parameters that cannot be enforced in this format.
    """
    form = FORMATS[format_name]
    picked = [tool.function for tool in tools if only in (None, tool.function.name)]
    if not picked:
        raise ApiError(f"tool_choice names {only!r}, which is not among tools", param="tool_choice")
    if not form.key:
        return python_grammar(picked, parallel=parallel and only is None, strict=strict)
    shapes = [
        {
            "type": "object",
            "properties": {"name": {"const": one.name}, form.key: copy.deepcopy(one.parameters or {"type": "object"})},
            "required": ["name", form.key],
            "additionalProperties": False,
        }
        for one in picked
    ]
    defined = _hoisted(shapes)
    schema: dict[str, Any] = {"anyOf": shapes} if len(shapes) > 1 else shapes[0]
    many = parallel and only is None
    if form.listed:
        schema = {"type": "array", "items": schema, "minItems": 1, **({} if many else {"maxItems": 1})}
    whole = bounded_json(schema | defined, strict=all(strict if one.strict is None else one.strict for one in picked))
    body = f"%json {json.dumps(whole)}"
    begin, end = (json.dumps(mark) if mark else "" for mark in (form.begin, form.end))
    call = f'{begin} "\\n"? call "\\n"? {end}' if form.end else f"{begin} call"
    rest = f'("\\n"? {call})*' if many and form.end else ""
    return f"%llguidance {{}}\nstart: {call} {rest}\ncall: {body}\n"


def _hoisted(shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Definitions of the functions' own schemas, moved to where their references look for them."""
    found: dict[str, Any] = {}
    for shape in shapes:
        for parameters in shape["properties"].values():
            for key in ("$defs", "definitions"):
                if key in parameters:
                    found.setdefault(key, {}).update(parameters.pop(key))
    return found
