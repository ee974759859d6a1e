"""Datastores on disk: texts as token ids with suffix arrays, mapped into memory and only read.

A datastore is one file in safetensors format, so that any reader of these opens it: `INDEX/tokens` (int32, -1 after
each document) and `INDEX/suffixes` (int32, positions in the former) for every shard, and the metadata of `Header` as
text. The data begin at byte 8 + `ROOM`, since the header is padded with spaces; other offsets are read as well. See
docs/datastore.md.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from paceline.drafters.retrieval.suffix_arrays import IntArray, LongArray
from paceline.errors import DrafterError
from paceline.utils import shortened

FORMAT: Final = "paceline-datastore-1"
ROOM: Final = 64 * 1024 - 8
"""Bytes of the header, padding included."""

LARGEST_HEADER: Final = 16 * 1024 * 1024
DATA_TYPE: Final = "I32"
CHUNK: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Holds what a datastore says of itself.

    Attributes:
        tokenizer: fingerprint of the tokenizer that made the ids. tokenizer_name: where it came from, for people.
        vocab_size: of the tokenizer; ids lie below it.
        tokens: number of ids, those between documents included. documents: number of documents. sources: of files.
        depth: tokens by which the suffixes are ordered.
        sha256: of all bytes after the header.
    """

    tokenizer: str
    tokenizer_name: str
    vocab_size: int
    tokens: int
    documents: int
    sources: int
    depth: int
    sha256: str

    def to_metadata(self) -> dict[str, str]:
        return {"format": FORMAT} | {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Self:
        """Raises ValueError for metadata of another format, or incomplete."""
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its format is {str(metadata.get('format'))[:40]!r}, not {FORMAT!r}")
        numbers = ("vocab_size", "tokens", "documents", "sources", "depth")
        try:
            values = {
                f.name: int(metadata[f.name]) if f.name in numbers else str(metadata[f.name]) for f in fields(cls)
            }
        except KeyError as error:
            raise ValueError(f"its header lacks {error}") from None
        return cls(**values)  # type: ignore[arg-type]  # names and kinds as declared above


class Datastore:
    """Opens a datastore for reading; its arrays stay on the disk until they are used.

    Attributes:
        path, header: of the file. file_bytes: its size.
        data: (tokens and suffixes of all shards,) int32, mapped and read-only.
        shards: (s, 3) int64: where in `data` a shard's tokens and its suffixes begin, and their number.
    """

    def __init__(self, path: str | Path) -> None:
        """Open a file.

        Raises:
            DrafterError: no such file, one of another kind, or cut short.
        """
        self.path = Path(path)
        try:
            self.file_bytes = self.path.stat().st_size
            self.header, self._start, shards = _read_header(self.path, self.file_bytes)
            self.data: IntArray = _mapped(self.path, self._start, (self.file_bytes - self._start) // 4)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or " ".join(str(error).split())
            todo = "build it with `paceline datastore build`"
            raise DrafterError(f"{str(path)!r} cannot be read as a datastore ({why}); {todo}") from None
        self.shards: LongArray = np.array(shards, np.int64).reshape(-1, 3)

    @classmethod
    def of(cls, path: object, fingerprint: str) -> Datastore:
        """Open a file for a target whose tokenizer has this fingerprint.

        Raises:
            DrafterError: no path, what the constructor raises, or a file of another tokenizer.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise DrafterError(
                f"'datastore' must be the path of a file made by `paceline datastore build`, got {shortened(path)}"
            )
        datastore = cls(path)
        if datastore.header.tokenizer != fingerprint:
            theirs = f"{datastore.header.tokenizer_name!r} ({datastore.header.tokenizer})"
            what = (
                f"the datastore {str(path)!r} was built with another tokenizer, that of {theirs}, than the target's "
                f"({fingerprint})"
            )
            raise DrafterError(f"{what}; build one with `paceline datastore build --model TARGET`")
        return datastore

    def check(self) -> None:
        """Read all of the file and compare it with the sum in its header.

        Raises:
            DrafterError: its content has changed since it was built.
        """
        total = hashlib.sha256()
        with self.path.open("rb") as file:
            file.seek(self._start)
            while piece := file.read(CHUNK):
                total.update(piece)
        if total.hexdigest() != self.header.sha256:
            raise DrafterError(
                f"the datastore {str(self.path)!r} is damaged: its content does not have its SHA-256; build it again"
            )


def _mapped(path: Path, start: int, count: int) -> IntArray:
    if not count:
        return np.empty(0, np.int32)
    return np.asarray(np.memmap(path, np.dtype("<i4"), "r", offset=start, shape=(count,)))


def _read_header(path: Path, size: int) -> tuple[Header, int, list[tuple[int, int, int]]]:
    """The header, the byte where the data begin, and the shards in units of tokens.

    Raises:
        ValueError: anything that does not fit.
    """
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise ValueError("it is not a safetensors file, or is cut short")
        try:
            content = json.loads(file.read(length))
            header = Header.from_metadata(dict(content.pop("__metadata__", {})))
        except (AttributeError, TypeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
            raise ValueError("its header is not a JSON object") from None
    shards, end = _shards(content)
    start = 8 + length
    if start % 4 or end * 4 != size - start:
        raise ValueError(
            f"it has {size - start} bytes of data where its header says {end * 4}: it was cut short or overwritten"
        )
    if sum(n for _, _, n in shards) != header.tokens:
        raise ValueError("its shards do not hold the number of tokens that its header says")
    return header, start, shards


def _shards(tensors: dict[str, Any]) -> tuple[list[tuple[int, int, int]], int]:
    """(tokens' begin, suffixes' begin, number) of every shard, and where the last ends, in units of 4 bytes."""
    spans = {}
    for name, entry in tensors.items():
        try:
            (n,), (first, last) = entry["shape"], entry["data_offsets"]
            fine = entry["dtype"] == DATA_TYPE and all(isinstance(number, int) and number >= 0 for number in (n, first))
            fine = fine and first % 4 == 0 and last - first == 4 * n
        except (TypeError, KeyError, ValueError):
            fine = False
        if not fine:
            raise ValueError(f"its tensor {name[:40]!r} is not a row of 32-bit integers")
        spans[name] = (first // 4, n)
    shards = []
    for index in range(len(spans) // 2):
        tokens, suffixes = spans.get(f"{index}/tokens"), spans.get(f"{index}/suffixes")
        if tokens is None or suffixes is None or tokens[1] != suffixes[1]:
            raise ValueError(f"its shard {index} is not complete")
        shards.append((tokens[0], suffixes[0], tokens[1]))
    if len(spans) % 2:
        raise ValueError("it holds tensors that belong to no shard")
    return shards, max((first + n for first, n in spans.values()), default=0)
