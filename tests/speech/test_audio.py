"""Audio of all kinds comes out as 16 kHz mono, and each kind of bad audio is told in one line."""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import ConfigError, PromptError
from paceline.speech.audio import AudioLimits, load_audio

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")
decoder = pytest.importorskip("paceline.speech.audio_decoder")

TONE = 440.0


def tone(seconds: float, rate: int = 16_000, channels: int = 1) -> np.ndarray:
    """(n, channels): a tone, half as loud in each further channel."""
    wave = 0.5 * np.sin(2 * np.pi * TONE * np.arange(round(seconds * rate)) / rate)
    return np.stack([wave / 2**place for place in range(channels)], axis=1).astype(np.float32)


def written(samples: np.ndarray, rate: int = 16_000, form: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def pitch(samples: np.ndarray) -> float:
    """Hz of the loudest tone."""
    loud = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(loud.argmax()) * 16_000 / len(samples)


@pytest.fixture(params=[False, True], ids=["here", "apart"])
def load(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    """`load_audio` in this process, or in one of its own."""

    def loaded(source: object, **options: object) -> np.ndarray:
        return load_audio(source, isolated=request.param, **options)  # type: ignore[arg-type]

    return loaded


@pytest.mark.parametrize(
    ("form", "subtype", "rate", "channels"),
    [
        ("WAV", "PCM_16", 16_000, 1),
        ("WAV", "FLOAT", 8_000, 1),
        ("WAV", "PCM_24", 96_000, 2),
        ("FLAC", "PCM_16", 44_100, 2),
        ("OGG", "VORBIS", 48_000, 1),
        ("OGG", "OPUS", 48_000, 2),
        ("MP3", "MPEG_LAYER_III", 44_100, 1),
    ],
)
def test_files_come_out_as_16_khz_mono(
    load: Callable[..., np.ndarray], form: str, subtype: str, rate: int, channels: int
) -> None:
    found = load(written(tone(2.0, rate, channels), rate, form, subtype))
    assert (found.dtype, found.ndim) == (np.float32, 1)
    assert len(found) == pytest.approx(32_000, abs=1600)
    assert pitch(found) == pytest.approx(TONE, abs=1.0)
    loudness = 0.5 if channels == 1 else 0.375
    assert np.abs(found[4_000:-4_000]).max() == pytest.approx(loudness, rel=0.1)


def test_both_processes_decode_the_same_from_path_and_bytes(tmp_path: Path) -> None:
    data = written(tone(9.7, 44_100, 2), 44_100)
    path = tmp_path / "tone.wav"
    path.write_bytes(data)
    found = [load_audio(source, isolated=apart) for source in (data, path, str(path)) for apart in (False, True)]
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16, np.int32])
def test_samples_are_taken_as_they_are(kind: type) -> None:
    scale = np.iinfo(kind).max if np.issubdtype(kind, np.integer) else 1
    given = (tone(0.5) * scale).astype(kind)
    assert load_audio(given) == pytest.approx(tone(0.5)[:, 0], abs=1e-4)
    assert load_audio(given[:, 0]) == pytest.approx(tone(0.5)[:, 0], abs=1e-4)


def test_samples_of_another_rate_are_resampled() -> None:
    found = load_audio(tone(1.0, 48_000, 2), sample_rate=48_000)
    assert len(found) == 16_000
    assert pitch(found) == pytest.approx(TONE, abs=1.0)


def test_silence_and_a_tenth_of_a_second_are_audio(load: Callable[..., np.ndarray]) -> None:
    assert not load(written(np.zeros((16_000, 1), np.float32))).any()
    assert len(load(written(tone(0.1)))) == 1600


# ------------------------------------------------------------------------------------------------ bad audio


def streamed(data: bytes) -> bytes:
    """A WAV file by a program that did not come back to its header."""
    place = data.index(b"data") + 4
    return data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :]


def test_a_file_that_was_streamed_is_whole(load: Callable[..., np.ndarray]) -> None:
    assert len(load(streamed(written(tone(1.0))))) == 16_000


