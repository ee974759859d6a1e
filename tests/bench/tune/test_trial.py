"""One setting against plain decoding: nobody learns from its own answer to the same prompt."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.bench.tune import Arm, Trial, salted, tuning
from paceline.engine import RequestOutput

PROMPTS = ["One day, a little girl named Lily found", "def add(a, b):\n    return"]
SUFFIX = {"method": "suffix", "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def accepted(llm: LLM, monkeypatch: pytest.MonkeyPatch, visits: int = 3) -> list[int]:
    """Guesses of suffix trees that stood in each visit to the same two prompts."""
    one = Trial(llm, [Arm(SUFFIX, tuning._threads())], [PROMPTS], SamplingParams(temperature=0.0, max_tokens=24))
    found, compare = [], one._compare

    def seen(plain: list[RequestOutput], fast: list[RequestOutput]) -> None:
        found.append(sum(output.metrics.num_accepted_tokens for output in fast))
        compare(plain, fast)

    monkeypatch.setattr(one, "_compare", seen)
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
