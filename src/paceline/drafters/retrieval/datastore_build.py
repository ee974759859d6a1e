"""Building a datastore: files and folders of text, JSONL or JSON in, one file out, in memory that does not grow with
it.

A text file is one document. A `.jsonl` file holds a document or several a row, and so does a `.json` file that is a
list of objects or strings; any other JSON is text. Which fields of a row are read follows from its keys, as for
benchmark files; answers that are given beside the prompts are read too:

    messages                    every message's content is a document
    turns                       every turn
    prompt (with completion,    one document, the answer right behind the prompt
    response, output, answer or
    canonical_solution)
    question, answer            a document each
    text, content               a document

Given names of fields replace this: each text, or list of texts, under one of them is a document. Folders are read in
the order of names, without hidden files and what is not UTF-8. Files that end in `.gz` are unpacked as they are read.

Ids are collected until a shard is full; then the shard's ids and its suffix array are written and forgotten. The header
is written last, into the room that was left for it. A document that lies across two shards is found in both, but not
across the border.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Protocol, Self, TextIO

import numpy as np

from paceline.drafters.common.part_file import PartFile
from paceline.drafters.retrieval.datastore import DATA_TYPE, ROOM, Header
from paceline.drafters.retrieval.suffix_arrays import BETWEEN, DEPTH, IntArray, suffix_array
from paceline.errors import ConfigError, DrafterError, PromptError
from paceline.utils import integer

PIECE: Final = 256 * 1024
"""Characters that are read at once; a piece ends at a line's end where there is one."""

