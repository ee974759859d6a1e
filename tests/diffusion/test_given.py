"""Text given in the answer, and thoughts before it, as requests ask for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline import LLM, RequestOutputKind, SamplingParams
from paceline.config import ThinkParams
from paceline.diffusion import METHODS, Canvas, ConfiguredMethod, DiffusionMetrics, decode
from paceline.diffusion.tccf import Phases, think_then_answer
from paceline.errors import ConfigError, PacelineError
from paceline.models import load_denoiser
from tests.diffusion.test_engine import GREEDY, OPEN, PROMPT
from tests.tiny_checkpoint import write as write_llama
from tests.tiny_diffusion import END, MASK, write

CHECK = "12:"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "full": write(tmp_path_factory.mktemp("llada")),
        "shifted": write(tmp_path_factory.mktemp("dream"), "dream"),
        "block": write(tmp_path_factory.mktemp("sdar"), "sdar"),
    }


def one(llm: LLM, prompt: str = PROMPT, **params: Any) -> Any:
    [out] = llm.generate(prompt, SamplingParams(**{**GREEDY, **params}))
    return out.outputs[0]


@pytest.mark.parametrize("kind", ["full", "shifted", "block"])
@pytest.mark.parametrize("method", ["static", "freedave", "eotp"])
def test_what_is_given_stays_and_the_rest_is_the_loops(folders: dict[str, Path], kind: str, method: str) -> None:
    llm = LLM(folders[kind], diffusion_config={"method": method}, **OPEN)
    ids = llm.tokenizer.encode
    pieces = [2, "ab", 3, ids("c, d"), 1]
    given = dict(zip((2, 3, 7, 8, 9, 10), [*ids("ab"), *ids("c, d")], strict=True))
    found = one(llm, canvas=pieces, ignore_eos=True)
    assert {slot: found.token_ids[slot] for slot in given} == given
    denoiser = load_denoiser(folders[kind], dtype="float32")
    canvas = Canvas.of(ids(PROMPT), 16, mask_token_id=MASK, priors=given)
    denoiser.eos_token_ids = ()
    assert llm.diffusion is not None
    [outcome] = decode([canvas], denoiser, [ConfiguredMethod(llm.diffusion.given).parts(denoiser, canvas)])
    assert found.token_ids == outcome.canvas.output
    assert found.token_ids != one(llm, ignore_eos=True).token_ids


@pytest.mark.parametrize("kind", ["full", "block"])
def test_a_text_does_not_end_before_what_is_given(folders: dict[str, Path], kind: str) -> None:
    llm = LLM(folders[kind], diffusion_config={"method": "static"}, **OPEN)
    eager: dict[str, Any] = {"logit_bias": {END: 100.0}}
    assert one(llm, **eager).token_ids == [END]
    found = one(llm, canvas=[5, "ab"], **eager)
    assert found.token_ids[5:] == [*llm.tokenizer.encode("ab"), END]
    assert END not in found.token_ids[:5]
    assert found.finish_reason == "stop"
    told = one(llm, canvas=[3, [END]], **eager)
    assert told.token_ids.index(END) == 3


def test_all_may_be_given(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        llm = LLM(folder, **OPEN)
        [out] = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=4, canvas=["abcd"]))
        assert (out.outputs[0].text, out.outputs[0].finish_reason) == ("abcd", "length")
        assert isinstance(out.metrics, DiffusionMetrics)
        assert out.metrics.num_calls == 0


def test_given_text_under_a_constraint(folders: dict[str, Path]) -> None:
    llm = LLM(folders["full"], diffusion_config={"regex": "[abc]{3}:[0-9]+"}, **OPEN)
    for seed in range(3):
        drawn: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": seed}
        text = one(llm, canvas=[2, "b:", 2, "7"], **drawn).text
        assert re.fullmatch("[abc]{2}b:[0-9]{2}7[0-9]*", text)
    assert not re.fullmatch("[abc]{2}b:[0-9]{2}7[0-9]*", one(llm, **drawn).text)
    [out] = llm.generate(PROMPT, SamplingParams(**GREEDY, canvas=[1, "1"]))
    with pytest.raises(PacelineError, match="the text given contradicts the constraint"):
        out.raise_for_error()


def test_prophet_monitors_what_follows_the_given_text(folders: dict[str, Path]) -> None:
    config = {"method": "prophet", "monitor": "template", "answer_length": 2, "gap_thresholds": [0.0, 0.0, 0.0]}
    llm = LLM(folders["full"], diffusion_config=config, **OPEN)
    [out] = llm.generate(PROMPT, SamplingParams(**GREEDY, canvas=[4, "ab: ", 4]))
    assert isinstance(out.metrics, DiffusionMetrics)
    assert out.metrics.num_calls == 1
    never = LLM(folders["full"], diffusion_config={**config, "gap_thresholds": [1e9] * 3}, **OPEN)
    [out] = never.generate(PROMPT, SamplingParams(**GREEDY, canvas=[4, "ab: ", 4], ignore_eos=True))
    assert isinstance(out.metrics, DiffusionMetrics)
    assert out.metrics.num_calls == 12
    with pytest.raises(ConfigError, match="canvas must give the text before the answer"):
        one(llm)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"canvas": "ab"}, "canvas must be a list of texts, numbers of slots to fill"),
    ({"canvas": 5}, "canvas must be a list of texts"),
    ({"canvas": [True, "a"]}, "canvas must be a list of texts"),
    ({"canvas": [1.5, "a"]}, "canvas must be a list of texts"),
    ({"canvas": [float("nan"), "a"]}, "canvas must be a list of texts"),
    ({"canvas": [float("inf"), "a"]}, "canvas must be a list of texts"),
    ({"canvas": [None, "a"]}, "canvas must be a list of texts"),
    ({"canvas": []}, "canvas must give a text or token ids"),
    ({"canvas": [3]}, "canvas must give a text or token ids"),
    ({"canvas": [0, "a"]}, "canvas slots to fill must be an integer in 1"),
    ({"canvas": [-1, "a"]}, "canvas slots to fill must be an integer in 1"),
    ({"canvas": [""]}, "canvas texts must not be empty"),
    ({"canvas": [[]]}, "canvas lists must hold token ids"),
    ({"canvas": [[-1]]}, "canvas token ids must be an integer of 0 or more"),
    ({"canvas": [["a"]]}, "canvas token ids must be an integer"),
    ({"canvas": [[True]]}, "canvas token ids must be an integer"),
    ({"canvas": [[MASK + 1]]}, f"canvas token ids must be an integer in 0..{MASK}"),
    ({"canvas": [[MASK]]}, "canvas must hold no mask token"),
    ({"canvas": ["a"] * 1025}, "canvas must have at most 1024 pieces"),
    ({"canvas": ["a" * 2**18, "a"]}, "canvas must hold at most 262144 characters"),
    ({"canvas": [16, "a"]}, "canvas must fit the 16 slots that max_tokens and the context leave, got 17"),
    ({"think": 0}, "think max_tokens must be an integer in 1"),
    ({"think": -1}, "think max_tokens must be an integer in 1"),
    ({"think": True}, "think must be a number of tokens"),
    ({"think": 1.5}, "think must be a number of tokens"),
    ({"think": float("nan")}, "think must be a number of tokens"),
    ({"think": "4"}, "think must be a number of tokens"),
    ({"think": {}}, "think must be a number of tokens"),
    ({"think": {"max_tokens": float("inf")}}, "think max_tokens must be an integer"),
    ({"think": {"max_tokens": True}}, "think max_tokens must be an integer"),
    ({"think": {"max_tokens": 4, "budget": 5}}, "think does not know 'budget'"),
    ({"think": {"max_tokens": 4, "check_prompt": 5}}, "think check_prompt must be a text"),
    ({"think": {"max_tokens": 4, "end": [""]}}, "think end must be a string or a list"),
    ({"think": {"max_tokens": 4, "end": ["a"] * 17}}, "think end must hold at most 16 texts"),
    ({"think": 10**6}, "think max_tokens must leave room for an answer"),
    ({"think": 252}, "think max_tokens must leave room for an answer"),
]


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return LLM(folders["full"], **OPEN)


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_values_get_one_line(llm: LLM, wrong: dict[str, Any], message: str) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(ConfigError, match="^" + re.escape(message)) as caught:
            call(PROMPT, SamplingParams(**{**GREEDY, **wrong}))
        assert "\n" not in str(caught.value)


def test_autoregressive_models_refuse_both_by_name(tmp_path: Path) -> None:
    plain = LLM(write_llama(tmp_path), speculative_config=None)
    for name, value in (("canvas", ["a"]), ("think", 4)):
        for call in (plain.generate, plain.stream):
            with pytest.raises(ConfigError, match=f"^{name} cannot be used with an autoregressive model; leave it out"):
                call("ab", SamplingParams(max_tokens=4, **{name: value}))


THINK: dict[str, Any] = {"check_prompt": CHECK, "end": ()}


@pytest.mark.parametrize("kind", ["full", "block"])
@pytest.mark.parametrize("length", [1, 3, 7, 8])
def test_thinking_is_the_published_procedure_at_any_length(folders: dict[str, Path], kind: str, length: int) -> None:
    config = {"method": "bacd", "block_length": 4}
    llm = LLM(folders[kind], diffusion_config=config, **OPEN)
    denoiser = load_denoiser(folders[kind], dtype="float32")
    denoiser.eos_token_ids = ()
    ids = llm.tokenizer.encode
    phases = Phases(thinking_length=length, answer_length=5, check_prompt=ids(CHECK), thinking=config)
    [right] = think_then_answer([ids(PROMPT)], denoiser, phases)
    assert (len(right.thoughts), len(right.answer)) == (length, 5)
    found = one(llm, think={**THINK, "max_tokens": length}, max_tokens=5, ignore_eos=True)
    assert (found.reasoning_token_ids, found.token_ids) == (right.thoughts, right.answer)
    assert (found.reasoning, found.text) == tuple(map(llm.tokenizer.decode, (right.thoughts, right.answer)))
    coarse = one(llm, llm.tokenizer.decode([*ids(PROMPT), *right.thoughts]) + CHECK, max_tokens=5, ignore_eos=True)
    assert kind == "full" or length != 8 or coarse.token_ids != found.token_ids, "the answer has blocks of one slot"


def test_thoughts_end_at_their_text_or_at_the_end(llm: LLM) -> None:
    whole = one(llm, think={**THINK, "max_tokens": 12}, ignore_eos=True)
    text = whole.reasoning
    mark = text[4:6]
    ended = one(llm, think={**THINK, "max_tokens": 12, "end": mark}, ignore_eos=True)
    assert ended.reasoning == text[: text.index(mark)]
    assert ended.reasoning_token_ids == whole.reasoning_token_ids[: text.index(mark) + 2]  # a token a character
    assert ended.token_ids != whole.token_ids
    short = one(llm, think={**THINK, "max_tokens": 12}, logit_bias={END: 100.0})
    assert (short.reasoning, short.reasoning_token_ids, short.token_ids) == ("", [], [END])


def test_streams_and_several_outputs_of_thoughts_and_answers(llm: LLM) -> None:
    params = {"temperature": 1.0, "max_tokens": 6, "seed": 3, "n": 2, "think": {**THINK, "max_tokens": 5}}
    for kind in RequestOutputKind:
        [whole] = llm.generate([PROMPT], SamplingParams(**params))
        chunks = list(llm.stream(PROMPT, SamplingParams(**params, output_kind=kind)))
        for i, output in enumerate(whole.outputs):
            mine = [chunk for chunk in chunks if chunk.index == i]
            assert "".join(chunk.reasoning for chunk in mine) == output.reasoning
            assert "".join(chunk.text for chunk in mine) == output.text
            assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
            told = [chunk.output.outputs[i].reasoning or "" for chunk in mine]
            assert ("".join(told) if kind is RequestOutputKind.DELTA else told[-1]) == output.reasoning
    assert whole.outputs[0].reasoning_token_ids != whole.outputs[1].reasoning_token_ids
    assert isinstance(whole.metrics, DiffusionMetrics)
    made = [(len(one.reasoning_token_ids), len(one.token_ids)) for one in whole.outputs]
    assert whole.metrics.num_reasoning_tokens == sum(thoughts for thoughts, _ in made)
    assert whole.metrics.num_generation_tokens == sum(map(sum, made))
    stream = llm.stream(PROMPT, SamplingParams(**params))
    first = next(stream)
    stream.close()
    assert {one.finish_reason for one in first.output.outputs} == {"abort"}


def test_who_thinks_and_who_does_not_are_decoded_as_alone(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, max_tokens=5, seed=i, think=4 if i % 2 else None) for i in range(4)]
    together = [out.outputs[0] for out in llm.generate([PROMPT] * 4, params)]
    alone = [llm.generate(PROMPT, each)[0].outputs[0] for each in params]
    assert [(o.reasoning, o.token_ids) for o in together] == [(o.reasoning, o.token_ids) for o in alone]
    assert [o.reasoning is None for o in together] == [True, False, True, False]


def test_a_constraint_and_given_text_hold_for_the_answer(folders: dict[str, Path]) -> None:
    llm = LLM(folders["block"], diffusion_config={"regex": "[abc]{3}:[0-9]+"}, **OPEN)
    found = one(llm, think=ThinkParams(max_tokens=6, check_prompt=CHECK), max_tokens=9, canvas=[2, "b"])
    assert re.fullmatch("[abc]{2}b:[0-9]+", found.text)
    assert not re.match("[abc]{3}:", found.reasoning)


def test_a_model_that_breaks_down_while_it_thinks(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folders["full"], diffusion_config="leftmost", **OPEN)
    assert llm.diffusion is not None
    forward, passes = llm.diffusion.denoiser.forward, iter(range(99))
    broken = lambda calls: [rows if next(passes) < 3 else rows.where(rows > 1e9, np.nan) for rows in forward(calls)]  # noqa: E731
    monkeypatch.setattr(llm.diffusion.denoiser, "forward", broken)
    found = one(llm, think={**THINK, "max_tokens": 8}, ignore_eos=True)
    assert (found.finish_reason, found.token_ids, len(found.reasoning_token_ids)) == ("error", [], 2)
    assert "NaN" in found.error


SHORT = ["ass_blocks", "bacd_progressive", "window_diffusion"]
"""Without `block_length`."""
ANYWHERE = ["ass", "eoser_ass", "dream_origin", "remdm", "remdm_conf", "mask_predict"]
"""They write anywhere: their text is one block."""


@pytest.mark.parametrize("kind", ["full", "block"])
@pytest.mark.parametrize("method", [name for name in METHODS if "learn2pd" not in name])
def test_lengths_that_do_not_divide(folders: dict[str, Path], kind: str, method: str) -> None:
    if kind == "block" and METHODS[method].needs == "full attention" and method not in ANYWHERE:
        pytest.skip("full attention only")
    config: dict[str, Any] = {"method": method} | ({"regex": "[a-p]*"} if method == "cfg_dllm" else {})
    blocks = {} if kind == "block" or method in [*SHORT, *ANYWHERE] else {"block_length": 5}
    llm = LLM(folders[kind], diffusion_config={**config, **blocks}, **OPEN)
    lengths = (1, 9) if kind == "full" or method not in ANYWHERE else (1, 3)
    for length in lengths:
        if method != "cfg_dllm":
            whole = one(llm, "abcd", max_tokens=length, ignore_eos=True)
            assert (len(whole.token_ids), whole.finish_reason) == (length, "length")
    found = one(llm, "abcd", max_tokens=lengths[-1])
    ended = found.token_ids[-1] == END
    assert found.finish_reason == ("stop" if ended else "length")
    assert len(found.token_ids) == lengths[-1] or ended
    if kind == "block" and method in ANYWHERE:
        with pytest.raises(ConfigError, match="max_tokens of a block-causal model must fit one block of 4 slots"):
            one(llm, "abcd", max_tokens=9)


def test_more_rounds_than_a_short_text_has_slots(folders: dict[str, Path]) -> None:
    llm = LLM(folders["full"], diffusion_config={"method": "static", "denoising_steps": 12}, **OPEN)
    singly = LLM(folders["full"], diffusion_config={"method": "static"}, **OPEN)
    short: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True}
    assert one(llm, **short).token_ids == one(singly, **short).token_ids
    assert one(llm, ignore_eos=True).token_ids != one(singly, ignore_eos=True).token_ids
    chosen = {"method": "static", "denoising_steps": 12, "block_length": 8}
    with pytest.raises(ConfigError, match=r"denoising_steps must lie in 1\.\.8"):
        one(LLM(folders["full"], diffusion_config=chosen, **OPEN))
