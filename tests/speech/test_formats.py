"""Transcripts as files, to the letter."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.speech.formats import write_transcript
from paceline.speech.transcript import Segment, Transcript, Word

HOUR = 3600.0
FIRST = Segment(
    start=0.0,
    end=2.5,
    text=" Hello & <b>welcome</b>.",
    tokens=(50364, 2425, 50489),
    avg_logprob=-0.25,
    compression_ratio=0.9,
    no_speech_prob=0.01,
    words=(Word(" Hello", 0.0, 0.42), Word(" &", 0.42, 0.42), Word(" <b>welcome</b>.", 0.5, 2.5)),
)
SECOND = Segment(
    start=HOUR + 61.0004,
    end=2 * HOUR + 59 * 60 + 59.9996,
    text=" a --> b\n\nthen\u2028c ",
    seek=6000,
    words=(Word(" a --> b then c", HOUR + 61.0004, 3 * HOUR),),
)
EMPTY = Segment(start=3 * HOUR, end=3 * HOUR + 1, text=" \n ")
TRANSCRIPT = Transcript(language="en", duration=3 * HOUR + 1, segments=(FIRST, SECOND, EMPTY))


def test_txt_has_a_line_for_each_segment() -> None:
    assert write_transcript(TRANSCRIPT, "txt") == "Hello & <b>welcome</b>.\na --> b then c\n"


def test_srt() -> None:
    assert write_transcript(TRANSCRIPT, "srt") == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello & <b>welcome</b>.\n\n"
        "2\n01:01:01,000 --> 03:00:00,000\na -> b then c\n\n"
    )


def test_vtt() -> None:
    assert write_transcript(TRANSCRIPT, "vtt") == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:02.500\nHello &amp; &lt;b&gt;welcome&lt;/b&gt;.\n\n"
        "01:01:01.000 --> 03:00:00.000\na --&gt; b then c\n\n"
    )


def test_words_are_shown_one_at_a_time_and_for_a_millisecond_at_least() -> None:
    spoken = replace(TRANSCRIPT, segments=(FIRST, EMPTY))
    assert write_transcript(spoken, "srt", words=True) == (
        "1\n00:00:00,000 --> 00:00:00,420\nHello\n\n"
        "2\n00:00:00,420 --> 00:00:00,421\n&\n\n"
        "3\n00:00:00,500 --> 00:00:02,500\n<b>welcome</b>.\n\n"
    )
    assert write_transcript(spoken, "vtt", words=True).endswith(
        "00:00:00.500 --> 00:00:02.500\n&lt;b&gt;welcome&lt;/b&gt;.\n\n"
    )


def test_hours_may_have_three_digits() -> None:
    late = Segment(start=123 * HOUR, end=123 * HOUR + 0.0014, text="x")
    found = write_transcript(replace(TRANSCRIPT, segments=(late,)), "srt")
    assert found == "1\n123:00:00,000 --> 123:00:00,001\nx\n\n"


def test_json_has_the_text() -> None:
    found = write_transcript(replace(TRANSCRIPT, segments=(replace(FIRST, text=' Olá, "mundo"'),)), "json")
    assert found == '{"text": "Olá, \\"mundo\\""}'


def test_verbose_json_has_all() -> None:
    found = json.loads(write_transcript(replace(TRANSCRIPT, segments=(FIRST, SECOND)), "verbose_json"))
    assert found == {
        "task": "transcribe",
        "language": "english",
        "duration": 10801.0,
        "text": "Hello & <b>welcome</b>. a --> b\n\nthen\u2028c",
        "segments": [
            {
                "id": 0,
                "seek": 0,
                "start": 0.0,
                "end": 2.5,
                "text": " Hello & <b>welcome</b>.",
                "tokens": [50364, 2425, 50489],
                "temperature": 0.0,
                "avg_logprob": -0.25,
                "compression_ratio": 0.9,
                "no_speech_prob": 0.01,
            },
            {
                "id": 1,
                "seek": 6000,
                "start": 3661.0,
                "end": 10800.0,
                "text": " a --> b\n\nthen\u2028c ",
                "tokens": [],
                "temperature": 0.0,
                "avg_logprob": 0.0,
                "compression_ratio": 0.0,
                "no_speech_prob": 0.0,
            },
        ],
    }


def test_verbose_json_has_words_where_they_are_asked_for() -> None:
    found = json.loads(write_transcript(replace(TRANSCRIPT, segments=(FIRST,)), "verbose_json", words=True))
    assert found["words"] == [
        {"word": "Hello", "start": 0.0, "end": 0.42},
        {"word": "&", "start": 0.42, "end": 0.42},
        {"word": "<b>welcome</b>.", "start": 0.5, "end": 2.5},
    ]


def test_nothing_said_is_a_file_all_the_same() -> None:
    silent = replace(TRANSCRIPT, segments=())
    assert [write_transcript(silent, form) for form in ("txt", "srt", "vtt", "json")] == [
        *("", "", "WEBVTT\n\n", '{"text": ""}')
    ]


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(
        ConfigError, match="response_format must be one of txt, srt, vtt, json, verbose_json, got 'ass'"
    ):
        write_transcript(TRANSCRIPT, "ass")
    bare = replace(FIRST, start=3.0, end=3.5, text="...", words=())  # its signs have joined the word before
    assert write_transcript(replace(TRANSCRIPT, segments=(FIRST, bare)), "srt", words=True)
    with pytest.raises(ConfigError, match="words can only be written with their times"):
        write_transcript(replace(TRANSCRIPT, segments=(replace(FIRST, words=()),)), "srt", words=True)