LARGEST_ROW: Final = 64 * 1024 * 1024
LARGEST_JSON: Final = 256 * 1024 * 1024
ANSWERS: Final = ("completion", "response", "output", "answer", "canonical_solution")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Holds some text of one document.

    Attributes:
        text: of one document. last: whether it ends the document.
        done: bytes of the source files that are read so far, about.
    """

    text: str
    last: bool
    done: int


@dataclass(frozen=True, slots=True)
class Sources:
    """Reads texts out of files.

    Attributes:
        files: in order. named: those that the user named, in which nothing is skipped.
        fields: of JSON rows; none means: by the keys.
    """

    files: tuple[Path, ...]
    named: frozenset[Path]
    fields: tuple[str, ...] = ()

    @classmethod
    def find(cls, paths: Sequence[Path], fields: Sequence[str] = ()) -> Sources:
        """Find all files in files and folders.

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
        """Count the bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def pieces(self) -> Iterator[TextPiece]:
        """Read all documents, in pieces.

        Raises:
            PromptError: a file that cannot be read, or rows without text.
        """
        before = 0
        for path in self.files:
            size = path.stat().st_size
            try:
                for text, last, share in self._of(path):
                    yield TextPiece(text, last, before + round(share * size))
            except UnicodeDecodeError as error:
                if path in self.named:
                    raise PromptError(
                        f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); give text"
                    ) from None
                yield TextPiece("", True, before)
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
        elif kind == ".json" and (listed := _list(path)) is not None:
            rows = ((f"row {i}", row, i / len(listed)) for i, row in enumerate(listed, 1))
        if rows is None:
            if self.fields and kind == ".json" and path in self.named:
                raise PromptError(
                    f"{str(path)!r} is not a list of rows with fields; leave --field out to read it as text"
                )
            yield from _text(path)
            return
        for where, row, share in rows:
            for text in documents(row, self.fields, title := f"{str(path)!r} {where}"):
                _must_be_text(text, title)
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
        raise PromptError(f"{where} is not JSON ({error}); give one object or string per line") from None


def _list(path: Path) -> list[Any] | None:
    """The rows of a JSON list of objects or strings; None for any other file, which is text."""
    with _opened(path) as (file, _):
        text = file.read(LARGEST_JSON + 1)
    try:
        content = json.loads(text) if len(text) <= LARGEST_JSON else None
    except (ValueError, RecursionError):
        return None
    return (
        content
        if isinstance(content, list) and content and all(isinstance(row, str | Mapping) for row in content)
        else None
    )


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
        raise PromptError(f"{where} is neither an object nor a string; give one of these per line")
    texts = [text for field in fields for text in _texts(row.get(field))] if fields else _by_keys(row)
    if not texts and not any(row.get(field) in ("", []) for field in fields or row):
        keys, rule = ", ".join(sorted(map(str, row)))[:100], "name one that holds text with --field"
        raise PromptError(
            f"{where} holds no text" + (f" under {', '.join(fields)}" if fields else "") + f" (keys {keys}); {rule}"
        )
    return texts


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


SHARD_TOKENS: Final = 2**24
"""Ids in a shard by default; 20 bytes each are needed while its suffixes are sorted."""

MOST_SHARD_TOKENS: Final = 2**31 - 2


class TextEncoder(Protocol):
    """The part of a tokenizer that is used here."""

    name: str
    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def fingerprint(self) -> str: ...


def build_datastore(
    sources: Sources,
    tokenizer: TextEncoder,
    path: Path,
    *,
    name: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = True,
    progress: Callable[[int, str], None] = lambda done, what: None,
) -> Header:
    """Make a datastore of all texts in `sources`.

    Args:
        path: of the file.
        name: of the tokenizer, for people; by default where it came from.
        shard_tokens: see `SHARD_TOKENS`.
        overwrite: a file that is there when the new one is complete is replaced; otherwise it stays, whoever wrote it
            meanwhile.
        progress: called with the number of bytes read and what is going on.
    Raises:
        PromptError: texts that cannot be read.
        DrafterError: the file cannot be written, is there already, or there is no text.
    """
    say = partial(progress, -1)
    with DatastoreWriter(path, tokenizer, name=name, shard_tokens=shard_tokens, overwrite=overwrite, say=say) as writer:
        _add_all(writer, sources.pieces(), tokenizer, progress)
        return writer.finish(len(sources.files))


def _add_all(
    writer: DatastoreWriter, pieces: Iterable[TextPiece], tokenizer: TextEncoder, progress: Callable[[int, str], None]
) -> None:
    for piece in pieces:
        writer.add(tokenizer.encode(piece.text, add_special_tokens=False) if piece.text else [])
        if piece.last:
            writer.end_document()
        progress(piece.done, "reading")


class DatastoreWriter:
    """A datastore that is being written; leaves nothing behind unless `finish` was reached.

    Args:
        path, tokenizer, name, shard_tokens, overwrite: as for `build`.
        say: told when a shard is sorted.
    Raises:
        ConfigError: a number of ids that no shard can hold.
        DrafterError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: TextEncoder,
        *,
        name: str | None = None,
        shard_tokens: int = SHARD_TOKENS,
        overwrite: bool = True,
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        integer("shard_tokens", shard_tokens, 2, MOST_SHARD_TOKENS)
        self.path, self._overwrite = path, overwrite
        self._part = PartFile(path)
        self._facts = (tokenizer.fingerprint(), name or tokenizer.name, tokenizer.vocab_size)
        self._buffer: IntArray = np.empty(min(shard_tokens, 2**16), np.int32)
        self._shard_tokens, self._used, self._say = shard_tokens, 0, say
        self._sum, self._lengths, self._documents = hashlib.sha256(), list[int](), 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._part.open()
            self._file.write(bytes(8 + ROOM))
        except (OSError, ValueError) as error:
            self._discard()
            raise self._cannot(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._discard()

    def add(self, ids: Sequence[int]) -> None:
        """Add ids to the present document."""
        new = np.asarray(ids, np.int32)
        while len(new):
            count = min(len(new), self._shard_tokens - self._used)
            self._reserve(self._used + count)
            self._buffer[self._used : self._used + count] = new[:count]
            self._used += count
            new = new[count:]
            if self._used == self._shard_tokens:
                self._write_shard()

    def end_document(self) -> None:
        """Nothing that follows continues what was added so far."""
        if self._used and self._buffer[self._used - 1] != BETWEEN:
            self.add([BETWEEN])
            self._documents += 1

    def finish(self, sources: int) -> Header:
        """Write what is left and the header, and give the file its name.

        Raises:
            DrafterError: no text at all, a file that cannot be written, or one that is there and may not be replaced.
        """
        if self._used:
            self._write_shard()
        if not sum(self._lengths):
            raise DrafterError(f"there is no text for the datastore {str(self.path)!r}; give files that hold some")
        words, name, vocabulary = self._facts
        header = Header(
            tokenizer=words,
            tokenizer_name=name,
            vocab_size=vocabulary,
            tokens=sum(self._lengths),
            documents=self._documents,
            sources=sources,
            depth=DEPTH,
            sha256=self._sum.hexdigest(),
        )
        self._write_header(header)
        return header

    def _reserve(self, count: int) -> None:
        if count > len(self._buffer):
            grown = np.empty(min(max(count, 2 * len(self._buffer)), self._shard_tokens), np.int32)
            grown[: self._used] = self._buffer[: self._used]
            self._buffer = grown

    def _write_shard(self) -> None:
        text_n = self._buffer[: self._used]
        self._say(f"sorting shard {len(self._lengths) + 1}")
        for array in (text_n, suffix_array(text_n)):
            data = np.ascontiguousarray(array, "<i4").data.cast("B")
            self._sum.update(data)
            self._write(data)
        self._lengths.append(self._used)
        self._used = 0

    def _write(self, data: memoryview | bytes) -> None:
        assert self._file is not None, "a DatastoreWriter is used inside `with`"
        try:
            self._file.write(data)
        except OSError as error:
            raise self._cannot(error) from None

    def _write_header(self, header: Header) -> None:
        entries: dict[str, object] = {"__metadata__": header.to_metadata()}
        at = 0
        for index, n in enumerate(self._lengths):
            for what in ("tokens", "suffixes"):
                entries[f"{index}/{what}"] = {"dtype": DATA_TYPE, "shape": [n], "data_offsets": [at, at + 4 * n]}
                at += 4 * n
        text = json.dumps(entries, separators=(",", ":")).encode()
        if len(text) > ROOM:
            raise ConfigError(
                f"{len(self._lengths)} shards do not fit the header; give more than {self._shard_tokens} shard_tokens"
            )
        assert self._file is not None, "a DatastoreWriter is used inside `with`"
        try:
            self._file.seek(0)
            self._file.write(struct.pack("<Q", ROOM) + text.ljust(ROOM))
            self._file.close()
            self._place()
        except FileExistsError:
            path = repr(str(self.path))
            raise DrafterError(f"there is a file {path} already; choose another --output, or add --overwrite") from None
        except OSError as error:
            raise self._cannot(error) from None
        self._file = None
        self._part.release()

    def _place(self) -> None:
        """Give the complete file its name; without `overwrite`, only one of several writers can."""
        if self._overwrite:
            self._part.path.replace(self.path)
            return
        try:
            os.link(self._part.path, self.path)
        except FileExistsError:
            raise
        except (
            OSError,
            AttributeError,
            NotImplementedError,
        ):  # no links here: the name is taken first, then the file comes
            self.path.open("xb").close()
            try:
                self._part.path.replace(self.path)
            except OSError:
                self.path.unlink(missing_ok=True)
                raise
        else:
            self._part.path.unlink()

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._part.path.unlink(missing_ok=True)
        self._part.release()

    def _cannot(self, error: Exception) -> DrafterError:
        why = getattr(error, "strerror", None) or error
        return DrafterError(f"the datastore {str(self.path)!r} cannot be written ({why}); choose another --output")
