"""Which attempts are doubtful, which windows silent, and how the ladder of temperatures is climbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.speech.fallback import Attempt, Thresholds, decode_with_fallback

FINE = Attempt(tokens=(), text="All is well.", temperature=0.0, avg_logprob=-0.3, no_speech_prob=0.1)
UNSURE = replace(FINE, avg_logprob=-1.5)
REPEATING = replace(FINE, text="and then " * 50)
SILENT = replace(UNSURE, no_speech_prob=0.9)


def tried(attempts: list[Attempt], thresholds: Thresholds) -> tuple[list[float], Attempt]:
    """Temperatures at which a window is decoded, and the attempt that is kept."""
    temperatures: list[float] = []

    def decode(temperature: float) -> Attempt:
        temperatures.append(temperature)
        return replace(attempts[min(len(temperatures), len(attempts)) - 1], temperature=temperature)

    kept = decode_with_fallback(decode, thresholds)
    return temperatures, kept


@pytest.mark.parametrize(
    ("attempts", "temperatures"),
    [
        ([FINE], [0.0]),
        ([UNSURE, FINE], [0.0, 0.2]),
        ([REPEATING, UNSURE, FINE], [0.0, 0.2, 0.4]),
        ([UNSURE], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ([SILENT], [0.0]),
    ],
)
def test_a_doubtful_window_is_decoded_at_higher_temperatures(
    attempts: list[Attempt], temperatures: list[float]
) -> None:
    found, kept = tried(attempts, Thresholds())
    assert found == temperatures
    assert kept.temperature == temperatures[-1]


def test_without_the_threshold_of_silence_a_silent_window_is_doubtful() -> None:
    assert tried([SILENT], Thresholds(no_speech_prob=None))[0] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]


def test_thresholds_can_be_turned_off() -> None:
    never = Thresholds(compression_ratio=None, avg_logprob=None)
    assert not any(never.is_doubtful(attempt) for attempt in (UNSURE, REPEATING, SILENT))
    assert never.is_silent(replace(FINE, no_speech_prob=0.7))
    assert not Thresholds(no_speech_prob=None).is_silent(SILENT)


def test_a_window_is_silent_unless_its_text_is_sure() -> None:
    thresholds = Thresholds()
    assert thresholds.is_silent(SILENT)
    assert not thresholds.is_silent(replace(SILENT, avg_logprob=-0.5))
    assert not thresholds.is_silent(replace(SILENT, no_speech_prob=0.6))


def test_repetition_in_a_silent_window_is_no_doubt_only_where_the_text_is_unsure() -> None:
    silent_and_repeating = replace(REPEATING, no_speech_prob=0.9)
    assert Thresholds().is_doubtful(silent_and_repeating)
    assert not Thresholds().is_doubtful(replace(silent_and_repeating, avg_logprob=-1.5))


def test_what_makes_no_sense_is_named() -> None:
    with pytest.raises(ConfigError, match="temperatures must hold at least one"):
        decode_with_fallback(lambda _: FINE, Thresholds(), ())
    with pytest.raises(ConfigError, match=r"no_speech_prob must be a number in 0\.\.1 or None, got 2"):
        Thresholds(no_speech_prob=2)
