"""Small datastores for tests: ids written as numbers between spaces, so that no tokenizer is needed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.drafters.retrieval import DatastoreWriter


class Numbers:
    """A tokenizer of numbers."""

    def __init__(self, vocab_size: int = 11, words: str = "") -> None:
        self.vocab_size, self.words, self.name = vocab_size, words, "numbers"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def fingerprint(self) -> str:
        return self.words


def write(
    path: Path, documents: Sequence[Sequence[int]], *, tokenizer: Numbers | None = None, shard_tokens: int = 4096
) -> Path:
    with DatastoreWriter(path, tokenizer or Numbers(), shard_tokens=shard_tokens) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
        writer.finish(1)
    return path


def written(documents: Sequence[Sequence[int]], shard_tokens: int = 4096) -> str:
    """Path of a datastore in a folder of its own."""
    return str(
        write(
            Path(tempfile.mkdtemp(prefix="paceline-datastore-")) / "texts.datastore",
            documents,
            shard_tokens=shard_tokens,
        )
    )
