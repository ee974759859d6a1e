"""What is no audio is named, by whom it is given to; and what a doubtful window keeps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tiny_whisper

from paceline import LLM, ConfigError, PacelineError, PromptError
from paceline.speech import Attempt, Thresholds


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_whisper.write(tmp_path_factory.mktemp("whisper")), speculative_config=None)


def sound(seconds: float = 0.5) -> Any:
    return np.random.default_rng(0).standard_normal(int(16_000 * seconds)).astype(np.float32) * 0.1


@pytest.mark.parametrize("audio", [None, 1.0, {"audio": 1}, [sound(), [0.0] * 16]])
def test_what_is_no_audio_is_named(llm: LLM, audio: Any) -> None:
    with pytest.raises(PromptError, match="audio must be the path of a file") as error:
        llm.transcribe(audio)
    assert str(error.value).startswith("audio[1]: ") == isinstance(audio, list)


def test_open_files_are_read(llm: LLM, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", sound(), 16_000)
    whole = llm.transcribe(tmp_path / "a.wav")
    with (tmp_path / "a.wav").open("rb") as file:
        assert llm.transcribe(file) == whole
    assert llm.transcribe([io.BytesIO((tmp_path / "a.wav").read_bytes())]) == [whole]


@pytest.mark.parametrize("samples", [None, "abc", [0.0], np.zeros((2, 2), np.float32), np.array([np.nan], np.float32)])
def test_captions_name_what_is_no_audio(llm: LLM, samples: Any) -> None:
    with pytest.raises(PromptError, match="samples must be a NumPy array"):
        llm.captions().feed(samples)


def test_captions_end_once(llm: LLM) -> None:
    captions = llm.captions()
    captions.feed(sound())
    captions.finish()
    assert captions.finish() == []
    with pytest.raises(ConfigError, match="have ended"):
        captions.feed(sound())


def test_a_context_that_holds_no_window_is_refused(tmp_path: Path) -> None:
    short = LLM(tiny_whisper.write(tmp_path), speculative_config=None, max_model_len=8)
    with pytest.raises(ConfigError, match="max_model_len must be"):
        short.transcribe(sound())


def test_encoder_decoder_models_do_not_embed(llm: LLM) -> None:
    with pytest.raises(PacelineError, match="load an embedding model"):
        llm.embed("x")


def test_a_window_that_was_heard_is_not_silent() -> None:
    """A sure text that repeats itself is kept before an unsure one in a window that might be silent; one that is not
    doubtful comes first (the control).
    """

    def attempt(text: str, avg_logprob: float, no_speech: float) -> Attempt:
        return Attempt(tokens=(1,), text=text, temperature=0.0, avg_logprob=avg_logprob, no_speech_prob=no_speech)

    sure, unsure = attempt("again " * 40, -0.25, 0.78), attempt("something else", -1.4, 0.78)
    assert Thresholds().best([sure, unsure]) is sure
    other = attempt("something else", -0.9, 0.1)
    assert Thresholds().best([sure, other]) is other
