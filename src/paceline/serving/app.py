"""The routes: requests are checked, decoded beside the event loop, and answered whole or as events."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from importlib.util import find_spec
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from paceline.async_llm import AsyncLLM
from paceline.config import ServerConfig
from paceline.errors import ConfigError, PacelineError
from paceline.llm import LLM
from paceline.serving.answers import ChatAnswer, CompletionAnswer
from paceline.serving.api_errors import ApiError, ErrorAnswer, internal_error
from paceline.serving.batch_routes import BatchRoutes
from paceline.serving.batch_runs import BatchRuns, Room
from paceline.serving.batch_store import BatchStore
from paceline.serving.bodies import READERS, BodyRoute
from paceline.serving.chat import constrained_by
from paceline.serving.embeddings import DecoderEmbedder
from paceline.serving.entrance import Entrance, guarded, metered
from paceline.serving.event_stream import EventStream
from paceline.serving.field_notes import NOTES, FieldNotes
from paceline.serving.grammars import Grammars
from paceline.serving.jobs import JobFactory, PromptJob
from paceline.serving.keys import NO_LIMITS, limits_by_owner, read_keys
from paceline.serving.limits import HEALTH, LIVE, LOAD, PING, BodyError, Slots, allowed_priority
from paceline.serving.llama import LlamaRoutes
from paceline.serving.messages import MessageRoutes
from paceline.serving.metrics import Metrics
from paceline.serving.page import LivePage
from paceline.serving.places import Places
from paceline.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DecodingRequest,
    DetokenizeRequest,
    TokenizeRequest,
    invalid_field,
)
from paceline.serving.quotas import Quotas
from paceline.serving.request_errors import named
from paceline.serving.request_log import LogFields
from paceline.serving.response_store import ResponseStore
from paceline.serving.responses import ResponseRoutes
from paceline.serving.runs import RequestRun, json_response, large_response
from paceline.serving.text_models import TextModels
from paceline.serving.text_requests import TextService
from paceline.serving.transcriptions import TranscriptionRoutes
from paceline.serving.translation import Outgoing
from paceline.utils import read_text, shortened
from paceline.version import __version__

logger = logging.getLogger("paceline.serving")

Json = dict[str, Any]
Reply = CompletionAnswer | ChatAnswer
PLAIN_PATHS: Final[Json] = {"docs_url": None, "redoc_url": None, "redirect_slashes": False}
"""No pages that fetch scripts, and no redirects, which would not know what a proxy in front of us is called."""

ERRORS: Final[dict[int | str, Json]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
"""Routes answer this beside their own, as the OpenAPI document says."""

MOST_LOGGED: Final = 4096
"""So many characters of a prompt are logged, with `log_requests`."""

JobsAndReply = tuple[list[PromptJob], Reply]


class Service:
    """Holds what the routes share: the model, the jobs, the limits, the counters and the stored responses.

    Args:
        model: decodes.
        names: under which it is known; the first is told in answers.
    """

    def __init__(self, model: AsyncLLM, names: Sequence[str], jobs: JobFactory, config: ServerConfig) -> None:
        self.model, self.names, self.jobs, self.config = model, list(names), jobs, config
        self.metrics = Metrics(model, self.names[0] if config.vllm_metrics else None)
        self._private = _private_names(model.llm)
        self.limits = limits_by_owner(config)
        self.slots, self.grammars, self.started = Slots(config, self.limits), Grammars(), int(time.time())
        self.store = ResponseStore(
            config.response_file, config.max_response_bytes, config.max_response_age, self.metrics.store_failed
        )
        self.text_models = TextModels(config)
        self.transcriptions = TranscriptionRoutes(
            model, config, slots=self.slots, metrics=self.metrics, check_model=self.check_model,
            waiting=lambda: self.waiting,
        )  # fmt: skip

    def close(self) -> None:
        """End the threads, and close the file of stored responses."""
        self.text_models.close()
        self.transcriptions.close()
        self.store.close()

    def _told(self, error: PacelineError, request: DecodingRequest) -> ApiError:
        """Return an error of the library in which the model has the name that clients know, not that of its files."""
        told = named(error, request)
        for name in self._private:
            told.message = told.message.replace(name, self.names[0])
        return told

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(f"the model {shortened(name)} is not served here; known: {known}", status=404, param="model",
                           code="model_not_found")  # fmt: skip

    @property
    def waiting(self) -> int:
        """Counts the requests that have not begun, those included that are being read and rendered."""
        gauges = self.model.llm.backend.gauges()
        waiting = sum(backend.gauges().waiting for backend in self.model.llm.backends)
        return max(waiting, self.slots.running.total() - gauges.max_running)

    async def answer(
        self,
        http: Request,
        request: DecodingRequest,
        make: Callable[[], Awaitable[JobsAndReply]],
        translated: Callable[[RequestRun], Outgoing] | None = None,
    ) -> Response:
        """Decode a request and answer it, in another API's words where `translated` says them."""
        self.check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError("stream_options needs stream: true", param="stream_options")
        owner, facts = http.scope["owner"], http.scope["facts"]
        limits = self.limits.get(owner, NO_LIMITS)
        turns: Json = {"priority": allowed_priority(limits, request.priority), "max_running": limits.max_running}
        with ExitStack() as slot:
            slot.enter_context(self.slots.slot(owner, self.waiting))
            try:
                jobs, reply = await make()
                slot.enter_context(self.slots.having(owner, sum(job.rows for job in jobs)))
                if (bound := jobs[0].params.structured_outputs) is not None:
                    await self.grammars.check(bound, constrained_by(request))
                if self.config.log_requests:
                    _log_prompts(owner, jobs, self.model.llm)
                facts.use(sum(job.prompt_tokens for job in jobs))
                streams = await asyncio.to_thread(
                    lambda: [
                        self.model.stream(job.prompt, job.params, search=job.search, owner=owner, **turns)
                        for job in jobs
                    ]
                )
            except PacelineError as error:
                raise self._told(error, request) from None
            run = RequestRun(
                streams, request, reply, metrics=self.metrics, grammars=self.grammars, facts=facts,
                max_seconds=self.config.request_timeout,
            )  # fmt: skip
            outgoing: Outgoing = run if translated is None else translated(run)
            if not outgoing.stream:
                return await outgoing.whole(http)
            return EventStream(outgoing.events(), slot.pop_all())


