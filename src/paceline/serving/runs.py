"""One request is decoded and answered: the chunks of all its prompts become events or one answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from fastapi import Request
from fastapi.responses import Response

from paceline.engine import RequestOutput, StreamChunk
from paceline.errors import PacelineError
from paceline.serving.answers import ChatAnswer, CompletionAnswer, usage_of
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import constrained_by, lenient_schema
from paceline.serving.grammars import Grammars
from paceline.serving.metrics import Metrics, Watch
from paceline.serving.protocol import DecodingRequest, StreamOptions
from paceline.serving.request_errors import named
from paceline.serving.request_log import CLOSED, LogFields

ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

logger = logging.getLogger("paceline.serving")
DEPTH: Final = 5
"""Of the objects that an answer has many of: those of a token, in the log probabilities of a choice."""

SLICE: Final = 4096
"""So many items of a list are written at once."""

Json = dict[str, Any]
Result = TypeVar("Result")
Part = list[tuple[int, StreamChunk]]
"""Chunks with the numbers of their prompts."""


class Lone:
    """Gives the chunks of a single output as they come, to the task that answers: without another one in between, which
    would cost each token a turn of the event loop. It is used as a context, whose end ends the stream.

    Attributes:
        outputs: the whole, once it has begun, under number 0.
    """

    def __init__(self, stream: AsyncGenerator[StreamChunk], metrics: Metrics, facts: LogFields) -> None:
        self.outputs: dict[int, RequestOutput] = {}
        self._stream, self._watch = stream, Watch(metrics, facts)

    async def __aenter__(self) -> Lone:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stream.aclose()
        for output in self.outputs.values():
            self._watch.end(output)

    async def next(self) -> Part | None:
        """Return what has come, as `Merged.next` does."""
        async for chunk in self._stream:
            self._watch.chunk(chunk)
            self.outputs[0] = chunk.output
            return [(0, chunk)]
        return None


class Merged:
    """Gives the chunks of several prompts as they come; used as a context, whose end ends them all.

    Args:
        streams: of the prompts.
    Attributes:
        outputs: the whole of each prompt that has begun, by number.
    """

    def __init__(self, streams: Sequence[AsyncGenerator[StreamChunk]], metrics: Metrics, facts: LogFields) -> None:
        self.outputs: dict[int, RequestOutput] = {}
        self._streams, self._metrics, self._facts = streams, metrics, facts
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
        """Put the chunks of one prompt into the queue, then None or the error that ended it."""
        watch = Watch(self._metrics, self._facts)
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
        """Return all that has come, at least one chunk; None at the end.

        Raises:
            Exception: what ended a prompt.
        """
        part: Part = []
        while self._left and not part:
            items = [await self._queue.get()]
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


class RequestRun:
    """Decodes a request and answers it.

    Args:
        facts: for the log.
        max_seconds: that it may take.
    Attributes:
        stream: it is answered by events.
    """

    def __init__(
        self,
        streams: Sequence[AsyncGenerator[StreamChunk]],
        request: DecodingRequest,
        reply: CompletionAnswer | ChatAnswer,
        *,
        metrics: Metrics,
        grammars: Grammars,
        facts: LogFields,
        max_seconds: float,
    ) -> None:
        self._request, self.reply, self._seconds = request, reply, max_seconds
        self.stream = bool(request.stream)
        self._stopped: ApiError | None = None
        self._clock = asyncio.timeout(max_seconds)
        alone = len(streams) == 1 and reply.jobs[0].params.n == 1
        self._merged = Lone(streams[0], metrics, facts) if alone else Merged(streams, metrics, facts)
        self._grammars, self._facts = grammars, facts

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events, an error among them as the last one."""
        try:
            async with aclosing(self.frames()) as parts:
                async for part in parts:
                    yield b"".join(event(body) for body in part)
        except ApiError as error:
            yield event(error.body())
        yield b"data: [DONE]\n\n"

    async def frames(self) -> AsyncGenerator[list[Json]]:
        """Yield the bodies of the events, as they come together.

        Raises:
            ApiError: what ended the request.
        """
        options = self._request.stream_options or StreamOptions()
        try:
            if self._stopped is not None:
                raise self._stopped
            async with self._clock, self._merged as merged:
                while (part := await merged.next()) is not None:
                    yield [self._body(*each, options) for each in part]
                    self._raise_failure(part)
                if errors := await self._schema_errors(merged.outputs):
                    nothing = self.reply.nothing
                    choices = [
                        {"index": index, **nothing, "schema_errors": violations} for index, violations in errors.items()
                    ]
                    yield [self.reply.answer.frame(choices)]
                if options.include_usage:
                    yield [self.reply.answer.frame([]) | {"usage": self.usage}]
        except Exception as error:
            why = self._stopped if isinstance(error, TimeoutError) else None
            why = why or as_api_error(error, self._request)
            if why.status == 500 and not isinstance(error, ApiError):
                logger.error("a request has failed", exc_info=error)
            self._facts.failed(why.status, why.message, why.code, why.param)
            raise why from None

    @property
    def usage(self) -> Json:
        """Counts the tokens so far."""
        return usage_of(list(self._merged.outputs.values()))

    def stop(self, why: ApiError) -> None:
        """End `frames` with an error, if they have not ended."""
        self._stopped = why
        with suppress(RuntimeError):  # the clock does not run yet, or no more
            self._clock.reschedule(asyncio.get_running_loop().time())

    def _body(self, number: int, chunk: StreamChunk, options: StreamOptions) -> Json:
        """Return the event of a chunk, with what `stream_options` asks for beside it."""
        body = self.reply.event(number, chunk)
        if options.include_segments:
            body["choices"][0]["segments"] = [{"text": text, "drafter": name} for text, name in chunk.segments]
            body["engine_request"] = chunk.output.request_id
        if options.continuous_usage_stats:
            body["usage"] = self.usage
        elif options.include_usage:
            body["usage"] = None
        return body

    async def whole(self, http: Request) -> Response:
        """Return one answer; decoding ends with the client's connection."""
        try:
            outputs = await unless_gone(http, self._gathered())
            if outputs is None:
                return Response(status_code=CLOSED)
            body = await asyncio.to_thread(self.reply.whole, outputs)
            if violations := await self._schema_errors(dict(enumerate(outputs))):
                choices = {choice["index"]: choice for choice in body["choices"]}
                for index, errors in violations.items():
                    choices[index]["schema_errors"] = errors
            return await large_response(body)
        except (PacelineError, TimeoutError) as error:
            raise as_api_error(error, self._request) from None

    async def _schema_errors(self, outputs: Mapping[int, RequestOutput]) -> dict[int, list[str]]:
        """Return what finished texts violate of a schema that was not enforced to the letter, by choice."""
        schema = lenient_schema(self._request)
        by_choice: dict[int, list[str]] = {}
        for number in sorted(outputs) if schema is not None else ():
            for completion in outputs[number].outputs:
                if completion.finish_reason == "stop" and (text := self.reply.text(completion)) is not None:
                    errors = await self._grammars.errors(schema, text)
                    if errors:
                        by_choice[number * self.reply.jobs[number].params.n + completion.index] = errors
        return by_choice

    def _raise_failure(self, part: Part) -> None:
        """Raise what ended an output, if something did."""
        for _, chunk in part:
            if chunk.finish_reason == "error":
                why = chunk.output.outputs[chunk.index].error or "decoding failed"
                if why.startswith("structured_outputs"):  # a constraint that compiles, and cannot be followed
                    field = constrained_by(self._request)
                    error = ApiError(why, param="structured_outputs", code="constraint_failed")
                    raise error.renamed({"structured_outputs": field})
                raise ApiError(why, status=500, code="decoding_failed")

    async def _gathered(self) -> list[RequestOutput]:
        async with asyncio.timeout(self._seconds), self._merged as merged:
            while (part := await merged.next()) is not None:
                self._raise_failure(part)
            return [merged.outputs[number] for number in sorted(merged.outputs)]


