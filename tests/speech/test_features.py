"""Features of a window are those of transformers, which need numpy alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from paceline.errors import CheckpointError
from paceline.speech.features import LogMel


@pytest.fixture(scope="module")
def mel(tmp_path_factory: pytest.TempPathFactory) -> LogMel:
    folder = tmp_path_factory.mktemp("mel")
    WhisperFeatureExtractor().save_pretrained(folder)
    return LogMel.load(folder)


def noise(seconds: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.1, round(seconds * 16_000)).astype(np.float32)


def test_a_window_has_3000_frames_however_long_the_audio(mel: LogMel) -> None:
    for seconds in (0.1, 30.0, 31.0):
        found = mel.window(noise(seconds))
        assert (found.shape, found.dtype) == ((80, 3000), np.float32)
    assert (mel.frames, mel.bins, mel.sample_rate) == (3000, 80, 16_000)


def test_it_is_that_of_transformers(mel: LogMel) -> None:
    audio = noise(41.0)
    expected = WhisperFeatureExtractor()(audio[16_000:], sampling_rate=16_000, return_tensors="np").input_features[0]
    assert np.array_equal(mel.window(audio, 100), expected)
    assert not np.array_equal(mel.window(audio, 98), expected)


def test_behind_the_end_there_is_silence(mel: LogMel) -> None:
    found = mel.window(noise(1.0))
    assert np.ptp(found[:, 200:]) == 0.0
    assert found[:, 200:].max() <= found.min()
    assert mel.window(np.zeros(100, np.float32)).std() == 0.0


def test_numpy_alone_computes_the_same(mel: LogMel, monkeypatch: pytest.MonkeyPatch) -> None:
    audio = noise(3.0)
    by_torch = mel.window(audio)
    module = sys.modules["transformers.models.whisper.feature_extraction_whisper"]
    monkeypatch.setattr(module, "is_torch_available", lambda: False)
    assert np.abs(mel.window(audio) - by_torch).max() < 1e-4


def test_frames_of_an_audio_are_counted(mel: LogMel) -> None:
    assert [mel.frame_count(np.zeros(count, np.float32)) for count in (1, 160, 161, 480_000)] == [1, 1, 2, 3000]


def test_a_folder_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must describe a WhisperFeatureExtractor, got none"):
        LogMel.load(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"feature_extractor_type": "Wav2Vec2FeatureExtractor"})
    )
    with pytest.raises(CheckpointError, match="got Wav2Vec2FeatureExtractor"):
        LogMel.load(tmp_path)
