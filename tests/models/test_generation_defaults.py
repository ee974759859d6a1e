"""Defaults read from generation_config.json, with what stands behind it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import write
from transformers import GenerationConfig

import paceline
from paceline import LLM
from paceline.checkpoints import GenerationDefaults, Tokenizer
from paceline.config import SamplingParams
from paceline.errors import CheckpointError

BUNDLED = Path(paceline.__file__).parent / "bundled"


def folder(tmp_path: Path, generation: Any = None, config: Any = None) -> Path:
    for name, content in (("generation_config", generation), ("config", config)):
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize("value", ["x", 1.5, True, [1, "x"]])
def test_a_broken_end_token_is_rejected_where_it_does_not_count_too(tmp_path: Path, value: Any) -> None:
    path = folder(tmp_path, {"eos_token_id": 5}, {"eos_token_id": value})
    with pytest.raises(
        CheckpointError, match=r"eos_token_id in .* must be a token id or a list of them, got .*; correct the file"
    ):
        GenerationDefaults.load(path)
    assert GenerationDefaults.load(folder(tmp_path, {"eos_token_id": 5}, {"eos_token_id": -1})).eos_ids == (5,)


@pytest.mark.parametrize(("last", "named"), [(9, False), (10, True)])
def test_an_end_token_beyond_the_vocabulary_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: int, named: bool
) -> None:
    GenerationDefaults.load(folder(tmp_path, {"eos_token_id": [5, last]}, {"vocab_size": 10}))
    assert ("end token 10 of" in caplog.text) == named


def test_the_bundled_target_ends_at_either_of_its_end_tokens() -> None:
    found = GenerationDefaults.load(Path(paceline.__file__).parent / "bundled" / "target")
    assert found.eos_ids == (3, 0)
    assert found.sampling == {}


@pytest.mark.parametrize(("value", "expected"), [(5, (5,)), ([7, 5, 7], (7, 5)), (0, (0,))])
def test_end_tokens_of_generation_config_win(tmp_path: Path, value: Any, expected: tuple[int, ...]) -> None:
    path = folder(tmp_path, {"eos_token_id": value}, {"eos_token_id": 2})
    assert GenerationDefaults.load(path).eos_ids == expected


def theirs(path: Path) -> tuple[int, ...]:
    """The end tokens that transformers' `from_pretrained` gives a model."""
    try:
        found = GenerationConfig.from_pretrained(path)
    except OSError:
        found = GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)
    ids = found.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)


GENERATION: list[Any] = [None, {}, {"eos_token_id": None}, {"eos_token_id": 5}, {"eos_token_id": [5, 6]}]
CONFIG: list[Any] = [
    {},
    {"eos_token_id": None},
    {"eos_token_id": 7},
    {"eos_token_id": [7, 8]},
    {"text_config": {"eos_token_id": 9}},
    {"eos_token_id": 7, "text_config": {"eos_token_id": 9}},
    {"decoder": {"eos_token_id": 4}, "text_config": {"eos_token_id": 9}},
    {"decoder": {}, "text_config": {"eos_token_id": 9}},
]


@pytest.mark.parametrize("generation", GENERATION)
@pytest.mark.parametrize("config", CONFIG)
def test_end_tokens_are_those_of_transformers_and_the_tokenizers(tmp_path: Path, generation: Any, config: Any) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "tokenizer", "byte_level"))
    path = folder(tmp_path, generation, config)
    expected = theirs(path)
    assert GenerationDefaults.load(path).eos_ids == expected
    assert GenerationDefaults.load(path, tokenizer).eos_ids == (*expected, tokenizer.eos_id)


def test_the_check_tells_the_files_apart(tmp_path: Path) -> None:
    assert theirs(folder(tmp_path, {}, {"eos_token_id": 7})) == ()
    (tmp_path / "generation_config.json").unlink()
    assert theirs(tmp_path) == (7,)


def test_a_checkpoint_without_any_end_token_ends_at_the_tokenizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "tokenizer", "byte_level"))
    assert GenerationDefaults.load(tmp_path / "tokenizer", tokenizer).eos_ids == (2,)
    assert GenerationDefaults.load(tmp_path / "tokenizer").eos_ids == ()
    assert not caplog.records
    assert GenerationDefaults.load(folder(tmp_path, {}, {"eos_token_id": 7}), tokenizer).eos_ids == (2,)
    assert "which generation_config.json does not name as end token" in caplog.text


def talk(header: str, end: str, last: str = "{{ '' }}") -> str:
    """A chat template."""
    turn = f"{header}{{{{ m.content }}}}{{% if m.role == 'assistant' %}}{end}{{% endif %}}"
    return f"{{% for m in messages %}}{turn}{{% endfor %}}{last}"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ENDINGS = "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
