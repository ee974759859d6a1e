"""Text of streams from diffusion checkpoints: as soon as it is final, and no sooner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from tests.tiny_diffusion import write

PROMPT = "a1: "
EDITS = "mask_predict"
Open = Callable[[str], LLM]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    folder: Path = write(tmp_path_factory.mktemp("llada"))
    return lambda method: LLM(folder, dtype="float32", seed=0, diffusion_config={"method": method})


def streamed(llm: LLM, **more: Any) -> list[str]:
    """The text of every chunk; together they are the whole text."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **more})
    [whole], chunks = llm.generate(PROMPT, params), list(llm.stream(PROMPT, params))
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.outputs[0].token_ids
    assert chunks[-1].finish_reason == whole.outputs[0].finish_reason
    return [chunk.text for chunk in chunks]


def test_text_streams_up_to_the_first_masked_slot(opened: Open) -> None:
    in_order = opened("leftmost")
    texts = streamed(in_order)
    assert sum(map(bool, texts)) > 4
    assert texts[-1] == "" or len(texts[-1]) < len("".join(texts)) / 2


def test_text_that_may_begin_a_stop_string_waits(opened: Open) -> None:
    in_order = opened("leftmost")
    whole = "".join(streamed(in_order))
    begun = whole[2:5] + "\x00"
    assert "".join(streamed(in_order, stop=[begun])) == whole
    assert "".join(streamed(in_order, stop=[whole[2:5]])) == whole[: whole.index(whole[2:5])]


def test_text_that_may_be_edited_comes_at_the_end(opened: Open) -> None:
    texts = streamed(opened(EDITS))
    assert not any(texts[:-1])
