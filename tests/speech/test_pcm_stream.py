"""Audio that comes piece by piece: raw samples and WAV streams, whatever the pieces."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import tiny_whisper

from paceline.errors import PromptError
from paceline.speech import PcmStream, Samples, load_audio


def read(data: bytes, piece: int) -> Samples:
    stream = PcmStream()
    found = [stream.feed(data[start : start + piece]) for start in range(0, len(data), piece)]
    return np.concatenate([*found, stream.finish()])


def raw(samples: Samples) -> bytes:
    return (samples * 32767).astype("<i2").tobytes()


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_raw_samples(piece: int) -> None:
    samples = tiny_whisper.sound(0.2)
    found = read(raw(samples), piece)
    assert np.abs(found - samples).max() < 1e-4
    assert len(read(raw(samples) + b"\1", piece)) == len(samples), "half a sample is dropped"


@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize("rate", [16_000, 22_050])
def test_wav_streams_are_read_as_their_files(piece: int, rate: int) -> None:
    file = tiny_whisper.wav(tiny_whisper.sound(0.2), rate)
    found, whole = read(file, piece), load_audio(file)
    assert len(found) == len(whole)
    assert np.abs(found - whole).max() < 1e-4


def test_channels_are_mixed_and_sizes_of_streams_mean_nothing() -> None:
    left, right = tiny_whisper.sound(0.2, 0), tiny_whisper.sound(0.2, 1)
    file = bytearray(tiny_whisper.wav(np.stack([left, right], 1)))
    at = file.index(b"data") + 4
    file[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)  # as ffmpeg writes to a pipe
    assert np.abs(read(bytes(file), 333) - (left + right) / 2).max() < 1e-4


@pytest.mark.parametrize("change", [{"format": 3, "bits": 32}, {"format": 1, "bits": 24}])
def test_other_samples_are_named(change: dict[str, int]) -> None:
    head = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, change["format"], 1, 16_000, 32_000, 2, change["bits"])
    with pytest.raises(PromptError, match=rf"samples of {change['bits']} bits .*; send 16-bit PCM"):
        read(head + b"data\0\0\0\0", 10)
    with pytest.raises(PromptError, match="begins like a WAV file"):
        read(b"RIFF\0\0\0\0AVI LIST" + bytes(100), 10)
