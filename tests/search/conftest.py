"""The bundled model, and the small one beside it."""

from __future__ import annotations

import pytest

from paceline import LLM


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The bundled model without drafts."""
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def small() -> LLM:
    """Its draft model."""
    return LLM("bundled/draft", dtype="float32", speculative_config=None)
