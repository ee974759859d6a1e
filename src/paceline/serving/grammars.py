"""Constraints of clients are compiled, and texts checked, in processes that can be killed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from typing import Any, Final

from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import grammar_text
from paceline.serving.api_errors import ApiError
from paceline.serving.workers import Workers

COMPILE_SECONDS, CHECK_SECONDS = 2.0, 1.0
"""Seconds of a processor that compiling a constraint, and checking a text, may take."""

MAX_GRAMMAR: Final = 256 * 1024
"""Characters of a grammar as it is given, or of another constraint in the library's notation."""

KNOWN: Final = 1024
"""So many constraints are remembered to compile."""


class Grammars:
    """Checks constraints of clients, and texts that were written under them.

    Attributes:
        workers: that do it.
    """

    def __init__(self) -> None:
        self.workers = Workers()
        self._known: OrderedDict[str, str] = OrderedDict()

    async def check(self, params: StructuredOutputsParams, param: str) -> None:
        """Compile a constraint, unless that has been done before.

        Args:
            param: the field that it is in.
        Raises:
            ApiError: it does not compile, is too large, or takes too much work; 503 where the machine is busy.
        """
        try:
            text = params.grammar  # which is translated where it can be stopped
            if text is None:
                text = await asyncio.to_thread(grammar_text, params)
        except (ConfigError, RecursionError) as error:
            raise ApiError(str(error) or "the constraint is nested too deeply", param=param) from None
        if len(text) > MAX_GRAMMAR:
            raise ApiError(f"the constraint must have at most {MAX_GRAMMAR} characters", param=param)
        key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        if key in self._known:
            self._known.move_to_end(key)
            return
        asked = {"grammar": text} if params.grammar is None else {"notation": text}
        answer = await self.workers.ask(asked, COMPILE_SECONDS)
        if answer is None:
            raise ApiError("the constraint takes too long to compile, or too much memory; make it simpler", param=param)
        if not answer["error"]:  # what the error is, the engine says in its own words
            self._known[key] = ""
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)

    async def errors(self, schema: Any, text: str) -> list[str]:
        """Return what a text violates of a JSON schema."""
        try:
            answer = await self.workers.ask({"schema": schema, "text": text}, CHECK_SECONDS)
        except ApiError:  # the text is written, and is not lost
            return ["not checked, since the machine is too busy"]
        return ["the schema takes too long to check"] if answer is None else list(answer["errors"])
