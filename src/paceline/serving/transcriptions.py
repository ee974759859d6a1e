"""`/v1/audio/transcriptions` and `/v1/audio/translations`: speech becomes text, by a served Whisper model.

Windows of 30 s are requests of the engine, which are decoded together with all others and take turns with them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Event
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.async_llm import AsyncLLM
from paceline.config import ServerConfig
from paceline.errors import ConfigError, PacelineError
from paceline.serving.api_errors import ApiError
from paceline.serving.event_stream import EventStream
from paceline.serving.field_notes import NOTES
from paceline.serving.keys import NO_LIMITS, limits_by_owner
from paceline.serving.limits import FORM_BYTES, TRANSCRIPTIONS, TRANSLATIONS, BodyError, Slots, allowed_priority
from paceline.serving.metrics import Metrics
from paceline.serving.places import OWNER, Places
from paceline.serving.request_log import CLOSED, LogFields
from paceline.serving.runs import event, json_response, unless_gone
from paceline.speech import (
    SAMPLE_RATE,
    AudioLimits,
    Samples,
    Segment,
    Transcript,
    load_audio,
    verbose,
    write_transcript,
)
from paceline.transcriber import Caller, HeardWindow, Transcriber, TranscriptionParams
from paceline.utils import shortened

logger = logging.getLogger("paceline.serving")

AT_ONCE: Final = 8
"""So many audios are in memory, and understood, at once; the others wait, and keys take turns."""

DECODE_SECONDS: Final = 60.0
"""A file may take so long to decode, in a process of its own."""

MOST_FIELDS: Final = 32
FORMATS: Final = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED: Final = ("json", "text")
GRANULARITIES: Final = ("segment", "word")
FLAGS: Final = {"true": True, "false": False, "1": True, "0": False}
HOTTEST: Final = 1.0

LIST: Final = "timestamp_granularities"
NAMES: Final = ("file", "model", "language", "prompt", "response_format", "temperature", "stream", "seed", LIST)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """What a form asks for, beside its file."""

    params: TranscriptionParams
    model: str | None = None
    form: str = "json"
    granularities: tuple[str, ...] = ()
    stream: bool = False

    @classmethod
    def read(cls, form: FormData, task: str) -> TranscriptionRequest:
        """Read the fields of a form.

        Raises:
            ApiError: an unknown field or a wrong value, by its name.
        """
        texts = {name.removesuffix("[]"): value for name, value in form.multi_items() if isinstance(value, str)}
        for name in {name for name in form if name.removesuffix("[]") not in NAMES}:
            _reject(name)
        given = Counter(name.removesuffix("[]") for name, _ in form.multi_items())
        for name, count in given.items():
            if count > 1 and name in NAMES and name != LIST:
                raise ApiError(f"{name} must be given once, got {count} values", param=name)
        wanted = _one_of("response_format", texts.get("response_format", "json"), FORMATS)
        granularities = tuple(
            _one_of(LIST, str(value), GRANULARITIES)
            for name, value in form.multi_items()
            if name.removesuffix("[]") == LIST
        )
        if granularities and wanted != "verbose_json":
            raise ApiError(f"{LIST} needs response_format verbose_json, got {wanted}", param=LIST)
        stream = FLAGS[_one_of("stream", texts.get("stream", "false").lower(), tuple(FLAGS))]
        if stream and wanted not in STREAMED:
            why = f"response_format must be {' or '.join(STREAMED)} with stream, got {wanted}"
            raise ApiError(why, param="response_format")
        temperature = _number("temperature", texts.get("temperature", "0"))
        if not 0.0 <= temperature <= HOTTEST:
            raise ApiError(f"temperature must be in 0..{HOTTEST:g}, got {temperature:g}", param="temperature")
        seed = _number("seed", texts.get("seed", "0"))
        if not seed.is_integer() or abs(seed) >= 2**53:
            raise ApiError(f"seed must be a whole number, got {shortened(texts['seed'], 64)}", param="seed")
        params = TranscriptionParams(
            language=texts.get("language") or None, task=task, prompt=texts.get("prompt", ""), temperature=temperature,
            words="word" in granularities, seed=int(seed),
        )  # fmt: skip
        return cls(params=params, model=texts.get("model"), form=wanted, granularities=granularities, stream=stream)


def _reject(name: str) -> None:
    """Reject a field that is not known, or ignore it where the operator wants that.

    Raises:
        ApiError: it is rejected.
    """
    notes = NOTES.get()
    if notes is None or not notes.lenient:
        raise ApiError(f"{name[:64]} is not supported; leave it out", param=name, code="unsupported_field")
    notes.ignore(name)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ApiError(f"{name} must be one of {', '.join(known)}, got {shortened(value, 64)}", param=name)
    return value


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ApiError(f"{name} must be a number, got {shortened(text, 64)}", param=name)
    return value


@dataclass(slots=True)
class _Progress:
    """What is told while windows are decoded, on another thread.

    Attributes:
        gone: nobody waits for the answer any more.
    """

    facts: LogFields
    metrics: Metrics
    gone: Event = field(default_factory=Event)
    _before: int = 0

    def advance(self, done: int, tokens: int) -> None:
        """Count the tokens of an attempt at a window so far.

        Raises:
            InterruptedError: nobody waits.
        """
        if self.gone.is_set():
            raise InterruptedError("the client has gone away")
        new = tokens - self._before if tokens >= self._before else tokens
        self._before = tokens
        if new:
            self.facts.use(new)
            self.facts.begun()
            self.metrics.tokens.inc(new)


class TranscriptionRoutes:
    """Handles the routes of audio.

    Args:
        check_model: raises ApiError for the name of a model that is not served.
        waiting: tells how many requests wait for the engine.
    """

    def __init__(
        self,
        model: AsyncLLM,
        config: ServerConfig,
        *,
        slots: Slots,
        metrics: Metrics,
        check_model: Callable[[str | None], None],
        waiting: Callable[[], int],
    ) -> None:
        self._llm, self._config, self._slots, self._metrics = model.llm, config, slots, metrics
        self._check_model, self._waiting, self._limits = check_model, waiting, limits_by_owner(config)
        self._places, self._threads = Places(AT_ONCE), ThreadPoolExecutor(AT_ONCE, "transcription")
        self._of_audio = AudioLimits(
            max_bytes=config.max_audio_bytes, max_seconds=config.max_audio_seconds, decode_seconds=DECODE_SECONDS
        )

    def add(self, app: FastAPI, errors: dict[int | str, Json]) -> None:
        """Bind the handlers to their paths."""
        for path, handler in ((TRANSCRIPTIONS, self.transcribe), (TRANSLATIONS, self.translate)):
            app.add_api_route(path, handler, methods=["POST"], response_model=None, responses=errors)

    def close(self) -> None:
        """End the threads behind what they do at present."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def transcribe(self, http: Request) -> Response:
        """Answer with what is said in an audio."""
        return await self._answer(http, "transcribe")

    async def translate(self, http: Request) -> Response:
        """Answer with what is said in an audio, in English."""
        return await self._answer(http, "translate")

    @cached_property
    def _transcriber(self) -> Transcriber:
        return Transcriber(self._llm)

    async def _answer(self, http: Request, task: str) -> Response:
        source = getattr(self._llm, "source", None)
        if source is None or source.reads != "input_features":
            why = f"the served model reads no speech; start the server with a Whisper model for {http.url.path}"
            raise ApiError(why, param="model", code="model_reads_no_speech")
        owner: str = http.scope["owner"]
        OWNER.set(owner)
        with ExitStack() as held:
            held.enter_context(self._slots.slot(owner, self._waiting()))
            held.enter_context(self._slots.having(owner, 1))
            try:
                async with asyncio.timeout(self._config.request_timeout):
                    asked, data = await self._read(http, task)
                    await self._places.take()
                    held.callback(self._places.give)
                    samples = await unless_gone(http, self._samples(data))
                    if samples is None:
                        return Response(status_code=CLOSED)
                    windows = self._windows(samples, asked.params, http)
                    if asked.stream:
                        return EventStream(self._events(windows, http.scope["facts"]), held.pop_all())
                    told = await unless_gone(http, self._whole(windows, asked, samples))
            except TimeoutError:
                raise _too_slow() from None
        return told or Response(status_code=CLOSED)

    async def _read(self, http: Request, task: str) -> tuple[TranscriptionRequest, bytes]:
        """Return what is asked for, and the bytes of the file."""
        try:
            async with http.form(max_files=1, max_fields=MOST_FIELDS, max_part_size=FORM_BYTES) as form:
                try:
                    asked = TranscriptionRequest.read(form, task)
                    self._check_model(asked.model)
                    transcriber = await asyncio.to_thread(lambda: self._transcriber)  # which reads files at first
                    transcriber.check(asked.params)
                except PacelineError as error:
                    raise ApiError(str(error), param="language" if "language" in str(error) else "model") from None
                if not isinstance(file := form.get("file"), UploadFile):
                    raise ApiError("file must be an audio file", param="file")
                return asked, await file.read()
        except ClientDisconnect:
            raise ApiError("the body did not arrive") from None
        except BodyError:
            raise
        except OSError as error:
            raise _no_room(error) from None
        except HTTPException as error:  # of what reads forms
            raise _no_form(error.detail) from None

    async def _samples(self, data: bytes) -> Samples:
        read = partial(load_audio, data, limits=self._of_audio, isolated=True)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except ConfigError as error:  # the extra is not installed
            raise ApiError(str(error), status=501, code="cannot_read_audio") from None
        except OSError as error:
            raise _no_room(error) from None
        except PacelineError as error:
            raise ApiError(str(error), param="file") from None

    async def _windows(
        self, samples: Samples, params: TranscriptionParams, http: Request
    ) -> AsyncGenerator[HeardWindow]:
        """Yield windows as they are understood, on a thread; closing this ends the request before its next step."""
        owner, facts = http.scope["owner"], http.scope["facts"]
        limits, progress = self._limits.get(owner, NO_LIMITS), _Progress(facts, self._metrics)
        caller = Caller(
            owner=owner, priority=allowed_priority(limits, None), max_running=limits.max_running,
            advance=progress.advance,
        )  # fmt: skip
        stream, step = self._transcriber.stream(samples, params, caller), _nothing()
        until = 0.0
        try:
            while True:
                step = self._threads.submit(next, stream, None)
                window = await asyncio.wrap_future(step)
                if window is None:
                    break
                self._metrics.audio_seconds.labels(params.task).inc(window.until - until)
                until = window.until
                yield window
            self._metrics.audio_requests.labels(params.task).inc()
            facts.count(0, 0, facts.tokens)
        except PacelineError as error:
            raise ApiError(str(error), status=500, code="decoding_failed") from None
        finally:
            progress.gone.set()
            step.add_done_callback(lambda _: self._end(stream))  # not before a thread has left it

    def _end(self, stream: Generator[HeardWindow]) -> None:
        """Close a stream on a thread, since it waits for the model to release what it holds."""
        try:
            self._threads.submit(stream.close)
        except RuntimeError:  # the server ends
            stream.close()

    async def _whole(
        self, windows: AsyncGenerator[HeardWindow], asked: TranscriptionRequest, samples: Samples
    ) -> Response:
        segments, language = list[Segment](), asked.params.language or "en"
        async with aclosing(windows) as coming:
            async for window in coming:
                segments += window.segments
                language = window.language
        duration = len(samples) / SAMPLE_RATE
        transcript = Transcript(language=language, duration=duration, segments=tuple(segments), task=asked.params.task)
        return await asyncio.to_thread(_told, transcript, asked)

    async def _events(self, windows: AsyncGenerator[HeardWindow], facts: LogFields) -> AsyncGenerator[bytes]:
        """Yield a delta for each window that adds text, and the whole at the end; an error as the last event."""
        text, sent = "", ""
        try:
            async with asyncio.timeout(self._config.request_timeout), aclosing(windows) as coming:
                async for window in coming:
                    text += "".join(segment.text for segment in window.segments)
                    if (whole := text.strip()) != sent:
                        yield event({"type": "transcript.text.delta", "delta": whole[len(sent) :]})
                        sent = whole
            yield event({"type": "transcript.text.done", "text": sent})
        except (TimeoutError, ApiError) as error:
            why = error if isinstance(error, ApiError) else _too_slow()
            facts.failed(why.status, why.message, why.code, why.param)
            yield event(why.body())
        yield b"data: [DONE]\n\n"


