"""Targets of tests of trained heads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_checkpoint import write

from paceline import LLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers, which runs by PyTorch's operators."""
    return write(tmp_path_factory.mktemp("target"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that runs in compiled passes."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64}
    return write(tmp_path_factory.mktemp("wide"), max_position_embeddings=2048, **sizes)


@pytest.fixture(scope="module")
def plain() -> LLM:
    """The bundled model without drafts."""
    return LLM(speculative_config=None, dtype="float32", seed=1)
