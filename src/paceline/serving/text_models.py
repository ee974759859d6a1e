"""The models beside the served one that read texts, and the routes that they and it answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from paceline.config import ServerConfig
from paceline.serving.embeddings import DecoderEmbedder, Embedder, EmbeddingRoutes, EncoderEmbedder
from paceline.serving.encoders import CrossEncoder, Encoder
from paceline.serving.rankings import CosineJudge, CrossJudge, Judge, RankingRoutes
from paceline.serving.text_requests import TextService

Json = dict[str, Any]


class TextModels:
    """Holds the encoders that a configuration names.

    Attributes:
        lengths: name of a model -> most tokens of a text.
    Raises:
        CheckpointError: one that cannot be loaded.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._encoder = None if config.embedding_model is None else Encoder(config.embedding_model)
        self._cross = None if config.rerank_model is None else CrossEncoder(config.rerank_model)
        self._threads = [model.thread for model in (self._encoder, self._cross) if model is not None]
        self.lengths = {thread.name: thread.most_tokens for thread in self._threads}

    def add(self, app: FastAPI, service: TextService, decoder: DecoderEmbedder, errors: dict[int | str, Json]) -> None:
        """Bind the routes that read texts to their paths.

        Args:
            decoder: the served model, which embeds where no encoder does.
            errors: that the routes answer, for the OpenAPI document.
        """
        encoder = None if self._encoder is None else EncoderEmbedder(self._encoder, service)
        embedders: list[Embedder] = [decoder] if encoder is None else [encoder, decoder]
        judge: Judge | None = None
        if self._cross is not None:
            judge = CrossJudge(self._cross, service)
        elif encoder is not None:
            judge = CosineJudge(encoder)
        EmbeddingRoutes(embedders, service).add(app, errors)
        RankingRoutes(judge, service).add(app, errors)

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.close()
