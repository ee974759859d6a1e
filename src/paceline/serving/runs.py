"""One request on its way: chunks of all its prompts, as events or as one answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from paceline.engine import RequestOutput, StreamChunk
from paceline.errors import PacelineError
from paceline.serving.answers import ChatAnswer, CompletionAnswer, constrained_by, lenient_schema, named, usage_of
from paceline.serving.grammars import Grammars
from paceline.serving.metrics import Metrics, Watch
from paceline.serving.protocol import ApiError, Sampled, StreamOptions

KEEP_ALIVE: Final = 15.0
"""Seconds without an event after which a comment is sent, so that nobody in between hangs up."""

CLOSED: Final = 499
"""Status in the log of a request whose client went away, as nginx has it."""

Json = dict[str, Any]
Part = list[tuple[int, StreamChunk]]
"""Chunks with the numbers of their prompts."""


class Merged:
    """Chunks of several prompts as they come; used as a context, whose end ends them all.

    Args:
        streams: of the prompts.
    Attributes:
        outputs: the whole of each prompt that has begun, by number.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[StreamChunk]], metrics: Metrics) -> None:
        self.outputs: dict[int, RequestOutput] = {}
        self._streams, self._metrics = streams, metrics
        self._queue: asyncio.Queue[tuple[int, StreamChunk | Exception | None]] = asyncio.Queue()
        self._left = len(streams)

    async def __aenter__(self) -> Merged:
        self._tasks = [asyncio.create_task(self._feed(*each)) for each in enumerate(self._streams)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _feed(self, number: int, stream: AsyncGenerator[StreamChunk]) -> None:
        watch = Watch(self._metrics)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    watch.chunk(chunk)
                    self.outputs[number] = chunk.output
                    self._queue.put_nowait((number, chunk))
            self._queue.put_nowait((number, None))
        except Exception as error:
            self._queue.put_nowait((number, error))
        finally:
            if number in self.outputs:
                watch.end(self.outputs[number])

    async def next(self) -> Part | None:
        """All that has come, at least one chunk; nothing after `KEEP_ALIVE` seconds; None at the end.

        Raises:
            Exception: what ended a prompt.
        """
        part: Part = []
        while self._left and not part:
            try:
                items = [self._queue.get_nowait() if self._queue.qsize() else await self._wait()]
            except TimeoutError:
                return []
            while self._queue.qsize():
                items.append(self._queue.get_nowait())
            for number, item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    self._left -= 1
                else:
                    part.append((number, item))
        return part or None

    async def _wait(self) -> tuple[int, StreamChunk | Exception | None]:
        async with asyncio.timeout(KEEP_ALIVE):
            return await self._queue.get()


class Run:
    """Decodes a request and answers it.

    Args:
        max_seconds: that it may take.
    """

    def __init__(
        self,
        streams: Sequence[AsyncGenerator[StreamChunk]],
        request: Sampled,
        reply: CompletionAnswer | ChatAnswer,
        *,
        metrics: Metrics,
        grammars: Grammars,
        max_seconds: float,
    ) -> None:
        self._request, self._reply, self._seconds = request, reply, max_seconds
        self._merged, self._grammars = Merged(streams, metrics), grammars

    async def events(self) -> AsyncGenerator[bytes]:
        """Server-sent events."""
        options = self._request.stream_options or StreamOptions()
        try:
            async with asyncio.timeout(self._seconds), self._merged as merged:
                while (part := await merged.next()) is not None:
                    yield self._lines(part, options) if part else b": keep-alive\n\n"
                    self._raise_failure(part)
                if errors := await self._schema_errors(merged.outputs):
                    nothing = self._reply.nothing
                    choices = [{"index": index, **nothing, "schema_errors": one} for index, one in errors.items()]
                    yield event(self._reply.answer.frame(choices))
                if options.include_usage:
                    yield event(self._reply.answer.frame([]) | {"usage": usage_of(list(merged.outputs.values()))})
        except (ApiError, PacelineError, TimeoutError) as error:
            yield event(as_api_error(error, self._request).body())
        yield b"data: [DONE]\n\n"

    def _lines(self, part: Part, options: StreamOptions) -> bytes:
        lines = []
        for number, chunk in part:
            body = self._reply.event(number, chunk)
            if options.include_segments:
                body["choices"][0]["segments"] = [{"text": text, "drafter": name} for text, name in chunk.segments]
            if options.continuous_usage_stats:
                body["usage"] = usage_of(list(self._merged.outputs.values()))
            elif options.include_usage:
                body["usage"] = None
            lines.append(event(body))
        return b"".join(lines)

    async def whole(self, http: Request) -> Response:
        """One answer; decoding ends with the client's connection."""
        gathered, gone = asyncio.create_task(self._gathered()), asyncio.create_task(_hung_up(http))
        try:
            await asyncio.wait({gathered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not gathered.done():
                return Response(status_code=CLOSED)
            outputs = gathered.result()
            body = self._reply.whole(outputs)
            for index, one in (await self._schema_errors(dict(enumerate(outputs)))).items():
                body["choices"][index]["schema_errors"] = one
            return json_response(body)
        except (PacelineError, TimeoutError) as error:
            raise as_api_error(error, self._request) from None
        finally:
            for task in (gathered, gone):
                task.cancel()
            await asyncio.gather(gathered, gone, return_exceptions=True)

    async def _schema_errors(self, outputs: Mapping[int, RequestOutput]) -> dict[int, list[str]]:
        """What finished texts violate of a schema that was not enforced to the letter, by choice."""
        schema = lenient_schema(self._request)
        found: dict[int, list[str]] = {}
        for number in sorted(outputs) if schema is not None else ():
            for one in outputs[number].outputs:
                if one.finish_reason == "stop":
                    errors = await self._grammars.errors(schema, one.text)
                    if errors:
                        found[number * len(outputs[number].outputs) + one.index] = errors
        return found

    def _raise_failure(self, part: Part) -> None:
        """Raise what ended an output, if something did."""
        for _, chunk in part:
            if chunk.finish_reason == "error":
                why = chunk.output.outputs[chunk.index].error or "decoding failed"
                if why.startswith("structured_outputs"):  # a constraint that compiles, and cannot be followed
                    raise ApiError(why, param=constrained_by(self._request), code="constraint_failed")
                raise ApiError(why, status=500, code="decoding_failed")

    async def _gathered(self) -> list[RequestOutput]:
        async with asyncio.timeout(self._seconds), self._merged as merged:
            while (part := await merged.next()) is not None:
                self._raise_failure(part)
            return [merged.outputs[number] for number in sorted(merged.outputs)]


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def as_api_error(error: BaseException, request: Sampled) -> ApiError:
    """For the client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than this server allows", status=504, code="timeout")
    return named(error, request) if isinstance(error, PacelineError) else ApiError("internal error", status=500)


def event(body: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + _dumped(body) + b"\n\n"


def json_response(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON as an answer."""
    return Response(_dumped(body), status, dict(headers or {}), "application/json")


def _dumped(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
