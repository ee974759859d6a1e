"""Which attempts are doubtful, which windows silent, and how the ladder of temperatures is climbed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.speech.fallback import Attempt, Thresholds

FINE = Attempt(tokens=(), text="All is well.", temperature=0.0, avg_logprob=-0.3, no_speech_prob=0.1)
UNSURE = replace(FINE, avg_logprob=-1.5)
REPEATING = replace(FINE, text="and then " * 50)
SILENT = replace(UNSURE, no_speech_prob=0.9)


@pytest.mark.parametrize(("attempt", "doubtful"), [(FINE, False), (UNSURE, True), (REPEATING, True), (SILENT, False)])
def test_what_is_doubtful(attempt: Attempt, doubtful: bool) -> None:
    assert Thresholds().is_doubtful(attempt) == doubtful


def test_without_the_threshold_of_silence_a_silent_window_is_doubtful() -> None:
    assert Thresholds(no_speech_prob=None).is_doubtful(SILENT)


def test_of_doubtful_attempts_the_surest_is_kept() -> None:
    worse = replace(UNSURE, temperature=1.0, avg_logprob=-4.0)
    assert Thresholds().best([UNSURE, worse]) == UNSURE
    assert Thresholds().best([worse, UNSURE]) == UNSURE
    sure_of_a_loop = replace(REPEATING, avg_logprob=-0.1)
    assert Thresholds().best([sure_of_a_loop, worse]) == sure_of_a_loop, "it may have been said"
    assert Thresholds().best([sure_of_a_loop, replace(sure_of_a_loop, avg_logprob=-2.0)]) == sure_of_a_loop


def test_a_hot_draw_is_no_silence_where_the_model_was_sure_before() -> None:
    """A sentence said again and again is doubtful at every temperature, until noise is drawn."""
    thresholds, repeated = Thresholds(), replace(REPEATING, avg_logprob=-0.15, no_speech_prob=0.68)
    noise = replace(SILENT, temperature=1.0, avg_logprob=-3.4, no_speech_prob=0.68)
    assert thresholds.is_silent(noise)
    assert thresholds.is_last(noise, [])
    assert thresholds.is_last(noise, [replace(noise, temperature=0.0)])
    assert not thresholds.is_last(noise, [repeated])
    assert thresholds.best([repeated, noise]) == repeated
    assert thresholds.is_last(FINE, [repeated])


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
    with pytest.raises(ConfigError, match=r"no_speech_prob must be a number in 0\.\.1 or None, got 2"):
        Thresholds(no_speech_prob=2)
