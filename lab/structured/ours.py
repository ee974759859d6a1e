"""The driver of our own structured outputs, in a process of our own environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lab.peers.drivers.structured import Row, StructuredDriver
from paceline.checkpoints import Tokenizer
from paceline.config import StructuredOutputsParams
from paceline.grammar import Constraint, constraint
from paceline.version import __version__


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

    def take(self, token: int) -> None:
        """See `Matcher`."""
        self._rule.advance([token])


def open_peer(request: dict[str, Any]) -> StructuredDriver:
    """Called by the wire loop."""
    return StructuredDriver(Ours(request), request)
