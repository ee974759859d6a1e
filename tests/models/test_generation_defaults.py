"""Defaults read from generation_config.json, with what stands behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import write
from transformers import GenerationConfig

import paceline
from paceline.config import SamplingParams
from paceline.errors import CheckpointError
from paceline.models.loading import GenerationDefaults, Tokenizer


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
def test_end_tokens_are_those_of_transformers(tmp_path: Path, generation: Any, config: Any) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "tokenizer", "byte_level"))
    path = folder(tmp_path, generation, config)
    expected = theirs(path)
    assert GenerationDefaults.load(path).eos_ids == expected
    alone = generation is None and not expected
    assert GenerationDefaults.load(path, tokenizer).eos_ids == ((tokenizer.eos_id,) if alone else expected)


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
    assert GenerationDefaults.load(folder(tmp_path, {}, {"eos_token_id": 7}), tokenizer).eos_ids == ()
    assert "generation_config.json defines no end token" in caplog.text


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
