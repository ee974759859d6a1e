"""The driver of the judge: what satisfies a schema, by a library that is not among those compared."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any


class Judge:
    """Says by another library, `jsonschema`, what satisfies a schema; formats are not asserted."""

    def __init__(self) -> None:
        self.version, self.settings = f"jsonschema {version('jsonschema')}", dict[str, Any]()

    def check(self, schema: str, texts: list[str]) -> dict[str, Any]:
        """`sound`: whether it is a schema of its dialect (2020-12 where it names none) that can be judged by; `valid`:
        for each text.
        """
        import jsonschema
        import referencing

        read = json.loads(schema)
        dialect = jsonschema.validators.validator_for(read, default=jsonschema.Draft202012Validator)
        try:
            dialect.check_schema(read)
            checker = dialect(read, registry=referencing.Registry())  # which follows no reference to elsewhere
            checker.is_valid({})
            return {"sound": True, "valid": [_satisfies(checker, text) for text in texts]}
        except Exception:  # patterns of another syntax, references to nowhere: many kinds, none of them a verdict
            return {"sound": False, "valid": [False] * len(texts)}


def _satisfies(checker: Any, text: str) -> bool:
    try:
        return bool(checker.is_valid(json.loads(text)))
    except ValueError:
        return False


def open_peer(request: dict[str, Any]) -> Judge:
    """Called by the wire loop."""
    return Judge()
