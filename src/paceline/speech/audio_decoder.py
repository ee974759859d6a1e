"""Audio files to 16 kHz mono, block by block; also a program that does so in a process of its own.

The program reads a file on standard input, which must be one that can be sought in, and writes float32 samples to
standard output, a file, too; where something is wrong with the audio, it writes why instead and exits with `BAD`, and
where there is no room to write, with `FULL`. Its argument is the limits, as JSON. Memory, time and what it writes are
bound by them, so that a file made to break a decoder breaks no other process. It imports nothing of this package, and
so starts quickly.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import struct
import sys
from collections.abc import Iterator
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

Samples = npt.NDArray[np.float32]

RATE: Final = 16_000
BLOCK_SECONDS: Final = 4
RATES: Final = (1_000, 768_000)
MOST_CHUNKS: Final = 1_000
LOUDEST: Final = 1e9
"""Samples lie in -1..1; what was not scaled is larger, and can be read up to here."""

STREAMED: Final = 0x7FFFF000
"""A size from here on stands in a WAV file whose writer did not come back to its header."""

UNCOUNTED: Final = 1 << 40
"""As many frames or more: the file does not say how many."""

MEMORY: Final = 1 << 30
"""Bytes of address space of the program, which keeps a few seconds of audio at a time."""

BAD, FULL = 3, 4
"""Exit codes for audio that cannot be used, and for no room to write it to."""


class BadAudioError(ValueError):
    """What is wrong with an audio, as the end of a sentence that begins with its name."""


def decoded(file: IO[bytes], max_seconds: float, max_channels: int) -> Iterator[Samples]:
    """Blocks of mono samples at 16 kHz of a file; a block may be empty.

    Args:
        file: wav, flac, ogg, mp3 or what else libsndfile knows; it can be sought in.
    Raises:
        BadAudioError: no audio, cut off, damaged, too long, with too many channels, or with values that are no numbers.
    """
    if is_cut(file):
        raise BadAudioError("is cut off: it ends before the samples that its header promises; get the whole file")
    try:
        sound = soundfile.SoundFile(file)
    except soundfile.LibsndfileError as error:
        raise BadAudioError(f"cannot be read as audio ({_said(error)}); wav, flac, ogg and mp3 can") from None
    with sound:
        yield from _resampled(sound, max_seconds, max_channels)


def converted(samples: Samples, rate: int, max_seconds: float, max_channels: int) -> Samples:
    """Mono samples at 16 kHz of (n, channels) samples.

    Raises:
        BadAudioError: as `decoded`.
    """
    _check_shape(rate, samples.shape[1], max_channels)
    _check_length(len(samples) / rate, max_seconds)
    if not len(samples):
        raise BadAudioError("holds no samples")
    mixed = _mono(samples)
    resampled: Samples = soxr.resample(mixed, rate, RATE) if rate != RATE else mixed
    return resampled


def is_cut(file: IO[bytes]) -> bool:
    """Whether it is a WAV file that ends before its samples do, which libsndfile does not tell.

    Nor does it of ogg and aiff, of which what is there is read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head, place, found = file.read(12), 12, False
    for _ in range(MOST_CHUNKS if head[:4] == b"RIFF" and head[8:] == b"WAVE" else 0):
        file.seek(place)
        if len(chunk := file.read(8)) < 8:
            break
        name, length = struct.unpack("<4sI", chunk)
        if name == b"data":
            found = length < STREAMED and place + 8 + length > size
            break
        place += 8 + length + length % 2
    file.seek(0)
    return found


def _resampled(sound: soundfile.SoundFile, max_seconds: float, max_channels: int) -> Iterator[Samples]:
    rate, frames = sound.samplerate, sound.frames if sound.frames < UNCOUNTED else 0
    _check_shape(rate, sound.channels, max_channels)
    _check_length(frames / rate, max_seconds)
    stream, read = soxr.ResampleStream(rate, RATE, 1, dtype="float32"), 0
    while len(block := _block(sound)):
        read += len(block)
        _check_length(read / rate, max_seconds)
        yield stream.resample_chunk(_mono(block))
    if not read:
        raise BadAudioError("holds no samples")
    if read < frames:
        raise BadAudioError(
            f"is cut off or damaged: {read / rate:.2f} of {frames / rate:.2f} s can be read; get the whole file"
        )
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _check_shape(rate: int, channels: int, max_channels: int) -> None:
    if not RATES[0] <= rate <= RATES[1]:
        raise BadAudioError(f"has a rate of {rate} Hz; {RATES[0]} to {RATES[1]} Hz can be read")
    if not 1 <= channels <= max_channels:
        raise BadAudioError(f"has {channels} channels; 1 to {max_channels} can be read")


def _block(sound: soundfile.SoundFile) -> Samples:
    try:
        block: Samples = sound.read(BLOCK_SECONDS * sound.samplerate, dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        raise BadAudioError(f"is cut off or damaged ({_said(error)}); get the whole file") from None
    return block


def _check_length(seconds: float, most: float) -> None:
    if seconds > most:
        raise BadAudioError(f"is longer than {most:g} s; cut it into parts")


def _mono(samples: Samples) -> Samples:
    """The mean of the channels."""
    mixed: Samples = samples.mean(axis=1, dtype=np.float32)
    if not (np.abs(mixed) < LOUDEST).all():  # which is so of no number, too
        raise BadAudioError("holds samples that are no finite numbers, or far beyond -1..1")
    return mixed


def _said(error: soundfile.LibsndfileError) -> str:
    return str(error.error_string).removeprefix("Error :").strip().rstrip(".")


def limit(max_seconds: float, decode_seconds: float) -> None:
    """Bind this process: memory, processor time, bytes that it writes, files that it opens."""
    written = round(max_seconds + 2 * BLOCK_SECONDS) * RATE * 4
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_CPU, int(decode_seconds) + 1),
        (resource.RLIMIT_FSIZE, written),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_CORE, 0),
    ):
        held = resource.getrlimit(kind)[1]
        allowed = most if held == resource.RLIM_INFINITY else min(most, held)
        resource.setrlimit(kind, (allowed, allowed))


def main(limits: dict[str, Any]) -> int:
    """The exit code."""
    limit(limits["max_seconds"], limits["decode_seconds"])
    try:
        for block in decoded(sys.stdin.buffer, limits["max_seconds"], limits["max_channels"]):
            _write(block.tobytes())
    except BadAudioError as error:
        os.ftruncate(1, 0)
        os.lseek(1, 0, os.SEEK_SET)
        _write(str(error).encode())
        return BAD
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return FULL
        raise
    return 0


def _write(data: bytes) -> None:
    """Write to standard output, all of it, past the buffer, which would be left full where there is no room."""
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
