"""Outlines' core (arXiv:2307.09702): a schema becomes a regular expression, and that an index of states and tokens."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from outlines_core import Guide, Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

from lab.peers.drivers.structured import Row, StructuredDriver, forbid, token_bytes


class Outlines:
    """The library with one vocabulary."""

    def __init__(self, request: dict[str, Any]) -> None:
        ids: dict[bytes, list[int]] = {}
        for token, text in enumerate(texts := token_bytes(request)):
            if text:
                ids.setdefault(text, []).append(token)
        self.vocabulary = Vocabulary(request["ends"][0], ids)
        self.words = np.zeros((len(texts) + 31) // 32, np.int32)
        self.version = f"outlines-core {version('outlines-core')}"
        self.settings = {"whitespace_pattern": "[ ]?"}

    def compile(self, schema: str) -> Callable[[], "Text"]:
        """See `Library`."""
        index = Index(build_regex_from_schema(schema), self.vocabulary)
        return lambda: Text(Guide(index), self.words)


class Text:
    """See `Matcher`."""

    def __init__(self, guide: Any, words: Any) -> None:
        self.guide, self.words = guide, words

    def mask(self, row_v: Row) -> None:
        """See `Matcher`."""
        self.guide.write_mask_into(self.words.ctypes.data, self.words.size, 4)
        forbid(row_v, self.words)

    def take(self, token: int) -> None:
        """See `Matcher`."""
        self.guide.advance(token, return_tokens=False)


def open_peer(request: dict[str, Any]) -> StructuredDriver:
    """Called by the wire loop."""
    return StructuredDriver(Outlines(request), request)
