"""The oracle: whatever is drafted, requests get the tokens of a plain loop that knows nothing of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine.harness import engine, run, tokens
from engine.test_loop import PROMPTS, RULES, Guess
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT
from paceline.engine import Request
from paceline.engine.plain_loop import decode_plainly
from paceline.tree import Verdict
from paceline.verifiers import GreedyVerifier

TEXTS = ("one two three one two three one two", "def f(x):\n    return", "Question: Tom has 3 apples and buys 4 more.")
DRAFT = {"method": "draft_model", "model": str(BUNDLED_DRAFT), "num_speculative_tokens": 5}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
CONFIGS: dict[str, Any] = {
    "none": None,
    "ngram": NGRAM,
    "suffix": {"method": "suffix"},
    "draft model": DRAFT,
    "tree": DRAFT | {"num_speculative_tokens": 12, "tree_width": 3},
    "two": {"method": [NGRAM, DRAFT], "num_speculative_tokens": 9},
    "auto": {"method": "auto", "model": str(BUNDLED_DRAFT)},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.9, max_tokens=24, seed=11)
PARAMS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "greedy with penalties": replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True),
    "seeded": SEEDED,
    "seeded with rules": replace(SEEDED, top_k=20, top_p=0.9, presence_penalty=0.7, min_tokens=9),
    "seeded, three outputs": replace(SEEDED, n=3, ignore_eos=True),
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", exactness="strict", speculative_config=None)


def generated(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(list(TEXTS), params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def expected(llm: LLM, params: SamplingParams) -> list[list[list[int]]]:
    requests = [llm.request(text, params)[0] for text in TEXTS]
    return decode_plainly(llm.runner, requests, llm.defaults.eos_ids)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
def test_every_drafter_gives_the_tokens_of_the_plain_loop(llm: LLM, params: SamplingParams) -> None:
    want = expected(llm, params)
    for name, config in CONFIGS.items():
        assert generated(llm.with_speculative_config(config), params) == want, name


def test_a_stop_token_ends_both(llm: LLM) -> None:
    (whole,), *_ = expected(llm, replace(GREEDY, ignore_eos=True))
    params = replace(GREEDY, stop_token_ids=[whole[10]])
    want = expected(llm, params)
    assert want[0][0] == whole[: whole.index(whole[10]) + 1]
    for name, config in CONFIGS.items():
        assert generated(llm.with_speculative_config(config), params) == want, name


def test_the_comparison_catches_a_verifier_that_keeps_a_wrong_draft(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(self: GreedyVerifier, trees: Sequence[Any], scores: Any) -> list[Any]:
        pairs = zip(trees, verify(self, trees, scores), strict=True)
        return [Verdict((0,), (int(tree.tokens[0]),), v.tokens[-1]) if len(tree) else v for tree, v in pairs]

    verify = GreedyVerifier.verify_scores
    monkeypatch.setattr(GreedyVerifier, "verify_scores", credulous)
    params = replace(GREEDY, ignore_eos=True)
    assert generated(llm.with_speculative_config(NGRAM), params) != expected(llm, params)


@pytest.mark.parametrize("other", [{"seed": 12}, {"temperature": 0.8}, {"repetition_penalty": 1.3}, {"n": 2}])
def test_the_oracle_heeds_seed_and_rules(llm: LLM, other: dict[str, Any]) -> None:
    """Else it would agree with an engine that left them out."""
    params = replace(SEEDED, ignore_eos=True)
    assert expected(llm, replace(params, **other)) != expected(llm, params)


def test_it_agrees_whether_requests_are_decoded_alone_or_side_by_side(llm: LLM) -> None:
    params = PARAMS["seeded with rules"]
    alone = [decode_plainly(llm.runner, [llm.request(text, params)[0]], llm.defaults.eos_ids)[0] for text in TEXTS]
    assert alone == expected(llm, params)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafts", [0, 5])
def test_toy_requests_get_the_tokens_of_the_plain_loop(rules: dict[str, Any], temperature: float, drafts: int) -> None:
    runner = ToyRunner(16, order=None)
    params = SamplingParams(temperature=temperature, max_tokens=24, n=1 if temperature == 0.0 else 2, **rules)
    live = engine(runner, [Guess(runner, bushy=True)], drafts)
    requests = [Request(f"p{i}", None, list(prompt), params, 7 + i, 24) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        live.check(request)
    want = decode_plainly(runner, requests, (0,))
    assert tokens(run(live, PROMPTS, params)) == want
    assert runner.open_caches == 0
