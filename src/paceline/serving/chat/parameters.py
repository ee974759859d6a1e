"""JSON schemas of functions' parameters are read for formats of calls that do not write arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from paceline.serving.api_errors import ApiError
from paceline.serving.protocol import Function

IDLE: Final = frozenset(
    ("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated")
)
"""These keywords ask for nothing of a value."""

OBJECT: Final = frozenset(("properties", "required", "additionalProperties"))
NUMBER: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
TYPES: Final[Mapping[str, frozenset[str]]] = {
    "object": OBJECT,
    "array": frozenset(("items", "minItems", "maxItems")),
    "number": NUMBER,
    "integer": NUMBER,
    "string": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The keywords that each type has."""

WHOLE: Final = "/-?(0|[1-9][0-9]{0,17})/"
REAL: Final = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?/"
"""Numbers, as regular expressions of a grammar."""

Schema = Any


class Parameters:
    """Reads the JSON schema of one function's parameters, for a format that does not write them as JSON.

    Args:
        strict: of a function that does not say whether it is.
    Attributes:
        whole: their schema.
    """

    def __init__(self, function: Function, *, strict: bool) -> None:
        self.function = function.name
        self.strict = strict if function.strict is None else function.strict
        self.whole: Mapping[str, Any] = function.parameters or {}
        if "$ref" in self.whole:  # as of models that hold themselves
            target = self.find(self.whole["$ref"])
            if not isinstance(target, Mapping) or "$ref" in target:
                raise self.wrong("must be an object's, not a chain of references")
            self.whole = {**self.whole, **target}
            del self.whole["$ref"]

    def limit(self, schema: Mapping[str, Any], known: frozenset[str]) -> None:
        """Reject, or ignore where the function is not strict, keywords that are not among these."""
        if self.strict and (unknown := sorted(schema.keys() - known - IDLE)):
            raise self.unenforced(json.dumps(unknown))

    def unenforced(self, what: str) -> ApiError:
        """Return the error of a strict function that asks for what no grammar enforces."""
        why = f"{what} cannot be enforced in this model's format of calls"
        return ApiError(f"function {self.function}: {why}; leave it out, or strict", param="tools")

    def wrong(self, why: str) -> ApiError:
        """Return the error of a function whose parameters no call can have."""
        return ApiError(f"the parameters of function {self.function} {why}", param="tools")

    def find(self, target: str) -> Schema:
        """Return the schema that a reference is to, with or without the sign of the document (`#`).

        Raises:
            ApiError: nothing, in a strict function; in others that is any value.
        """
        schema = referred(target, self.whole)
        if schema is None or not target.startswith(("#", "/")):
            if self.strict:
                raise self.wrong(f"refer to {target!r}, which is not there")
            return True
        return schema

    def kinds(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the types that a value may have; none are all.

        Raises:
            ApiError: one that is none.
        """
        declared = schema.get("type", "object" if "properties" in schema else [])
        kinds = [declared] if isinstance(declared, str) else list(declared)
        if unknown := [kind for kind in kinds if kind not in TYPES]:
            raise self.wrong(f"have a type {unknown[0]!r}, which is none of JSON Schema")
        return kinds

    def listed(self, schema: Mapping[str, Any]) -> list[Any] | None:
        """Return the values that a schema lists; None where it lists none."""
        for key in ("enum", "const"):
            if key in schema:
                self.limit(schema, frozenset((key, "type")))
                return list(schema[key]) if key == "enum" else [schema[key]]
        return None

    def choices(self, schema: Mapping[str, Any]) -> list[Schema] | None:
        """Return the schemas one of which holds; None where there are none."""
        for key in ("anyOf", "oneOf"):
            if key in schema:
                self.limit(schema, frozenset(("anyOf",)))
                return list(schema[key])
        return None


def referred(target: str, whole: Schema) -> Schema:
    """Return what a reference within a schema is to; None is nothing."""
    schema = whole
    for part in target.removeprefix("#").split("/")[1:]:
        schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema
