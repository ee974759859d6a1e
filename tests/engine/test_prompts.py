"""What a caller may pass as a prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.drafters import NO_TENANT
from paceline.engine import as_list, read_prompt
from paceline.errors import PromptError


def encode(text: str, add_special_tokens: bool = True) -> list[int]:
    return [0] * add_special_tokens + [ord(letter) for letter in text]


def test_texts_ids_and_dicts() -> None:
    assert read_prompt("ab", encode).tokens == [0, 97, 98]
    assert read_prompt([1, np.int64(2)], encode).tokens == [1, 2]
    assert read_prompt({"prompt_token_ids": [5], "prompt": None}, encode).tokens == [5]
    assert read_prompt({"prompt": "a", "prompt_token_ids": None}, encode).tokens == [0, 97]
    for both in ([0, 97], [97]):  # the ids of the text, with and without special tokens
        assert read_prompt({"prompt": "a", "prompt_token_ids": both}, encode).tokens == both
    assert read_prompt({"prompt": "a", "prompt_token_ids": np.array([97])}, encode).text == "a"
    assert read_prompt({"prompt": "a"}, encode).tenant == NO_TENANT
    assert read_prompt({"prompt": "a", "cache_salt": "me"}, encode).tenant == "me"
    with pytest.raises(PromptError):
        read_prompt(
            {"prompt": "a", "cache_salt": NO_TENANT}, encode
        )  # nobody can ask for the caches of those without a salt


PREDICTIONS = {
    "text": "hi",
    "ids": [104, 105],
    "array": np.array([104, 105]),
    "OpenAI's": {"type": "content", "content": "hi"},
    "OpenAI's parts": {"type": "content", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
}


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS.keys())
def test_predictions_have_no_special_tokens(prediction: Any) -> None:
    assert read_prompt({"prompt": "a", "prediction": prediction}, encode).prediction == [104, 105]
    assert read_prompt({"prompt": "a"}, encode).prediction == []


REFUSED = {
    "an unknown key": ({"prompt": "a", "predicton": "b"}, "'predicton'; did you mean prediction"),
    "images": ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data"),
    "a salt that is no text": ({"prompt": "a", "cache_salt": 5}, "cache_salt must be a text"),
    "an empty salt": ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a text"),
    "a long salt": ({"prompt": "a", "cache_salt": "x" * 300}, "cache_salt must be a text"),
    "another kind of prediction": ({"prompt": "a", "prediction": {"type": "image"}}, "prediction must be"),
    "fractions as prediction": (
        {"prompt": "a", "prediction": [0.5]},
        "prediction token ids must be integers of 0 or more, got 0.5",
    ),
    "texts as prediction": (
        {"prompt": "a", "prediction": ["b", "c"]},
        "prediction token ids must be integers of 0 or more, got 'b'",
    ),
    "a negative prediction": (
        {"prompt": "a", "prediction": [3, -1]},
        "prediction token ids must be integers of 0 or more, got -1",
    ),
    "truth as prediction": (
        {"prompt": "a", "prediction": [True]},
        "prediction token ids must be integers of 0 or more, got True",
    ),
    "a number as prediction": (
        {"prompt": "a", "prediction": 5},
        "prediction must be a text, a list of token ids or {'type': 'content', 'content': TEXT}, got 5",
    ),
    "a part without a text": (
        {"prompt": "a", "prediction": {"type": "content", "content": [{"type": "text"}]}},
        "prediction must be {'type': 'content', 'content': TEXT}, got",
    ),
    "no parts": (
        {"prompt": "a", "prediction": {"type": "content", "content": []}},
        "prediction must be {'type': 'content'",
    ),
    "ids as content": (
        {"prompt": "a", "prediction": {"type": "content", "content": [202, 2]}},
        "prediction must be {'type': 'content'",
    ),
    "a misspelt prediction": (
        {"prompt": "a", "prediction": {"content": "b", "typ": "content"}},
        "prediction must be {'type'",
    ),
    "a text and other ids": (
        {"prompt": "a", "prompt_token_ids": [5]},
        r"has both 'prompt' and 'prompt_token_ids', and \[5\] are not the token ids of 'a'; give one of them",
    ),
    "no text beside ids": ({"prompt": 5, "prompt_token_ids": [5]}, "a prompt dict needs a text under 'prompt'"),
    "a number as ids": ({"prompt_token_ids": 5}, "prompt_token_ids must be a list of token ids, got 5"),
    "a set of ids": ({"prompt_token_ids": {5}}, "prompt_token_ids must be a list of token ids, got .5."),
}


@pytest.mark.parametrize(("prompt", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_rejected(prompt: Any, why: str) -> None:
    with pytest.raises(PromptError, match=why):
        read_prompt(prompt, encode)


def test_one_or_many() -> None:
    assert as_list("a") == ["a"]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list(np.array([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert as_list(["a", {"prompt": "b"}]) == ["a", {"prompt": "b"}]
