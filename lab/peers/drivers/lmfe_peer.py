"""LM Format Enforcer: a parser of characters in Python, over a tree of the vocabulary."""

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from lmformatenforcer import JsonSchemaParser
from lmformatenforcer.tokenenforcer import TokenEnforcer, TokenEnforcerTokenizerData

from lab.peers.drivers.structured import FORBIDDEN, Row, StructuredDriver, token_bytes


class Enforcer:
    """The library with one vocabulary."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.texts = token_bytes(request)
        regular = [(token, self.decoded([token]), False) for token, text in enumerate(self.texts) if text]
        regular = [one for one in regular if one[1]]
        size, ends = len(self.texts), list(request["ends"])
        self.vocabulary = TokenEnforcerTokenizerData(regular, self.decoded, ends, False, size)
        self.version, self.settings = f"lm-format-enforcer {version('lm-format-enforcer')}", {"bitmask": False}

    def decoded(self, tokens: list[int]) -> str:
        """Text without a character that has only begun."""
        return b"".join(self.texts[token] for token in tokens).decode("utf-8", "replace").rstrip("\ufffd")

    def compile(self, schema: str) -> Callable[[], "Text"]:
        """See `Library`."""
        enforcer = TokenEnforcer(self.vocabulary, JsonSchemaParser(json.loads(schema)))
        return lambda: Text(enforcer)  # which keeps a state for each text


class Text:
    """See `Matcher`."""

    def __init__(self, enforcer: Any) -> None:
        self.enforcer, self.tokens = enforcer, list[int]()

    def mask(self, row_v: Row) -> None:
        """See `Matcher`."""
        found = self.enforcer.get_allowed_tokens(self.tokens).allowed_tokens
        kept = row_v[found]
        row_v.fill(FORBIDDEN)
        row_v[found] = kept

    def take(self, token: int) -> None:
        """See `Matcher`."""
        self.tokens.append(token)


def open_peer(request: dict[str, Any]) -> StructuredDriver:
    """Called by the wire loop."""
    return StructuredDriver(Enforcer(request), request)
