"""`/v1/embeddings`: texts become vectors, by the served decoder or by an encoder beside it."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch
from fastapi import FastAPI, Request
from fastapi.responses import Response

from paceline.async_llm import AsyncLLM
from paceline.config import EmbeddingParams
from paceline.engine import shaped_embeddings
from paceline.serving.api_errors import ApiError
from paceline.serving.encoders import Encoder, Text
from paceline.serving.jobs import JobFactory
from paceline.serving.places import Places
from paceline.serving.protocol import Prompts
from paceline.serving.text_requests import Answered, TextRequest, TextService, usage_of
from paceline.utils import shortened

EMBEDDINGS: Final = "/v1/embeddings"

Json = dict[str, Any]


class EmbeddingRequest(TextRequest):
    """Is the body of `/v1/embeddings`."""

    input: Prompts
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool = True


@dataclass(slots=True)
class Vectors:
    """Holds the embeddings of texts, (n, d) float32, with the number of tokens that were read."""

    values: torch.Tensor
    tokens: int


class Embedder(Protocol):
    """Embeds texts."""

    @property
    def names(self) -> Sequence[str]:
        """By which requests may ask for it; the first is told in answers."""
        ...

    async def embed(self, texts: Sequence[Text], params: EmbeddingParams, field: str, *, special: bool) -> Vectors:
        """Return the embeddings of texts, in their order.

        Args:
            params: whose pooling and normalisation an encoder has from its checkpoint.
            field: that the texts are in.
            special: texts get the special tokens that the tokenizer adds.
        Raises:
            ApiError, PacelineError: texts or parameters that cannot be honoured.
        """
        ...


class DecoderEmbedder:
    """Embeds by the served model, between its steps of decoding."""

    def __init__(self, model: AsyncLLM, names: Sequence[str], jobs: JobFactory, service: TextService) -> None:
        self.names = names
        self._llm, self._jobs, self._service, self._places = model.llm, jobs, service, Places(1)

    async def embed(self, texts: Sequence[Text], params: EmbeddingParams, field: str, *, special: bool) -> Vectors:
        """See `Embedder.embed`. Keys take turns; one text at a time is in memory between two passes of the model."""
        if self._llm.source is not None:
            raise ApiError("a model with an encoder does not embed; serve an embedding model", param="model")
        async with self._jobs.turn([text for text in texts if isinstance(text, str)]):
            prompts = await asyncio.to_thread(lambda: [self._tokens(text, special=special) for text in texts])
        run = await asyncio.to_thread(self._llm.embedding_run, prompts, params)
        try:
            count = self._service.check_tokens(run.lengths, field)
            while not run.ended:
                async with self._places.place():
                    await asyncio.to_thread(run.read_on)
        finally:
            run.close()
        return Vectors(run.vectors(), count)

    def _tokens(self, text: Text, *, special: bool) -> list[int]:
        if isinstance(text, list):
            return text
        return self._llm.tokenizer.encode(text, special, most=self._jobs.most_tokens)


class EncoderEmbedder:
    """Embeds by an encoder, on a thread of its own."""

    def __init__(self, encoder: Encoder, service: TextService) -> None:
        self.names = [encoder.thread.name]
        self._encoder, self._service = encoder, service

    async def embed(self, texts: Sequence[Text], params: EmbeddingParams, field: str, *, special: bool) -> Vectors:
        """See `Embedder.embed`."""
        encoder = self._encoder
        params.check_size(encoder.size)
        kept = params.most_tokens(encoder.thread.most_tokens)
        fields = await encoder.thread.tokens(texts, kept, special=special)
        count = self._service.check_tokens([len(one["input_ids"]) for one in fields], field)
        pooled = await encoder.pooled(fields)
        normalize = encoder.pooling.normalize
        return Vectors(shaped_embeddings(pooled, params.dimensions, normalize=normalize), count)


class EmbeddingRoutes:
    """Handles the route of embeddings.

    Args:
        embedders: the first is used where a request names no model.
    """

    def __init__(self, embedders: Sequence[Embedder], service: TextService) -> None:
        self._embedders, self._service = embedders, service

    def add(self, app: FastAPI, errors: dict[int | str, Json]) -> None:
        """Bind the handler to its path."""
        app.add_api_route(EMBEDDINGS, self.create, methods=["POST"], response_model=None, responses=errors)

    async def create(self, request: EmbeddingRequest, http: Request) -> Response:
        """Answer with an embedding for each text."""
        embedder, texts = self._chosen(request.model), _texts(request.input)
        self._service.check_count(len(texts), "input")

        async def work() -> Answered:
            params = EmbeddingParams(
                pooling=self._service.config.embedding_pooling,
                dimensions=request.dimensions,
                truncate_prompt_tokens=request.truncate_prompt_tokens,
            )
            self._service.log(http, texts)
            vectors = await embedder.embed(texts, params, "input", special=request.add_special_tokens)
            told = _base64 if request.encoding_format == "base64" else _floats
            data = await asyncio.to_thread(
                lambda: [
                    {"object": "embedding", "index": i, "embedding": told(row)} for i, row in enumerate(vectors.values)
                ]
            )
            body: Json = {"object": "list", "data": data, "model": embedder.names[0], "usage": usage_of(vectors.tokens)}
            return Answered(body, vectors.tokens)

        return await self._service.answer(http, request, "embeddings", "input", work)

    def _chosen(self, name: str | None) -> Embedder:
        if name is None:
            return self._embedders[0]
        for embedder in self._embedders:
            if name in embedder.names:
                return embedder
        known = ", ".join(known for embedder in self._embedders for known in embedder.names)
        raise ApiError(f"the model {shortened(name)} gives no embeddings here; known: {known}", status=404,
                       param="model", code="model_not_found")  # fmt: skip


def _texts(given: Prompts) -> list[Text]:
    """Return the texts of a request; a list of numbers is one text."""
    if isinstance(given, str):
        return [given]
    tokens = [part for part in given if isinstance(part, int)]
    return [tokens] if tokens else [part for part in given if not isinstance(part, int)]


def _floats(row: torch.Tensor) -> list[float]:
    numbers: list[float] = row.tolist()
    return numbers


def _base64(row: torch.Tensor) -> str:
    """Write float32 numbers, least byte first, as OpenAI's client reads them."""
    return base64.b64encode(row.numpy().astype("<f4").tobytes()).decode()
