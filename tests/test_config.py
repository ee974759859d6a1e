"""The configuration classes refuse what they should, by name, and accept vLLM's dialect."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from processors import unlike_the_last
from transformers import LogitsProcessorList

from paceline import LLM, ConfigError, SamplingParams, SpeculativeConfig
from paceline.config import EngineConfig

BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must"),
    ({"n": True}, "n must"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"temperature": 1e31}, "temperature must be at most 1e\\+30"),
    ({"repetition_penalty": 0}, "repetition_penalty must be 1e-30 or more"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty must be 1e-30 or more"),  # 0 in float32
    ({"logit_bias": {5: 101.0}}, "logit_bias"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"logit_bias": {"32": -100, 32: 5}}, "logit_bias must have each token id once, and 32 occurs twice"),
    ({"stop_token_ids": np.array([1.5])}, "stop_token_ids must be"),
    ({"stop_token_ids": np.array([True])}, "stop_token_ids must be"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens=4"),
    ({"logprobs": -2}, "logprobs must be an integer in 0..128, or -1 for all tokens, got -2"),
    ({"logprobs": -1.0}, "logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids must not be empty"),
    ({"allowed_token_ids": [1.5]}, "allowed_token_ids"),
    ({"output_kind": "delta"}, "output_kind must be a RequestOutputKind"),
    ({"logits_processors": unlike_the_last}, "logits_processors must be a list of functions"),
    ({"logits_processors": [5]}, "logits_processors must hold functions"),
    ({"logits_processors": [lambda logits: logits]}, "logits_processors must hold functions"),
    ({"logits_processors": [LogitsProcessorList]}, "logits_processors must hold functions"),
    ({"prompt_logprobs": 10**6}, "prompt_logprobs"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"stop": "x", "detokenize": False}, "stop"),
]


@pytest.mark.parametrize(("given", "text"), BAD, ids=lambda value: str(value)[:40])
def test_bad_sampling_parameters_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SamplingParams(**given)


def test_defaults_are_vllms_and_forms_are_normalised() -> None:
    params = SamplingParams(stop="x", logit_bias={"7": 1}, stop_token_ids=[3], bad_words=["a"])
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.n) == (1.0, 1.0, 0, 16, 1)
    assert params.stop == ("x",)
    assert params.logit_bias == {7: 1.0}
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-3).greedy


BAD_FORMS: list[Callable[[Any], Any]] = [
    *(
        lambda value, key=key: SamplingParams(**{key: value})
        for key in ("logit_bias", "stop", "temperature", "n", "seed")
    ),
    *(
        lambda value, key=key: EngineConfig(**{key: value})
        for key in ("dtype", "device", "exactness", "quantization", "threads")
    ),
    *(
        lambda value, key=key: SpeculativeConfig(**{key: value})
        for key in ("method", "acceptance_method", "options", "model")
    ),
    *(lambda value, key=key: SpeculativeConfig.parse({key: value}) for key in ("method", "acceptance_method", "model")),
    SpeculativeConfig.parse,
]


ODD = [np.array([1, 2]), [[]], {1}, object(), torch.device("cpu"), b"x", torch.float32]


@pytest.mark.parametrize("value", ODD, ids=[type(value).__name__ for value in ODD])
def test_no_odd_value_ends_in_anything_but_a_line(value: Any) -> None:
    for make in BAD_FORMS:
        with pytest.raises(ConfigError) as caught:
            make(value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ids", [np.array([1, 2]), torch.tensor([1, 2]), [np.int64(1), torch.tensor(2)], np.array([1, 2], np.uint8)]
)
def test_arrays_of_integers_are_stop_token_ids(ids: Any) -> None:
    found = SamplingParams(stop_token_ids=ids).stop_token_ids
    assert found == (1, 2)
    assert [type(one) for one in found] == [int, int]


def test_bytes_are_no_token_ids() -> None:
    with pytest.raises(ConfigError, match="stop_token_ids must be a list of token ids, got b'x'"):
        SamplingParams(stop_token_ids=b"x")


def test_unknown_names_get_near_matches() -> None:
    with pytest.raises(ConfigError, match="did you mean temperature"):
        SamplingParams.from_dict({"temprature": 1})


def test_the_speculative_dialect() -> None:
    parse = SpeculativeConfig.parse
    assert parse(None) is None
    assert parse("null") is parse("none") is None
    assert parse({}).method == "auto"
    assert parse({"model": "x"}).method == "draft_model"
    both = parse('{"method": ["ngram", {"method": "draft_model", "model": "d"}], "num_speculative_tokens": 4}')
    assert [one.method for one in both.method] == ["ngram", "draft_model"]
    assert both.method[1].model == "d"
    assert parse({"method": ["ngram", "draft_model"], "model": "m"}).method[1].model == "m"
    assert parse({"use_relaxed_acceptance_for_thinking": True}).acceptance_method == "relaxed_thinking"
    assert parse({"use_relaxed_acceptance_for_thinking": False}).acceptance_method == "rejection_sampler"
    assert parse({"rejection_sample_method": "fly"}).acceptance_method == "fly"
    assert parse({"rejection_sample_method": "block"}).acceptance_method == "block_verification"
    assert parse({"method": "ngram", "prompt_lookup_max": 3}).options == {"prompt_lookup_max": 3}
    for given in ("suffix", " suffix ", '"suffix"', {"method": "suffix"}):
        assert parse(given) == SpeculativeConfig(method="suffix")
    for given in (["ngram", "suffix"], ("ngram", "suffix"), '["ngram", "suffix"]', [{"method": "ngram"}, "suffix"]):
        assert [one.method for one in parse(given).method] == ["ngram", "suffix"]
    for given, text in (
        ("[1]", "each entry of method must be a name or a dict, got 1"),
        ([], "method must not be an empty list"),
        (5, "be a dict, the name of a method"),
        ({"method": 3}, "method"),
        ({"method": [3]}, "each entry"),
        ({"method": ["auto"]}, "each entry of a list of methods must be one method, and not 'auto'"),
        ({"posterior_alpha": 0.5}, 'be given together with "acceptance_method": "typical_acceptance_sampler"'),
        ({"posterior_threshold": 0.5, "acceptance_method": "k_seq"}, 'be given together with "acceptance_method"'),
        ({"fly_window_size": 3}, 'fly_window_size must be given together with "acceptance_method": "fly"'),
        ({"rejection_sample_method": "fly", "fly_window_size": 0}, "fly_window_size"),
        ({"rejection_sample_method": "fly", "num_speculative_tokens": 6}, "fly_window_size must be below num_spec"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method must be one of standard, block, fly"),
        ({"rejection_sample_method": "fly", "acceptance_method": "k_seq"}, "left out beside acceptance_method 'k_seq'"),
        ({"use_relaxed_acceptance_for_thinking": 1}, "use_relaxed_acceptance_for_thinking must be True or False"),
        ({"relaxed_topk": 3, "use_relaxed_acceptance_for_thinking": False}, "relaxed_topk must be given together"),
        ({"relaxed_delta": 1.5, "use_relaxed_acceptance_for_thinking": True}, "relaxed_delta must be in 0..1"),
        ({"speculative_accept_threshold_acc": 0.5}, 'together with "acceptance_method": "accept_thresholds"'),
        (
            {"speculative_accept_threshold_single": 2, "acceptance_method": "accept_thresholds"},
            "single must be in 0..1",
        ),
        ({"acceptance_method": ""}, "acceptance_method must be a verifier of `paceline methods` or module:Class"),
        ({"num_speculative_tokens": "3"}, "num_speculative_tokens"),
        ({"posterior_threshold": 2}, "posterior_threshold"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size"),
    ):
        with pytest.raises(ConfigError, match=text):
            parse(given)


@pytest.mark.parametrize(
    "given",
    [{"dtype": "int3"}, {"device": "tpu"}, {"threads": 0}, {"max_model_len": 1}, {"max_num_seqs": 0}, {"seed": 1.5}],
)
def test_bad_engine_sizes_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        EngineConfig(**given)


@pytest.mark.parametrize(
    "given", [{"temperature": np.float32(0.5)}, {"max_tokens": np.int64(3)}, {"top_p": torch.tensor(0.5)}]
)
def test_numbers_of_other_libraries_are_named(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(
        ConfigError, match=rf"{name} must be a plain number of Python's \(x\.item\(\) makes one\), got "
    ):
        SamplingParams(**given)
    assert getattr(SamplingParams(**{name: given[name].item()}), name) == given[name]


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids"])
def test_an_array_without_dimensions_is_no_list(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        SamplingParams(**{name: torch.tensor(1)})


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_integers_that_tensors_do_not_take_are_rejected(name: str) -> None:
    with pytest.raises(OverflowError):
        torch.ones(1).div_(10**30)
    with pytest.raises(ConfigError, match=f"{name} must be at most"):
        SamplingParams(**{name: 10**30})
    assert torch.ones(1).div_(getattr(SamplingParams(**{name: 2**62}), name)).item() > 0.0


def test_keys_of_vllm_that_ask_for_nothing_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    given = {"method": "ngram", "draft_tensor_parallel_size": 1, "enforce_eager": True, "parallel_drafting": False}
    with caplog.at_level("WARNING", "paceline"):
        assert SpeculativeConfig.parse(given) == SpeculativeConfig.parse("ngram")
    assert [record.getMessage() for record in caplog.records] == [
        "ignored, since it changes nothing here: draft_tensor_parallel_size=1, enforce_eager=True, "
        "parallel_drafting=False"
    ]
    caplog.clear()
    assert SpeculativeConfig.parse({"method": "ngram", "draft_tensor_parallel_size": 2}).options
    assert SpeculativeConfig.parse({"method": "ngram", "parallel_drafting": True}).options
    assert not caplog.records


@pytest.mark.parametrize("name", ["ngram", "[ngram]"])
def test_prompt_lookup_is_named_as_a_model_too(name: str) -> None:
    assert SpeculativeConfig.parse({"model": name, "num_speculative_tokens": 3}) == SpeculativeConfig(
        method="ngram", num_speculative_tokens=3
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"method": "ngram", "foo": 1, "bar": 2}, "config of 'ngram' does not know 'foo', 'bar'; known are"),
        (
            {"speculative_model": "x", "ngram_prompt_lookup_max": 2},
            "does not know 'speculative_model' (did you mean model?), "
            "'ngram_prompt_lookup_max' (did you mean prompt_lookup_max?)",
        ),
        ({"prompt_lookup_num_tokens": 5}, "'prompt_lookup_num_tokens'; did you mean num_speculative_tokens?"),
        ({"method": "NGRAM"}, "unknown drafter 'NGRAM'; did you mean ngram?"),
    ],
)
def test_unknown_keys_are_reported_together(given: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(speculative_config=given)
    assert line in str(caught.value)
