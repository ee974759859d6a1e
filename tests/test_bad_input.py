"""Whatever is wrong with what a user gives: one clear line, exit code 2, nothing loaded or decoded in vain, no
traceback.

The table at the top is the promise; the loops at the end look for leaks in broken files.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import Command
from tiny_checkpoint import edit_json, edit_weights, write

from paceline import (
    LLM,
    AsyncLLM,
    CheckpointError,
    ConfigError,
    PacelineError,
    PromptError,
    SamplingParams,
    SpeculativeConfig,
)
from paceline.models import memory

MISSING = "/no/such/folder"
FAST = ("--threads", "1", "--max-tokens", "3")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of a whole checkpoint, to be broken."""
    return shutil.copytree(whole, tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def llm(whole: Path) -> LLM:
    return LLM(whole, threads=1, speculative_config=None)


ARGUMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "no such verb": (("nonsense",), "No such command 'nonsense'"),
    "no such flag": (("generate", "x", "--maxtokens", "3"), "No such option: --maxtokens"),
    "flag without value": (("generate", "x", "--seed"), "requires an argument"),
    "two prompts": (("generate", "x", "--file", "y"), "not both"),
    "more words": (("generate", "x", "y"), "unexpected extra argument"),
    "empty prompt": (("generate", ""), "the prompt is empty"),
    "empty input": (("generate",), "standard input is empty"),
    "no such file": (("generate", "--file", MISSING), "No such file or directory"),
    "file is a folder": (("generate", "--file", "/"), "Is a directory"),
    "missing model": (("generate", "x", "-m", MISSING), "no folder '/no/such/folder'"),
    "no model name": (("generate", "x", "-m", ""), "no folder ''"),
    "endless model name": (("generate", "x", "-m", "x/" * 3000), "File name too long"),
    "no such home": (("generate", "x", "-m", "~nobody-of-that-name/x"), "home directory"),
    "zero in the name": (("generate", "x", "-m", "a\0b"), "no folder"),
    "not in the cache": (("generate", "x", "-m", "nobody/nothing"), "HF_HUB_OFFLINE"),
    "missing tokenizer": (("generate", "x", "--tokenizer", MISSING), "no folder"),
    "revision of a folder": (("generate", "x", "-m", "/", "--revision", "main"), "revision='main' applies to hub ids"),
    "dtype": (
        ("generate", "x", "--dtype", "float8"),
        "dtype must be one of auto, float32, bfloat16, float16, got 'float8'",
    ),
    "device": (("generate", "x", "--device", "tpu"), "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
    "device number": (("generate", "x", "--device", "cuda:99999999999"), "CUDA devices"),
    "no threads": (("generate", "x", "--threads", "0"), "threads must be an integer in 1..1024, got 0"),
    "context of zero": (("generate", "x", "--max-model-len", "0"), "max_model_len must be"),
    "endless context": (("generate", "x", "--max-model-len", "1" + "0" * 12), "max_model_len must lie in 2..2048"),
    "no tokens": (("generate", "x", "--max-tokens", "0"), "max_tokens must be an integer of 1 or more, got 0"),
    "tokens in words": (("generate", "x", "--max-tokens", "many"), "--max-tokens must be an integer, got 'many'"),
    "too many digits": (("generate", "x", "--max-tokens", "9" * 5000), "--max-tokens must be an integer"),
    "min above max": (
        ("generate", "x", "--min-tokens", "9", "--max-tokens", "3"),
        "min_tokens must be at most max_tokens=3, got 9",
    ),
    "NaN": (("generate", "x", "--temperature", "nan"), "temperature must be 0 (greedy) or positive, got nan"),
    "infinity": (("generate", "x", "--temperature", "inf"), "temperature must be"),
    "negative": (("generate", "x", "--temperature", "-1"), "temperature must be"),
    "top_p": (("generate", "x", "--top-p", "0"), "top_p must be above 0 and at most 1, got 0.0"),
    "top_k": (("generate", "x", "--top-k", "-2"), "top_k must be an integer of -1 or more, got -2"),
    "penalty": (("generate", "x", "--repetition-penalty", "0"), "repetition_penalty must be 1e-30 or more, got 0.0"),
    "huge penalty": (("generate", "x", "--repetition-penalty", "1e300"), "repetition_penalty must be"),
    "seed": (("generate", "x", "--seed", "9" * 30), "seed must be an integer in"),
    "no outputs": (("generate", "x", "--n", "0"), "n must be an integer in 1..128, got 0"),
    "empty stop": (("generate", "x", "--stop", ""), "stop must be a string or a list of non-empty strings"),
    "empty bad word": (("generate", "x", "--bad-words", ""), "bad_words must be"),
    "stop token": (
        ("generate", "x", "--stop-token-ids", "-1"),
        "stop_token_ids must be an integer of 0 or more, got -1",
    ),
    "stop token out of range": (("generate", "x", "--stop-token-ids", "999999999"), "stop_token_ids"),
    "bias no JSON": (("generate", "x", "--logit-bias", "{"), "--logit-bias is not JSON (Expecting property name"),
    "bias twice": (
        ("generate", "x", "--logit-bias", '{"1": 1, "1": 2}'),
        "--logit-bias must have each key once, and '1' occurs",
    ),
    "bias a list": (("generate", "x", "--logit-bias", "[1]"), "--logit-bias must be a JSON object or null, got '[1]'"),
    "steering unknown": (("generate", "x", "--steering", "doal"), "unknown steering method 'doal'; did you mean dola?"),
    "steering without a model": (("generate", "x", "--steering", "contrastive"), "steering must give 'model'"),
    "steering in a search": (("generate", "x", "--steering", "dola", "--search", "beam"), "steering must be left out"),
    "bias of a word": (("generate", "x", "--logit-bias", '{"a": 1}'), "logit_bias token id must be an integer"),
    "bias too large": (("generate", "x", "--logit-bias", '{"1": 1e9}'), "logit_bias[1] must be in -100..100"),
    "bias out of range": (("generate", "x", "--logit-bias", '{"999999999": 1}'), "logit_bias"),
    "method no JSON": (("generate", "x", "-s", "{ngram"), "speculative_config is not JSON (Expecting property name"),
    "no method by this name": (("generate", "x", "-s", "ngrm"), "unknown drafter 'ngrm'; did you mean ngram?"),
    "no method in the list": (("generate", "x", "-s", "[]"), "method must not be an empty list, got []"),
    "number that is none": (("demo", "--repeats", "x"), "--repeats must be an integer in 1..100, got 'x'; see"),
    "number out of range": (("tune", "--budget", "0"), "--budget must be a number in 1..86400, got '0'; see"),
    "number below a minimum": (
        ("datastore", "build", "x", "--shard-tokens", "1"),
        "--shard-tokens must be an integer of 2 or more, got '1'; see",
    ),
    "nested too deep": (("generate", "x", "-s", "[" * 100_000), "speculative_config cannot be read"),
    "number too long": (
        ("generate", "x", "-s", '{"posterior_alpha": ' + "9" * 5000 + "}"),
        "speculative_config cannot be read",
    ),
    "unknown method": (("generate", "x", "-s", '{"method": "ngrm"}'), "unknown drafter 'ngrm'; did you mean ngram?"),
    "unknown method of a missing model": (
        ("generate", "x", "-m", MISSING, "-s", '{"method": "ngrm"}'),
        "did you mean ngram?",
    ),
    "unknown option": (
        ("generate", "x", "-s", '{"method": "ngram", "prompt_lookup_mx": 3}'),
        "does not know 'prompt_lookup_mx'; did you mean prompt_lookup_max",
    ),
    "option of nobody": (
        ("generate", "x", "-s", '{"method": ["ngram"], "prompt_lookup_max": 3}'),
        "put it into the entry",
    ),
    "policy in an entry": (
        ("generate", "x", "-s", '{"method": [{"method": "ngram", "controller": "fixed"}]}'),
        "beside the list",
    ),
    "unknown controller": (
        ("generate", "x", "-s", '{"controller": "autoo"}'),
        "unknown controller 'autoo'; did you mean auto?",
    ),
    "unknown verifier": (("generate", "x", "-s", '{"acceptance_method": "all"}'), "unknown verifier 'all'; known are"),
    "too many guesses": (
        ("generate", "x", "-s", '{"num_speculative_tokens": 100000}'),
        "num_speculative_tokens must be",
    ),
    "the same method twice": (
        ("generate", "x", "-s", '{"method": ["ngram", "ngram"]}'),
        "'ngram' would draft the same twice",
    ),
    "the same key twice": (
        ("generate", "x", "-s", '{"method": "ngram", "method": "suffix"}'),
        "have each key once, and 'method'",
    ),
    "missing draft model": (("generate", "x", "-s", '{"model": "/no/such/folder"}'), "no folder '/no/such/folder'"),
    "no such plugin": (
        ("generate", "x", "-s", '{"method": "no.such:Drafter"}'),
        "cannot import drafter 'no.such:Drafter'",
    ),
    "no class": (("generate", "x", "-s", '{"method": "math:pi"}'), "is not a drafter class"),
    "no class but a function": (
        ("generate", "x", "-s", '{"method": "os:system"}'),
        "'os:system' is not a drafter class: <built-in function system> does not derive from "
        "paceline.drafters.base.Drafter",
    ),
    "a class of something else": (
        ("generate", "x", "-s", '{"method": "subprocess:Popen"}'),
        "Popen'> does not derive from",
    ),
    "no controller": (
        ("generate", "x", "-s", '{"controller": "json:dumps"}'),
        "has no plan, select, observe, forget; give module:Class of a class with the methods of "
        "paceline.controllers.base",
    ),
    "no controller of a missing model": (
        ("generate", "x", "-m", MISSING, "-s", '{"controller": "os:abort"}'),
        "'os:abort' is not a controller class: <built-in function abort> has no plan,",
    ),
    "a module of a controller": (("generate", "x", "-s", '{"controller": "math:pi"}'), "is not a controller class"),
    "no policy": (("generate", "x", "-s", '{"controller": "builtins:dict"}'), "is not a controller class"),
    "another kind of object": (
        ("generate", "x", "-s", '{"controller": "collections:UserDict"}'),
        "'collections:UserDict' is not a controller class",
    ),
    "a controller without a name": (
        ("generate", "x", "-s", '{"controller": "nameless:Policy", "num_speculative_tokens": 2}'),
        "is not a controller: it has no name",
    ),
    "taps of no list": (("generate", "x", "-s", '{"method": "bad_taps:Word"}'), "must be a tuple of layers in -1.."),
    "taps too deep": (("generate", "x", "-s", '{"method": "bad_taps:TooDeep"}'), "must be a tuple of layers in -1.."),
    "taps of no layer": (
        ("generate", "x", "-s", '{"method": "bad_taps:Fraction"}'),
        "must be a tuple of layers in -1..",
    ),
    "no drafter": (("generate", "x", "-s", '{"method": "builtins:str"}'), "'builtins:str' is not a drafter class"),
    "demo of nothing": (("demo", "--max-tokens", "0"), "--max-tokens"),
    "verify of nothing": (("verify", "--samples", "-1"), "--samples"),
    "verify too hot": (("verify", "--temperature", "nan"), "--temperature"),
    "verify without prompts": (("verify", "--prompts", MISSING), "No such file or directory"),
    "chat of two": (("chat", "--n", "2", "--temperature", "1"), "n must be 1 in a conversation, got 2"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(run: Command, case: str) -> None:
    arguments, line = ARGUMENTS[case]
    found = run(*arguments)
    assert (found.code, found.out.strip()) == (2, "")
    assert line in found.line
    assert len(found.line) < 700


def test_a_draft_model_without_a_model(run: Command, folder: Path) -> None:
    found = run("generate", "x", "-m", folder, "-s", '{"method": "draft_model"}')
    assert (found.code, found.out) == (2, "")
    assert "speculative_config model must be a folder or hub id" in found.line


def test_numbers_that_are_only_large_are_fine(run: Command) -> None:
    arguments = ("--max-tokens", 10**12, "--min-tokens", 2, "--top-k", 10**12, "--temperature", 1e-300, "--stop", "e")
    found = run("generate", "Once upon a time", *arguments, "--threads", 1)
    assert found.code == 0
    assert any(line.startswith("--max-tokens 1000000000000 was cut to") for line in found.err.splitlines()), found.err


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"caf\xe9", b"\xff\xfeh\0i\0"])
def test_prompts_that_are_no_text(run: Command, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "binary").write_bytes(data)
    for found in (run("generate", "--file", tmp_path / "binary"), run("generate", stdin=data)):
        assert (found.code, found.out) == (2, "")
        assert "not UTF-8 text" in found.line


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(run: Command, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    assert "Permission denied" in run("generate", "--file", tmp_path / "secret").line


def test_a_prompt_longer_than_the_context(run: Command, folder: Path) -> None:
    found = run("generate", "one two three " * 60, "-m", folder, *FAST)
    assert (found.code, found.out.strip()) == (2, "")
    assert "but the context holds 128 including at least one new token; shorten the prompt" in found.line


PROMPTS: dict[str, tuple[Any, str]] = {
    "no prompts": ([], "no prompts were given"),
    "nothing": (None, "prompts must be"),
    "a number": (5, "prompts must be"),
    "bytes": (b"abc", "prompts must be"),
    "an empty list inside": ([[]], "the prompt is empty"),
    "an empty text": ([""], "the prompt is empty"),
    "a negative id": ([1, -1], "prompt token ids must be integers in 0..8191, got -1"),
    "an id out of range": ([[1, 10**9]], "got 1000000000"),
    "an enormous id": ([10**5000], "prompt token ids must be"),
    "a fraction": ([[1, 1.5]], "got 1.5"),
    "a bool": ([[True]], "got True"),
    "a text among ids": ([[1, "a"]], "got 'a'"),
    "None among prompts": (["a", None], "a prompt must be"),
    "a dict of nothing": ({}, "a prompt dict needs"),
    "a dict with a wrong prompt": ({"prompt": 5}, "a prompt dict needs"),
    "a dict with ids that are text": (
        {"prompt_token_ids": "abc"},
        "prompt_token_ids must be a list of token ids, got 'abc'",
    ),
    "a text and other ids": (
        {"prompt": "a", "prompt_token_ids": [5]},
        "[5] are not the token ids of 'a'; give one of them",
    ),
    "a number as prediction": (
        {"prompt": "a", "prediction": 5},
        "prediction must be a text, a list of token ids or {'type'",
    ),
    "a prediction out of range": (
        {"prompt": "a", "prediction": [10**9]},
        "prediction token ids must be integers in 0..8191, got 10000",
    ),
    "a set": ({5, 6}, "prompts must be"),
    "an array of bytes": (bytearray(b"abc"), "prompts must be"),
    "a dict with no ids": ({"prompt_token_ids": []}, "the prompt is empty"),
    "a lone surrogate": ("\ud800", "not valid Unicode"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_of_the_api(llm: LLM, case: str) -> None:
    prompt, line = PROMPTS[case]
    vocabulary = str(llm.runner.info.vocab_size - 1)
    with pytest.raises(PromptError) as caught:
        llm.generate(prompt, SamplingParams(max_tokens=2))
    assert line.replace("8191", vocabulary) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work


def test_token_ids_of_numpy_and_torch_are_fine(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    ids = [5, 6, 7]
    texts = [
        llm.generate(prompt, params)[0].outputs[0].text
        for prompt in (ids, [ids], np.array(ids), torch.tensor(ids), {"prompt_token_ids": np.array(ids)}, tuple(ids))
    ]
    assert len(set(texts)) == 1


PARAMETERS: dict[str, Callable[[], Any]] = {
    "min above max": lambda: SamplingParams(min_tokens=5, max_tokens=3),
    "stop without text": lambda: SamplingParams(stop=["x"], detokenize=False),
    "stop a number": lambda: SamplingParams(stop=5),  # type: ignore[arg-type]  # what is tested
    "stop ids a number": lambda: SamplingParams(stop_token_ids=5),  # type: ignore[arg-type]  # what is tested
    "bias a list": lambda: SamplingParams(logit_bias=[1]),  # type: ignore[arg-type]  # what is tested
    "temperature of 401 digits": lambda: SamplingParams(temperature=10**400),
    "top_k of 5001 digits": lambda: SamplingParams(top_k=10**5000),
    "unknown name": lambda: SamplingParams.from_dict({"temprature": 1}),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_parameters_of_the_api(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PARAMETERS[case]()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


CALLS: dict[str, tuple[Callable[[LLM], Any], str]] = {
    "unknown parameter": (
        lambda _: SamplingParams(temprature=1),
        "SamplingParams does not know 'temprature'; did you mean temperature",
    ),
    "parameters by place": (
        lambda _: SamplingParams(0.5),
        "SamplingParams: all arguments are keyword-only, e.g. temperature=0; its arguments are n, temp",
    ),
    "config by place": (
        lambda _: SpeculativeConfig("ngram"),
        'SpeculativeConfig: all arguments are keyword-only, e.g. method="ngram"; its arguments are method',
    ),
    "no dict of parameters": (
        lambda _: SamplingParams.from_dict(None),
        "SamplingParams.from_dict must get a dict, got None",
    ),
    "a list of parameters": (
        lambda _: SamplingParams.from_dict([1]),
        "SamplingParams.from_dict must get a dict, got [1]",
    ),
    "from_dict of nothing": (
        lambda _: SamplingParams.from_dict(),
        "SamplingParams.from_dict: missing a required argument: 'values'",
    ),
    "unknown in another config": (
        lambda llm: llm.with_speculative_config(confg=None),
        "LLM.with_speculative_config does not know 'confg'; known are speculative_config",
    ),
    "unknown in save_tables": (
        lambda llm: llm.save_tables(folde="x"),
        "LLM.save_tables does not know 'folde'; did you mean folder?",
    ),
    "no messages": (lambda llm: llm.chat_ids(nope=1), "LLM.chat_ids: missing a required argument: 'messages'"),
    "defaults by place": (
        lambda llm: llm.default_sampling_params(0),
        "default_sampling_params: all arguments are keyword-only",
    ),
    "unknown argument": (lambda _: LLM(modle="x"), "LLM does not know 'modle'; did you mean model?"),
    "argument of a request": (
        lambda _: LLM(temperature=0.5),
        "LLM does not know 'temperature'; did you mean SamplingParams(temperature=...)?",
    ),
    "several GPUs": (
        lambda _: LLM(tensor_parallel_size=2),
        "tensor_parallel_size must be 1, got 2 (a model runs on one device)",
    ),
    "all that is wrong": (
        lambda _: LLM(tensor_parallel_size=2, modle="x", max_len=4, hf_overrides={"a": 1}),
        "tensor_parallel_size must be 1, got 2 (a model runs on one device); hf_overrides must be {}, got {'a': 1} "
        "(the checkpoint is read as it is); LLM does not know 'modle' (did you mean model?), 'max_len' (did you mean "
        "max_model_len?)",
    ),
    "a dtype twice": (lambda _: LLM(dtype="float32", torch_dtype="bfloat16"), "torch_dtype and dtype mean the same"),
    "two devices": (lambda _: LLM(device_map="balanced"), "device_map must be 'auto' or one device, got 'balanced'"),
    "a number in quotes": (
        lambda _: SamplingParams(temperature="0"),
        "temperature must be 0 (greedy) or positive, got the text '0'; leave the quotes out",
    ),
    "an integer in quotes": (
        lambda _: SamplingParams(max_tokens="8"),
        "max_tokens must be an integer of 1 or more, got the text '8'; leave the quotes out",
    ),
    "no number in quotes": (
        lambda _: SamplingParams(temperature="a"),
        "temperature must be 0 (greedy) or positive, got 'a'",
    ),
    "parameters of transformers": (
        lambda _: SamplingParams(max_new_tokens=5, num_return_sequences=2),
        "does not know 'max_new_tokens' (did you mean max_tokens?), 'num_return_sequences' (did you mean n?)",
    ),
    "an adapter": (lambda llm: llm.generate("a", lora_request=1), "lora_request must be None: an adapter is merged"),
    "a bar of nobody": (lambda llm: llm.generate("a", use_tqdm="yes"), "use_tqdm must be True, False, None"),
    "names of a template": (
        lambda llm: llm.chat(TALK, chat_template_kwargs={"thinking": True}),
        "does not know 'thinking'",
    ),
    "no names of a template": (
        lambda llm: llm.chat(TALK, chat_template_kwargs=[1]),
        "chat_template_kwargs must be a dict",
    ),
    "arguments by place": (lambda _: LLM("x", "y"), "LLM: too many positional arguments"),
    "key of a config": (
        lambda _: SpeculativeConfig(metod="ngram"),
        "SpeculativeConfig does not know 'metod'; did you mean method or model?",
    ),
    "unknown in generate": (
        lambda llm: llm.generate("a", sampling_param=None),
        "LLM.generate does not know 'sampling_param'",
    ),
    "unknown in stream": (lambda llm: llm.stream("a", params=None), "LLM.stream does not know 'params'"),
    "nothing to generate": (lambda llm: llm.generate(), "LLM.generate: missing a required argument: 'prompts'"),
    "unknown in chat": (lambda llm: llm.chat(TALK, max_tokens=5), "'max_tokens' is a sampling parameter"),
    "no template variable": (lambda llm: llm.chat(TALK, thinking=True), "LLM.chat does not know 'thinking'"),
    "mistyped in chat": (
        lambda llm: llm.chat(TALK, sampling_parms=SamplingParams()),
        "LLM.chat does not know 'sampling_parms'; did you mean sampling_params?",
    ),
    "mistyped in a live chat": (
        lambda llm: AsyncLLM(llm).chat(TALK, prioriti=1),
        "AsyncLLM.chat does not know 'prioriti'; did you mean priority?",
    ),
    "another library's in chat": (
        lambda llm: llm.chat(TALK, max_new_tokens=5),
        "LLM.chat does not know 'max_new_tokens'; did you mean SamplingParams(max_tokens=...)?",
    ),
    "one of several prompts": (lambda llm: llm.generate(["a", "b", [1] * 5000]), "prompts[2]: the prompt has 5000"),
    "one of several dicts": (lambda llm: llm.generate(["a", {"promt": "b"}]), "prompts[1]: a prompt dict does not"),
    "one of several talks": (lambda llm: llm.chat([TALK, [{"role": "user"}]]), "messages[1]: "),
    "model a number": (lambda _: LLM(5), "model must be a folder or hub id, got 5"),
    "model a list": (lambda _: LLM(model=["x"]), "model must be a folder or hub id, got ['x']"),
    "tokenizer a number": (lambda _: LLM(tokenizer=5), "tokenizer must be a folder or hub id, got 5"),
    "revision a number": (lambda _: LLM("a/b", revision=5), "revision must be a branch, tag or commit, got 5"),
    "profile a number": (lambda _: LLM(profile=3), "profile must be True or False, got 3"),
    "trust a word": (lambda _: LLM(trust_remote_code="no"), "trust_remote_code must be True or False, got 'no'"),
    "stream of a list": (
        lambda llm: llm.stream(["a"]),
        "stream takes one prompt, got a list of 1; use generate for lists, or stream each of them",
    ),
    "tables into a number": (lambda llm: llm.save_tables(5), "folder must be the path of a folder, got 5"),
    "stream of rows": (lambda llm: llm.stream(np.array([[1, 2], [3, 4]])), "stream takes one prompt, got a list of 2"),
    "stream of dicts": (
        lambda llm: llm.stream([{"prompt": "a"}, {"prompt": "b"}]),
        "stream takes one prompt, got a list of 2",
    ),
}
TALK = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("case", CALLS)
def test_calls_of_the_api(llm: LLM, case: str) -> None:
    call, line = CALLS[case]
    with pytest.raises(PacelineError) as caught:
        call(llm)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_one_prompt_alone_needs_no_number(llm: LLM) -> None:
    for given in ([1] * 5000, [[1] * 5000]):
        with pytest.raises(PromptError) as caught:
            llm.generate(given)
        assert str(caught.value).startswith("the prompt has 5000 tokens")


def test_a_type_error_from_within_stays_one(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    def broken(_prompts: object) -> list[Any]:
        raise TypeError("ours")

    monkeypatch.setattr("paceline.llm.as_list", broken)
    with pytest.raises(TypeError, match="ours"):
        llm.generate("a")


def test_signatures_are_seen_through() -> None:
    for function, known in (
        (LLM, "speculative_config"),
        (LLM.generate, "sampling_params"),
        (SamplingParams, "temperature"),
    ):
        assert known in inspect.signature(function).parameters


@pytest.mark.parametrize("text", [False, True], ids=["dict", "JSON"])
def test_none_is_not_given_for_keys_of_vllm(llm: LLM, text: bool) -> None:
    given = {
        "method": "ngram",
        "quantization": None,
        "draft_tensor_parallel_size": None,
        "prompt_lookup_max": None,
        "model": None,
    }
    parsed = SpeculativeConfig.parse(json.dumps(given) if text else given)
    assert parsed == SpeculativeConfig(method="ngram")
    llm.with_speculative_config(given)
    for key, value in (("quantisation", None), ("quantization", "int8"), ("draft_tensor_parallel_size", 2)):
        with pytest.raises(ConfigError, match=f"speculative_config of 'ngram' does not know '{key}'"):
            llm.with_speculative_config({"method": "ngram", key: value})


@pytest.mark.parametrize("params", [{}, "greedy", [None], [SamplingParams()] * 2])
def test_what_is_no_sampling_params(llm: LLM, params: Any) -> None:
    with pytest.raises(ConfigError, match="sampling_params must be"):
        llm.generate("a", params)


@pytest.mark.parametrize("messages", [None, [], "hi", 5])
def test_what_is_no_conversation(llm: LLM, messages: Any) -> None:
    with pytest.raises(ConfigError, match=r"messages must (be|hold)"):
        llm.chat(messages)


def cut_in_half(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def only_config(folder: Path, **config: Any) -> None:
    """Nothing is left of the checkpoint but this config.json."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "config.json").write_text(json.dumps(config))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "half-written weights": (cut_in_half, "is half-written"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights in"),
    "a missing tensor": (lambda f: edit_weights(f, lambda w: w.pop("model.layers.1.mlp.up_proj.weight")), "up_proj"),
    "a wrong shape": (lambda f: edit_json(f / "config.json", intermediate_size=40), "download both again"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json in"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "no tokenizer in"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object, got list"),
    "config cut": (lambda f: (f / "config.json").write_text('{"model_type": "lla'), "cannot be read as JSON"),
    "config key twice": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("{", '{"vocab_size": 5, ', 1)),
        "config.json must have each key once, and 'vocab_size' occurs 2 times",
    ),
    "config no text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), "cannot be read as JSON"),
    "config too deep": (lambda f: (f / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
    "endless layers": (lambda f: edit_json(f / "config.json", num_hidden_layers=10**30), "'num_hidden_layers' must be"),
    "a negative window": (
        lambda f: edit_json(f / "config.json", sliding_window=-4),
        "'sliding_window' must be an integer in 1",
    ),
    "dtype unknown": (lambda f: edit_json(f / "config.json", dtype="zzz"), "'dtype' must be one of float32, bfloat16"),
    "end token a word": (
        lambda f: edit_json(f / "config.json", eos_token_id="x"),
        "must be a token id or a list of them, got 'x'",
    ),
    "yarn without factor": (
        lambda f: edit_json(f / "config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "rope type 'yarn' needs 'factor'",
    ),
    "layer types too long": (
        lambda f: edit_json(f / "config.json", layer_types=["full_attention"] * 3),
        "'layer_types' must be a list of 2 entries",
    ),
    "architecture unknown": (
        lambda f: edit_json(f / "config.json", model_type="martian", architectures=["Martian"]),
        "martian",
    ),
    "a classifier": (
        lambda f: edit_json(f / "config.json", architectures=["LlamaForSequenceClassification"]),
        "does not write text",
    ),
    "template a number": (
        lambda f: edit_json(f / "tokenizer_config.json", chat_template=5),
        "the chat template in",
    ),
    "template no text": (
        lambda f: (f / "chat_template.jinja").write_bytes(b"\xff"),
        "chat_template.jinja cannot be read",
    ),
    "GPTQ without bits": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "gptq"}),
        "'bits' must be a whole number, got None",
    ),
    "AWQ of float weights": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "awq"}),
        "is said to be quantised (AWQ), but holds no tensor that ends in .qweight",
    ),
    "bitsandbytes": (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "is quantised (BITSANDBYTES), which is not supported; use a GGUF file",
    ),
    "Pix2Struct": (
        lambda f: only_config(
            f, model_type="pix2struct", is_encoder_decoder=True, architectures=["Pix2StructForConditionalGeneration"]
        ),
        "(pix2struct): encoder-decoder models of this kind are not supported yet",
    ),
    "Qwen2-VL written by hand": (
        lambda f: only_config(f, model_type="qwen2_vl", architectures=["Qwen2VLForConditionalGeneration"]),
        "(qwen2_vl): vision-language models are not supported yet",
    ),
    "shards without their index": (
        lambda f: rename(f, "model.safetensors", "model-00001-of-00002.safetensors"),
        "model.safetensors.index.json; it holds model-00001-of-00002.safetensors; give the folder",
    ),
    "Qwen2-VL": (
        lambda f: only_config(f, model_type="qwen2_vl", vision_config={"depth": 2}),
        "(qwen2_vl): vision-language models are not supported yet",
    ),
    "GGUF": (lambda f: rename(f, "model.safetensors", "model.gguf"), "GGUF"),
    "LoRA": (
        lambda f: [
            rename(f, "config.json", "adapter_config.json"),
            rename(f, "model.safetensors", "adapter_model.safetensors"),
        ],
        "adapter",
    ),
    "pickles": (lambda f: rename(f, "model.safetensors", "pytorch_model.bin"), "pickled weights"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints(run: Command, folder: Path, case: str) -> None:
    break_it, line = CHECKPOINTS[case]
    break_it(folder)
    found = run("generate", "x", "-m", folder, *FAST)
    assert (found.code, found.out) == (2, "")
    assert line in found.line
    with pytest.raises(CheckpointError):
        LLM(folder)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% if %}", "cannot be read (Expected an expression, got 'end of statement block' at line 1); repair it"),
        (
            "{{ nothing.at }}",
            "failed on these messages (UndefinedError: 'nothing' is undefined); change the messages, repair",
        ),
        ("{{ raise_exception('no\nway') }}", "rejected the messages: no way"),
    ],
)
def test_broken_chat_templates(run: Command, folder: Path, template: str, line: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    for found in (run("generate", "x", "--chat", "-m", folder, *FAST), run("chat", "-m", folder, *FAST, stdin="hi\n")):
        assert (found.code, found.out.strip()) == (2, "")
        assert found.line.startswith(f"the chat template of {folder} {line}")


def test_an_environment_that_says_neither_on_nor_off(
    run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PROFILE", "flase")
    found = run("generate", "x", "-m", folder, *FAST)
    assert (found.code, found.out) == (2, "")
    assert found.line == "PACELINE_PROFILE must be 0 (profiles off) or 1 (on, as without it), got 'flase'"


@pytest.mark.parametrize(
    ("weights", "line"),
    [("model.gguf", "is cut off or no GGUF file"), ("adapter_model.safetensors", "holds a LoRA or other adapter")],
)
def test_what_is_rejected_by_name_needs_no_tokenizer(run: Command, tmp_path: Path, weights: str, line: str) -> None:
    (tmp_path / weights).write_bytes(b"GGUF")
    if weights.startswith("adapter"):
        (tmp_path / "adapter_config.json").write_text("{}")
    draft = json.dumps({"method": "draft_model", "model": str(tmp_path)})
    for found in (run("generate", "x", "-m", tmp_path), run("generate", "x", "-s", draft)):
        assert (found.code, found.out) == (2, "")
        assert line in found.line


def test_a_gguf_file(run: Command, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    found = run("generate", "x", "-m", tmp_path / "model.gguf")
    assert found.code == 2
    assert "is cut off or no GGUF file" in found.line
    with pytest.raises(CheckpointError):
        LLM(tmp_path / "model.gguf")


def test_not_enough_memory(run: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    found = run("generate", "x", "-m", folder, *FAST)
    assert (found.code, found.out) == (2, "")
    assert "GiB can be used; use a smaller dtype, context (max_model_len) or model" in found.line


def test_a_draft_model_with_another_tokenizer(run: Command, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [name for name, index in vocabulary.items() if index in (4000, 4001)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = run("generate", "x", "-s", json.dumps({"model": str(folder)}), *FAST)
    assert (found.code, found.out) == (2, "")
    assert "has another tokenizer than the target" in found.line


def test_nan_in_the_middle_keeps_the_text_so_far(run: Command, whole: Path, folder: Path) -> None:
    plain = json.loads(run("generate", "Once upon", "-m", whole, "--json", "--threads", 1, "--max-tokens", 12).out)
    fatal = plain["token_ids"][6]
    kept = plain["token_ids"].index(fatal) + 1
    assert kept > 2
    edit_weights(folder, lambda weights: weights["model.embed_tokens.weight"][fatal].fill_(float("nan")))
    found = run("generate", "Once upon", "-m", folder, "--json", "--threads", 1, "--max-tokens", 12)
    made = json.loads(found.out)
    assert found.code == 2
    assert made["token_ids"] == plain["token_ids"][:kept]
    assert made["finish_reason"] == "error"
    assert "NaN" in made["error"]
    assert found.line == made["error"]
    streamed = run("generate", "Once upon", "-m", folder, "--threads", 1, "--max-tokens", 12)
    assert (streamed.code, streamed.out, streamed.line) == (2, made["text"] + "\n", found.line)


@pytest.mark.parametrize("verb", ["chat", "demo", "verify"])
def test_nan_from_the_start(run: Command, folder: Path, tmp_path: Path, verb: str) -> None:
    edit_weights(folder, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    (tmp_path / "prompts.txt").write_text("hello\n")
    more = {"demo": ("--repeats", "1"), "verify": ("--prompts", str(tmp_path / "prompts.txt")), "chat": ()}[verb]
    found = run(verb, "-m", folder, "--threads", 1, "--max-tokens", 3, *more, stdin="hello\n")
    assert (found.code, found.out.strip()) == (2, "")
    assert "NaN" in found.line


HOSTILE = [None, "x", -1, 0, 1e308, [], {}, True, 10**30, [None], 0.5, "\ud800"]


def mutations(data: bytes, number: int, seed: int) -> Iterator[bytes]:
    """The bytes cut off somewhere, or with single bytes replaced."""
    noise = random.Random(seed)
    for cut in (0, 1, len(data) - 1, *(noise.randrange(len(data)) for _ in range(number))):
        yield data[:cut]
    for _ in range(number):
        changed = bytearray(data)
        changed[noise.randrange(len(changed))] = noise.randrange(256)
        yield bytes(changed)


def no_leak(run: Command, folder: Path, what: object) -> None:
    found = run("generate", "Hi", "-m", folder, *FAST)
    assert found.code in (0, 2), (what, found.err)
    if found.code == 2:
        assert found.line, what


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_no_broken_json_leaks(run: Command, folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for number, broken in enumerate(mutations(data, 5, seed=1)):
        (folder / name).write_bytes(broken)
        no_leak(run, folder, (name, number))
    known = json.loads(data)
    noise = random.Random(2)
    for key in known:
        for value in noise.sample(HOSTILE, 2):
            (folder / name).write_text(json.dumps(known | {key: value}))
            no_leak(run, folder, (name, key, value))


def test_no_broken_tokenizer_leaks(run: Command, folder: Path) -> None:
    path = folder / "tokenizer.json"
    for number, broken in enumerate(mutations(path.read_bytes(), 4, seed=3)):
        path.write_bytes(broken)
        no_leak(run, folder, number)


def test_no_broken_safetensors_leak(run: Command, folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    for number, broken in enumerate(mutations(data[:end], 12, seed=4)):
        path.unlink()
        path.write_bytes(broken + data[end:] if len(broken) == end else broken)
        no_leak(run, folder, number)
    header = json.loads(data[8:end])
    for field in ("dtype", "shape", "data_offsets"):
        for value in (*HOSTILE, [0, 10**30], "F8_E4M3"):
            text = json.dumps(header | {"model.norm.weight": header["model.norm.weight"] | {field: value}}).encode()
            path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
            no_leak(run, folder, (field, value))
