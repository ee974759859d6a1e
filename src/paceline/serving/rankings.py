"""`/v1/rerank` and `/v1/score`: how well texts answer a query, by a cross-encoder, or by the cosines of embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Protocol

import torch
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from paceline.checkpoints import check_unicode
from paceline.config import EmbeddingParams
from paceline.errors import PromptError
from paceline.serving.api_errors import ApiError
from paceline.serving.embeddings import Embedder
from paceline.serving.encoders import CrossEncoder
from paceline.serving.protocol import QUICK, Strict
from paceline.serving.text_requests import Answered, TextRequest, TextService, usage_of
from paceline.utils import shortened

RERANK: Final = ("/v1/rerank", "/v2/rerank", "/rerank")
SCORE: Final = ("/v1/score", "/score")

NO_MODEL: Final = (
    "texts are not ranked here; start the server with --rerank-model, or with --embedding-model for cosines"
)

MOST_CHARACTERS: Final = 2**24
"""Of all pairs, in each of which a query counts anew: a short body may hold many pairs with one long query."""

Json = dict[str, Any]
Pair = tuple[str, str]


class Document(Strict):
    """Holds the text of a document."""

    text: str


class RerankRequest(TextRequest):
    """Is the body of `/v1/rerank`, in Jina's and Cohere's form."""

    query: str
    documents: Annotated[list[str | Document], QUICK]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool = True


TextOrTexts = str | Annotated[list[str], QUICK]


class ScoreRequest(TextRequest):
    """Is the body of `/v1/score`, in vLLM's form: its first texts are queries, its second ones documents."""

    text_1: TextOrTexts | None = None
    text_2: TextOrTexts | None = None
    queries: TextOrTexts | None = None
    documents: TextOrTexts | None = None

    def pairs(self) -> list[Pair]:
        """Return what is to be scored: each first text with its second one, or a single first one with all.

        Raises:
            ApiError: fields are missing or of both namings, or there are other numbers of texts.
        """
        first, second = self._chosen("text_1", "queries"), self._chosen("text_2", "documents")
        if len(first) not in (1, len(second)):
            why = f"give one first text, or as many as second ones, got {len(first)} and {len(second)}"
            raise ApiError(why, param="text_1" if self.queries is None else "queries")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def _chosen(self, name: str, other: str) -> list[str]:
        given = [found for found in (getattr(self, name), getattr(self, other)) if found is not None]
        if len(given) != 1:
            raise ApiError(f"give one of {name} and {other}", param=name)
        return [given[0]] if isinstance(given[0], str) else given[0]


class Judge(Protocol):
    """Scores pairs of texts."""

    name: str
    """Told in answers."""

    async def scores(self, pairs: Sequence[Pair], kept: int | None, field: str) -> tuple[list[float], int]:
        """Return a score for each pair, and the number of tokens that were read.

        Args:
            kept: `truncate_prompt_tokens`. field: that the texts are in.
        Raises:
            ApiError, PacelineError: texts that cannot be scored.
        """
        ...


class CrossJudge:
    """Scores by a cross-encoder, which reads both texts of a pair together."""

    def __init__(self, encoder: CrossEncoder, service: TextService) -> None:
        self.name = encoder.thread.name
        self._encoder, self._service = encoder, service

    async def scores(self, pairs: Sequence[Pair], kept: int | None, field: str) -> tuple[list[float], int]:
        """See `Judge.scores`."""
        if (length := sum(len(one) + len(other) for one, other in pairs)) > MOST_CHARACTERS:
            why = f"pairs of texts may have {MOST_CHARACTERS} characters together, got {length}"
            raise ApiError(why, param=field)
        thread = self._encoder.thread
        params = EmbeddingParams(truncate_prompt_tokens=kept)
        fields = await thread.tokens(pairs, params.most_tokens(thread.most_tokens))
        count = self._service.check_tokens([len(one["input_ids"]) for one in fields], field)
        return await self._encoder.scores(fields), count