def _private_names(llm: LLM) -> list[str]:
    """Return what messages of the library call the model by: a path or a hub id, the longest first."""
    names = {str(llm.folder), *([llm.runner.info.name] if hasattr(llm, "runner") else [])}
    return sorted((name for name in names if "/" in name), key=len, reverse=True)


def _log_prompts(owner: str, jobs: Sequence[PromptJob], llm: LLM) -> None:
    for job in jobs:
        text = job.shown or llm.tokenizer.decode(job.prompt.tokens[:MOST_LOGGED], False)
        logger.info("%s", LogFields(owner=owner[:12], prompt=text[:MOST_LOGGED]))


def check_files(config: ServerConfig) -> None:
    """Read the files that a configuration names, so that what is wrong with one is told before a model is loaded.

    Raises:
        ConfigError: a file of keys, of a template or of stored responses that cannot be read; a folder of batches that
            cannot be used.
    """
    read_keys(config)
    if config.chat_template is not None:
        read_text("chat_template", config.chat_template)
    if config.response_file is not None:
        ResponseStore(config.response_file, config.max_response_bytes, config.max_response_age).close()
    if config.batch_folder is not None:
        if find_spec("python_multipart") is None:
            raise ConfigError("batch_folder needs python-multipart; pip install '.[serve]' in a checkout")
        BatchStore(config.batch_folder).close()


