"""`/v1/responses/compact`: a long conversation becomes what the user said and a summary that the model writes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

from paceline.serving.api_errors import ApiError
from paceline.serving.fields import RESPONSES
from paceline.serving.protocol import Body, ChatRequest
from paceline.serving.response_items import new_id
from paceline.serving.response_request import ResponseRequest, response_usage
from paceline.serving.runs import Json, RequestRun
from paceline.serving.sealed import sealed
from paceline.serving.translation import ChatPiece, Translation

ASK: Final = (
    "Summarise our conversation so far for yourself, so that you can go on with it from the summary alone: what was "
    "asked, what was found and decided, names, numbers and results that matter, and what is still open. Write the "
    "summary and nothing else."
)

MAX_SUMMARY: Final = 2048
"""So many tokens may a summary have, with the thoughts before it."""


class CompactRequest(Body):
    """Is the body of `/v1/responses/compact`."""

    api: ClassVar[str] = RESPONSES
    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None

    def asked(self, earlier: list[Json], most: int | None = None) -> tuple[list[Json], ChatRequest]:
        """Return the items of the conversation, and the chat that asks for their summary.

        Args:
            earlier: items of earlier turns.
            most: tokens that an answer may have; None for any number.
        Raises:
            ApiError: there are none, or some that cannot be read.
        """
        raw = [{"role": "user", "content": self.input}] if isinstance(self.input, str) and self.input else self.input
        if not raw and not earlier:
            raise ApiError("input must not be empty", param="input")
        inner = ResponseRequest(
            model=self.model,
            instructions=self.instructions,
            prompt_cache_key=self.prompt_cache_key,
            input=[*(raw or []), {"role": "user", "content": ASK}],
            max_output_tokens=min(MAX_SUMMARY, most or MAX_SUMMARY),
        )
        items, chat = inner.asked(earlier)
        return items[:-1], chat


class Compaction(Translation):
    """Tells a chat as a compacted conversation.

    Args:
        items: of the conversation.
    """

    def __init__(self, run: RequestRun, items: Sequence[Json]) -> None:
        super().__init__(run, stream=False)
        self._id, self._created, self._items = new_id("resp"), int(time.time()), items
        self._text: list[str] = []

    def body(self) -> Json:
        said = [item for item in self._items if item["type"] == "message" and item["role"] == "user"]
        summary = {"id": new_id("cmp"), "type": "compaction", "encrypted_content": sealed("".join(self._text).strip())}
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": self._created,
            "model": self.run.reply.answer.model,
            "output": [*said, summary],
            "usage": response_usage(self.run.usage, self.thoughts),
        }

    def begin(self) -> Iterator[Json]:
        yield from ()

    def open(self, piece: ChatPiece) -> Iterator[Json]:
        yield from ()

    def add(self, piece: ChatPiece) -> Iterator[Json]:
        if piece.block == "text":
            self._text.append(piece.text)
        yield from ()

    def shut(self) -> Iterator[Json]:
        yield from ()

    async def end(self) -> list[Json]:
        return []

    async def fail(self, error: ApiError) -> list[Json]:
        raise error
