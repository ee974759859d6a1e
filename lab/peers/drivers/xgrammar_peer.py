"""XGrammar (arXiv:2411.15100): byte-level pushdown automata with token masks that are computed ahead.

One thread and no cache, so that compiling is measured alone; `strict_mode` as the library has it by default: what a
schema does not name is not written.
"""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import xgrammar

from lab.peers.drivers.structured import Row, StructuredDriver, token_bytes


class XGrammar:
    """The library with one vocabulary."""

    def __init__(self, request: dict[str, Any]) -> None:
        texts = token_bytes(request)
        info = xgrammar.TokenizerInfo(texts, vocab_size=len(texts), stop_token_ids=request["ends"])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.words = xgrammar.allocate_token_bitmask(1, len(texts))
        self.version = f"xgrammar {version('xgrammar')}"
        self.settings = {"any_whitespace": True, "strict_mode": True, "threads": 1}

    def compile(self, schema: str) -> Callable[[], "Text"]:
        """See `Library`."""
        compiled = self.compiler.compile_json_schema(schema)
        return lambda: Text(xgrammar.GrammarMatcher(compiled), self.words)


class Text:
    """See `Matcher`."""

    def __init__(self, matcher: Any, words: Any) -> None:
        self.matcher, self.words = matcher, words

    def mask(self, row_v: Row) -> None:
        """See `Matcher`."""
        import torch

        if self.matcher.is_terminated():
            row_v.fill(-np.inf)
            return
        self.matcher.fill_next_token_bitmask(self.words)
        xgrammar.apply_token_bitmask_inplace(torch.from_numpy(row_v)[None], self.words)

    def take(self, token: int) -> None:
        """See `Matcher`."""
        if not self.matcher.accept_token(token):
            raise ValueError(f"token {token} is in the mask and not accepted")


def open_peer(request: dict[str, Any]) -> StructuredDriver:
    """Called by the wire loop."""
    return StructuredDriver(XGrammar(request), request)
