"""Audio as Whisper takes it, from files, bytes and arrays.

Files are read by libsndfile (wav, flac, ogg, mp3, aiff and more) and resampled by soxr, which the extra `speech`
installs. What strangers send can be decoded in a process of its own, which is killed when it takes too long; so are mp3
files in any case, since libmpg123 writes what it thinks of a damaged one to standard error.
"""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from types import ModuleType
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, PromptError
from paceline.utils import integer, need, number, shortened

Samples = npt.NDArray[np.float32]
AudioSource = str | Path | bytes | npt.NDArray[Any] | IO[bytes]
"""The path of a file, its bytes, an open one, or samples: (n,) or (n, channels), of floats in -1..1, int16 or int32."""

SAMPLE_RATE: Final = 16_000
MOST_REASON: Final = 300
MOST_HEADER: Final = 4096
"""Bytes at the beginning of a file in which its kind is looked for."""

MPEG_IN_WAV: Final = (b"\x50\0", b"\x55\0")
"""Formats of WAV files whose samples are MPEG audio."""

FULL_SCALE: Final = {"i2": 1 << 15, "i4": 1 << 31}
"""The size of the largest value, of arrays of integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """What is read at most.

    Attributes:
        max_bytes: of a file.
        max_seconds: of audio.
        max_channels: which are mixed into one.
        decode_seconds: that decoding a file in a process of its own, as mp3 files are, may take.

    Raises:
        ConfigError: a number out of its range.
    """

    max_bytes: int = 1 << 30
    max_seconds: float = 2 * 3600.0
    max_channels: int = 8
    decode_seconds: float = 600.0

    def __post_init__(self) -> None:
        integer("max_bytes", self.max_bytes, 1)
        number("max_seconds", self.max_seconds, 0.0, 1e6, "be a number of seconds above 0", open_low=True)
        integer("max_channels", self.max_channels, 1, 1024)
        number("decode_seconds", self.decode_seconds, 0.0, 1e6, "be a number of seconds above 0", open_low=True)


def load_audio(
    source: AudioSource,
    *,
    sample_rate: int = SAMPLE_RATE,
    limits: AudioLimits | None = None,
    isolated: bool = False,
) -> Samples:
    """(n,) float32 mono samples at 16 kHz, n at least 1.

    Args:
        source: the path of a file, its bytes, an open one (binary), or samples: (n,) or (n, channels), of floats in
            -1..1, int16 or int32.
        sample_rate: of samples; files tell their own.
        limits: None is `AudioLimits()`.
        isolated: decode a file of any kind in a process of its own, whose memory and time are limited.
    Raises:
        PromptError: no audio, or beyond the limits; in one line that names the file.
        ConfigError: the extra is not installed.
        OSError: no room for what a process of its own decodes, in the folder of temporary files.
    """
    decoder, limits = _decoder(), AudioLimits() if limits is None else limits
    need(isinstance(limits, AudioLimits), "limits", "be AudioLimits", limits)
    if isinstance(source, io.TextIOBase):
        raise PromptError(f"audio must be a file that is open in binary mode ('rb'), got {shortened(source)}")
    if hasattr(source, "read"):
        source = source.read(limits.max_bytes + 1)
    if not isinstance(source, str | Path | bytes | np.ndarray):
        raise PromptError(
            f"audio must be the path of a file, its bytes, an open one or a NumPy array, got {shortened(source)}"
        )
    name = str(source) if isinstance(source, str | Path) else "the audio"
    bounds = limits.max_seconds, limits.max_channels
    try:
        if isinstance(source, np.ndarray):
            integer("sample_rate", sample_rate, 1)
            found: Samples = decoder.converted(_floats(source), sample_rate, *bounds)
            return found
        with _opened(source, name) as file:
            _check_size(file, name, limits)
            if isolated or _is_mpeg(file):
                return _decoded_apart(file, name, limits)
            return np.concatenate(list(decoder.decoded(file, *bounds)))
    except decoder.BadAudioError as error:
        raise PromptError(f"{name} {error}") from None


def _decoder() -> ModuleType:
    try:
        import paceline.speech.audio_decoder as decoder
    except ImportError as error:
        raise ConfigError(
            f"reading audio needs {error.name}, which is not installed; pip install '.[speech]'"
        ) from None
    return decoder


@contextmanager
def _opened(source: str | Path | bytes, name: str) -> Iterator[IO[bytes]]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    path = Path(source)
    try:
        if not path.is_file():
            raise PromptError(f"{name} must be an audio file, got {'a folder' if path.is_dir() else 'no file'}")
        file = path.open("rb")
    except OSError as error:
        raise PromptError(f"{shortened(name)} cannot be read ({error.strerror or error})") from None
    with file:
        yield file


def _check_size(file: IO[bytes], name: str, limits: AudioLimits) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if not size:
        raise PromptError(f"{name} must be an audio file, got an empty one")
    if size > limits.max_bytes:
        raise PromptError(f"{name} has {size} bytes; {limits.max_bytes} at most are read")


def _is_mpeg(file: IO[bytes]) -> bool:
    """Whether it begins with a tag or a frame of MPEG audio, or is a WAV file of such frames."""
    head = file.read(MOST_HEADER)
    file.seek(0)
    place = head.find(b"fmt ") if head[:4] == b"RIFF" else -1
    if place >= 0:
        return head[place + 8 : place + 10] in MPEG_IN_WAV
    return head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0)


def _floats(given: npt.NDArray[Any]) -> Samples:
    """(n, channels) float32 samples."""
    if given.ndim not in (1, 2):
        raise PromptError(f"samples must have the shape (n,) or (n, channels), got {given.shape}")
    if given.ndim == 2 and 0 < len(given) < given.shape[1]:
        raise PromptError(f"samples must have the shape (n, channels), got {given.shape}; transpose them")
    scale = FULL_SCALE.get(given.dtype.str[1:], 1)
    if scale == 1 and given.dtype.kind != "f":
        raise PromptError(f"samples must be floats, int16 or int32, got {given.dtype}")
    with np.errstate(over="ignore"):  # what becomes infinite is rejected
        samples: Samples = given.astype(np.float32) / np.float32(scale)
    return samples[:, None] if given.ndim == 1 else samples


# ------------------------------------------------------------------------------------------------ a process of its own


def _decoded_apart(file: IO[bytes], name: str, limits: AudioLimits) -> Samples:
    """What a process of its own decodes, which has the file as its input and another as its output."""
    from paceline.speech.audio_decoder import BAD, FULL

    with _on_disk(file) as given, TemporaryFile() as output:
        code = _run_decoder(given, output, limits)
        if code is None:
            raise PromptError(
                f"{name} takes more than {limits.decode_seconds:g} s to decode; send a shorter or plainer one"
            )
        output.seek(0)
        if code == BAD:
            reason = output.read(MOST_REASON).decode(errors="replace")
            raise PromptError(f"{name} {''.join(sign for sign in reason if sign.isprintable())}")
        if code == FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), gettempdir())
        if code != 0:
            raise PromptError(f"{name} cannot be read as audio (its decoder ended with {code})")
        found: Samples = np.fromfile(output, dtype=np.float32)
        return found


@contextmanager
def _on_disk(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """A file that another process can read, at its beginning."""
    if not isinstance(file, io.BytesIO):
        yield file
        return
    with TemporaryFile() as copy:
        copy.write(file.getbuffer())
        copy.seek(0)
        yield copy


def _run_decoder(given: IO[bytes], output: IO[bytes], limits: AudioLimits) -> int | None:
    """The exit code of the decoder; None where it was killed, since it took too long."""
    script = Path(__file__).with_name("audio_decoder.py")
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(script), json.dumps(asdict(limits))]
    process = subprocess.Popen(
        command, stdin=given, stdout=output, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    try:
        return process.wait(limits.decode_seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()
