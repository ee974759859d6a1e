"""Errors are answers of requests, which have the forms of OpenAI's and of Anthropic's APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

MAX_MESSAGE: Final = 2000
"""Characters of an error's message, and of its field: both may repeat what a client sent."""


class Problem(BaseModel):
    """Says what was wrong.

    Attributes:
        param: the field that is wrong, as `messages.0.content`.
        code: for programs.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Is the body of every answer that is an error."""

    error: Problem


MESSAGES: Final = "/v1/messages"
"""The routes of Anthropic's API begin with this."""

ANTHROPIC: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Anthropic's API has these names for statuses."""


FIELD_NAME: Final = re.compile(r"(?<![\w'\"])(?:think )?[a-z]+(?:_[a-z]+)+(?![\w'\"])")
"""A field in the text of a message: lower-case words joined by `_`, not quoted. Behind `think` it is a key of that."""


class ApiError(Exception):
    """Raised for what a client did wrong, or what the server cannot do now; it becomes the answer.

    Args:
        status: of HTTP.
        param: the field that is wrong, as `messages.0.content`.
        code: for programs.
        headers: more of the answer's headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param = _cut(message), None if param is None else _cut(param)
        self.status, self.code, self.headers = status, code, headers or {}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Return the same error where these fields have other names: the field at fault, and those that the message
        speaks of and that look like nothing else (`FIELD_NAME`).
        """
        first, _, rest = (self.param or "").partition(".")
        message, param = FIELD_NAME.sub(lambda name: names.get(name[0], name[0]), self.message), self.param
        if first in names:
            param = ".".join(part for part in (names[first], rest) if part)
            if names[first] not in message:
                message = message.replace(first, names[first], 1)
        return ApiError(message, status=self.status, param=param, code=self.code, headers=self.headers)

    def body(self, path: str = "") -> dict[str, Any]:
        """Return the body of the answer, as the clients of that route read it: Anthropic's, or OpenAI's."""
        if path.startswith(MESSAGES):
            kind = ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            named = self.message if (self.param or "") in self.message else f"{self.param}: {self.message}"
            more = {} if self.code is None else {"details": {"error_code": self.code}}
            return {"type": "error", "error": {"type": kind, "message": named, **more}}
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def internal_error() -> ApiError:
    """Return the answer where code of the server's own has failed, which announces that the connection ends with it."""
    return ApiError("internal error", status=500, headers={"Connection": "close"})


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 3]}..."
