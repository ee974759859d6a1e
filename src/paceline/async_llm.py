"""`LLM` for event loops: results as async iterators, decoded together on a thread of the engine's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from paceline.arguments import chat_names
from paceline.config import EmbeddingParams, SamplingParams
from paceline.engine import (
    AsyncRolloutPool,
    Backend,
    DecodingWorker,
    EmbeddingRequestOutput,
    Mailbox,
    OutputAssembly,
    Prompt,
    ReadPrompt,
    Request,
    RequestOutput,
    StreamChunk,
)
from paceline.errors import ConfigError
from paceline.llm import LLM
from paceline.search import GivenRetrieval, GivenSearch
from paceline.utils import MAX_COUNT, integer

logger = logging.getLogger("paceline")


class AsyncLLM:
    """A language model whose requests run beside an event loop and join each other's steps.

    Requests of any number of coroutines, and of several event loops, are decoded together; what one of them raises, or
    leaves, ends no other. A coroutine that is cancelled, or an iterator that is closed, ends its request before the
    next step. Diffusion language models decode one request after the other.

    Args:
        model: as in `LLM`, or an `LLM`, which may then go on to be used as well.
        arguments: of `LLM`.
    Attributes:
        llm: the model, its tokenizer and its defaults.
    Raises:
        CheckpointError, ConfigError: see `LLM`.
    """

    def __init__(self, model: str | Path | LLM | None = None, **arguments: Any) -> None:
        if isinstance(model, LLM) and arguments:
            raise ConfigError(f"AsyncLLM takes no arguments beside an LLM, got {', '.join(arguments)}")
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        self._workers: dict[int, DecodingWorker] = {}

    def stream(
        self,
        prompt: Prompt | ReadPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        search: GivenSearch | None = None,
        retrieval: GivenRetrieval | None = None,
        owner: str = "",
        priority: int = 0,
        max_running: int | None = None,
    ) -> AsyncGenerator[StreamChunk]:
        """What each step adds to one prompt's outputs; `chunk.output` is live and may be ahead of its chunk.

        Args:
            prompt, sampling_params: as in `LLM.request`. search, retrieval: as in `LLM.stream`.
            owner: whose request it is. Owners take turns, and each gets its share of the engine's time.
            priority: of the owner's requests that wait, the one with the lowest number begins first.
            max_running: outputs of the owner that are decoded at once; the others wait, oldest first. None is all.
        Raises:
            PromptError, ConfigError: at once, before anything runs.
        """
        request, backend = self.llm.request(prompt, sampling_params, search, retrieval=retrieval)
        integer("priority", priority, -MAX_COUNT)
        if max_running is not None:
            integer("max_running", max_running, 1)
        request.owner, request.priority, request.max_running = owner, priority, max_running
        return self._chunks(request, backend)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        search: GivenSearch | None = None,
        retrieval: GivenRetrieval | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """One prompt's outputs after each step, as `sampling_params.output_kind` says: all so far, what is new, or once
        at the end.

        Args:
            priority: of requests that wait, the one with the lowest number begins first.
            search, retrieval: as in `LLM.stream`.
        Raises:
            PromptError, ConfigError: at once, before anything runs.
        """
        return self._begun(prompt, sampling_params, search, retrieval, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        search: GivenSearch | None = None,
        retrieval: GivenRetrieval | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_special_tokens: bool = False,
        **template: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """The answer to a conversation, as `generate` gives it.

        Args:
            messages: dicts with "role" and "content".
            priority: as in `generate`.
            search, retrieval: as in `LLM.stream`. chat_template_kwargs, allow_special_tokens, template: as in
                `LLM.chat`.
        Raises:
            ConfigError, PromptError: at once, before anything runs.
        """
        names = chat_names(AsyncLLM.chat, self.llm.tokenizer, template, chat_template_kwargs)
        names["allow_special_tokens"] = allow_special_tokens
        text, tokens = self.llm.tokenizer.encode_chat(messages, **names)
        return self._begun(ReadPrompt(text, tokens, []), sampling_params, search, retrieval, priority)

    def rollouts(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        segment_tokens: int,
        pool_size: int | None = None,
    ) -> AsyncRolloutPool:
        """Samples for training, decoded in segments beside other requests: see `LLM.rollouts` and `AsyncRolloutPool`.

        Args:
            prompts: taken on a thread as places get free.
            sampling_params, segment_tokens, pool_size: as in `LLM.rollouts`.
        Raises:
            ConfigError, CapabilityError: as there.
        """
        return AsyncRolloutPool(
            self.llm.rollouts(prompts, sampling_params, segment_tokens=segment_tokens, pool_size=pool_size)
        )

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each text, as `LLM.embed` gives it.

        Passes over texts and steps of decoding take turns, and so do calls, of which one at a time has a long text in
        memory. One that is cancelled ends before its next pass.

        Raises:
            PromptError, ConfigError, CapabilityError: before anything runs.
        """
        params = EmbeddingParams(
            pooling=pooling, normalize=normalize, dimensions=dimensions, truncate_prompt_tokens=truncate_prompt_tokens
        )
        run = await asyncio.to_thread(self.llm.embedding_run, prompts, params)
        loop = asyncio.get_running_loop()
        try:
            while not run.ended:
                await loop.run_in_executor(self._embedder, run.read_on)
        finally:
            run.close()
        return run.results()

    @cached_property
    def _embedder(self) -> ThreadPoolExecutor:
        """One thread, so that texts never have two turns of the model for one of the decoding thread's."""
        return ThreadPoolExecutor(1, "paceline-embedding")

    async def _chunks(self, request: Request, backend: Backend) -> AsyncGenerator[StreamChunk]:
        worker, mailbox = self._worker(backend), Mailbox(request)
        worker.submit(mailbox)
        try:
            while (chunk := await mailbox.get()) is not None:
                yield chunk
        finally:
            worker.cancel(request)

    def _begun(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams | None,
        search: GivenSearch | None,
        retrieval: GivenRetrieval | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput]:
        """A request that runs as soon as its outputs are asked for."""
        request, backend = self.llm.request(prompt, params, search, retrieval=retrieval)
        integer("priority", priority, -MAX_COUNT)
        request.priority = priority
        return self._assembled(request, backend)

    async def _assembled(self, request: Request, backend: Backend) -> AsyncGenerator[RequestOutput]:
        assembly = OutputAssembly(request.params.output_kind)
        async with aclosing(self._chunks(request, backend)) as chunks:
            async for chunk in chunks:
                if (found := assembly.add(chunk)) is not None:
                    yield found

    def _worker(self, backend: Backend) -> DecodingWorker:
        worker = self._workers.get(id(backend))
        if worker is None:
            worker = self._workers[id(backend)] = DecodingWorker(backend)
        return worker

    @property
    def faults(self) -> int:
        """Decoding steps that raised so far; each ended the requests that had begun."""
        return sum(worker.faults for worker in self._workers.values())

    def get_tokenizer(self) -> Any:
        """The tokenizer as an object of transformers."""
        return self.llm.get_tokenizer()

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, with changes."""
        return self.llm.default_sampling_params(**changes)

    async def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of ended requests; whether there was such a cache."""
        return await asyncio.to_thread(self.llm.reset_prefix_cache)

    def close(self) -> None:
        """End all requests with what they have, and let go of the model."""
        for worker in self._workers.values():
            worker.close()
        if "_embedder" in vars(self):
            self._embedder.shutdown(wait=False)
        self.llm.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)
