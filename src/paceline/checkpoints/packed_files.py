"""Files of packed weights: matrices in the order and the layout that compiled passes read, which the next process maps.

They are safetensors files of bytes, whose header ends at a page of memory and says what the matrices depend on: path,
size, times and header of each file of the model, the model's shape, the form of its weights, and everything here that
takes part in packing, the processor too. Where any of it differs, the weights are packed anew. A file is put in its
place when it is whole and on the disk; of its data no sums are kept, as of the model's own files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from paceline.checkpoints.checkpoint import MAX_HEADER, Checkpoint
from paceline.utils import make_room, touch, user_cache
from paceline.version import __version__

log = logging.getLogger("paceline")

LEAST: Final = 2**25
"""Bytes of packed matrices below which packing is as fast as looking for them."""

PAGE: Final = 4096
LINE: Final = 64
"""What addresses of a file's data, and of a matrix, are multiples of."""

Key = Mapping[str, Any]
"""What packed weights depend on, in plain values."""


def packed_folder() -> Path:
    """Where the files are."""
    return user_cache("packed")


def file_keys(checkpoint: Checkpoint, adapter: Path | None = None) -> list[list[Any]]:
    """Of each file of a model its path, size, time of its last change and of that of its state, and the sha256 of its
    header.

    Args:
        adapter: a folder whose files count too.
    """
    sizes = checkpoint.header_sizes()
    if adapter is not None:
        sizes |= {path: 0 for path in adapter.iterdir() if path.is_file()}
    keys: list[list[Any]] = []
    for path, size in sorted(sizes.items()):
        with path.open("rb") as file:
            state, digest = os.fstat(file.fileno()), hashlib.sha256(file.read(size)).hexdigest()
        keys.append([str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, digest])
    return keys


@cache
def layout() -> list[str]:
    """What says how weights are rounded and packed here: versions, and a number for the sources of both packages."""
    number = 0
    parts = (Path(__file__).parents[1] / name for name in ("checkpoints", "models"))
    for path in sorted(path for part in parts for path in part.rglob("*.py")):
        number = zlib.crc32(path.read_bytes(), number)
    return [__version__, torch.__version__, f"{number:08x}"]


class PackedFile:
    """One model's packed weights on disk.

    Args:
        name: of the model, for its file and for messages. key: what they depend on.
    """

    def __init__(self, name: str, key: Key) -> None:
        self.name, self._key = name, json.dumps(key, sort_keys=True)
        digest = hashlib.sha256(self._key.encode()).hexdigest()[:16]
        self.path = packed_folder() / f"{Path(name).name.removesuffix('.gguf')}-{digest}.safetensors"

    def read(self) -> list[torch.Tensor] | None:
        """The matrices, each (bytes,) uint8, mapped; None where there is none, or a file that is broken (logged)."""
        try:
            with self.path.open("rb") as file:
                size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
                if length > min(size - 8, MAX_HEADER):
                    raise ValueError(f"a header of {length} bytes in {size}")
                header = json.loads(file.read(length))
                key, places = header.pop("__metadata__")["key"], [entry["data_offsets"] for entry in header.values()]
                if [first for first, _ in places] != [0, *(stop for _, stop in places[:-1])]:
                    raise ValueError("its matrices do not follow one another")
                if size != (whole := 8 + length + places[-1][1]):
                    raise ValueError(f"{size} bytes of {whole}")
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            log.debug("%s: no packed weights in %s (%s)", self.name, self.path, error.strerror or error)
            return None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            text = f"{type(error).__name__}: {error}"
            log.warning(
                "%s: its packed weights in %s cannot be read (%s); they are packed again", self.name, self.path, text
            )
            return None
        if key != self._key:
            log.warning("%s: the packed weights in %s are another model's; packing anew", self.name, self.path)
            return None
        touch(self.path)
        data = torch.frombuffer(memory, dtype=torch.uint8)[8 + length :]
        return [data[first:stop] for first, stop in places]

    def write(self, matrices: Sequence[torch.Tensor]) -> None:
        """Keep packed matrices, where they are large enough and there is room; a failure is logged, not raised."""
        size = sum(matrix.nbytes for matrix in matrices)
        if size < LEAST:
            return
        try:
            if not make_room(self.path.parent, size):
                log.info("%s: its packed weights (%d MB) are not kept, for want of room", self.name, size // 10**6)
                return
            with _finished(self.path) as file:
                file.write(_header(self._key, matrices))
                for matrix in matrices:
                    file.write(matrix.flatten().view(torch.uint8).numpy().data)
                    file.write(bytes(-matrix.nbytes % LINE))
        except OSError as error:
            log.info("%s: its packed weights cannot be kept in %s (%s)", self.name, self.path.parent, error)


def _header(key: str, matrices: Sequence[torch.Tensor]) -> bytes:
    """The front of a safetensors file, filled up with spaces so that the data begins at a page."""
    entries: dict[str, Any] = {"__metadata__": {"key": key}}
    at = 0
    for number, matrix in enumerate(matrices):
        size = -(-matrix.nbytes // LINE) * LINE
        entries[str(number)] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def _finished(path: Path) -> Iterator[Any]:
    """A file to write to, which gets its name at the end of the block; nothing is left of it where the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
