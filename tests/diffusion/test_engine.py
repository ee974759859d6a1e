"""`LLM` on a diffusion checkpoint: canvases behind the front door, cut and counted as other models' texts, or refused
by name.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, RequestOutputKind, SamplingParams
from paceline.checkpoints import hub
from paceline.config import OF_DIFFUSION
from paceline.diffusion import Canvas, ConfiguredMethod, DiffusionMetrics, decode
from paceline.diffusion.options import ENGINE, SAMPLING
from paceline.diffusion.outputs import DOT, CanvasChunk
from paceline.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    PacelineError,
    PromptError,
    UnsupportedModelError,
)
from paceline.models import load_denoiser
from tests.tiny_checkpoint import edit_json
from tests.tiny_checkpoint import write as write_llama
from tests.tiny_diffusion import END, MASK, write

PROMPT = "a1: "

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16}

OPEN: dict[str, Any] = {"dtype": "float32", "seed": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llada"))


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sdar"), "sdar")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, diffusion_config={"method": "static"}, **OPEN)


def direct(folder: Path, prompt: list[int], slots: int, config: dict[str, Any]) -> list[int]:
    """The tokens of the loop, without the front door; with what comes after the end."""
    denoiser = load_denoiser(folder, dtype="float32")
    canvas = Canvas.of(prompt, slots, mask_token_id=denoiser.mask_token_id, eos_token_ids=denoiser.eos_token_ids)
    return decode([canvas], denoiser, [ConfiguredMethod(config).parts(denoiser, canvas)])[0].canvas.output


def test_the_tokens_are_the_loops(folder: Path, llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    [out] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True))
    output = out.outputs[0]
    assert output.token_ids == direct(folder, ids, 16, {"method": "static"})
    assert output.token_ids != direct(folder, ids, 16, {"method": "leftmost"})
    assert (output.text, output.finish_reason) == (llm.tokenizer.decode(output.token_ids), "length")
    assert (out.prompt, out.prompt_token_ids) == (PROMPT, ids)
    metrics = out.metrics
    assert isinstance(metrics, DiffusionMetrics)
    assert (metrics.num_calls, metrics.num_steps, metrics.num_rounds, metrics.num_generation_tokens) == (16, 16, 16, 16)
    assert (metrics.num_slots_computed, metrics.tokens_per_call) == (16 * (len(ids) + 16), 1.0)
    assert 0 < metrics.seconds <= metrics.generation_time
    assert {"num_calls", "num_slots_computed", "tokens_per_call", "seconds"} <= out.to_dict()["metrics"].keys()


def test_times_cover_all_groups_of_canvases_that_wait_for_room(folder: Path) -> None:
    narrow = LLM(folder, diffusion_config={"method": "static"}, max_num_seqs=1, **OPEN)
    many, few = (SamplingParams(temperature=1.0, max_tokens=8, n=n, ignore_eos=True, seed=0) for n in (6, 2))
    early, late = (out.metrics for out in narrow.generate([PROMPT, PROMPT], [many, few]))
    for metrics, outputs in ((early, 6), (late, 2)):
        assert isinstance(metrics, DiffusionMetrics)
        assert metrics.num_calls == outputs * 8
        assert metrics.seconds <= metrics.generation_time, "canvases one after the other"
    assert early.time_to_first_token is not None
    assert late.time_to_first_token is not None
    assert early.time_to_first_token < early.generation_time
    assert late.generation_time < early.generation_time < late.time_to_first_token, "it waited for the first request"


def test_the_block_cache_of_a_block_causal_model_is_on_and_changes_nothing(causal: Path) -> None:
    found = LLM(causal, **OPEN)
    assert found.diffusion is not None
    assert found.diffusion.method.names["cache"] == "block"
    ids = found.tokenizer.encode(PROMPT + "b")  # 5 tokens in blocks of 4
    [out] = found.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert out.outputs[0].token_ids == direct(causal, ids, 11, {"method": "threshold"})[:9]
    plain = LLM(causal, diffusion_config={"cache": "none"}, **OPEN)
    [other] = plain.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert other.outputs[0].token_ids == out.outputs[0].token_ids
    assert isinstance(out.metrics, DiffusionMetrics)
    assert isinstance(other.metrics, DiffusionMetrics)
    assert out.metrics.num_slots_computed < other.metrics.num_slots_computed


def test_lengths_are_rounded_up_to_blocks_and_cut_back(folder: Path) -> None:
    blocks = LLM(folder, diffusion_config={"method": "static", "dllm_block_length": 8}, **OPEN)
    ids = blocks.tokenizer.encode(PROMPT)
    [out] = blocks.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True))
    whole = direct(folder, ids, 16, {"method": "static", "block_length": 8})
    assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == (whole[:13], "length")
    assert out.metrics.num_steps == 16
    long = [7] * 250  # of 256
    with pytest.raises(
        PromptError, match="the prompt has 250 tokens, but the context holds 256 including at least one block of 8"
    ):
        blocks.generate({"prompt_token_ids": long}, SamplingParams(**GREEDY))
    [short] = blocks.generate(
        {"prompt_token_ids": long[:240]}, SamplingParams(temperature=0.0, max_tokens=999, ignore_eos=True)
    )
    assert len(short.outputs[0].token_ids) == 16


def test_text_ends_at_the_first_end_token(folder: Path, llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True))
    tokens = whole.outputs[0].token_ids
    to_end = SamplingParams(**GREEDY, logit_bias={END: 6.0})
    [ended] = llm.generate(PROMPT, to_end)
    first = ended.outputs[0]
    assert first.token_ids[-1] == END
    assert END not in first.token_ids[:-1]
    assert len(first.token_ids) < 16
    assert (first.finish_reason, first.stop_reason) == ("stop", None)
    assert "</s>" not in first.text
    [on] = llm.generate(PROMPT, SamplingParams(**GREEDY, logit_bias={END: 6.0}, ignore_eos=True))
    assert (len(on.outputs[0].token_ids), on.outputs[0].finish_reason) == (16, "length")
    assert on.outputs[0].token_ids != tokens  # the bias is what made it end


@pytest.mark.parametrize("method", ["static", "leftmost", "freedave", "llada2.1_q"])
def test_what_would_be_cut_off_is_not_decoded(folder: Path, method: str) -> None:
    found = LLM(folder, diffusion_config={"method": method, "block_length": 4}, **OPEN)
    [whole] = found.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    tokens = whole.outputs[0].token_ids
    stop = next(i for i in range(4, 32) if tokens[i] not in tokens[:i])
    for change in ({"stop_token_ids": [tokens[stop]]}, {"stop": found.tokenizer.token_text(tokens[stop])}):
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, **change)
        [out] = found.generate(PROMPT, params)
        assert out.outputs[0].token_ids == tokens[: stop + 1]
        spared = out.metrics.num_steps < whole.metrics.num_steps
        assert spared == (method != "llada2.1_q")  # which may still edit what it has written
        assert list(found.stream(PROMPT, params))[-1].output.outputs[0].token_ids == tokens[: stop + 1]


def test_stop_strings_and_tokens(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True))
    text, tokens = whole.outputs[0].text, whole.outputs[0].token_ids
    part = text[4:6]
    [stopped] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True, stop=part))
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == (text[: text.index(part)], part)
    [kept] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True, stop=part, include_stop_str_in_output=True))
    assert kept.outputs[0].text == text[: text.index(part) + 2]
    [by_token] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True, stop_token_ids=[tokens[5]]))
    output = by_token.outputs[0]
    assert (output.token_ids, output.stop_reason) == (tokens[: tokens.index(tokens[5]) + 1], tokens[5])


def test_a_bias_bars_a_token_in_every_slot(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True))
    barred = whole.outputs[0].token_ids[0]
    [other] = llm.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True, logit_bias={barred: -100}))
    assert barred not in other.outputs[0].token_ids
    with pytest.raises(ConfigError, match=r"logit_bias token id must be an integer in 0\.\.39, got 40"):
        llm.generate(PROMPT, SamplingParams(logit_bias={MASK + 1: 1.0}))


def test_a_batch_gives_what_each_prompt_gives_alone(folder: Path) -> None:
    prompts = [PROMPT, "b", "cdefgh 12: ", "0"]
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature=temperature, max_tokens=4 + i, seed=i, ignore_eos=True) for i in range(4)]
        together = LLM(folder, max_num_seqs=3, **OPEN).generate(prompts, params)
        alone = [LLM(folder, **OPEN).generate(p, one)[0] for p, one in zip(prompts, params, strict=True)]
        assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    assert len({tuple(o.outputs[0].token_ids) for o in together}) == 4


def test_seeds_and_several_outputs(llm: LLM) -> None:
    def drawn(seed: int | None, n: int = 1) -> list[list[int]]:
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed, n=n, ignore_eos=True)
        return [output.token_ids for output in llm.generate(PROMPT, params)[0].outputs]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert drawn(None) != drawn(None)
    three = drawn(3, n=3)
    assert three[0] == drawn(3)[0]
    assert len({tuple(one) for one in three}) == 3


def test_streams_show_the_canvas_and_end_with_the_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    [whole] = llm.generate(PROMPT, params)
    chunks = list(llm.stream(PROMPT, params))
    assert all(isinstance(chunk, CanvasChunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert [t for chunk in chunks for t in chunk.token_ids] == whole.outputs[0].token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    drawn = [chunk.pieces for chunk in chunks if isinstance(chunk, CanvasChunk)]
    masked = [sum(len(text) for text, state in pieces if state == "masked") for pieces in drawn]
    assert masked == [5, 4, 3, 2, 0, 0]  # the last slot needs no pass of its own
    assert {text for pieces in drawn for text, state in pieces if state == "masked"} <= {DOT * n for n in range(1, 6)}
    assert [sum(len(text) for text, state in pieces if state == "new") for pieces in drawn] == [1, 1, 1, 1, 2, 0]
    assert "".join(text for text, _ in drawn[-1]) == whole.outputs[0].text


def test_kinds_of_stream_output(llm: LLM) -> None:
    [whole] = llm.generate(PROMPT, SamplingParams(**GREEDY, n=2))
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        chunks = list(llm.stream(PROMPT, SamplingParams(**GREEDY, n=2, output_kind=kind)))
        for i, output in enumerate(whole.outputs):
            parts = [one for one in chunks if one.index == i]
            assert "".join(one.output.outputs[i].text for one in parts) == output.text
            assert [one.finish_reason for one in parts][-1] == output.finish_reason
        assert (len(chunks) == 2) == (kind is RequestOutputKind.FINAL_ONLY)
        assert isinstance(chunks[0], CanvasChunk)


def test_progress_and_close(folder: Path) -> None:
    told: list[int] = []

    class Bar(nullcontext):  # type: ignore[type-arg]
        def __init__(self, total: int, **_: Any) -> None:
            super().__init__(self)
            self.n = 0

        def update(self, more: int) -> None:
            self.n += more
            told.append(self.n)

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            pass

    with LLM(folder, diffusion_config={"method": "static"}, max_num_seqs=1, **OPEN) as one:
        one.generate([PROMPT, PROMPT], SamplingParams(**GREEDY), use_tqdm=Bar)
        assert not one.reset_prefix_cache()
    assert told == [1, 2]
    with pytest.raises(ConfigError, match="this LLM is closed"):
        one.generate(PROMPT)


def test_closing_a_stream_cancels_it(llm: LLM) -> None:
    chunks = llm.stream(PROMPT, SamplingParams(**GREEDY))
    first = next(chunks)
    assert not first.output.finished
    chunks.close()
    assert first.output.outputs[0].finish_reason == "abort"


def test_chat(llm: LLM) -> None:
    params = SamplingParams(**GREEDY)
    [answer] = llm.chat([{"role": "user", "content": "ab"}], params)
    [same] = llm.generate("ab:", params)
    assert answer.outputs[0].token_ids == same.outputs[0].token_ids


def test_constrained_texts(folder: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 999}}, "required": ["a"]}
    for config, fits in (
        ({"json_schema": schema}, lambda text: isinstance(json.loads(text)["a"], int)),
        ({"method": "cfg_dllm", "regex": "[abc]{3}:[0-9]+"}, lambda text: re.fullmatch("[abc]{3}:[0-9]+", text)),
    ):
        found = LLM(folder, diffusion_config=config, **OPEN)
        for seed in range(4):
            [out] = found.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=14, seed=seed))
            assert fits(out.outputs[0].text), out.outputs[0].text
    for length in (5, 6):  # of blocks of 8: the text ends before the cut
        blocks = LLM(
            folder, diffusion_config={"method": "static", "regex": "[abc]{3}:[0-9]+", "block_length": 8}, **OPEN
        )
        [out] = blocks.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=length, seed=0))
        assert re.fullmatch("[abc]{3}:[0-9]+", out.outputs[0].text)
        with pytest.raises(ConfigError, match="fill whole blocks where a constrained text has no end"):
            blocks.generate(PROMPT, SamplingParams(max_tokens=length, ignore_eos=True))
    free = LLM(folder, **OPEN).generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=14, seed=0))
    assert not re.fullmatch("[abc]{3}:[0-9]+", free[0].outputs[0].text)


@pytest.mark.parametrize(
    "change",
    [
        {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.1}, {"bad_words": ["a"]}, {"min_tokens": 2}, {"logprobs": 1}, {"prompt_logprobs": 0},
        {"allowed_token_ids": [3]}, {"logits_processors": [lambda output, logits: logits]},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_cannot_be_honoured_is_rejected_by_name(llm: LLM, change: dict[str, Any]) -> None:
    [name] = change
    for call in (llm.generate, llm.stream):
        with pytest.raises(
            ConfigError, match=f"^{name}=.* cannot be used with a diffusion language model; leave it out$"
        ):
            call(PROMPT, SamplingParams(**GREEDY, **change))


def test_every_sampling_parameter_is_either_honoured_or_rejected() -> None:
    honoured = {
        "n",
        "temperature",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "max_tokens",
    }
    honoured |= {
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "output_kind",
        "truncate_prompt_tokens",
        *OF_DIFFUSION,
    }
    assert honoured | SAMPLING.keys() == set(SamplingParams.__dataclass_fields__)
    assert not honoured & SAMPLING.keys()
    defaults = SamplingParams()
    assert all(getattr(defaults, name) == value for name, value in SAMPLING.items())


def test_engine_arguments_that_cannot_be_honoured(folder: Path) -> None:
    wrong = {
        "quantization": "int8",
        "activation_bits": 16,
        "exactness": "strict",
        "kv_cache_memory_bytes": 10**9,
        "max_num_batched_tokens": 64,
        "kv_selection": "double_sparsity",
        "skipping": "lora_drop",
    }
    assert wrong.keys() | {"speculative_memory_bytes"} == ENGINE.keys()
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"^{name}=.* cannot be used with a diffusion language model"):
            LLM(folder, **{name: value})
    with pytest.raises(ConfigError, match=r"max_model_len must be an integer in 1\.\.256, got 257"):
        LLM(folder, max_model_len=257)
    short = LLM(folder, max_model_len=10, **OPEN)
    assert len(short.generate(PROMPT, SamplingParams(**GREEDY, ignore_eos=True))[0].outputs[0].token_ids) == 6


def test_the_configurations_of_the_other_kind(folder: Path, tmp_path: Path, llm: LLM) -> None:
    with pytest.raises(
        ConfigError, match=r"speculative_config cannot be used with .*, a diffusion language model; .*diffusion_config"
    ):
        LLM(folder, speculative_config={"method": "ngram"})
    LLM(folder, speculative_config=None, **OPEN)  # asks for nothing
    with pytest.raises(
        ConfigError, match=r"diffusion_config needs a diffusion language model.* use speculative_config"
    ):
        LLM(write_llama(tmp_path), diffusion_config={"method": "static"})
    for refused in (lambda: llm.exactness, llm.save_tables, lambda: llm.with_speculative_config(None)):
        with pytest.raises(CapabilityError, match="is a diffusion language model"):
            refused()
    with pytest.raises(ConfigError, match="a prediction cannot be used"):
        llm.generate({"prompt": PROMPT, "prediction": "abc"}, SamplingParams(**GREEDY))


WRONG: list[tuple[Any, str]] = [
    ({"method": "stattic"}, "unknown diffusion method 'stattic'; did you mean static"),
    ({"method": "static", "confidence_threshold": 0.5}, "has no option 'confidence_threshold'"),
    ({"temperature": 1.0}, "temperature in diffusion_config must be a sampling parameter"),
    ({"block_length": 0}, "block_length must be an integer of 1 or more, got 0"),
    ({"block_length": "8"}, "block_length must be an integer, got '8'"),
    ("{", "diffusion_config is not JSON"),
    (
        '{"cache": "none", "cache": "dual"}',
        "diffusion_config must have each key once, and 'cache' occurs 2 times",
    ),
    ({"confidence_threshold": 5}, r"confidence_threshold must be a number in 0\.\.2, got 5"),
    ({"confidence_threshold": -0.1}, "confidence_threshold must be a number in"),
    ({"confidence_threshold": float("nan")}, "confidence_threshold must be a number in"),
    ({"confidence_threshold": "0.5"}, "confidence_threshold must be a number in"),
    ({"confidence_threshold": True}, "confidence_threshold must be a number in"),
    ({"confidence_threshold": None}, "confidence_threshold must be a number in"),
    (
        {"confidence_threshold": 0.5, "dllm_confidence_threshold": 0.9},
        "'dllm_confidence_threshold' is another name of 'confidence",
    ),
    ({"method": "factor", "factor": -1}, "factor must be a number in"),
    ({"method": "factor", "factor": [1]}, "factor must be a number in"),
    ({"method": "llada2.1_s", "edit_threshold": 1.5}, r"edit_threshold must be a number in 0\.\.1, got 1\.5"),
    ({"method": "bacd", "confidence_low": -3}, "confidence_low must be a number in"),
    ({"method": "static", "denoising_steps": 2.5}, r"denoising_steps must be an integer, got 2\.5"),
    ({"method": "static", "denoising_steps": "8"}, "denoising_steps must be an integer, got '8'"),
    ({"method": "freedave", "drafts": 0.5}, "drafts must be an integer"),
    ({"method": "freedave", "layout": 5}, "layout must be one of 'batch', 'tree', got 5"),
    ({"method": "prophet", "gap_thresholds": 5}, "gap_thresholds must be a list of numbers"),
    ({"method": "prophet", "gap_progress": [0.3, 7.0]}, "gap_progress must be a list of numbers in"),
    ({"method": "eotp", "end_token_ids": ["x"]}, "end_token_ids must be a list of integers in"),
    ({"method": "eotp", "eager_end": 1}, "eager_end must be True or False, got 1"),
    ({"method": "learn2pd", "filter": 5}, "filter must be a string or a path or a function, got 5"),
    ({"method": "eoser", "eos_factor_min": "x"}, "eos_factor_min must be a number in"),
    ({"method": "ete", "min_exploit": -1}, "min_exploit must be an integer in"),
    ({"cache": 5}, "cache must be one of none, prefix, dual, window, block, got 5"),
    ({"cache": None}, "cache must be one of none"),
    ({"commit": []}, "commit must be one of quota"),
    ({"method": 3}, "method must be the name of a diffusion method, got 3"),
    ({"modifiers": "eoser"}, "modifiers must be a list of eoser, eos_bar, order_noise, got 'eoser'"),
    ({"modifiers": ["eosr"]}, "unknown modifier 'eosr'; did you mean eoser"),
    ({5: 1}, "each key of a diffusion_config must be a string, got 5"),
    ({"dllm_temperature": 1.0}, "temperature in diffusion_config must be a sampling parameter"),
    (5, "diffusion_config must be a dict, JSON or the name of a method, got 5"),
    ("[1]", r"unknown diffusion method '\[1\]'"),
    ({"cache": "block"}, "this model's attention is full"),
    (
        {"method": "static", "block_length": 16, "denoising_steps": 17},
        r"denoising_steps must lie in 1\.\.16, .* got 17",
    ),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=str)
def test_wrong_configurations_get_one_line(folder: Path, config: Any, message: str) -> None:
    with pytest.raises(PacelineError, match=message) as caught:
        LLM(folder, diffusion_config=config, **OPEN).generate(PROMPT, SamplingParams(**GREEDY))
    assert "\n" not in str(caught.value)


def test_wrong_checkpoints_and_blocks(causal: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"block_length must divide the model's block length 4 .* got 3"):
        LLM(causal, diffusion_config={"block_length": 3}, **OPEN).generate(PROMPT, SamplingParams(**GREEDY))
    nameless = shutil.copytree(folder, tmp_path / "nameless")
    edit_json(nameless / "config.json", mask_token_id=None)
    edit_json(nameless / "tokenizer_config.json", mask_token=None)
    text = (nameless / "tokenizer.json").read_text().replace("<|mask|>", "<|gap|>")
    (nameless / "tokenizer.json").write_text(text)
    with pytest.raises(UnsupportedModelError, match="without a mask token cannot be decoded by diffusion"):
        LLM(nameless)
    with pytest.raises(ConfigError, match="hold no mask token"):
        LLM(folder, **OPEN).generate({"prompt_token_ids": [5, MASK]}, SamplingParams(**GREEDY))


def test_a_constraint_that_no_text_meets(folder: Path) -> None:
    [out] = LLM(folder, diffusion_config={"regex": "zz"}, **OPEN).generate(PROMPT, SamplingParams(**GREEDY))
    assert (out.outputs[0].finish_reason, out.outputs[0].token_ids) == ("error", [])
    with pytest.raises(PacelineError, match="no text of the constraint fits 16 slots"):
        out.raise_for_error()


def test_a_model_that_breaks_down_ends_its_output_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = LLM(folder, diffusion_config="static", **OPEN)
    assert found.diffusion is not None
    forward, passes = found.diffusion.denoiser.forward, iter(range(99))
    broken = lambda calls: [rows if next(passes) < 3 else rows.where(rows > 1e9, np.nan) for rows in forward(calls)]  # noqa: E731
    monkeypatch.setattr(found.diffusion.denoiser, "forward", broken)
    [out] = found.generate(PROMPT, SamplingParams(**GREEDY))
    assert out.outputs[0].finish_reason == "error"
    with pytest.raises(PacelineError, match="the model's logits hold NaN"):
        out.raise_for_error()


def test_the_names_of_bundled_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve("bundled/target") == hub.BUNDLED_FOLDER / "target"
    with pytest.raises(CheckpointError, match=r"no model called 'bundled/nothing' ships .* bundled/target"):
        LLM("bundled/nothing")
    shutil.copytree(folder, tmp_path / "diffusion")
    monkeypatch.setattr(hub, "BUNDLED_FOLDER", tmp_path)
    assert LLM("bundled/diffusion", **OPEN).diffusion is not None
    with pytest.raises(ConfigError, match="leave it out"):
        LLM("bundled/diffusion", revision="main")


def test_recommendations_that_cannot_be_honoured_are_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = shutil.copytree(folder, tmp_path / "there")
    (there / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "eos_token_id": END})
    )
    found = LLM(there, **OPEN)
    assert found.default_sampling_params() == SamplingParams(temperature=0.5)
    assert "top_p cannot be honoured" in caplog.text
    found.generate(PROMPT)


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
