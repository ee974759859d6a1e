"""Audio that comes piece by piece, of which no end is known: bytes become samples as they come.

What begins with the header of a WAV file of 16-bit integers is read as that, at its rate and with its channels; all
else is raw: 16 kHz, mono, 16-bit integers, least byte first; but for files that are known by how they begin.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.errors import ConfigError, PromptError

Samples = npt.NDArray[np.float32]

RATE: Final = 16_000
FULL_SCALE: Final = 1 << 15
PCM: Final = (1, 0xFFFE)
"""Formats of WAV files: integers, and "extensible", which is integers where samples have 16 bits."""

OTHERS: Final = {
    b"ID3": "mp3", b"fLaC": "flac", b"OggS": "ogg", b"FORM": "aiff", b"\x1a\x45\xdf\xa3": "webm or mkv",
    b"RF64": "RF64", b"RIFX": "RIFX", b".snd": "au", b"caff": "caf",
}  # fmt: skip
"""How files begin that hold no samples as they are wanted -> what they are."""

MP4: Final = b"ftyp"
"""So do mp4 and m4a files behind four bytes."""

LONGEST: Final = 8
"""Bytes by which all of these are known."""

NOT_WHOLE: Final = ("webm or mkv", "mp4 or m4a")
"""Files that cannot be transcribed as a whole either."""

MP3_FRAMES: Final = {bytes([0xFF, second]) for second in (0xE2, 0xE3, 0xF2, 0xF3, 0xFA, 0xFB)}
"""Bytes by which each frame of an mp3 file begins; loud noise may begin so too, but does not go on so."""

MP3_FRAME: Final = 24, 1500
"""Bytes of the least and the largest frame."""

MOST_HEADER: Final = 1 << 16
RATES: Final = (1_000, 768_000)
MOST_CHANNELS: Final = 8


class PcmStream:
    """Reads a stream of audio.

    Args:
        wav: it must have the header of a WAV file.

    Attributes:
        rate, channels: of what comes in.
    """

    def __init__(self, *, wav: bool = False) -> None:
        self.rate, self.channels = RATE, 1
        self._wav, self._bytes, self._begun, self._any = wav, b"", False, False
        self._resampler: Any = None

    def feed(self, data: bytes) -> Samples:
        """(n,) mono samples at 16 kHz that these bytes complete; none until a header is whole.

        Raises:
            PromptError: a file of another kind, or a WAV file that holds something else than 16-bit integers.
            ConfigError: another rate, where the extra that resamples is not installed.
        """
        self._bytes += data
        if not self._begun:
            self._begun = self._read_header()
        return self._samples(last=False) if self._begun else np.zeros(0, np.float32)

    def finish(self) -> Samples:
        """The samples that are left at the end; a sample that is not whole is dropped.

        Raises:
            PromptError: there were none at all, or the header of a WAV file is cut off.
        """
        if not self._begun and self._bytes[:4] == b"RIFF":
            raise PromptError("the stream ends within the header of a WAV file; send the whole of it")
        found = self._samples(last=True)
        if not self._any:
            raise PromptError("the stream ended before any sample came; send 16-bit PCM")
        return found

    def _read_header(self) -> bool:
        """Whether the samples begin now."""
        data = self._bytes
        if data[:4] != b"RIFF"[: len(data)]:
            return self._is_raw()
        place = 12
        while len(data) >= place + 8:
            name, length = struct.unpack_from("<4sI", data, place)
            if name == b"data":
                self._bytes = data[place + 8 :]
                return True
            if name == b"fmt " and len(data) >= place + 24:
                self._read_format(struct.unpack_from("<HHIIHH", data, place + 8))
            place += 8 + length + length % 2
        if data[8:12] != b"WAVE"[: len(data[8:12])] or len(data) > MOST_HEADER:
            raise PromptError("the stream begins like a WAV file and holds no samples; send 16-bit PCM")
        return False

    def _is_raw(self) -> bool:
        """Whether this is known by now."""
        data, (least, most) = self._bytes, MP3_FRAME
        kind = next((kind for magic, kind in OTHERS.items() if data.startswith(magic)), "")
        is_frame = data[:2] in MP3_FRAMES
        if is_frame and data.find(data[:2], least, most) > 0:
            kind = "mp3"
        if data[4:8] == MP4:
            kind = "mp4 or m4a"
        if kind:
            instead = "" if kind in NOT_WHOLE else ", or transcribe it as a whole"
            raise PromptError(f"the stream is a file of the kind {kind}; send 16-bit PCM{instead}")
        if self._wav:
            raise PromptError("the file has the name of a WAV file and not its header; send 16-bit PCM with a header")
        return len(data) >= LONGEST and not (is_frame and len(data) < most)

    def _read_format(self, found: tuple[int, ...]) -> None:
        kind, channels, rate, _, _, bits = found
        if kind not in PCM or bits != 16:
            raise PromptError(f"the stream has samples of {bits} bits (format {kind}); send 16-bit PCM")
        if not 1 <= channels <= MOST_CHANNELS or not RATES[0] <= rate <= RATES[1]:
            raise PromptError(
                f"the stream has {channels} channels at {rate} Hz; 1 to {MOST_CHANNELS} channels at {RATES[0]} to "
                f"{RATES[1]} Hz can be read"
            )
        self.rate, self.channels = rate, channels

    def _samples(self, *, last: bool) -> Samples:
        size = 2 * self.channels
        whole = len(self._bytes) // size * size
        found = np.frombuffer(self._bytes[:whole], "<i2").reshape(-1, self.channels)
        self._bytes, self._any = self._bytes[whole:], self._any or whole > 0
        mono: Samples = found.mean(axis=1, dtype=np.float32) / np.float32(FULL_SCALE) if whole else _NOTHING
        return mono if self.rate == RATE else self._resampled(mono, last=last)

    def _resampled(self, mono: Samples, *, last: bool) -> Samples:
        try:
            import soxr
        except ImportError:
            raise ConfigError(
                f"a stream at {self.rate} Hz needs soxr, which is not installed; pip install '.[speech]'"
            ) from None
        if self._resampler is None:
            self._resampler = soxr.ResampleStream(self.rate, RATE, 1, dtype="float32")
        found: Samples = self._resampler.resample_chunk(mono, last=last)
        return found


_NOTHING: Final = np.zeros(0, np.float32)