async def unless_gone(http: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return what the work finds; None, and its end, where the client goes away before."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(http))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _hung_up(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def as_api_error(error: BaseException, request: DecodingRequest) -> ApiError:
    """Return what ended a request as an error for its client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than this server allows", status=504, code="timeout")
    return named(error, request) if isinstance(error, PacelineError) else ApiError("internal error", status=500)


def event(body: Json) -> bytes:
    """Write a server-sent event."""
    return b"data: " + _dumped(body) + b"\n\n"


def json_response(body: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON as an answer."""
    return Response(_dumped(body), status, dict(headers or {}), "application/json")


async def large_response(body: Json) -> Response:
    """Return JSON as an answer that may be long, written beside the event loop and in pieces that take little time."""
    content = await asyncio.to_thread(lambda: "".join(pieces_of(body)).encode("utf-8", "replace"))
    return Response(content, 200, None, "application/json")


def pieces_of(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """Yield JSON as `json_response` has it, cut so that no piece holds much.

    Args:
        depth: of lists and objects that are cut.
    """
    if isinstance(value, dict) and depth:
        for number, (name, inner) in enumerate(value.items()):
            yield f"{',' if number else '{'}{ENCODER.encode(name)}:"
            yield from pieces_of(inner, depth - 1)
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) and depth and isinstance(value[0], dict | list):
        for number, inner in enumerate(value):
            yield "," if number else "["
            yield from pieces_of(inner, depth - 1)
        yield "]"
    elif isinstance(value, list) and len(value) > SLICE:
        for start in range(0, len(value), SLICE):
            yield ("," if start else "[") + ENCODER.encode(value[start : start + SLICE])[1:-1]
        yield "]"
    else:
        yield ENCODER.encode(value)


def _dumped(body: Json) -> bytes:
    return ENCODER.encode(body).encode("utf-8", "replace")
