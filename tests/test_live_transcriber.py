"""Captions of a growing audio with a made Whisper model: the same words with drafts and without, and their pace."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_whisper
import torch

from paceline import LLM, live_transcriber
from paceline.errors import ConfigError
from paceline.live_transcriber import LiveTranscriber, Pace
from paceline.speech import Thresholds, WhisperTokens, Word, language_probabilities
from paceline.transcriber import Transcriber, TranscriptionParams

ALL = Thresholds(compression_ratio=None, avg_logprob=None, no_speech_prob=None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_whisper.write(tmp_path_factory.mktemp("whisper"), seed=1)
    return LLM(folder, dtype="float32", speculative_config=None)


def captioned(llm: LLM, *, drafts: bool, language: str | None = "en") -> tuple[list[Word], LiveTranscriber, int]:
    """Words, as they became stable, and passes."""
    transcriber = Transcriber(llm)
    params = TranscriptionParams(language=language, thresholds=ALL)
    live, words = LiveTranscriber(transcriber, params, drafts=drafts, longest=8.0), list[Word]()
    samples = tiny_whisper.sound(24, 2)
    for start in range(0, len(samples), 48_000):
        live.feed(samples[start : start + 48_000])
        words += live.update()
        assert list(live.stable) == words
    return [*words, *live.finish()], live, transcriber.cost.passes


def test_drafts_leave_the_words_as_they_are_and_save_passes(llm: LLM) -> None:
    drafted, live, fewer = captioned(llm, drafts=True)
    plain, _, more = captioned(llm, drafts=False)
    assert drafted == plain
    assert drafted
    assert list(live.stable) == drafted
    assert not live.rest
    assert live.updates == 8
    assert fewer < more


def test_captions_of_a_model_in_one_call(llm: LLM) -> None:
    live = llm.captions(language="en", thresholds=ALL, longest=8.0)
    live.feed(tiny_whisper.sound(3, 2))
    assert live.finish() == list(live.stable) != []
    with pytest.raises(ConfigError, match="languge"):
        llm.captions(languge="en")
    with pytest.raises(ConfigError, match="longest must be a number of seconds"):
        llm.captions(longest=40)
    with pytest.raises(ConfigError, match="reads no speech"):
        LLM(dtype="float32", profile=False).captions()


def test_nothing_is_transcribed_without_new_audio(llm: LLM) -> None:
    live = LiveTranscriber(Transcriber(llm), TranscriptionParams(language="en", thresholds=ALL))
    assert live.update() == []
    live.feed(tiny_whisper.sound(2))
    assert live.new_seconds == 2.0
    live.update()
    assert (live.new_seconds, live.updates) == (0.0, 1)
    rest = live.rest
    assert live.finish() == rest
    assert live.updates == 1


def test_the_language_is_listened_for_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noted(logits: torch.Tensor, tokens: WhisperTokens) -> dict[str, float]:
        asked.append(1)
        return language_probabilities(logits, tokens)

    monkeypatch.setattr("paceline.transcriber.language_probabilities", noted)
    captioned(llm, drafts=True, language=None)
    assert len(asked) == 1


def test_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(live_transcriber, "monotonic", lambda: now)
    for share, wait in ((0.5, 2.0), (0.25, 6.0), (1.0, 0.0)):
        pace = Pace(share)
        assert pace.wait <= 0
        with pace.working():
            now += 2.0
        assert pace.wait == pytest.approx(wait)
        now += 1.0
        assert pace.wait == pytest.approx(wait - 1.0)
        assert pace.busy == 2.0
    for wrong in (0.0, 1.5):
        with pytest.raises(ConfigError, match="cpu_share must be a number above 0 and up to 1"):
            Pace(wrong)
