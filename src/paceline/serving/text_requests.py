"""Requests about texts that decode nothing, and what they have in common: a slot, a time limit, counters, a log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Request
from fastapi.responses import Response
from pydantic import Field

from paceline.config import ServerConfig
from paceline.errors import PacelineError
from paceline.serving.api_errors import ApiError
from paceline.serving.limits import Slots
from paceline.serving.metrics import Metrics
from paceline.serving.protocol import Body
from paceline.serving.request_log import CLOSED, LogFields
from paceline.serving.runs import large_response, unless_gone

logger = logging.getLogger("paceline.serving")

MOST_LOGGED: Final = 4096
"""So many characters of a text are logged, with `log_requests`."""

FIRST_WORD: Final = re.compile(r"^([a-z_]+)\b")

Json = dict[str, Any]


class TextRequest(Body):
    """Has the fields that these requests share."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    user: str | None = None

    def check_truncation(self) -> None:
        """Reject a truncation to nothing.

        Raises:
            ApiError: 0 tokens are to be left.
        """
        if self.truncate_prompt_tokens == 0:
            raise ApiError("truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens")


@dataclass(slots=True)
class Answered:
    """An answer, with the number of tokens that were read for it."""

    body: Json
    tokens: int


class TextService:
    """Answers requests about texts within the limits of the server.

    Args:
        waiting: tells how many requests wait for the engine.
    """

    def __init__(self, slots: Slots, metrics: Metrics, config: ServerConfig, waiting: Callable[[], int]) -> None:
        self.config = config
        self._slots, self._metrics, self._waiting = slots, metrics, waiting

    async def answer(
        self,
        http: Request,
        request: TextRequest,
        kind: str,
        field: str,
        work: Callable[[], Coroutine[Any, Any, Answered]],
    ) -> Response:
        """Answer with what the work gives, unless the client goes away before.

        Args:
            kind: of the request, for the metrics. field: with the texts, which errors of these name.
        Raises:
            ApiError: what the work raises; 429; 504.
        """
        owner: str = http.scope["owner"]
        request.check_truncation()
        with self._slots.slot(owner, self._waiting()):
            try:
                async with asyncio.timeout(self.config.request_timeout):
                    answered = await unless_gone(http, work())
            except TimeoutError:
                why = "the request took longer than this server allows"
                raise ApiError(why, status=504, code="timeout") from None
            except PacelineError as error:
                raise _named(error, request, field) from None
            if answered is None:
                return Response(status_code=CLOSED)
            facts: LogFields = http.scope["facts"]
            facts.count(answered.tokens, 0, 0)
            self._metrics.read_texts(kind, answered.tokens)
            return await large_response(answered.body)

    def check_count(self, count: int, field: str) -> None:
        """Reject a request of no texts or too many.

        Raises:
            ApiError: it has.
        """
        most = self.config.max_embedding_texts
        if not 0 < count <= most:
            raise ApiError(f"{field} must hold 1 to {most} texts, got {count}", param=field)

    def check_tokens(self, lengths: Sequence[int], field: str) -> int:
        """Return how many tokens there are.

        Raises:
            ApiError: more than a request may have.
        """
        if (count := sum(lengths)) > (most := self.config.max_embedding_tokens):
            raise ApiError(f"{field} must hold at most {most} tokens together, got {count}", param=field)
        return count

    def log(self, http: Request, texts: Sequence[object]) -> None:
        """Write texts to the log, where the operator wants that."""
        if self.config.log_requests:
            for text in [text for text in texts if isinstance(text, str)]:
                logger.info("%s", LogFields(owner=http.scope["owner"][:12], prompt=text[:MOST_LOGGED]))


def usage_of(tokens: int) -> Json:
    """Return what a request has cost, as OpenAI counts it."""
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _named(error: PacelineError, request: TextRequest, field: str) -> ApiError:
    """Return an error of the library with the field at fault: the one that it begins with, else that of the texts."""
    first = FIRST_WORD.search(str(error))
    named = first is not None and first[1] in type(request).model_fields
    return ApiError(str(error), param=first[1] if first is not None and named else field)
