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


@pytest.mark.parametrize("piece", [1, 7, 4096])
@pytest.mark.parametrize(
    ("begin", "kind"),
    [
        (b"ID3\4", "mp3"),
        ((b"\xff\xfb\x90\x64" + bytes(413)) * 4, "mp3"),
        ((b"\xff\xf3\x40\xc4" + bytes(140)) * 9, "mp3"),
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"RF64\xff\xff\xff\xffWAVE", "RF64"),
        (b"\0\0\0\x20ftypM4A ", "mp4 or m4a"),
    ],
)
def test_other_files_are_named(piece: int, begin: bytes, kind: str) -> None:
    with pytest.raises(PromptError, match=rf"the stream is a file of the kind {kind}; ") as error:
        read(begin + bytes(2000), piece)
    assert str(error.value).endswith("PCM" if kind == "mp4 or m4a" else "PCM, or transcribe it as a whole")


@pytest.mark.parametrize("begin", [b"\xff\xfb", b"\xff\xff", b"I", b"fLa", b"ID"])
@pytest.mark.parametrize("size", [2, 100, 4000])
def test_raw_samples_that_begin_much_like_other_files(begin: bytes, size: int) -> None:
    assert len(read(begin + bytes(size), 3)) == (len(begin) + size) // 2


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "ended before any sample came"),
        (b"\0", "ended before any sample came"),
        (tiny_whisper.wav(tiny_whisper.sound(0.1))[:44], "ended before any sample came"),
        (tiny_whisper.wav(tiny_whisper.sound(0.1))[:43], "within the header"),
        (b"RIFF", "within the header"),
    ],
)
def test_streams_that_hold_nothing(data: bytes, line: str) -> None:
    with pytest.raises(PromptError, match=line):
        read(data, 5)


def test_a_header_that_must_be_there() -> None:
    with pytest.raises(PromptError, match="has the name of a WAV file and not its header"):
        PcmStream(wav=True).feed(b"no audio at all")
    file, stream = tiny_whisper.wav(tiny_whisper.sound(0.2)), PcmStream(wav=True)
    assert sum(len(stream.feed(file[at : at + 1])) for at in range(len(file))) == 3200