class CosineJudge:
    """Scores by the cosine of the embeddings of both texts, each of which is read once."""

    def __init__(self, embedder: Embedder) -> None:
        self.name, self._embedder = embedder.names[0], embedder

    async def scores(self, pairs: Sequence[Pair], kept: int | None, field: str) -> tuple[list[float], int]:
        """See `Judge.scores`."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        place = {text: number for number, text in enumerate(texts)}
        params = EmbeddingParams(truncate_prompt_tokens=kept)
        vectors = await self._embedder.embed(texts, params, field, special=True)
        first, second = ([place[pair[side]] for pair in pairs] for side in (0, 1))
        cosines = torch.nn.functional.cosine_similarity(vectors.values[first], vectors.values[second])
        return cosines.tolist(), vectors.tokens


class RankingRoutes:
    """Handles the routes of rankings and scores.

    Args:
        judge: None: there is no model for it, as errors then say.
    """

    def __init__(self, judge: Judge | None, service: TextService) -> None:
        self._judge, self._service, self._count = judge, service, 0

    def add(self, app: FastAPI, errors: dict[int | str, Json]) -> None:
        """Bind the handlers to their paths."""
        for paths, handler in ((RERANK, self.rerank), (SCORE, self.score)):
            for path in paths:
                app.add_api_route(path, handler, methods=["POST"], response_model=None, responses=errors)

    async def rerank(self, request: RerankRequest, http: Request) -> Response:
        """Answer with documents, those that suit the query best first."""
        judge = self._chosen(request.model)
        texts = [one if isinstance(one, str) else one.text for one in request.documents]
        self._service.check_count(len(texts), "documents")
        _check("query", [request.query])

        async def work() -> Answered:
            self._service.log(http, [request.query, *texts])
            pairs = [(request.query, text) for text in texts]
            scores, tokens = await judge.scores(pairs, request.truncate_prompt_tokens, "documents")
            order = sorted(range(len(texts)), key=lambda number: -scores[number])
            results: list[Json] = [{"index": i, "relevance_score": scores[i]} for i in order[: request.top_n or None]]
            for result in results if request.return_documents else ():
                result["document"] = {"text": texts[result["index"]]}
            return Answered(self._head("rerank", judge) | {"results": results, "usage": usage_of(tokens)}, tokens)

        return await self._service.answer(http, request, "rerank", "documents", work)

    async def score(self, request: ScoreRequest, http: Request) -> Response:
        """Answer with the score of each pair."""
        judge, pairs = self._chosen(request.model), request.pairs()
        field = "text_2" if request.documents is None else "documents"
        self._service.check_count(len(pairs), field)
        _check("text_1" if request.queries is None else "queries", dict.fromkeys(query for query, _ in pairs))

        async def work() -> Answered:
            self._service.log(http, list(dict.fromkeys(text for pair in pairs for text in pair)))
            scores, tokens = await judge.scores(pairs, request.truncate_prompt_tokens, field)
            data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
            head = self._head("score", judge) | {"object": "list", "created": int(time.time())}
            return Answered(head | {"data": data, "usage": usage_of(tokens)}, tokens)

        return await self._service.answer(http, request, "score", field, work)

    def _chosen(self, name: str | None) -> Judge:
        if self._judge is None:
            raise ApiError(NO_MODEL, status=404, code="no_rerank_model")
        if name not in (None, self._judge.name):
            raise ApiError(f"the model {shortened(name)} does not rank texts here; known: {self._judge.name}",
                           status=404, param="model", code="model_not_found")  # fmt: skip
        return self._judge

    def _head(self, kind: str, judge: Judge) -> Json:
        self._count += 1
        return {"id": f"{kind}-{time.time_ns():x}-{self._count}", "model": judge.name}


def _check(field: str, texts: Iterable[str]) -> None:
    """Reject queries that no tokenizer reads; texts behind them are checked as they are read."""
    for text in texts:
        try:
            check_unicode(text)
        except PromptError as error:
            raise ApiError(str(error), param=field) from None
