"""Strict mode end to end: tokens and logprobs of every drafter, batch and precision are those of plain decoding, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.bench.run import dial_registered
from paceline.llm import BUNDLED
from paceline.models.runners import NativeRunner, native
from paceline.tree import Scores

PROMPTS = (
    "def f(x):\n    return",
    "SELECT name FROM course WHERE",
    "one two three one two three one two",
    "The sum of two and two is",
    "Question: Tom has 3 apples and buys 4 more. How many",
)
GUESSES = {"num_speculative_tokens": 5}
DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft"), **GUESSES}
LENGTHS = (20, 32, 14, 26, 9)

Found = list[tuple[list[int], list[float]]]


def decoded(llm: LLM, temperature: float = 0.0) -> Found:
    params = [
        SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, logprobs=0, seed=length)
        for length in LENGTHS
    ]
    found = []
    for one in llm.generate(list(PROMPTS), params):
        one.raise_for_error()
        tokens, tables = one.outputs[0].token_ids, one.outputs[0].logprobs or []
        found.append((tokens, [table[token].logprob for token, table in zip(tokens, tables, strict=True)]))
    return found


def opened(dtype: str, batch: int, config: Any = None) -> LLM:
    return LLM(dtype=dtype, exactness="strict", speculative_config=config, max_num_seqs=batch)


@pytest.fixture(scope="module")
def plain() -> dict[tuple[str, float], Found]:
    return {(dtype, t): decoded(opened(dtype, 1), t) for dtype in ("bfloat16", "float32") for t in (0.0, 0.9)}


@pytest.fixture(autouse=True)
def _dial() -> Iterator[None]:
    with dial_registered():
        yield


def oracle(plain: Found, llm: LLM) -> dict[str, Any]:
    pairs = zip(PROMPTS, plain, strict=True)
    record = {tuple(llm.tokenizer.encode(text)): tokens for text, (tokens, _) in pairs}
    return {"method": "corrupted_oracle", "continuations": record, "acceptance": 0.7, **GUESSES}


def drafters(plain: Found, llm: LLM) -> Sequence[dict[str, Any] | None]:
    ngram = {"method": "ngram", **GUESSES}
    both = {"method": [ngram, DRAFT], "num_speculative_tokens": 9}
    return (ngram, DRAFT, both, {"method": "auto"}, oracle(plain, llm), None)


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_drafter_gives_the_bits_of_plain_decoding(plain, dtype, batch):
    llm, want = opened(dtype, batch), plain[dtype, 0.0]
    for config in drafters(want, llm):
        assert decoded(llm.with_speculative_config(config)) == want, config


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_points_give_the_bits_of_plain_decoding_for_equal_seeds(plain, dtype):
    llm, want = opened(dtype, 4), plain[dtype, 0.9]
    assert want != plain[dtype, 0.0]
    for config in ({"method": "ngram", **GUESSES}, oracle(want, llm)):
        assert decoded(llm.with_speculative_config(config), 0.9) == want


def test_operators_in_strict_form_give_the_bits_of_plain_decoding(monkeypatch):
    monkeypatch.setattr(native, "fits", lambda *_, **__: False)
    want = decoded(opened("bfloat16", 1))
    llm = opened("bfloat16", 4)
    assert decoded(llm.with_speculative_config(oracle(want, llm))) == want


def test_a_pass_whose_bits_depend_on_its_rows_is_noticed(plain, monkeypatch):
    """A unit in the last place on the logits of every pass of several rows."""
    score = NativeRunner.score

    def noisy(self: NativeRunner, *args: Any, **kwargs: Any) -> Scores:
        found = score(self, *args, **kwargs)
        if found.rows[-1] == 1:
            return found
        return Scores(torch.nextafter(found.logits, found.logits + 1), found.rows, found.taps)

    monkeypatch.setattr(NativeRunner, "score", noisy)
    want = plain["bfloat16", 0.0]
    llm = opened("bfloat16", 1)
    assert decoded(llm.with_speculative_config(oracle(want, llm))) != want
