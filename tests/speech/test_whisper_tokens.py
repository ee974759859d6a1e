"""Special ids come from a checkpoint's own files, and prompts are made of them as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from speech.toy_whisper import (
    DE,
    EN,
    END,
    NO_SPEECH,
    NO_TIMES,
    PREVIOUS,
    START,
    START_OF_LM,
    TOKENS,
    TRANSCRIBE,
    TRANSLATE,
    write,
)

from paceline.errors import CheckpointError, ConfigError
from paceline.speech.whisper_tokens import WhisperTokens, language_code, language_name


def test_ids_are_those_of_the_tokenizer_and_lists_those_of_the_generation_config(tmp_path: Path) -> None:
    found = WhisperTokens.load(write(tmp_path))
    assert (found.end, found.start, found.no_timestamps, found.no_speech) == (END, START, NO_TIMES, NO_SPEECH)
    assert found.first_timestamp == NO_TIMES + 1
    assert found.languages == TOKENS.languages
    assert found.tasks == {"transcribe": TRANSCRIBE, "translate": TRANSLATE}
    assert found.suppressed == (1, START, TRANSLATE, TRANSCRIBE, START_OF_LM, PREVIOUS, NO_SPEECH)
    assert found.suppressed_at_begin == (0, END)
    assert found.max_initial == 25
    assert found.alignment_heads == ((0, 1), (1, 0))


def test_what_a_generation_config_leaves_out_is_as_published(tmp_path: Path) -> None:
    found = WhisperTokens.load(write(tmp_path, lists=False))
    assert found.suppressed_at_begin == (0, END)
    assert found.max_initial == 50
    assert found.suppressed == (START, TRANSLATE, TRANSCRIBE, START_OF_LM, PREVIOUS, NO_SPEECH)
    assert found.alignment_heads == ()


def test_a_folder_without_whispers_tokens_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    with pytest.raises(CheckpointError, match=r"must hold a Whisper model .* lacks <\|endoftext\|>"):
        WhisperTokens.load(folder)


def test_a_prompt_names_language_task_and_times() -> None:
    assert TOKENS.prompt(language="de") == [START, DE, TRANSCRIBE]
    assert TOKENS.prompt(language="German", task="translate") == [START, DE, TRANSLATE]
    assert TOKENS.prompt(language="en", timestamps=False) == [START, EN, TRANSCRIBE, NO_TIMES]


def test_earlier_text_fills_half_the_context_less_one() -> None:
    previous = [token % 10 for token in range(500)]
    found = TOKENS.prompt(language="en", previous=previous)
    assert found[0] == PREVIOUS
    assert found[1:-3] == previous[-223:]
    assert found[-3:] == [START, EN, TRANSCRIBE]
    assert len(found) + TOKENS.max_sampled <= TOKENS.context + len(TOKENS.prompt(language="en"))
    assert TOKENS.prompt(language="en", previous=()) == [START, EN, TRANSCRIBE]


def test_an_english_model_has_a_prompt_of_its_own(tmp_path: Path) -> None:
    english = WhisperTokens.load(write(tmp_path, multilingual=False))
    assert not english.multilingual
    assert english.prompt() == english.prompt(language="English") == [START]
    assert english.prompt(timestamps=False) == [START, NO_TIMES]
    with pytest.raises(ConfigError, match="only transcribes English, got language 'de'; take a multilingual one"):
        english.prompt(language="de")
    with pytest.raises(ConfigError, match="only transcribes English, got task 'translate'; take a multilingual one"):
        english.prompt(task="translate")


def test_what_the_model_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match="language must be one of de, en, haw, got 'fr'"):
        TOKENS.prompt(language="french")
    with pytest.raises(ConfigError, match="language must be one of de, en, haw, got 'klingon'"):
        TOKENS.prompt(language="Klingon")
    with pytest.raises(ConfigError, match="language must be one of de, en, haw, got None"):
        TOKENS.prompt()
    with pytest.raises(ConfigError, match="task must be one of transcribe, translate, got 'sing'"):
        TOKENS.prompt(language="en", task="sing")


def test_languages_have_codes_and_names() -> None:
    assert [language_code(name) for name in ("DE", "german", "Castilian", "haw")] == ["de", "de", "es", "haw"]
    assert [language_name(code) for code in ("en", "haw", "xx")] == ["english", "hawaiian", "xx"]
