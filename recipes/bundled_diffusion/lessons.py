"""Lessons of the bundled denoisers: generated tasks, and windows of public text.

An answer is followed by end tokens up to one of LENGTHS slots, so that a canvas of any of these lengths is filled to
its end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lab.diffusion import TASKS, Split, items
from recipes.bundled_diffusion.losses import Batch
from recipes.bundled_diffusion.model import EOS
from recipes.bundled_pair.corpus import read_documents

LENGTHS = (16, 24, 32)
TEXT_SLOTS = 64
SOURCES = ("math", "sql")


@dataclass(frozen=True, slots=True)
class Lesson:
    """Token ids of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


def task_lessons(
    tokenizer: Tokenizer, *, split: Split, count: int, seed: int, names: Sequence[str] = tuple(TASKS)
) -> list[Lesson]:
    """`count` lessons of each task."""
    lessons = []
    for name in names:
        made = items(name, split=split, count=count, seed=seed)
        prompts = tokenizer.encode_batch([item.prompt for item in made])
        answers = tokenizer.encode_batch([item.answer for item in made])
        lessons += [Lesson(p.ids, a.ids) for p, a in zip(prompts, answers, strict=True)]
    return lessons


def read_rows(path: Path) -> list[Any]:
    """The JSON values of a file, one a line; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] if path.is_file() else []


def documents(corpus: Path, tokenizer: Tokenizer, *, heldout: bool) -> list[list[int]]:
    """Token ids of the texts of SOURCES. Raises SystemExit without a corpus."""
    texts = [d.text for d in read_documents(corpus) if d.source in SOURCES and d.heldout == heldout]
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def text_lesson(ids: list[int], rng: random.Random) -> Lesson:
    """A window of TEXT_SLOTS slots, from the beginning half of the time; a part of at most half is given."""
    start = 0 if rng.random() < 0.5 else rng.randrange(max(1, len(ids) - TEXT_SLOTS // 2))
    window = ids[start : start + TEXT_SLOTS]
    given = rng.randint(1, max(1, min(TEXT_SLOTS, len(window)) // 2))
    return Lesson(window[:given], window[given:])


def batch_of(lessons: Sequence[tuple[Lesson, int]]) -> Batch:
    """Lessons with the slots of their canvas after the prompt, end tokens behind the answer; few different widths."""
    rows = [lesson.prompt + (lesson.answer + [EOS] * length)[:length] for lesson, length in lessons]
    longest = -(-max(map(len, rows)) // 8) * 8
    ids = torch.tensor([row + [EOS] * (longest - len(row)) for row in rows])
    start = torch.tensor([len(lesson.prompt) for lesson, _ in lessons])
    return Batch(ids, start, torch.tensor([len(row) for row in rows]))


def batches(
    tasks: Sequence[Lesson],
    texts: Sequence[list[int]],
    *,
    size: int,
    text_share: float,
    seed: int,
    lengths: Sequence[int] = LENGTHS,
) -> Iterator[Batch]:
    """Endless batches, each of text windows or of tasks with the same number of answer slots, one of `lengths`."""
    rng = random.Random(seed)
    decks = {length: Deck([lesson for lesson in tasks if len(lesson.answer) < length], rng) for length in set(lengths)}
    while True:
        if texts and rng.random() < text_share:
            windows = [text_lesson(rng.choice(texts), rng) for _ in range(size)]
            yield batch_of([(lesson, TEXT_SLOTS - len(lesson.prompt)) for lesson in windows])
            continue
        length = rng.choice(lengths)
        yield batch_of([(decks[length].draw(), length) for _ in range(size)])


class Deck:
    """Lessons in random order, every one once before any comes again."""

    def __init__(self, lessons: Sequence[Lesson], rng: random.Random) -> None:
        self._lessons, self._rng, self._left = lessons, rng, list[int]()

    def draw(self) -> Lesson:
        if not self._left:
            self._left = self._rng.sample(range(len(self._lessons)), len(self._lessons))
        return self._lessons[self._left.pop()]
