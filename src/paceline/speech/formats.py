"""A transcript as text: txt, srt, vtt, json and verbose_json, the last two as OpenAI's API answers.

Sources: SubRip as openai/whisper writes it (whisper/utils.py); WebVTT, W3C Candidate Recommendation of 2019; OpenAI's
API reference, audio transcriptions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.speech.transcript import Segment, Transcript, Word
from paceline.speech.whisper_tokens import language_name
from paceline.utils import choice


@dataclass(frozen=True, slots=True)
class Cue:
    """A line that is shown for some time.

    Attributes:
        start, end: milliseconds; it is shown for 1 ms at least, since players drop what lasts no time.
        text: one line.
    """

    start: int
    end: int
    text: str


def write_transcript(transcript: Transcript, form: str, *, words: bool = False) -> str:
    """The text of a file.

    Args:
        form: txt, srt, vtt, json or verbose_json.
        words: srt and vtt show a word at a time, verbose_json has the words beside the segments; the others know none.
    Raises:
        ConfigError: an unknown form, or words without times.
    """
    choice("response_format", form, tuple(WRITERS))
    if words and transcript.text and not transcript.words:  # a segment of signs that join a word before has none
        raise ConfigError("words can only be written with their times, which this transcript lacks; ask for word times")
    return WRITERS[form](transcript, words)


def _txt(transcript: Transcript, words: bool) -> str:
    return "".join(f"{line}\n" for segment in transcript.segments if (line := one_line(segment.text)))


def _srt(transcript: Transcript, words: bool) -> str:
    return "".join(
        f"{number}\n{clock(cue.start, ',')} --> {clock(cue.end, ',')}\n{cue.text.replace('-->', '->')}\n\n"
        for number, cue in enumerate(_cues(transcript, words), 1)
    )


def _vtt(transcript: Transcript, words: bool) -> str:
    cues = (
        f"{clock(cue.start, '.')} --> {clock(cue.end, '.')}\n{_escaped(cue.text)}\n\n"
        for cue in _cues(transcript, words)
    )
    return "WEBVTT\n\n" + "".join(cues)


def _json(transcript: Transcript, words: bool) -> str:
    return json.dumps({"text": transcript.text}, ensure_ascii=False)


def _verbose_json(transcript: Transcript, words: bool) -> str:
    return json.dumps(verbose(transcript, words=words), ensure_ascii=False)


WRITERS: Final[Mapping[str, Callable[[Transcript, bool], str]]] = {
    "txt": _txt,
    "srt": _srt,
    "vtt": _vtt,
    "json": _json,
    "verbose_json": _verbose_json,
}


def verbose(transcript: Transcript, *, words: bool = False) -> dict[str, Any]:
    """All that is known of a transcript, as OpenAI's API names it; `language` is the English name."""
    found = {
        "task": transcript.task,
        "language": language_name(transcript.language),
        "duration": round(transcript.duration, 3),
        "text": transcript.text,
        "segments": [_segment(number, segment) for number, segment in enumerate(transcript.segments)],
    }
    if words:
        found["words"] = [
            {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
            for word in transcript.words
        ]
    return found


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    return {
        "id": number,
        "seek": segment.seek,
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def clock(milliseconds: int, mark: str) -> str:
    """Hours, minutes, seconds, milliseconds: `00:00:00,000` where the mark is a comma; hours may have more digits."""
    seconds, thousandths = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{seconds:02}{mark}{thousandths:03}"


def one_line(text: str) -> str:
    """A text without its line breaks, which would end a cue, and without blanks around it."""
    return " ".join(stripped for line in text.splitlines() if (stripped := line.strip()))


def _escaped(text: str) -> str:
    """So that no sign of it is a tag of WebVTT, and none an arrow."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cues(transcript: Transcript, words: bool) -> Iterator[Cue]:
    shown: tuple[Segment | Word, ...] = transcript.words if words else transcript.segments
    for part in shown:
        start, end = round(part.start * 1000), round(part.end * 1000)
        if line := one_line(part.text):
            yield Cue(start, max(end, start + 1), line)
