"""What users of vLLM and transformers type from memory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
from command import Terminal

from paceline import LLM, ConfigError, PacelineError, PromptError, RequestOutputKind, SamplingParams
from paceline.arguments import IGNORED, NEUTRAL, Meant, translated
from paceline.config.engine import FORMATS
from paceline.config.sampling import IDLE
from paceline.utils import shown_by

TALK = [{"role": "user", "content": "Write SQL: all courses"}]
FEW = SamplingParams(temperature=0.0, max_tokens=8)
NGRAM = {"method": "ngram", "num_speculative_tokens": 6}
REPEATING = "def f(n):\n    if n:\n        return 1\n    return n\n\ndef g(n):\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=NGRAM, dtype="float32", seed=1)


def asked(**others: Any) -> Meant:
    ours = {"dtype": "auto", "device": "auto", "max_model_len": None, "threads": None}
    ours |= {key: others.pop(key) for key in ours if key in others}
    cuda = others.pop("cuda", False)
    return translated(others, Meant(**ours), own=("model", "max_model_len", "dtype"), cuda=cuda)


NOTHING = Meant("auto", "auto", None, None)


# ---------------------------------------------------------------------------------------------- arguments of LLM


def test_a_call_as_in_vllms_examples_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        LLM(
            model="bundled/target", tensor_parallel_size=1, enforce_eager=True, swap_space=4, disable_log_stats=True,
            load_format="auto", rope_scaling=None, max_num_seqs=None, enable_prefix_caching=True, quantization=None,
            max_model_len=64,
        )  # fmt: skip
    (line,) = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert line == (
        "ignored, since it changes nothing here: tensor_parallel_size=1, enforce_eager=True, swap_space=4, "
        "disable_log_stats=True, load_format='auto'"
    )


@pytest.mark.parametrize("name", [*sorted(IGNORED), "gpu_memory_utilization"])
def test_what_changes_no_output_is_ignored_whatever_it_is(name: str) -> None:
    for value in (None, True, 0.9, "x"):
        assert asked(**{name: value}) == NOTHING


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_would_change_something_is_rejected_by_name(name: str) -> None:
    for value in (None, *NEUTRAL[name][0]):
        assert asked(**{name: value}) == NOTHING
    for value in (2, "other", 0.5, [3], {"a": 1}, object(), torch.tensor([1, 2])):
        with pytest.raises(ConfigError, match=rf"^{name} must be .*, got"):
            asked(**{name: value})


def test_a_share_of_a_gpu_is_not_ignored_where_there_is_one() -> None:
    for given in ({"device": "cuda:1"}, {"cuda": True}, {"device_map": "cuda"}):
        with pytest.raises(ConfigError, match="gpu_memory_utilization is not available: kv_cache_memory_bytes"):
            asked(gpu_memory_utilization=0.9, **given)
    asked(gpu_memory_utilization=0.9, cuda=True, device="cpu")


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"dtype": "half"}, "bfloat16"),
        ({"dtype": "half", "cuda": True}, "float16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "half", "device_map": "cuda:0"}, "float16"),
        ({"dtype": "float"}, "float32"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"torch_dtype": torch.float32}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": "auto"}, "auto"),
        ({"dtype": "int3"}, "int3"),
        ({"dtype": None}, None),
    ],
    ids=str,
)
def test_dtypes(given: dict[str, Any], dtype: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        assert asked(**given).dtype == dtype
    assert ("runs as bfloat16" in caplog.text) == (dtype == "bfloat16" and given.get("dtype") == "half")


@pytest.mark.parametrize(
    ("given", "device"),
    [
        ({"device_map": "auto"}, "auto"),
        ({"device_map": "cpu"}, "cpu"),
        ({"device_map": {"": "cuda:1"}}, "cuda:1"),
        ({"device_map": {"": 0}}, "cuda:0"),
        ({"device": torch.device("cpu")}, "cpu"),
        ({"device_map": torch.device("cuda", 1)}, "cuda:1"),
    ],
    ids=str,
)
def test_devices(given: dict[str, Any], device: str) -> None:
    assert asked(**given).device == device


@pytest.mark.parametrize("given", [{"lm_head": 0, "model": 1}, "balanced", "sequential", {"": "disk"}], ids=str)
def test_a_model_on_several_devices_is_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match="device_map must be 'auto' or one device"):
        asked(device_map=given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"n_ctx": 4096, "n_threads": 3}, Meant("auto", "auto", 4096, 3)),
        ({"n_ctx": 0}, NOTHING),
        ({"n_gpu_layers": 0}, Meant("auto", "cpu", None, None)),
        ({"n_gpu_layers": -1}, NOTHING),
        ({"n_gpu_layers": 99, "threads": 2}, Meant("auto", "auto", None, 2)),
    ],
    ids=str,
)
def test_the_names_of_llama_cpp_are_understood(given: dict[str, Any], meant: Meant) -> None:
    assert asked(**given) == meant


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n_ctx": 64, "max_model_len": 128}, "n_ctx and max_model_len mean the same; give one of them"),
        ({"n_threads": 1, "threads": 2}, "n_threads and threads mean the same"),
        ({"n_gpu_layers": 0, "device": "cuda"}, "n_gpu_layers and device say the same"),
        ({"n_gpu_layers": "all"}, "n_gpu_layers must be an integer"),
    ],
    ids=str,
)
def test_two_names_of_one_thing_are_rejected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(**given)


def test_the_names_of_llama_cpp_reach_the_model() -> None:
    with LLM(speculative_config=None, dtype="float32", n_ctx=96, n_threads=1, n_gpu_layers=0) as llm:
        assert llm.config.max_model_len == llm.runner.info.max_context == 96
        assert llm.config.threads == 1
        assert llm.runner.info.device.type == "cpu"


def test_what_llama_cpp_calls_otherwise_is_told(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"'model_path'; did you mean model\?"):
        asked(model_path="x.gguf")
    with caplog.at_level(logging.WARNING, "paceline"):
        assert asked(verbose=False, n_batch=512) == NOTHING
    assert "verbose=False, n_batch=512" in caplog.text
    with pytest.raises(AttributeError, match=r"call chat\(messages\)"):
        llm.create_chat_completion  # noqa: B018


def test_our_own_names_are_offered_first() -> None:
    with pytest.raises(ConfigError, match=r"mean max_model_len\?\), 'enforce_eagr' \(did you mean enforce_eager\?\)$"):
        asked(max_len=3, enforce_eagr=True)


def test_a_gguf_file_of_no_model() -> None:
    with pytest.raises(ConfigError, match=r"gguf_file must be given together with model, got 'x\.gguf'"):
        LLM(gguf_file="x.gguf")


# ---------------------------------------------------------------------------------------------- methods of LLM


def test_a_closed_model(llm: LLM) -> None:
    with LLM(speculative_config=None, dtype="float32", max_model_len=256, max_num_seqs=1) as one:
        twin = one.with_speculative_config(NGRAM)
        expected = one.generate("def f(n):", FEW)[0].outputs[0].token_ids
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        running, engine = one.stream("def f(n):", long), one.engine
        next(running)
        waiting = Thread(target=lambda: ended.extend(one.generate(["a", "b"], long)))
        ended: list[Any] = []
        waiting.start()
        while not engine.scheduler.waiting:
            sleep(1e-3)
    assert [chunk.finish_reason for chunk in running][-1:] == ["abort"]
    waiting.join(60)
    assert [out.outputs[0].finish_reason for out in ended] == ["abort", "abort"]
    assert not engine.has_work
    one.close()
    for call in (
        lambda: one.generate("x"),
        lambda: one.chat(TALK),
        lambda: one.stream("x"),
        lambda: one.with_speculative_config(None),
        lambda: one.exactness,
        one.get_tokenizer,
        one.reset_prefix_cache,
        one.save_tables,
    ):
        with pytest.raises(ConfigError, match="this LLM is closed; open a new one"):
            call()
    with pytest.raises(AttributeError, match="this LLM is closed"):
        _ = one.runner
    assert twin.generate("def f(n):", FEW)[0].outputs[0].token_ids == expected, "it shares the weights, and goes on"


def test_what_is_missing_says_what_to_do_instead(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="params must be BeamSearchParams"):
        llm.beam_search(["x"], SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = llm.nonsense
    with pytest.raises(AttributeError, match=r"LLM has no attribute 'from_pretrained'; call LLM\(model\)"):
        LLM.from_pretrained("x")
    assert not hasattr(llm, "encode")
    assert not hasattr(LLM, "encode")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_of_checkpoints_are_no_quantization(name: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization='{name.upper()}' names a format of checkpoints; "):
        LLM(quantization=name.upper())


def test_prompt_dicts_of_other_libraries(llm: LLM) -> None:
    expected = llm.generate("x", FEW)[0].outputs[0].token_ids
    assert llm.generate({"prompt": "x", "multi_modal_data": None}, FEW)[0].outputs[0].token_ids == expected
    for given, line in (
        ({"input_ids": [5]}, r"does not know 'input_ids'; did you mean prompt_token_ids\?"),
        ({"prompt": "x", "multi_modal_data": {}}, "'multi_modal_data'; models read texts and token ids here"),
        ({"messages": TALK}, "'messages'; conversations go to chat"),
    ):
        with pytest.raises(PromptError, match=line):
            llm.generate(given, FEW)


def test_arguments_of_other_libraries_methods(llm: LLM) -> None:
    expected = llm.generate("x", FEW)[0].outputs[0].token_ids
    idle = {"priority": None, "tokenization_kwargs": None, "prompt_token_ids": None}
    assert llm.generate("x", FEW, **idle)[0].outputs[0].token_ids == expected
    assert llm.generate(["x", "y"], FEW, priority=[3, -1])[0].outputs[0].token_ids == expected
    for wrong, line in (([1], "a list of 2 integers"), ([1, "a"], "an integer"), (3, "a list of integers")):
        with pytest.raises(ConfigError, match=f"priority must be {line}"):
            llm.generate(["x", "y"], FEW, priority=wrong)
    with pytest.raises(
        ConfigError,
        match=r"'prompt_token_ids' \(prompts may hold token ids\), 'max_tokens' \(did you mean SamplingParams\(max_tok"
        r".*'max_new_tokens' \(did you mean SamplingParams\(max_tok",
    ):
        llm.generate("x", prompt_token_ids=[[5]], max_tokens=3, max_new_tokens=3)


def test_outputs_that_ended_with_an_error_are_not_silent(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        raise RuntimeError("of the user")

    with caplog.at_level(logging.WARNING, "paceline"):
        bad, good = llm.generate(["x", "y"], [SamplingParams(logits_processors=[broken], max_tokens=3), FEW])
    assert (bad.outputs[0].finish_reason, good.outputs[0].error) == ("error", None)
    assert "of the user" in bad.outputs[0].error
    (line,) = [record.getMessage() for record in caplog.records if "ended with an error" in record.getMessage()]
    assert line.startswith("1 of 2 outputs ended with an error")
    assert bad.outputs[0].error in line


def test_the_tokenizer_of_transformers_is_the_models_own(llm: LLM) -> None:
    found = llm.get_tokenizer()
    text = "SELECT a\n  FROM <|user|> é"
    assert found(text)["input_ids"] == llm.tokenizer.encode(text)
    assert found.decode(found.encode(text)) == llm.tokenizer.decode(llm.tokenizer.encode(text), False)
    assert found.eos_token_id == llm.tokenizer.eos_id
    rendered = found.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert llm.generate(rendered, FEW)[0].prompt_token_ids == llm.chat(TALK, FEW)[0].prompt_token_ids


def test_the_prefix_cache_is_reset(llm: LLM) -> None:
    def cached() -> int | None:
        return llm.generate([list(range(5, 200))], FEW)[0].num_cached_tokens

    assert cached() == 0
    assert cached() > 100
    assert llm.reset_prefix_cache()
    assert cached() == 0
    assert not LLM(speculative_config=None, enable_prefix_caching=False).reset_prefix_cache()


def test_default_parameters_may_be_set_and_are_checked(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.temperature, params.max_tokens = 0.0, 3
    assert len(llm.generate("x", params)[0].outputs[0].token_ids) == 3
    for name, value in (("temperature", -1), ("max_token", 5), ("min_tokens", 9)):
        with pytest.raises(ConfigError, match=name):
            setattr(params, name, value)
    assert params == SamplingParams(temperature=0.0, max_tokens=3)
    stream = llm.stream("def f(n):", params)
    params.max_tokens = 1
    assert len([token for chunk in stream for token in chunk.token_ids]) == 3, "as it was when it was given"


class Bar:
    made: list[Bar] = []  # noqa: RUF012 (a record of the test)

    def __init__(self, *, total: int, **_: Any) -> None:
        self.total, self.n, self.said = total, 0, ""
        Bar.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, more: int) -> None:
        self.n += more

    def set_postfix_str(self, said: str, refresh: bool) -> None:
        self.said = said


def test_a_bar_of_the_users_own(llm: LLM) -> None:
    llm.generate(["a", "b", "c"], FEW, use_tqdm=Bar)
    llm.chat([TALK, TALK], FEW, use_tqdm=Bar)
    assert [(bar.total, bar.n) for bar in Bar.made] == [(3, 3), (2, 2)]
    assert Bar.made[0].said.endswith("tokens/s")


@contextmanager
def screen(taken: bool) -> Iterator[None]:
    if not taken:
        yield
        return
    with shown_by(lambda what: contextmanager(lambda: iter([None]))()):
        yield


@pytest.mark.parametrize(
    ("terminal", "taken", "prompts", "wanted", "shown"),
    [
        (True, False, 2, None, True),
        (True, False, 1, None, False),
        (True, True, 2, None, False),
        (False, False, 2, None, False),
        (False, False, 1, True, True),
        (True, False, 2, False, False),
    ],
)
def test_when_a_bar_is_shown(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    taken: bool,
    prompts: int,
    wanted: bool | None,
    shown: bool,
) -> None:
    stream = Terminal()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with screen(taken):
        llm.generate(["a", "b"][:prompts], FEW, wanted)
    assert ("requests: 100%" in stream.getvalue()) == shown


def test_chat_as_in_vllm(llm: LLM) -> None:
    (out,) = llm.chat(TALK, FEW, False)
    assert out.prompt == "<|user|>\nWrite SQL: all courses\n<|assistant|>\n"
    assert out.prompt_token_ids == llm.chat_ids(TALK)
    assert [one.prompt for one in llm.chat([TALK, TALK], sampling_params=FEW)] == [out.prompt] * 2
    begun = [*TALK, {"role": "assistant", "content": "SELECT"}]
    for more in ({"add_generation_prompt": False}, {}):
        (found,) = llm.chat(begun, FEW, continue_final_message=True, **more)
        assert found.prompt == out.prompt + "SELECT"
    own = "{% for m in messages %}{{ m.content }}{{ tools }}{{ style }}{% endfor %}"
    given = {"chat_template": own, "chat_template_kwargs": {"style": "!"}, "tools": None, "lora_request": None}
    assert llm.chat(TALK, FEW, **given)[0].prompt == "Write SQL: all coursesNone!"
    with pytest.raises(ConfigError, match="chat_template_content_format must be one of auto, got 'openai'"):
        llm.chat(TALK, FEW, chat_template_content_format="openai")


# ---------------------------------------------------------------------------------------------- SamplingParams


def test_all_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=-1, prompt_logprobs=-1)
    (out,) = llm.generate([[5, 6, 7]], params)
    (few,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=6, logprobs=3))
    for whole, some in zip(out.outputs[0].logprobs, few.outputs[0].logprobs, strict=True):
        assert len(whole) == llm.runner.info.vocab_size
        assert sum(2.718281828459045**one.logprob for one in whole.values()) == pytest.approx(1, abs=1e-3)
        assert [(token, one.rank, one.decoded_token) for token, one in list(whole.items())[:3]] == [
            (token, one.rank, one.decoded_token) for token, one in list(some.items())[:3]
        ]
    assert [entry and len(entry) for entry in out.prompt_logprobs] == [None, *[llm.runner.info.vocab_size] * 2]


def test_the_end_of_a_prompt(llm: LLM) -> None:
    def used(kept: int, prompt: list[int], **more: Any) -> list[int]:
        return llm.generate([prompt], SamplingParams(truncate_prompt_tokens=kept, **more))[0].prompt_token_ids

    context = llm.runner.info.max_context
    assert used(3, [5, 6, 7, 8, 9]) == [7, 8, 9]
    assert used(9, [5, 6, 7]) == [5, 6, 7]
    assert len(used(-1, [5] * (context + 10), max_tokens=4)) == context - 4
    assert used(-1, [5, 6, 7], max_tokens=4) == [5, 6, 7]
    assert len(used(-1, [5] * context, max_tokens=None, stop_token_ids=range(6000))) == context - 1
    with pytest.raises(PromptError, match="the context holds"):
        used(context, [5] * context)


@pytest.mark.parametrize(("given", "hint"), [(None, ""), (40, r" or raise max_model_len \(at most 2048\)")])
def test_a_longer_context_is_offered_only_where_there_is_one(given: int | None, hint: str) -> None:
    with pytest.raises(PromptError, match=rf"shorten the prompt{hint}$"):
        LLM(speculative_config=None, max_model_len=given).generate([[5] * 3000])


CASES: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 60},
    {"temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 12, "logprobs": 1},
    {"temperature": 0.0, "max_tokens": 60, "stop": ["return n"]},
    {"temperature": 0.0, "max_tokens": 20, "detokenize": False},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kinds_of_stream_output(llm: LLM, case: dict[str, Any]) -> None:
    (whole,) = llm.generate(REPEATING, SamplingParams(**case))
    expected = [(one.text, one.token_ids, one.finish_reason, one.stop_reason, one.logprobs) for one in whole.outputs]

    def chunks(kind: RequestOutputKind) -> list[Any]:
        return list(llm.stream(REPEATING, SamplingParams(**case, output_kind=kind)))

    plain = chunks(RequestOutputKind.CUMULATIVE)
    assert {id(chunk.output.outputs) for chunk in plain} == {id(plain[0].output.outputs)}
    deltas = chunks(RequestOutputKind.DELTA)
    assert len(deltas) == len(plain)
    parts = [[chunk.output.outputs[i] for chunk in deltas] for i in range(len(expected))]
    assert [
        (
            "".join(one.text for one in mine),
            [token for one in mine for token in one.token_ids],
            mine[-1].finish_reason,
            mine[-1].stop_reason,
            None if mine[0].logprobs is None else [entry for one in mine for entry in one.logprobs],
        )
        for mine in parts
    ] == expected
    assert [mine[-1].cumulative_logprob for mine in parts] == pytest.approx(
        [one.cumulative_logprob for one in whole.outputs], nan_ok=True
    ) or whole.outputs[0].cumulative_logprob is None
    assert not deltas[0].output.finished
    assert deltas[-1].output.finished
    finals = chunks(RequestOutputKind.FINAL_ONLY)
    assert len(finals) == len(expected)
    assert sorted((chunk.index, chunk.text, list(chunk.token_ids)) for chunk in finals) == [
        (i, text, tokens) for i, (text, tokens, *_) in enumerate(expected)
    ]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_closed_stream_of_any_kind_leaves_nothing_behind(llm: LLM, kind: RequestOutputKind) -> None:
    stream = llm.stream("def f(n):", SamplingParams(max_tokens=3, n=2, output_kind=kind))
    next(stream)
    stream.close()
    assert not llm.engine.has_work


def test_names_of_transformers_are_translated_in_the_message() -> None:
    with pytest.raises(PacelineError, match=r"'num_beams' \(give search='beam' to generate\), 'max_new_tokens'"):
        SamplingParams(num_beams=4, max_new_tokens=20)


@pytest.mark.parametrize("name", sorted(IDLE))
def test_parameters_that_ask_for_nothing_are_left_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    for value in (None, *IDLE[name]):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "paceline"):
            assert SamplingParams(seed=1, **{name: value}) == SamplingParams(seed=1)
        said = [record.getMessage() for record in caplog.records]
        assert said == ([] if value is None else [f"ignored, since it changes nothing here: {name}={value!r}"])
    with pytest.raises(ConfigError, match=f"SamplingParams does not know '{name}'"):
        SamplingParams(**{name: 7})


def test_parameters_that_ask_for_nothing_hide_no_others() -> None:
    with pytest.raises(
        ConfigError, match=r"^SamplingParams does not know 'tempreature' \(did you mean temperature\?\), 'x'"
    ):
        SamplingParams(best_of=None, tempreature=0, x=1)
