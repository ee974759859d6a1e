"""Writing a datastore: token ids in, one file out, in memory that does not grow with it.

In: pieces of text, a tokenizer. Out: a file as `datastore` reads it, at once or not at all. Not here: which texts
(`datastore_sources`).

Ids are collected until a shard is full; then the shard's ids and its suffix array are written and forgotten. The header
is written last, into the room that was left for it. A document that lies across two shards is found in both, but not
across the border.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Protocol, Self

import numpy as np

from paceline.drafters.common.part_file import Part
from paceline.drafters.retrieval.datastore import DATA_TYPE, ROOM, Header
from paceline.drafters.retrieval.datastore_sources import Piece, Sources
from paceline.drafters.retrieval.suffix_arrays import BETWEEN, DEPTH, IntArray, suffix_array
from paceline.errors import ConfigError, DrafterError
from paceline.utils import integer

SHARD_TOKENS: Final = 2**24
"""Ids in a shard by default; 20 bytes each are needed while its suffixes are sorted."""

MOST_SHARD_TOKENS: Final = 2**31 - 2


class Encoder(Protocol):
    """The part of a tokenizer that is used here."""

    name: str
    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def fingerprint(self) -> str: ...


def build_datastore(
    sources: Sources,
    tokenizer: Encoder,
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
        PromptError: texts that cannot be read. DrafterError: the file cannot be written, is there already, or there is
        no text.
    """
    say = partial(progress, -1)
    with Writer(path, tokenizer, name=name, shard_tokens=shard_tokens, overwrite=overwrite, say=say) as writer:
        _add_all(writer, sources.pieces(), tokenizer, progress)
        return writer.finish(len(sources.files))


def _add_all(writer: Writer, pieces: Iterable[Piece], tokenizer: Encoder, progress: Callable[[int, str], None]) -> None:
    for piece in pieces:
        writer.add(tokenizer.encode(piece.text, add_special_tokens=False) if piece.text else [])
        if piece.last:
            writer.end_document()
        progress(piece.done, "reading")


class Writer:
    """A datastore that is being written; leaves nothing behind unless `finish` was reached.

    Args:
        path, tokenizer, name, shard_tokens, overwrite: as for `build`.
        say: told when a shard is sorted.
    Raises:
        ConfigError: a number of ids that no shard can hold. DrafterError: the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Encoder,
        *,
        name: str | None = None,
        shard_tokens: int = SHARD_TOKENS,
        overwrite: bool = True,
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        integer("shard_tokens", shard_tokens, 2, MOST_SHARD_TOKENS)
        self.path, self._overwrite = path, overwrite
        self._part = Part(path)
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
        """More ids of the present document."""
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
        assert self._file is not None, "a Writer is used inside `with`"
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
        assert self._file is not None, "a Writer is used inside `with`"
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
