"""Decoding a window again at higher temperatures where the text is doubtful.

Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), section 4.5, and its code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.speech.scores import compression_ratio
from paceline.utils import number

TEMPERATURES: Final = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A window decoded once.

    Attributes:
        tokens: what was sampled, text and times, without the end.
        text: of its text tokens.
        temperature: at which it was sampled.
        avg_logprob: see `average_logprob`.
        no_speech_prob: see `no_speech_probability`.
    """

    tokens: tuple[int, ...]
    text: str
    temperature: float
    avg_logprob: float
    no_speech_prob: float

    @property
    def compression_ratio(self) -> float:
        """See `compression_ratio`."""
        return compression_ratio(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When a text is doubtful and when a window is silent; None turns a test off.

    Attributes:
        compression_ratio: above it the text repeats itself.
        avg_logprob: below it the model is unsure.
        no_speech_prob: above it nobody speaks, unless the model is sure of the text.

    Raises:
        ConfigError: a number out of its range.
    """

    compression_ratio: float | None = 2.4
    avg_logprob: float | None = -1.0
    no_speech_prob: float | None = 0.6

    def __post_init__(self) -> None:
        if self.compression_ratio is not None:
            number("compression_ratio", self.compression_ratio, 0.0, 1000.0, "be a number in 0..1000 or None")
        if self.avg_logprob is not None:
            number("avg_logprob", self.avg_logprob, -1000.0, 0.0, "be a number in -1000..0 or None")
        if self.no_speech_prob is not None:
            number("no_speech_prob", self.no_speech_prob, 0.0, 1.0, "be a number in 0..1 or None")

    def is_silent(self, attempt: Attempt) -> bool:
        """Nobody speaks in the window: it is passed over, and its text dropped."""
        if self.no_speech_prob is None or attempt.no_speech_prob <= self.no_speech_prob:
            return False
        return self.avg_logprob is None or attempt.avg_logprob <= self.avg_logprob

    def is_doubtful(self, attempt: Attempt) -> bool:
        """It should be decoded again at a higher temperature; silence is not."""
        unsure = self.avg_logprob is not None and attempt.avg_logprob < self.avg_logprob
        if unsure and self.no_speech_prob is not None and attempt.no_speech_prob > self.no_speech_prob:
            return False
        return unsure or (self.compression_ratio is not None and attempt.compression_ratio > self.compression_ratio)

    def is_last(self, attempt: Attempt, before: Sequence[Attempt]) -> bool:
        """No further attempt is needed. What is drawn at a high temperature is no sign of silence where an attempt
        before it was sure of its text: who repeats a sentence is not silent.
        """
        heard = any(not self.is_silent(one) for one in before)
        return not self.is_doubtful(attempt) and not (heard and self.is_silent(attempt))

    def best(self, attempts: Sequence[Attempt]) -> Attempt:
        """Of attempts none of which was the last the surest; first of those that are not doubtful, if there are any.

        The published code keeps the last one, which is often worse: it is drawn at the highest temperature. A text that
        repeats itself may be what was said, and is better than another that the model is unsure of.
        """
        fine = [attempt for attempt in attempts if not self.is_doubtful(attempt) and not self.is_silent(attempt)]
        return max(fine or attempts, key=lambda attempt: attempt.avg_logprob)
