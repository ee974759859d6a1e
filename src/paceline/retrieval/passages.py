"""Passages of texts, and the file that holds them: one JSON string a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from paceline.utils import integer

FILE: Final = "passages.jsonl"

PASSAGE_WORDS: Final = 100
"""As Wikipedia is divided for dense passage retrieval (arXiv:2004.04906)."""


def passages_of(texts: Iterable[str], words: int = PASSAGE_WORDS) -> Iterator[str]:
    """Divide texts into passages of so many words at most, in order; blanks within stay as they are.

    Raises:
        ConfigError: no words.
    """
    integer("passage_words", words, 1)
    for text in texts:
        begin, count, within = 0, 0, False
        for place, letter in enumerate(text):
            blank = letter.isspace()
            if not blank and not within:
                if count == words:
                    yield text[begin:place].strip()
                    begin, count = place, 0
                count += 1
            within = not blank
        if count:
            yield text[begin:].strip()


def write_passages(folder: Path, passages: Sequence[str]) -> None:
    """Raises OSError where they cannot be written."""
    with (folder / FILE).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(passage, ensure_ascii=False) + "\n" for passage in passages)


def read_passages(folder: Path) -> list[str]:
    """Raises OSError or ValueError where they cannot be read."""
    with (folder / FILE).open(encoding="utf-8") as file:
        passages = [json.loads(line) for line in file]
    if not all(isinstance(passage, str) for passage in passages):
        raise ValueError(f"a line of {FILE} is no string")
    return passages
