"""The front door on the bundled models: the same tokens with and without drafts, for every method and parameter."""

from __future__ import annotations

import gc
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, ConfigError, PromptError, SamplingParams
from paceline.bench import bundled_prompts
from paceline.llm import BUNDLED
from paceline.verify import first_difference

DRAFT = str(BUNDLED / "draft")
METHODS: dict[str, dict[str, Any]] = {
    "auto": {"method": "auto", "model": DRAFT},
    "ngram": {"method": "ngram", "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4},
    "draft tree": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 9, "tree_width": 3},
    "merged": {"method": ["ngram", "draft_model"], "model": DRAFT, "num_speculative_tokens": 8},
}
PARAMETERS: tuple[dict[str, Any], ...] = (
    {
        "presence_penalty": 0.6,
        "repetition_penalty": 1.2,
        "logit_bias": {5: 4.0},
        "bad_words": ["return"],
        "logprobs": 2,
    },
    {"stop": ["\n", "of"], "stop_token_ids": [202, 15], "min_tokens": 20, "include_stop_str_in_output": True},
)
"""Several at once; one by one with every drafter they are in the contract suite."""
SAMPLED: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "n": 3}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[dict[str, Any]]:
    return every_prompt(plain)[::4]


def every_prompt(llm: LLM) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": llm.chat_ids([{"role": "user", "content": p.prompt}])} for p in bundled_prompts()]


def decoded(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams) -> list[list[tuple[Any, ...]]]:
    found = llm.generate(prompts, params)
    assert not any(out.metrics.dropped_drafters for out in found)
    return [[(o.token_ids, o.text, o.finish_reason, o.stop_reason) for o in out.outputs] for out in found]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_equal_in_float32(plain: LLM, prompts: list[dict[str, Any]], method: str) -> None:
    fast = plain.with_speculative_config(METHODS[method])
    for given in PARAMETERS:
        params = SamplingParams(temperature=0.0, max_tokens=32, **given)
        assert decoded(fast, prompts, params) == decoded(plain, prompts, params), given


LONG = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[list[tuple[Any, ...]]]:
    """What plain decoding says to every prompt."""
    return decoded(plain, every_prompt(plain), LONG)


@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_equal_on_every_prompt(
    plain: LLM, expected: list[list[tuple[Any, ...]]], method: str
) -> None:
    fast = plain.with_speculative_config(METHODS[method])
    assert decoded(fast, every_prompt(plain), LONG) == expected


@pytest.mark.parametrize("method", ["ngram", "draft points"])
def test_point_drafts_give_the_tokens_of_the_seed(plain: LLM, prompts: list[dict[str, Any]], method: str) -> None:
    config = METHODS["ngram"] if method == "ngram" else METHODS["draft tree"] | {"draft_sample_method": "greedy"}
    fast = plain.with_speculative_config(config)
    for given in (*PARAMETERS, SAMPLED):
        params = SamplingParams(temperature=0.8, max_tokens=24, seed=11, **given)
        assert decoded(fast, prompts[:4], params) == decoded(plain, prompts[:4], params), given


@pytest.mark.parametrize("method", ["auto", "merged"])
def test_a_seed_gives_its_tokens_whatever_is_drafted(plain: LLM, prompts: list[dict[str, Any]], method: str) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=24, seed=4)
    assert decoded(plain.with_speculative_config(METHODS[method]), prompts, params) == decoded(plain, prompts, params)
    drawn = METHODS["draft_model"] | {"draft_sample_method": "probabilistic"}
    assert decoded(plain.with_speculative_config(drawn), prompts, params) != decoded(plain, prompts, params)


def test_the_comparison_catches_another_seed_and_a_relaxed_rule(plain: LLM, prompts: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=24, seed=11)
    base = decoded(plain, prompts, params)
    assert base != decoded(plain, prompts, replace(params, seed=12))
    relaxed = METHODS["draft_model"] | {"acceptance_method": "typical_acceptance_sampler", "posterior_threshold": 1e-6}
    assert base != decoded(plain.with_speculative_config(relaxed), prompts, params)


