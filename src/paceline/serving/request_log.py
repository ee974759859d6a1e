"""The log tells of each request in a line of JSON, without any text of it."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, Final

QUOTED: Final = re.compile(r"""(?<![A-Za-z0-9])(["'])(?:(?!\1)[^\\]|\\.)*(?:\1|$)""", re.S)
"""What an error's message repeats of a request, up to the end where the quotation was cut off."""

CONSTRAINTS: Final = ("structured_outputs", "response_format", "tools", "text", "output_config")
"""Fields of grammars and schemas, of which messages repeat parts without quoting them."""

MOST: Final = 300
"""So many characters of a message are logged."""

CLOSED: Final = 499
"""Status of a request whose client went away, as nginx has it."""


class LogFields(dict[str, Any]):
    """Collects the fields of a line in the log, as which they are JSON.

    Attributes:
        start: reading of the clock (`time.perf_counter`) when the request came.
        texts: messages of errors are told as they are, with what they quote of a request.
    """

    _used = 0  # tokens while it runs

    def __init__(self, *, texts: bool = False, **fields: Any) -> None:
        super().__init__(fields)
        self.start, self.texts = perf_counter(), texts

    def __str__(self) -> str:
        return json.dumps(self)

    def seconds(self) -> float:
        """Return how long ago the request came."""
        return round(perf_counter() - self.start, 4)

    @property
    def tokens(self) -> int:
        """How many tokens of its prompts and answers have been read and decoded so far."""
        counted: int = self.get("prompt_tokens", 0) + self.get("completion_tokens", 0)
        return max(self._used, counted)

    def use(self, tokens: int) -> None:
        """Count tokens of a prompt that is about to be read, or that were decoded."""
        self._used += tokens

    def begun(self) -> None:
        """Note that the first token has come, unless it had before."""
        self.setdefault("first_token_seconds", self.seconds())

    def count(self, prompt: int, cached: int, completion: int) -> None:
        """Add the tokens of a prompt and of its outputs."""
        for name, number in (
            ("prompt_tokens", prompt),
            ("cached_tokens", cached),
            ("completion_tokens", completion),
        ):
            self[name] = self.get(name, 0) + number

    def failed(self, status: int, message: str, code: str | None, param: str | None) -> None:
        """Note why the request failed. What the client did wrong is told without what the message quotes of the
        request.
        """
        if not self.texts and status < 500:
            message = "" if (param or "").partition(".")[0] in CONSTRAINTS else QUOTED.sub("'...'", message)
        known = {"error_code": code, "error_param": None if param is None else param[:64]}
        known["error"] = " ".join(message.split())[:MOST]
        self.update({name: value for name, value in known.items() if value})

    def failed_with(self, status: int, body: bytes) -> None:
        """Note the same of an answer's body in the form of any of the APIs, or with a status in words."""
        try:
            told = json.loads(body)
            error = told.get("error") or {"message": told["status"]}
            self.failed(status, str(error["message"]), error.get("code") or error.get("type"), error.get("param"))
        except (ValueError, LookupError, TypeError, AttributeError):  # of no API of ours
            self["error"] = f"an answer of {len(body)} bytes"


class JsonLines(logging.Formatter):
    """Writes a record as a line of JSON: time, level, logger, and the fields of `LogFields` or the message."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name}
        facts = record.args if isinstance(record.args, LogFields) else {"message": record.getMessage()}
        line |= {name: value for name, value in facts.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