def create_app(model: AsyncLLM, config: ServerConfig | None = None) -> Entrance:
    """Build the server as an ASGI application.

    Args:
        model: loaded; it is not closed here.
        config: its address is not used here.
    Raises:
        ConfigError: a file of keys, of a template or of stored responses that cannot be read; a folder of batches that
            cannot be used.
        CheckpointError: an encoder that cannot be loaded.
    """
    config = config or ServerConfig()
    template = None if config.chat_template is None else read_text("chat_template", config.chat_template)
    names = config.served_model_name or [str(model.llm.folder.name)]
    service = Service(model, names, JobFactory(model.llm, config, template), config)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        ready = asyncio.create_task(service.jobs.get_ready())
        if runs is not None:
            runs.resume()
        gc.freeze()  # a search of the model's and the libraries' objects for garbage would hold the loop
        yield
        gc.unfreeze()
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await responses.close()
        if runs is not None:
            await runs.close()
        for workers in (service.grammars.workers, service.jobs.workers):
            await workers.close()
        service.close()
        if batches is not None:
            batches.close()

    app = FastAPI(title="Paceline", version=__version__, lifespan=life, **PLAIN_PATHS)
    app.router.route_class, app.state.readers = BodyRoute, Places(READERS)
    _add_errors(app, service)
    responses = _add_routes(app, service)
    noted = FieldNotes(app, lenient=config.lenient_fields)
    batches = None if config.batch_folder is None else BatchStore(config.batch_folder)
    quotas = metered(noted, config, service.metrics.refused)
    runs = None if batches is None else _batch_runs(batches, quotas, service)
    BatchRoutes(batches, runs, config, service.limits).add(app)
    return guarded(quotas, config, service.metrics.refused)


def _add_routes(app: FastAPI, service: Service) -> ResponseRoutes:
    """Bind the routes of all APIs but those of files and batches; returns the ones that have work to end."""
    model, names, config = service.model, service.names, service.config
    llama = LlamaRoutes(service.answer, model, names[0], jobs=service.jobs, slots=service.slots, config=config)
    llama.add(app)
    routes = Routes(service, llama)
    routes.add(app)
    responses = ResponseRoutes(routes.conversation, service.store, service.jobs.most_new)
    responses.add(app)
    MessageRoutes(routes.conversation, service.jobs).add(app)
    texts = TextService(service.slots, service.metrics, config, lambda: service.waiting)
    service.text_models.add(app, texts, DecoderEmbedder(model, names, service.jobs, texts), ERRORS)
    service.transcriptions.add(app, ERRORS)
    LivePage(model, names[0], service.slots, config).add(app)
    return responses


def _batch_runs(store: BatchStore, app: Quotas, service: Service) -> BatchRuns:
    """Return what answers batches by the application, whose live requests leave them room."""
    room = Room(service.slots.running.total, lambda: service.model.llm.backend.gauges().max_running)
    return BatchRuns(store, app, room, service.config.max_batch_requests, service.metrics.refused)


def _add_errors(app: FastAPI, service: Service) -> None:
    """Answer every error in the form that the clients of its route read."""

    @app.exception_handler(ApiError)
    async def told(http: Request, error: ApiError) -> Response:
        service.metrics.refused(error.status)
        notes = NOTES.get()
        error = error if notes is None else error.renamed(notes.names)
        return json_response(error.body(http.url.path), error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: Request, error: RequestValidationError) -> Response:
        return await told(http, invalid_field(error.errors(), error.body))

    @app.exception_handler(BodyError)
    async def unread(http: Request, error: BodyError) -> Response:
        return await told(http, error.error)

    @app.exception_handler(HTTPException)
    async def unknown(http: Request, error: HTTPException) -> Response:
        return await told(
            http, ApiError(str(error.detail), status=error.status_code, headers=dict(error.headers or {}))
        )

    @app.exception_handler(Exception)
    async def failed(http: Request, _: Exception) -> Response:
        return await told(http, internal_error())