def _no_room(error: OSError) -> ApiError:
    """Return that the file cannot be kept while it is read, as of a full disk, and log it for the operator."""
    logger.error("an audio cannot be kept (%s)", error)
    return ApiError(f"the file cannot be kept ({error.strerror or error})", status=500, code="store_failed")


def _no_form(why: str) -> ApiError:
    """Return what is wrong with a form in words that say what to do."""
    if why.startswith("Too many files"):
        why = "file must be one audio file, and no other field a file; send a request for each audio"
        return ApiError(why, param="file")
    if why.startswith("Part exceeded"):
        why = (
            f"a part without a filename may be at most {FORM_BYTES} bytes long; shorten prompt, or send file as a file"
        )
        return ApiError(why, param="prompt")
    if why.startswith("Missing boundary"):
        why = "file cannot be read: the Content-Type names no boundary; let the HTTP client write that header"
        return ApiError(why, param="file")
    return ApiError(why)


def _told(transcript: Transcript, asked: TranscriptionRequest) -> Response:
    """Return a transcript in the form that was asked for."""
    if asked.form == "text":
        return Response(f"{transcript.text}\n", media_type="text/plain; charset=utf-8")
    if asked.form in ("srt", "vtt"):
        return Response(write_transcript(transcript, asked.form), media_type="text/plain; charset=utf-8")
    usage = {"type": "duration", "seconds": math.ceil(transcript.duration)}
    if asked.form == "json":
        return json_response({"text": transcript.text, "usage": usage})
    body = verbose(transcript, words="word" in asked.granularities)
    if asked.granularities and "segment" not in asked.granularities:
        del body["segments"]
    return json_response(body | {"usage": usage})


def _too_slow() -> ApiError:
    return ApiError("the request took longer than this server allows", status=504, code="timeout")


def _nothing() -> Future[HeardWindow | None]:
    """Return what has been done before the first step."""
    done: Future[HeardWindow | None] = Future()
    done.set_result(None)
    return done