WHOLE = written(tone(2.0))
FLAC = written(np.random.default_rng(0).normal(0, 0.1, (64_000, 1)), 16_000, "FLAC")
BAD = {
    "no audio": (b"This is a letter, and no audio at all." * 50, "the audio cannot be read as audio \\("),
    "empty": (b"", "the audio must be an audio file, got an empty one"),
    "no samples": (written(np.zeros((0, 1), np.float32)), "the audio holds no samples"),
    "cut off": (WHOLE[:30_000], "the audio is cut off: it ends before the samples that its header promises"),
    "cut off flac": (
        FLAC[: len(FLAC) // 2],
        r"the audio is cut off or damaged \(flac decoder lost sync\); get the whole file",
    ),
    "nothing but a header": (WHOLE[:44], "the audio is cut off"),
    "no numbers": (
        written(np.array([[0.1], [np.nan]] * 800, np.float32), subtype="FLOAT"),
        "the audio holds samples that are no finite numbers",
    ),
    "infinite": (
        written(np.array([[0.1], [np.inf]] * 800, np.float32), subtype="FLOAT"),
        "the audio holds samples that are no finite numbers",
    ),
    "many channels": (written(tone(0.1, channels=9)), "the audio has 9 channels; 1 to 8 can be read"),
    "a strange rate": (written(tone(1, 500), 500), "the audio has a rate of 500 Hz; 1000 to 768000 Hz can be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_audio_is_told_in_one_line(load: Callable[..., np.ndarray], name: str) -> None:
    data, says = BAD[name]
    with pytest.raises(PromptError, match=says) as told:
        load(data)
    assert "\n" not in str(told.value)


def in_wav(frames: bytes) -> bytes:
    """A WAV file of MPEG frames."""
    form = struct.pack("<HHIIHHHHIHHH", 0x55, 1, 44_100, 8000, 1, 0, 12, 1, 2, 417, 1, 1393)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(frames)) + frames
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("wrap", [bytes, lambda frames: b"ID3\4" + bytes(5) + b"\x0a" + bytes(10) + frames, in_wav])
def test_what_a_decoder_of_mp3_says_is_told_in_our_line_alone(
    wrap: Callable[[bytes], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    mp3 = written(tone(4.0, 44_100), 44_100, "MP3", "MPEG_LAYER_III")
    data = wrap(mp3[: len(mp3) // 3] + bytes(3000) + mp3[len(mp3) // 3 :])
    with pytest.raises(PromptError, match="the audio is cut off or damaged") as told:
        load_audio(data)
    assert "\n" not in str(told.value)
    assert capfd.readouterr() == ("", "")
    with pytest.raises(decoder.BadAudioError):
        list(decoder.decoded(io.BytesIO(data), 60.0, 8))
    assert "Illegal Audio-MPEG-Header" in capfd.readouterr().err, "the control: in this process it talks"


def test_limits_are_kept(load: Callable[..., np.ndarray]) -> None:
    with pytest.raises(PromptError, match=r"is longer than 1.5 s; cut it into parts"):
        load(WHOLE, limits=AudioLimits(max_seconds=1.5))
    with pytest.raises(PromptError, match=r"has 64044 bytes; 1000 at most are read"):
        load(WHOLE, limits=AudioLimits(max_bytes=1000))


@pytest.fixture(scope="module")
def three_hours() -> bytes:
    """A small file, as FLAC packs silence."""
    return written(np.zeros((3 * 3600 * 1000, 1), np.int16), 1000, "FLAC")


def test_three_hours_are_too_long(load: Callable[..., np.ndarray], three_hours: bytes) -> None:
    with pytest.raises(PromptError, match="is longer than 7200 s"):
        load(three_hours)


def test_samples_have_limits_too() -> None:
    with pytest.raises(PromptError, match="is longer than 1 s"):
        load_audio(tone(1.1), limits=AudioLimits(max_seconds=1))
    with pytest.raises(PromptError, match="holds no samples"):
        load_audio(np.zeros(0, np.float32))
    with pytest.raises(PromptError, match="no finite numbers"):
        load_audio(np.array([0.0, np.nan]))
    with pytest.raises(PromptError, match=r"must have the shape \(n,\) or \(n, channels\), got \(2, 2, 2\)"):
        load_audio(np.zeros((2, 2, 2)))
    with pytest.raises(PromptError, match="must be floats, int16 or int32, got bool"):
        load_audio(np.zeros(5, bool))
    with pytest.raises(PromptError, match=r"must have the shape \(n, channels\), got \(2, 16000\); transpose them"):
        load_audio(tone(1.0, channels=2).T)
    for loud in (1e10, 1e300):
        with pytest.raises(PromptError, match=r"no finite numbers, or far beyond -1\.\.1"):
            load_audio(np.array([0.0, loud]))
    assert load_audio(np.array([0.0, 30_000.0]))[1] == 30_000.0, "the control: not scaled"


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"nothing\.wav must be an audio file, got no file"):
        load_audio(tmp_path / "nothing.wav")
    with pytest.raises(PromptError, match="must be an audio file, got a folder"):
        load_audio(tmp_path)
    with pytest.raises(PromptError, match=r"'aaa.* cannot be read \(File name too long\)"):
        load_audio("a" * 5000)
    text = tmp_path / "talk.wav"
    text.write_bytes(WHOLE)
    with (
        text.open(encoding="latin-1") as file,
        pytest.raises(PromptError, match="audio must be a file that is open in binary mode"),
    ):
        load_audio(file)
    with pytest.raises(PromptError, match="in binary mode"):
        load_audio(io.StringIO(str(text)))


def test_a_decoder_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"takes more than 0\.01 s to decode"):
        load_audio(WHOLE, isolated=True, limits=AudioLimits(decode_seconds=0.01))


def test_no_room_for_what_is_decoded_is_not_blamed_on_the_audio(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tone.wav"
    path.write_bytes(WHOLE)
    monkeypatch.setattr("paceline.speech.audio.TemporaryFile", partial(open, "/dev/full", "w+b", 0))
    with pytest.raises(OSError, match="No space left on device"):
        load_audio(path, isolated=True)
    assert len(load_audio(path)) == 32_000, "the control: nothing is written"


def test_a_wav_file_of_nothing_but_chunks_ends() -> None:
    chunks = b"".join(struct.pack("<4sI", b"junk", 0) for _ in range(5000))
    with pytest.raises(PromptError, match=r"cannot be read as audio|holds no samples"):
        load_audio(b"RIFF" + struct.pack("<I", len(chunks) + 4) + b"WAVE" + chunks)


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    monkeypatch.delitem(sys.modules, "paceline.speech.audio_decoder", raising=False)
    with pytest.raises(
        ConfigError, match=r"reading audio needs soxr, which is not installed; pip install '\.\[speech\]'"
    ):
        load_audio(WHOLE)


def test_limits_make_sense() -> None:
    with pytest.raises(ConfigError, match="limits must be AudioLimits, got "):
        load_audio(WHOLE, limits={"max_seconds": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_seconds must be a number of seconds above 0, got 0"):
        AudioLimits(max_seconds=0)