class Routes:
    """Handles the routes of OpenAI's chats, completions and models, and those that tell how the server is."""

    def __init__(self, service: Service, llama: LlamaRoutes) -> None:
        self._service, self._llm, self._llama = service, service.model.llm, llama
        info = self._llm.backend.info
        self._context, self._vocab_size = info.max_context, info.vocab_size

    def add(self, app: FastAPI) -> None:
        """Bind the handlers to their paths."""
        posts: dict[str, Callable[..., Any]] = {
            "/v1/chat/completions": self.chat,
            "/v1/completions": self.completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        gets: dict[str, Callable[..., Any]] = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.one_model,
            **dict.fromkeys(HEALTH, self.health),
            LIVE: self.live,
            "/version": self.version,
            LOAD: self.load,
            "/metrics": self.metrics,
        }
        for method, routes in (("POST", posts), ("GET", gets)):
            for path, handler in routes.items():
                app.add_api_route(path, handler, methods=[method], response_model=None, responses=ERRORS)
        app.add_api_route(PING, self.health, methods=["POST"], response_model=None, responses=ERRORS)
        for path in (*HEALTH, LIVE):
            app.add_api_route(path, gets[path], methods=["HEAD"], response_model=None, include_in_schema=False)

    async def chat(self, request: ChatRequest, http: Request) -> Response:
        return await self.conversation(request, http)

    async def conversation(
        self, request: ChatRequest, http: Request, translated: Callable[[RequestRun], Outgoing] | None = None
    ) -> Response:
        async def make() -> JobsAndReply:
            jobs = await self._service.jobs.chat(request, http.scope["owner"])
            return jobs, ChatAnswer(request, jobs, self._service.names[0], self._service.jobs)

        return await self._service.answer(http, request, make, translated)

    async def completions(self, request: CompletionRequest, http: Request) -> Response:
        async def make() -> JobsAndReply:
            async with self._service.jobs.turn(request.prompt):
                jobs = await asyncio.to_thread(self._service.jobs.completion, request, http.scope["owner"])
            return jobs, CompletionAnswer(request, jobs, self._service.names[0], self._llm)

        return await self._service.answer(http, request, make)

    async def models(self) -> Response:
        names = dict.fromkeys([*self._service.names, *self._service.text_models.lengths])
        return json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def one_model(self, name: str) -> Response:
        if name not in self._service.text_models.lengths:
            self._service.check_model(name)
        return json_response(self._card(name))

    def _card(self, name: str) -> Json:
        created = self._service.started
        card = {"id": name, "object": "model", "created": created, "owned_by": "paceline"}
        return card | {"max_model_len": self._service.text_models.lengths.get(name, self._context)}

    async def tokenize(self, request: TokenizeRequest, http: Request) -> Response:
        """Answer with the tokens of a prompt, or of a conversation as the template renders it."""
        self._service.check_model(request.model)
        if request.content is not None:
            return await self._llama.tokenize(request, http)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError("give one of prompt and messages", param="prompt")
        tokenizer, jobs = self._llm.tokenizer, self._service.jobs
        special = request.prompt is not None if request.add_special_tokens is None else request.add_special_tokens
        try:
            with self._service.slots.slot(http.scope["owner"], 0):
                if request.prompt is None:
                    tokens = (await jobs.conversation(request))[1]
                    tokens = tokenizer.framed(tokens) if special else tokens
                else:
                    async with jobs.turn(request.prompt):
                        tokens = await asyncio.to_thread(
                            tokenizer.encode, request.prompt, special, most=jobs.most_tokens
                        )
                answer: Json = {"count": len(tokens), "max_model_len": self._context, "tokens": tokens}
                if request.return_token_strs:
                    async with jobs.turn(""):
                        texts = await asyncio.to_thread(lambda: [tokenizer.token_text(token) for token in tokens])
                    answer["token_strs"] = texts
        except PacelineError as error:
            raise named(error, request) from None
        return await large_response(answer)

    async def detokenize(self, request: DetokenizeRequest, http: Request) -> Response:
        self._service.check_model(request.model)
        if any(token >= self._vocab_size for token in request.tokens):
            raise ApiError(f"tokens must hold ids in 0..{self._vocab_size - 1}", param="tokens")
        with self._service.slots.slot(http.scope["owner"], 0):
            async with self._service.jobs.turn(""):
                text = await asyncio.to_thread(self._llm.tokenizer.decode, request.tokens, False)
        return await large_response({"prompt": text, "content": text})

    async def health(self) -> Response:
        """Answer 200 as long as requests are answered, and tell what has failed."""
        closed, faults = self._llm.closed, self._service.model.faults
        answer: Json = {"status": "closed" if closed else "ok", "faults": faults}
        answer["response_store_failures"] = self._service.metrics.store_failures
        answer["response_store_error"] = self._service.store.fault or None
        return json_response(answer, 503 if closed else 200)

    async def live(self) -> Response:
        closed = self._llm.closed
        return json_response({"status": "closed" if closed else "live"}, 503 if closed else 200)

    async def load(self) -> Response:
        """Answer with how many requests run or wait, as vLLM does."""
        return json_response({"server_load": self._service.slots.running.total()})

    async def version(self) -> Response:
        return json_response({"version": __version__})

    async def metrics(self) -> Response:
        return Response(self._service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")