TEMPLATES: dict[str, tuple[str | None, str | None]] = {
    "ChatML, Qwen": (CHATML, "<|im_end|>"),
    "Llama 2": (talk("{{ bos_token }}[INST] ", " {{ eos_token }}"), "</s>"),
    "Llama 3": (talk("<|im_start|>{{ m.role }}<|im_start|>\n\n", "<|eot_id|>"), "<|eot_id|>"),
    "Phi-3, which ends a conversation by another token": (talk("<|{{ m.role }}|>\n", "<|end|>\n", "</s>"), "<|end|>"),
    "an added token that is not special": (talk("# {{ m.role }}\n", "<turn>\n"), "<turn>"),
    "gpt-oss, whose last answer ends otherwise": (talk("<|im_start|>", ENDINGS), None),
    "Command A, with two tokens": (talk("<|im_start|>", "<|end|><|im_end|>"), None),
    "GLM-4, where the next header ends an answer": (talk("<|im_start|>{{ m.role }}\n", ""), None),
    "a word": (talk("{{ m.role }}: ", " and"), None),
    "a rejection": ("{{ raise_exception('one turn only') }}", None),
    "a broken one": ("{% for m in", None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn_is_what_a_template_writes_behind_an_answer(tmp_path: Path, name: str) -> None:
    template, end = TEMPLATES[name]
    special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|return|>", "<|user|>", "<|assistant|>"]
    plain = {"content": "<turn>", "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    more = {"additional_special_tokens": special, "added_tokens_decoder": {"340": plain}}
    tokenizer = Tokenizer.load(write(tmp_path, "byte_level", chat_template=template, **more))
    assert (None if (found := tokenizer.end_of_turn()) is None else tokenizer.tokens()[found]) == end


def test_all_ends_count_in_order_and_what_the_files_do_not_agree_on_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = write(tmp_path / "words", "byte_level", chat_template=CHATML, additional_special_tokens=["<|im_end|>"])
    tokenizer = Tokenizer.load(words)
    turn = tokenizer.end_of_turn()
    assert GenerationDefaults.load(folder(tmp_path, {"eos_token_id": 7}), tokenizer).eos_ids == (7, 2, turn)
    (said,) = caplog.messages
    assert said.endswith(
        f"outputs end at '</s>' (2, the tokenizer's end token) and '<|im_end|>' ({turn}, the chat template's end of a "
        "turn) too, which generation_config.json does not name as end token"
    )
    caplog.clear()
    assert GenerationDefaults.load(folder(tmp_path, {"eos_token_id": [turn, 2]}), tokenizer).eos_ids == (turn, 2)
    assert not caplog.messages


def changed(tmp_path: Path, **words: Any) -> Path:
    """The bundled target with the generation_config.json of a base model."""
    path = shutil.copytree(BUNDLED / "target", tmp_path / "model")
    generation = json.loads((path / "generation_config.json").read_text()) | {"eos_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    config = json.loads((path / "tokenizer_config.json").read_text()) | words
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


ASK = [{"role": "user", "content": "def add(a, b):"}]


@pytest.mark.parametrize("words", [{"eos_token": "<|endoftext|>"}, {"chat_template": None}])
def test_outputs_end_at_either_of_both(tmp_path: Path, words: dict[str, Any]) -> None:
    """The text is that of the files as they are; of the control, where neither names the token, it runs on."""
    own, other = LLM(speculative_config=None), LLM(str(changed(tmp_path, **words)), speculative_config=None)
    prompt = own.tokenizer.encode("def add(a, b):\n    return")
    params = SamplingParams(temperature=0, max_tokens=60)
    (wanted,), (found,) = (
        own.generate({"prompt_token_ids": prompt}, params),
        other.generate({"prompt_token_ids": prompt}, params),
    )
    assert wanted.outputs[0].token_ids[-1] == 3
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert (found.outputs[0].text, found.outputs[0].finish_reason) == (wanted.outputs[0].text, "stop")
    (on,) = other.generate({"prompt_token_ids": prompt}, replace(params, ignore_eos=True))
    assert len(on.outputs[0].token_ids) == 60
    (beam,) = other.generate({"prompt_token_ids": prompt}, params, search={"method": "beam", "beam_width": 2})
    assert beam.outputs[0].finish_reason == "stop"
    neither = changed(tmp_path / "neither", eos_token="<|endoftext|>", chat_template=None)
    (on,) = LLM(str(neither), speculative_config=None).generate({"prompt_token_ids": prompt}, params)
    assert 3 in on.outputs[0].token_ids[:-1]


def test_sampling_parameters_count_with_do_sample(tmp_path: Path) -> None:
    values = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "max_new_tokens": 77,
    }
    GenerationConfig(do_sample=True, **values).save_pretrained(str(tmp_path))
    found = GenerationDefaults.load(tmp_path).sampling
    assert found == {**{key: value for key, value in values.items() if key != "max_new_tokens"}, "max_tokens": 77}
    assert SamplingParams(**found).top_k == 20
    without = GenerationDefaults.load(folder(tmp_path, {**values, "do_sample": False})).sampling
    assert without == {"repetition_penalty": 1.1, "max_tokens": 77}


def test_what_is_recommended_and_not_honoured_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [], "stop_strings": None}
    assert GenerationDefaults.load(folder(tmp_path, neutral)).sampling == {}
    assert not caplog.messages
    GenerationDefaults.load(folder(tmp_path, neutral | {"suppress_tokens": [5], "num_beams": 4}))
    assert caplog.messages[-1].endswith("recommends num_beams, suppress_tokens, which is not honoured")


def test_a_tokenizer_with_more_tokens_than_the_model_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "words", "byte_level"))
    for more, said in ((0, False), (-1, True)):
        config = {"vocab_size": tokenizer.vocab_size + more, "eos_token_id": 2}
        GenerationDefaults.load(folder(tmp_path, None, config), tokenizer)
        assert ("prompts with one of the others are rejected" in caplog.text) == said


@pytest.mark.parametrize(
    "generation",
    [{"eos_token_id": "2"}, {"eos_token_id": [True]}, {"do_sample": True, "top_p": 3.0}, {"repetition_penalty": "x"}],
)
def test_values_that_make_no_sense_are_the_checkpoints_fault(tmp_path: Path, generation: Any) -> None:
    with pytest.raises(CheckpointError, match="correct the file"):
        GenerationDefaults.load(folder(tmp_path, generation))


def test_a_file_that_is_no_json_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        GenerationDefaults.load(tmp_path)
