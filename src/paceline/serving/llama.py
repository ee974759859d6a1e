"""llama-server's own routes beside OpenAI's: completions, infill, what the server is, and texts as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from paceline.async_llm import AsyncLLM
from paceline.config import ServerConfig
from paceline.errors import PacelineError
from paceline.serving.answers import ChatAnswer, CompletionAnswer
from paceline.serving.api_errors import ApiError
from paceline.serving.field_notes import NOTES
from paceline.serving.infill import InfillPrompts
from paceline.serving.jobs import JobFactory, PromptJob
from paceline.serving.limits import Slots
from paceline.serving.llama_answers import LlamaAnswer, LlamaOutgoing, settings_of
from paceline.serving.llama_request import InfillRequest, LlamaRequest
from paceline.serving.protocol import DecodingRequest, TokenizeRequest
from paceline.serving.request_errors import named
from paceline.serving.runs import ENCODER, Json, RequestRun, json_response, large_response
from paceline.serving.translation import Outgoing
from paceline.utils import shortened
from paceline.version import __version__

JobsAndReply = tuple[list[PromptJob], CompletionAnswer | ChatAnswer]


class RequestHandler(Protocol):
    """Decodes the jobs of a request and answers it."""

    async def __call__(
        self,
        http: Request,
        request: DecodingRequest,
        make: Callable[[], Awaitable[JobsAndReply]],
        translated: Callable[[RequestRun], Outgoing] | None = None,
        /,
    ) -> Response: ...


class LlamaRoutes:
    """Handles llama-server's routes.

    Args:
        answer: decodes and answers.
        name: of the model.
    """

    def __init__(
        self,
        answer: RequestHandler,
        model: AsyncLLM,
        name: str,
        *,
        jobs: JobFactory,
        slots: Slots,
        config: ServerConfig,
    ) -> None:
        self._answer, self._llm, self._name, self._jobs, self._slots = answer, model.llm, name, jobs, slots
        self._context = self._llm.backend.info.max_context

    def add(self, app: FastAPI) -> None:
        """Bind the handlers to their paths."""
        routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("POST", "/completion", self.completion),
            ("POST", "/completions", self.completion),
            ("POST", "/infill", self.infill),
            ("POST", "/apply-template", self.apply_template),
            ("GET", "/props", self.props),
            ("GET", "/slots", self.list_slots),
        )
        for method, path, handler in routes:
            app.add_api_route(path, handler, methods=[method], response_model=None)

    @cached_property
    def _infill(self) -> InfillPrompts:
        return InfillPrompts(self._llm.tokenizer, self._name)

    def _most(self, http: Request) -> int:
        """Return how many tokens an answer may have, by the context and the limits of the server and of the key."""
        return min(self._context, self._jobs.most_new(http.scope["owner"]) or self._context)

    async def completion(self, request: LlamaRequest, http: Request) -> Response:
        return await self._complete(request.settled(self._most(http)), http)

    async def infill(self, request: InfillRequest, http: Request) -> Response:
        """Answer with what stands between a prefix and a suffix."""
        infill = await asyncio.to_thread(lambda: self._infill)
        ends = [*(request.stop_token_ids or ()), *infill.ends]
        extra = [(file.filename, file.text) for file in request.input_extra or ()]

        def made() -> list[int]:
            parts = (request.input_prefix, request.input_suffix, request.prompt)
            return infill.tokens(*parts, extra=extra, filename=request.filename, most=self._jobs.most_tokens)

        async with self._jobs.turn([request.input_prefix, request.input_suffix, *(text for _, text in extra)]):
            try:
                tokens = await asyncio.to_thread(made)
            except PacelineError as error:
                raise ApiError(str(error), param="input_prefix") from None
        if (notes := NOTES.get()) is not None:
            notes.names["prompt"] = "input_prefix"  # errors are of all parts together
        return await self._complete(request.settled(self._most(http), prompt=tokens, stop_token_ids=ends), http)

    async def _complete(self, request: LlamaRequest, http: Request) -> Response:
        slots = self._llm.backend.gauges().max_running
        if request.id_slot >= slots:
            why = f"id_slot must be -1 for any slot, or in 0..{slots - 1}, got {shortened(request.id_slot)}"
            raise ApiError(why, param="id_slot")

        async def make() -> JobsAndReply:
            async with self._jobs.turn(request.prompt):
                jobs = await asyncio.to_thread(self._made, request, http.scope["owner"])
            return jobs, LlamaAnswer(request, jobs, self._name, self._llm, self._context)

        return await self._answer(http, request, make, lambda run: LlamaOutgoing(run, request.response_fields))

    def _made(self, request: LlamaRequest, owner: str) -> list[PromptJob]:
        """Return the jobs of a request, each with its prompt's text."""
        jobs = self._jobs.completion(request, owner)
        for job in jobs:
            job.shown = job.shown or self._llm.tokenizer.decode(job.prompt.tokens, False)
        return jobs

    async def apply_template(self, request: TokenizeRequest) -> Response:
        """Answer with the text of a conversation."""
        if request.messages is None or request.prompt is not None or request.content is not None:
            raise ApiError("give messages", param="messages")
        try:
            return await large_response({"prompt": (await self._jobs.rendered(request)).text})
        except PacelineError as error:
            raise named(error, request) from None

    async def tokenize(self, request: TokenizeRequest, http: Request) -> Response:
        """Answer with the tokens of a content, or with each token's text too."""
        content, tokenizer, most = request.content or "", self._llm.tokenizer, self._jobs.most_tokens
        if request.prompt is not None or request.messages is not None:
            raise ApiError("give one of prompt, messages and content", param="content")

        def read() -> list[int]:
            if request.parse_special:
                return tokenizer.encode(content, request.add_special, most=most)
            ids = tokenizer.encode_plain(content, most=most)
            return tokenizer.framed(ids) if request.add_special else ids

        try:
            with self._slots.slot(http.scope["owner"], 0):
                async with self._jobs.turn(content):
                    tokens = await asyncio.to_thread(read)
                    pieces = await asyncio.to_thread(self._pieces, tokens) if request.with_pieces else None
        except PacelineError as error:
            raise named(error, request) from None
        return await large_response({"tokens": tokens if pieces is None else pieces})

    def _pieces(self, tokens: Sequence[int]) -> list[Json]:
        """Return tokens with their texts, or with their bytes where they are no text."""
        pieces: list[Json] = []
        for token in tokens:
            data = self._jobs.token_bytes[token]
            try:
                pieces.append({"id": token, "piece": data.decode()})
            except UnicodeDecodeError:
                pieces.append({"id": token, "piece": list(data)})
        return pieces

    async def props(self) -> Response:
        """Answer with what does not change while the server runs."""
        named_tokens = self._llm.tokenizer.named
        params = settings_of(self._llm.default_sampling_params(max_tokens=None))
        return json_response(
            {
                "default_generation_settings": {"n_ctx": self._context, "params": params},
                "total_slots": self._llm.backend.gauges().max_running,
                "model_alias": self._name,
                "model_path": self._name,
                "chat_template": self._jobs.template_text or "",
                "modalities": {"vision": False, "audio": False},
                "bos_token": named_tokens.get("bos_token", ""),
                "eos_token": named_tokens.get("eos_token", ""),
                "build_info": f"paceline {__version__}",
                "is_sleeping": False,
            }
        )

    async def list_slots(self, http: Request) -> Response:
        """Answer with as many slots as sequences can be decoded together; of whom they are is not told."""
        gauges = self._llm.backend.gauges()
        if http.query_params.get("fail_on_no_slot") == "1" and gauges.running >= gauges.max_running:
            raise ApiError("no slot is free", status=503, code="no_slot", headers={"Retry-After": "1"})
        slots = [
            {"id": number, "n_ctx": self._context, "is_processing": number < gauges.running}
            for number in range(gauges.max_running)
        ]
        return Response(ENCODER.encode(slots), media_type="application/json")
