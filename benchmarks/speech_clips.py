"""Clips of speech to train drafts on, and others to measure them by: texts by espeak-ng, and digits spoken by people.

usage: speech_clips.py --data FOLDER CLIPS [--count 280]

Writes wav files into the folder CLIPS: so many texts of some 10 to 25 s, and a seventh as many of digits. `FOLDER`
holds published data: `sherlock-holmes`, `gsm8k`, `xquad` and `spoken-digits`. Texts, voices and speakers of
`held_out` clips are in none of the training clips.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
from whisper_check import PAUSE, recordings

from paceline.speech import SAMPLE_RATE, load_audio

VOICES = ("en-us", "en-gb", "en-gb-scotland", "en-us+m3", "en-us+f2", "en-gb+m5", "en-gb+f4")
OTHER_VOICES = ("en-gb-x-rp", "en-us+f5", "en-us+m7")
SPEEDS = (130, 185)
WORDS = (25, 55)
LONGEST = 29.0
SPEAKERS = 4
"""Whose digits are for training; the others' are held out."""

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Clip:
    """Holds one clip: where it comes from, and its samples at 16 kHz."""

    name: str
    samples: Samples


def stories(data: Path) -> list[str]:
    """Sentences of a book."""
    text = (data / "sherlock-holmes" / "1661.txt").read_text(encoding="utf-8", errors="replace")
    return sentences(text[text.index("To Sherlock Holmes") : text.rindex("*** END") if "*** END" in text else None])


def problems(data: Path) -> list[str]:
    """Sentences of word problems."""
    with gzip.open(data / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        return [sentence for line in file for sentence in sentences(json.loads(line)["question"])]


def articles(data: Path) -> list[str]:
    """Sentences of encyclopedia articles."""
    found: Any = json.loads((data / "xquad" / "xquad.en.part-a.json").read_text(encoding="utf-8"))
    paragraphs = [part["context"] for article in found["data"] for part in article["paragraphs"]]
    return [sentence for paragraph in paragraphs for sentence in sentences(paragraph)]


def sentences(text: str) -> list[str]:
    """Sentences of a text, without marks that are not spoken."""
    plain = re.sub(r"[^\w\s.,;:!?'$%-]", " ", text.replace("--", ", "))
    return [one for one in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", plain)) if len(one.split()) > 2]


def passages(found: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Runs of sentences with as many words as a window can hold, from places that are drawn."""
    while True:
        at, words, wanted = draw.randrange(len(found)), list[str](), draw.randint(*WORDS)
        while len(words) < wanted and at < len(found):
            words += found[at].split()
            at += 1
        yield " ".join(words[: WORDS[1]])


def said(text: str, voice: str, speed: int) -> Samples:
    """A text spoken by espeak-ng."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "--stdout", text]
    return load_audio(subprocess.run(command, capture_output=True, check=True).stdout)


def texts(kinds: Sequence[Sequence[str]], voices: Sequence[str], count: int, seed: int, name: str) -> Iterator[Clip]:
    """So many clips of texts of several kinds in turn."""
    draw = random.Random(seed)
    runs = [passages(kind, draw) for kind in kinds]
    for number in range(count):
        samples = said(next(runs[number % len(runs)]), draw.choice(voices), draw.randint(*SPEEDS))
        yield Clip(f"{name}-{number:03}", samples[: int(LONGEST * SAMPLE_RATE)])


def digits(data: Path, speakers: slice, count: int, seed: int, name: str) -> Iterator[Clip]:
    """So many clips of ten digits each."""
    draw, files = random.Random(seed), recordings(data)
    names = sorted({speaker for _, speaker, _ in files})[speakers]
    for number in range(count):
        speaker = names[number % len(names)]
        drawn = draw.sample(sorted(key for key in files if key[1] == speaker), 10)
        samples = np.concatenate([part for key in drawn for part in (load_audio(files[key]), PAUSE)])
        yield Clip(f"{name}-{number:03}", samples / max(float(np.abs(samples).max()), 1e-6) * 0.8)


def training(data: Path, count: int) -> Iterator[Clip]:
    """Clips to learn from: the first four fifths of the book, word problems, digits of some speakers."""
    book = stories(data)
    yield from texts([book[: 4 * len(book) // 5], problems(data)], VOICES, count, 1, "text")
    yield from digits(data, slice(0, SPEAKERS), count // 7, 2, "digits")


def held_out(data: Path, count: int) -> dict[str, list[Clip]]:
    """Clips that nothing was learned from, by kind: the rest of the book, articles, digits of other speakers."""
    book = stories(data)
    return {
        "book": list(texts([book[4 * len(book) // 5 :]], OTHER_VOICES, count, 3, "book")),
        "articles": list(texts([articles(data)], OTHER_VOICES, count, 4, "articles")),
        "digits": list(digits(data, slice(SPEAKERS, None), count, 5, "digits")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    parser.add_argument("clips", type=Path)
    parser.add_argument("--count", type=int, default=280)
    given = parser.parse_args()
    given.clips.mkdir(parents=True, exist_ok=True)
    for clip in training(given.data, given.count):
        soundfile.write(given.clips / f"{clip.name}.wav", clip.samples, SAMPLE_RATE, subtype="PCM_16")


if __name__ == "__main__":
    main()