def test_drafts_are_accepted_so_that_equality_means_something(plain: LLM, prompts: list[dict[str, Any]]) -> None:
    fast = plain.with_speculative_config(METHODS["merged"])
    found = fast.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48))
    assert sum(out.metrics.num_accepted_tokens for out in found) > 20
    assert {name for out in found for name in out.metrics.drafters} == {"ngram", "draft_model"}


def test_bfloat16_differs_at_counted_near_ties_only(prompts: list[dict[str, Any]]) -> None:
    plain = LLM(speculative_config=None, dtype="bfloat16")
    fast = plain.with_speculative_config(METHODS["merged"])
    params = SamplingParams(temperature=0.0, max_tokens=64)
    for a, b in zip(plain.generate(prompts, params), fast.generate(prompts, params), strict=True):
        difference = first_difference(plain.runner, a.prompt_token_ids, a.outputs[0].token_ids, b.outputs[0].token_ids)
        assert difference is None or difference.near_tie, difference
    wrong = [*a.outputs[0].token_ids[:3], 77, 78]
    caught = first_difference(plain.runner, a.prompt_token_ids, a.outputs[0].token_ids, wrong)
    assert caught is not None
    assert caught.position == 3
    assert not caught.near_tie


def test_streaming_gives_the_same_text(plain: LLM) -> None:
    fast = plain.with_speculative_config(METHODS["merged"])
    params = SamplingParams(temperature=0.0, max_tokens=60, stop=["return n"])
    (whole,) = plain.generate("def f(n):\n    if n:\n        return 1\n    return n\n\ndef g(n):\n", params)
    chunks = list(fast.stream("def f(n):\n    if n:\n        return 1\n    return n\n\ndef g(n):\n", params))
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.outputs[0].token_ids
    assert chunks[-1].finish_reason == whole.outputs[0].finish_reason
    assert {source for chunk in chunks for _, source in chunk.segments} > {None}


