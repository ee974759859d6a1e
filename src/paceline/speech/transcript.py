"""What a transcript consists of: words and segments with their times in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

FRAMES_PER_SECOND: Final = 100


@dataclass(frozen=True, slots=True)
class Word:
    """A word as it stands in the text, with the space before it and the signs around it.

    Attributes:
        text: the word.
        start, end: seconds from the beginning of the audio.
        probability: mean of its tokens'.
    """

    text: str
    start: float
    end: float
    probability: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of speech that belongs together, as the model cuts it.

    Attributes:
        start, end: seconds from the beginning of the audio.
        text: with the space before it.
        tokens: text and times.
        seek: first frame, of 10 ms, of the window that it was decoded in.
        temperature, avg_logprob, compression_ratio, no_speech_prob: of that window (`Attempt`).
        words: empty where they were not asked for.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...] = ()
    seek: int = 0
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    words: tuple[Word, ...] = ()

    def moved(self, seconds: float) -> Self:
        """The same segment of an audio in which it lies so much later."""
        words = tuple(replace(word, start=word.start + seconds, end=word.end + seconds) for word in self.words)
        seek = self.seek + round(seconds * FRAMES_PER_SECOND)
        return replace(self, start=self.start + seconds, end=self.end + seconds, seek=seek, words=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The text of an audio.

    Attributes:
        language: its code, such as "en".
        duration: of the audio, in seconds.
        segments: in the order of time.
        task: "transcribe" or "translate".
    """

    language: str
    duration: float
    segments: tuple[Segment, ...]
    task: str = "transcribe"

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> tuple[Word, ...]:
        """Those of all segments."""
        return tuple(word for segment in self.segments for word in segment.words)
