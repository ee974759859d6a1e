"""The driver of our own structured outputs, and the judge: what runs in processes of our own environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from paceline.bench.peers.drivers.structured import Row, StructuredDriver
from paceline.config import StructuredOutputsParams
from paceline.grammar import Constraint, constraint
from paceline.models.loading import Tokenizer
from paceline.version import __version__

JUDGE: Final = "judge"


class Ours:
    """Constraints as requests have them; `strict` comes with the open message, as does the folder of the tokenizer."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._tokenizer, self._strict = Tokenizer.load(Path(request["model"])), bool(request["strict"])
        self._size, self._ends = len(request["tokens"]), request["ends"]
        self.version = f"paceline {__version__}, llguidance {version('llguidance')}"
        self.settings = {"strict": self._strict}

    def compile(self, schema: str) -> Callable[[], Text]:
        """See `Library`."""
        given = StructuredOutputsParams(json=json.loads(schema), strict=self._strict)
        made = constraint(given, self._tokenizer, self._size, self._ends)
        return lambda: Text(made.fork())


class Text:
    """See `Matcher`."""

    def __init__(self, rule: Constraint) -> None:
        self._rule = rule

    def mask(self, row_v: Row) -> None:
        """See `Matcher`."""
        self._rule.apply(torch.from_numpy(row_v)[None], [()], ())
        if self._rule.failure:
            raise RuntimeError(self._rule.failure)

    def take(self, token: int) -> None:
        """See `Matcher`."""
        self._rule.advance([token])


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


def open_peer(request: dict[str, Any]) -> StructuredDriver | Judge:
    """Called by the wire loop."""
    return Judge() if request["role"] == JUDGE else StructuredDriver(Ours(request), request)