def test_a_closed_stream_leaves_nothing_behind(plain: LLM) -> None:
    stream = plain.stream("def f(n):", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    next(stream)
    stream.close()
    assert not plain.engine.has_work


def test_streams_in_turn_and_a_call_in_between_get_all_their_text(plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    texts = ["def f(n):", "SELECT a FROM", "Janet has"]
    expected = [out.outputs[0].text for out in plain.generate(texts, params)]
    first, second = plain.stream(texts[0], params), plain.stream(texts[1], params)
    found = [next(first).text, next(second).text]
    assert plain.generate(texts[2], params)[0].outputs[0].text == expected[2]
    for _ in range(10):
        found[0] += next(first).text
        found[1] += next(second).text
    found[0] += "".join(chunk.text for chunk in first)
    found[1] += "".join(chunk.text for chunk in second)
    assert found == expected[:2]
    assert not plain.engine.has_work


def test_a_rejected_prompt_takes_the_whole_call_back(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="logit_bias"):
        plain.generate(["x", "y"], [SamplingParams(), SamplingParams(logit_bias={999999: 1.0})])
    with pytest.raises(ConfigError, match="logit_bias"):
        plain.stream("x", SamplingParams(logit_bias={999999: 1.0}))
    plain.stream("x", SamplingParams())  # never read: it must not be left in the queue
    assert not plain.engine.has_work


def test_an_interrupted_call_leaves_a_working_model(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    fast = plain.with_speculative_config(METHODS["merged"])
    expected = decoded(fast, [{"prompt": "def f(n):"}], params)
    score, calls = plain.runner.score, []

    def interrupted(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(*given, **more)

    monkeypatch.setattr(plain.runner, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast.generate(["def f(n):", "SELECT"], params)
    assert not fast.engine.has_work
    assert decoded(fast, [{"prompt": "def f(n):"}], params) == expected


def test_prompts_in_every_form(plain: LLM) -> None:
    ids = plain.tokenizer.encode("SELECT a")
    params = SamplingParams(temperature=0.0, max_tokens=5)
    forms = ["SELECT a", ids, {"prompt": "SELECT a"}, {"prompt_token_ids": ids}]
    outputs = [out.outputs[0].token_ids for out in plain.generate(forms, params)]
    assert all(tokens == outputs[0] for tokens in outputs)
    assert plain.generate(ids, params)[0].outputs[0].token_ids == outputs[0]
    each = plain.generate(["SELECT a", "def f"], [params, SamplingParams(temperature=0.0, max_tokens=2)])
    assert [len(out.outputs[0].token_ids) for out in each] == [5, 2]


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_of_token_ids(plain: LLM, make: Any) -> None:
    params, rows = SamplingParams(temperature=0.0, max_tokens=2), [[1, 2], [3, 4]]
    for prompts in (make(rows), list(map(make, rows)), [{"prompt_token_ids": make(row)} for row in rows]):
        assert [out.prompt_token_ids for out in plain.generate(prompts, params)] == rows
    for prompt in (make([1, 2]), list(make([1, 2]))):
        assert [out.prompt_token_ids for out in plain.generate(prompt, params)] == [[1, 2]]
    assert next(plain.stream(make([1, 2]), params)).output.prompt_token_ids == [1, 2]
    for bad in ([1.0, 2.0], [[1.0, 2.0]], [True, False]):
        with pytest.raises(PromptError, match=r"must hold integers, got (torch\.)?(float|bool)"):
            plain.generate(make(bad), params)
    for bad in ([[[1, 2]]], 3):
        with pytest.raises(PromptError, match="must be"):
            plain.generate(make(bad), params)


def test_the_draft_that_ships_with_the_target(plain: LLM, prompts: list[dict[str, Any]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    bundled = LLM(speculative_config=None, dtype="float32")
    for config in (
        {"method": "draft_model"},
        {"method": ["ngram", "draft_model"]},
        {"method": ["ngram", {"method": "draft_model", "tree_width": 2}]},
    ):
        fast = bundled.with_speculative_config(config)
        assert "draft_model" in fast.drafter_methods
        assert decoded(fast, prompts[:2], params) == decoded(plain, prompts[:2], params)


def test_a_model_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(name: str, **options: Any) -> str:
        asked.append(name)
        return str(BUNDLED / name.split("/")[1])

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    llm = LLM("some/target", speculative_config={"method": "draft_model", "model": "some/draft"})
    assert asked == ["some/target", "some/draft"]
    assert llm.runner.info.name == "some/target"


def test_threads_share_a_model(plain: LLM) -> None:
    fast, params = plain.with_speculative_config(METHODS["merged"]), SamplingParams(temperature=0.0, max_tokens=24)
    texts = ["def f(n):", "SELECT a FROM", "Janet has", "One day"]
    expected = [out.outputs[0].text for out in plain.generate(texts, params)]
    found: dict[int, str] = {}

    def work(i: int) -> None:
        llm = fast if i < 3 else plain  # the same weights under another engine
        found[i] = "".join(chunk.text for chunk in llm.stream(texts[i], params))

    threads = [Thread(target=work, args=[i], daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [found.get(i) for i in range(4)] == expected
    assert not fast.engine.has_work


def test_a_forgotten_stream_leaves_nothing_behind(plain: LLM) -> None:
    stream = plain.stream("def f(n):", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    next(stream)
    assert plain.engine.has_work
    del stream
    gc.collect()
    assert not plain.engine.has_work


def test_chat_uses_the_template(plain: LLM) -> None:
    messages = [{"role": "user", "content": "Write SQL: all courses"}]
    (out,) = plain.chat(messages, SamplingParams(temperature=0.0, max_tokens=8))
    assert out.prompt_token_ids == plain.tokenizer.encode(
        "<|user|>\nWrite SQL: all courses\n<|assistant|>\n", add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "no prompts"),
        ([[]], "empty"),
        ([[1, 99999]], "99999"),
        ([[1, -1]], "-1"),
        ([[1] * 3000], "3000 tokens"),
        ([{"text": "x"}], "prompt_token_ids"),
    ],
)
def test_bad_prompts_are_rejected_before_anything_runs(plain: LLM, prompt: Any, text: str) -> None:
    with pytest.raises(PromptError, match=text):
        plain.generate(prompt, SamplingParams(max_tokens=2))
    assert not plain.engine.has_work


def test_bad_parameters_are_rejected_by_name(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="logit_bias"):
        plain.generate("x", SamplingParams(logit_bias={999999: 1.0}))
    with pytest.raises(ConfigError, match="sampling_params"):
        plain.generate(["x", "y"], [SamplingParams()])
    assert not plain.engine.has_work
    for config, text in (
        ({"method": "ngramm"}, "did you mean"),
        ({"method": "ngram", "prompt_lookup_maxx": 3}, "prompt_lookup_max"),
        ({"method": []}, "empty list"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ("{", "not JSON"),
    ):
        with pytest.raises(ConfigError, match=text):
            plain.with_speculative_config(config)


def test_a_request_chooses_among_the_engines_drafters(plain: LLM, prompts: list[dict[str, Any]]) -> None:
    methods = ["prediction", "suffix", {"method": "draft_model", "model": "bundled/draft"}]
    fast = plain.with_speculative_config({"method": methods, "controller": "fixed", "num_speculative_tokens": 8})
    params = SamplingParams(temperature=0.0, max_tokens=40)
    expected = plain.generate(prompts, params)
    choices: list[Any] = [None, "draft_model", ["suffix", "prediction"], "auto", {"num_speculative_tokens": 2}]
    given = [prompt | {"speculative_config": choice} for choice in choices for prompt in prompts]
    found = fast.generate(given, params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected] * len(choices)
    used: list[dict[str, int]] = []
    for i in range(len(choices)):
        share: dict[str, int] = {}
        for one in found[i * len(prompts) : (i + 1) * len(prompts)]:
            for name, counts in one.metrics.drafters.items():
                share[name] = share.get(name, 0) + counts.num_draft_tokens
        used.append({name: count for name, count in share.items() if count})
    assert used[0] == {}
    assert set(used[1]) == {"draft_model"}
    assert set(used[2]) <= {"suffix"}
    assert set(used[3]) == {"suffix", "draft_model"}
    for one in found[-len(prompts) :]:
        assert one.metrics.num_draft_tokens <= 2 * one.metrics.num_drafts
    assert sum(one.metrics.num_draft_tokens for one in found[3 * len(prompts) : 4 * len(prompts)]) > 2 * sum(
        one.metrics.num_drafts for one in found[3 * len(prompts) : 4 * len(prompts)]
    )  # where the limit was not given


@pytest.mark.parametrize(("given", "text"), [
    ("ngram", "speculative_config method must name methods that this engine has"),
    ({"method": "suffix", "model": "a/b"}, "speculative_config of a request does not know 'model'"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"num_speculative_tokens": 10**6}, "num_speculative_tokens"),
    ({"method": 3}, "method"),
    (3, "speculative_config"),
])  # fmt: skip
def test_what_the_engine_does_not_have_is_rejected(plain: LLM, given: Any, text: str) -> None:
    fast = plain.with_speculative_config("suffix")
    with pytest.raises(ConfigError, match=text):
        fast.generate({"prompt": "a", "speculative_config": given})
    with pytest.raises(ConfigError, match="prediction must be left out"):
        fast.generate({"prompt": "a", "prediction": "b", "speculative_config": None})
