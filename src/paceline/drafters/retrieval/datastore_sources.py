"""The texts that a datastore is built from: files and folders of text, JSONL or JSON, read a piece at a time.

In: paths, names of fields. Out: pieces of documents. Not here: token ids, writing (`datastore_build`).

A text file is one document. A `.jsonl` file holds a document or several a row, and so does a `.json` file that is a
list of objects or strings; any other JSON is text. Which fields of a row are read follows from its keys, as for
benchmark files; answers that stand beside the prompts are read too:

    messages                    every message's content is a document
    turns                       every turn
    prompt (with completion,    one document, the answer right behind the prompt
    response, output, answer or
    canonical_solution)
    question, answer            a document each
    text, content               a document

Given names of fields replace this: each text, or list of texts, under one of them is a document. Folders are read in
the order of names, without hidden files and what is not UTF-8. Files that end in `.gz` are unpacked as they are read.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO

from paceline.errors import PromptError

PIECE: Final = 256 * 1024
"""Characters that are read at once; a piece ends at a line's end where there is one."""

LARGEST_ROW: Final = 64 * 1024 * 1024
LARGEST_JSON: Final = 256 * 1024 * 1024
ANSWERS: Final = ("completion", "response", "output", "answer", "canonical_solution")


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text.

    Attributes:
        text: of one document. last: whether it ends the document.
        done: bytes of the source files that are read so far, about.
    """

    text: str
    last: bool
    done: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Files to read.

    Attributes:
        files: in order. given: those that the user named, in which nothing is skipped.
        fields: of JSON rows; none means: by the keys.
    """

    files: tuple[Path, ...]
    given: frozenset[Path]
    fields: tuple[str, ...] = ()

    @classmethod
    def find(cls, paths: Sequence[Path], fields: Sequence[str] = ()) -> Sources:
        """All files in files and folders.

        Raises:
            PromptError: a path that is not there, or nothing to read.
        """
        files: dict[Path, None] = {}
        for path in paths:
            if not path.exists():
                raise PromptError(
                    f"no file or folder {str(path)!r}; give text, JSONL or JSON files, or folders of them"
                )
            files.update(dict.fromkeys(_within(path) if path.is_dir() else [path]))
        if not files:
            raise PromptError(f"no files in {', '.join(map(repr, map(str, paths)))}; give text, JSONL or JSON files")
        return cls(tuple(files), frozenset(path for path in paths if not path.is_dir()), tuple(fields))

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[Piece]:
        """All documents, in pieces.

        Raises:
            PromptError: a file that cannot be read, or rows without text.
        """
        before = 0
        for path in self.files:
            size = path.stat().st_size
            try:
                for text, last, share in self._of(path):
                    yield Piece(text, last, before + round(share * size))
            except UnicodeDecodeError as error:
                if path in self.given:
                    raise PromptError(
                        f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); give text"
                    ) from None
                yield Piece("", True, before)
            except (OSError, EOFError, zlib.error) as error:
                why = getattr(error, "strerror", None) or error
                raise PromptError(f"cannot read {str(path)!r} ({why}); check the file") from None
            before += size

    def _of(self, path: Path) -> Iterator[tuple[str, bool, float]]:
        """(text, ends its document, share of the file that is read)."""
        rows: Iterator[tuple[str, Any, float]] | None = None
        kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
        if kind == ".jsonl":
            rows = _lines(path)
        elif kind == ".json" and (found := _list(path)) is not None:
            rows = ((f"row {i}", row, i / len(found)) for i, row in enumerate(found, 1))
        if rows is None:
            if self.fields and kind == ".json" and path in self.given:
                raise PromptError(
                    f"{str(path)!r} is no list of rows that have fields; leave --field out to read it as text"
                )
            yield from _text(path)
            return
        for where, row, share in rows:
            for text in documents(row, self.fields, place := f"{str(path)!r} {where}"):
                _must_be_text(text, place)
                yield text, True, share


def _within(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            Path(root, name) for name in sorted(files) if not name.startswith(".") and Path(root, name).is_file()
        )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TextIO, Callable[[], float]]]:
    """A file as text, unpacked if it is a .gz, and a function that gives the share of it that is read."""
    size = max(path.stat().st_size, 1)
    with path.open("rb") as raw:
        stream: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(stream, encoding="utf-8-sig", newline="\n") as file:
            yield file, lambda: min(1.0, raw.tell() / size)


def _text(path: Path) -> Iterator[tuple[str, bool, float]]:
    rest = ""
    with _opened(path) as (file, share):
        while more := file.read(PIECE):
            cut = more.rfind("\n") + 1 or len(more)
            yield rest + more[:cut], False, share()
            rest = more[cut:]
    yield rest, True, 1.0


def _lines(path: Path) -> Iterator[tuple[str, Any, float]]:
    number = 0
    with _opened(path) as (file, share):
        while line := file.readline(LARGEST_ROW):
            number += 1
            if len(line) >= LARGEST_ROW:
                raise PromptError(f"{str(path)!r} line {number} is longer than {LARGEST_ROW} characters; split it")
            if line.strip():
                yield f"line {number}", _parsed(line, f"{str(path)!r} line {number}"), share()


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON ({error}); give an object or a string a line") from None


def _list(path: Path) -> list[Any] | None:
    """The rows of a JSON list of objects or strings; None for any other file, which is text."""
    with _opened(path) as (file, _):
        text = file.read(LARGEST_JSON + 1)
    try:
        found = json.loads(text) if len(text) <= LARGEST_JSON else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and found and all(isinstance(row, str | Mapping) for row in found) else None


def _must_be_text(text: str, where: str) -> None:
    """Raise PromptError for halves of characters, which JSON can hold and no text can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} is not valid Unicode (lone surrogate at character {error.start}); mend or leave out the row"
        ) from None


def documents(row: Any, fields: Sequence[str], where: str) -> list[str]:
    """The texts of one row, none empty.

    Args:
        fields: names to look for; none means: by the keys, see above.
        where: names the row in messages.
    Raises:
        PromptError: a row without text.
    """
    if isinstance(row, str):
        return [row] if row else []
    if not isinstance(row, Mapping):
        raise PromptError(f"{where} is neither an object nor a string; give one of these a line")
    found = [text for field in fields for text in _texts(row.get(field))] if fields else _by_keys(row)
    if not found and not any(row.get(field) in ("", []) for field in fields or row):
        keys, rule = ", ".join(sorted(map(str, row)))[:100], "name one that holds text with --field"
        raise PromptError(
            f"{where} holds no text" + (f" under {', '.join(fields)}" if fields else "") + f" (keys {keys}); {rule}"
        )
    return found


def _by_keys(row: Mapping[str, Any]) -> list[str]:
    if "messages" in row and isinstance(row["messages"], list):
        contents = [message.get("content") for message in row["messages"] if isinstance(message, Mapping)]
        return [text for content in contents for text in _texts(content)]
    if "turns" in row:
        return _texts(row["turns"])
    if isinstance(row.get("prompt"), str):
        answers = [row[key] for key in ANSWERS if isinstance(row.get(key), str)]
        return _texts(row["prompt"] + (answers[0] if answers else ""))
    if "question" in row:
        return [*_texts(row["question"]), *_texts(row.get("answer"))]
    return [text for key in ("text", "content") for text in _texts(row.get(key))][:1]


def _texts(value: object) -> list[str]:
    """A text, or the texts of a list, without empty ones."""
    if isinstance(value, str):
        return [value] if value else []
    return [text for text in value if isinstance(text, str) and text] if isinstance(value, list) else []
