"""Values that a model writes as plain text, as the types that a JSON schema gives them, and literals of Python, with
JSON's `true`, `false` and `null` beside Python's own words.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from paceline.serving.chat.parameters import referred

KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
WORDS: Final = {"true": True, "false": False, "null": None}
DEEPEST: Final = 16
"""Alternatives within alternatives, and references, are followed so deep."""


def typed_value(text: str, parameters: Any, key: str) -> Any:
    """Return the value that a text means for one of a function's parameters.

    A text stays one where the schema has texts and nothing else that it may be, and where it is no value of the types
    that the schema has. Without a schema, whatever is JSON is taken as JSON.
    """
    whole = parameters if isinstance(parameters, Mapping) else {}
    properties = whole.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = set(_kinds(schema, whole, 0))
    if kinds == {"string"}:
        return text
    bare = text.strip()
    if bare == "null" or (bare == "None" and kinds):
        return None if "null" in kinds or "string" not in kinds else text
    value = _fitting(_read(bare, kinds), kinds)
    return text if value is None else value


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield the types that a schema allows, as far as it says so."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return
    declared = schema.get("type")
    for kind in declared if isinstance(declared, list) else [declared]:
        if isinstance(kind, str) and kind in KINDS:
            yield kind
    if schema.get("nullable") is True:
        yield "null"
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    for value in values if declared is None else ():
        yield next(name for name, kind in KINDS.items() if isinstance(value, kind))
    for name in ("anyOf", "oneOf", "allOf"):
        for choice in _listed(schema.get(name)):
            yield from _kinds(choice, whole, depth + 1)
    if isinstance(target := schema.get("$ref"), str):
        yield from _kinds(referred(target, whole), whole, depth + 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read(text: str, kinds: set[str]) -> Any:
    """Read a text as JSON, or as Python writes it; None where it is neither."""
    if text in ("True", "False") and (not kinds or "boolean" in kinds):
        return text == "True"
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        return value
    if not text.startswith(("{", "[", "(")):
        return None
    try:
        return _value(_parsed(text.strip()))
    except ValueError:
        return None


def _fitting(value: Any, kinds: set[str]) -> Any:
    """Return the value, if it has one of these types and is no text, whose quotes would be its own; None if not."""
    if isinstance(value, str):
        return None
    if isinstance(value, bool) or not kinds:
        return value if "boolean" in kinds or not kinds else None
    if isinstance(value, float) and "number" not in kinds and "integer" in kinds:
        return int(value) if value.is_integer() else None
    return value if any(isinstance(value, KINDS[kind]) for kind in kinds - {"boolean", "null"}) else None


def keywords(written: str) -> dict[str, Any]:
    """Return the arguments of a call, as what stands between its parentheses has them.

    Raises:
        ValueError: anything but names with literals.
    """
    call = _parsed(f"f({written}\n)")
    if not isinstance(call, ast.Call) or call.args or any(argument.arg is None for argument in call.keywords):
        raise ValueError("no keywords")
    return {str(argument.arg): _value(argument.value) for argument in call.keywords}


def _parsed(written: str) -> ast.expr:
    try:
        return ast.parse(written, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> Any:
    try:
        value = _plain(node)
        json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def _plain(node: ast.expr) -> Any:
    """Return the value of a literal of Python, in which JSON's words may stand."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _signed(node)
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _plain(value) for key, value in zip(node.keys, node.values, strict=True)}
    raise ValueError("no literal")


def _signed(node: ast.UnaryOp) -> int | float:
    number = _plain(node.operand)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ValueError("no number")
    return -number if isinstance(node.op, ast.USub) else number


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is no text")
