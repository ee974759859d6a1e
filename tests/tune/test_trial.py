"""One setting against plain decoding: nobody learns from its own answer to the same prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.tune import tuning
from paceline.tune.candidates import Arm
from paceline.tune.tuning import TuningTrial, salted
from paceline.utils import Turn, in_turn

PROMPTS = ["One day, a little girl named Lily found", "def add(a, b):\n    return"]
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def accepted(llm: LLM, monkeypatch: pytest.MonkeyPatch, visits: int = 3) -> list[int]:
    """Drafted tokens of suffix trees that were accepted in each visit to the same two prompts."""
    one = TuningTrial(
        llm, [Arm(SUFFIX, torch.get_num_threads())], [PROMPTS], SamplingParams(temperature=0.0, max_tokens=24)
    )
    found: list[int] = []

    def seen(*given: Any, **more: Any) -> Iterator[Turn[Any]]:
        for turn in in_turn(*given, **more):
            found.append(sum(output.metrics.num_accepted_tokens for output in turn.outputs["arm"]))
            yield turn

    monkeypatch.setattr(tuning, "in_turn", seen)
    for _ in range(visits):
        one.pull(0, 0)
    assert one.identical + one.near_ties == visits * len(PROMPTS)
    return found


def test_an_earlier_answer_is_no_help(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *later = accepted(llm, monkeypatch)
    assert later == [first, first]
    monkeypatch.setattr(tuning, "salted", lambda prompt, salt: prompt)
    assert min(accepted(llm, monkeypatch)) > first + 10  # all was heard before, in the warm-up


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", {"prompt": "text", "cache_salt": "s"}),
        ([1, 2], {"prompt_token_ids": [1, 2], "cache_salt": "s"}),
        ({"prompt": "text"}, {"prompt": "text", "cache_salt": "s"}),
        ({"prompt": "text", "cache_salt": "mine"}, {"prompt": "text", "cache_salt": "mine s"}),
    ],
)
def test_prompts_in_any_form(prompt: Any, expected: dict[str, Any]) -> None:
    assert salted(prompt, "s") == expected
