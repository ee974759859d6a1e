"""Values that a model writes as plain text, as the types that a JSON schema gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from paceline.serving.python_literals import literal

KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
DEEPEST: Final = 16
"""Alternatives within alternatives, and references, that are followed."""


def typed_value(text: str, parameters: Any, key: str) -> Any:
    """The value that a text means for one of a function's parameters.

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
    found = _fitting(_read(bare, kinds), kinds)
    return text if found is None else found


def _kinds(schema: Any, whole: Mapping[str, Any], depth: int) -> Iterator[str]:
    """The types that a schema allows, as far as it says so."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return
    given = schema.get("type")
    yield from (one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str) and one in KINDS)
    if schema.get("nullable") is True:
        yield "null"
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    for value in values if given is None else ():
        yield next(name for name, kind in KINDS.items() if isinstance(value, kind))
    for name in ("anyOf", "oneOf", "allOf"):
        for one in _listed(schema.get(name)):
            yield from _kinds(one, whole, depth + 1)
    if isinstance(target := schema.get("$ref"), str):
        yield from _kinds(_referred(target, whole), whole, depth + 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(target: str, whole: Mapping[str, Any]) -> Any:
    found: Any = whole
    for part in target.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _read(text: str, kinds: set[str]) -> Any:
    """What a text is as JSON, or as Python writes it; None where it is neither."""
    if text in ("True", "False") and (not kinds or "boolean" in kinds):
        return text == "True"
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        json.dumps(found, allow_nan=False)
        return found
    if not text.startswith(("{", "[", "(")):
        return None
    try:
        return literal(text)
    except ValueError:
        return None


def _fitting(found: Any, kinds: set[str]) -> Any:
    """The value, if it has one of these types and is no text, whose quotes would be its own; None if not."""
    if isinstance(found, str):
        return None
    if isinstance(found, bool) or not kinds:
        return found if "boolean" in kinds or not kinds else None
    if isinstance(found, float) and "number" not in kinds and "integer" in kinds:
        return int(found) if found.is_integer() else None
    return found if any(isinstance(found, KINDS[kind]) for kind in kinds - {"boolean", "null"}) else None
