"""The format of GGUF files: metadata, descriptions of tensors, and their values as float32.

A file is a header of typed key-value pairs, then descriptions of tensors, then their data, aligned. The header is read
here and not by `gguf.GGUFReader`, which takes 17 seconds for a vocabulary of 262,144 tokens.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.checkpoints.checkpoint import some
from paceline.checkpoints.gguf_blocks import block_values
from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.utils import shortened

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_TENSORS, MOST_FIELDS, MOST_DIMS = 2**20, 2**16, 4
SPLIT = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
INT4_BITS = 5
"""Most bits of a weight, scales counted, in types of four bits or fewer (Q4_1 has 5, Q5_0 5.5)."""

UNEVEN = re.compile("^(IQ|MXFP|NVFP)")
"""Types whose steps differ in size, which those of int4 do not: rounding them again would cost as much as they cost."""

Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a file: type as gguf calls it, shape as in PyTorch, bytes from the start of the file."""

    path: Path
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Header:
    """Reads values from the front of a file, every length checked against what is left of it."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is cut off or no GGUF file ({what}); download it again")

    def take(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{kind}"
        size = struct.calcsize(form)
        if count < 0 or self.at + size > len(self.data):
            raise self.broken(f"{count} values at byte {self.at} of {len(self.data)}")
        values = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return values

    def text(self) -> str:
        (size,) = self.take("Q")
        start = self.at
        if start + size > len(self.data):
            raise self.broken(f"a text of {size} bytes at byte {start} of {len(self.data)}")
        self.at = start + size
        return str(self.data[start : self.at], "utf-8", "replace")

    def value(self, kind: int, *, nested: bool = True) -> Any:
        if kind in SCALARS:
            return self.take(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY or not nested:
            raise self.broken(f"a value of unknown kind {kind} at byte {self.at}")
        inner, count = *self.take("I"), *self.take("Q")
        if inner in SCALARS:
            return list(self.take(SCALARS[inner], count))
        if count > len(self.data):
            raise self.broken(f"a list of {count} values at byte {self.at}")
        return [self.value(inner, nested=False) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed GGUF file, or all parts of a split one.

    Attributes:
        path: the file, the first of split ones.
        metadata: key -> value.
        asked: keys of the architecture that somebody asked for.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, _Tensor] = field(repr=False)
    asked: set[str] = field(default_factory=set, repr=False, compare=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of this architecture, such as "context_length"."""
        self.asked.add(key)
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """The value of such a key that is a whole number of 0 or more.

        Raises:
            CheckpointError: it is missing or something else.
        """
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"{self.path}: {self.architecture}.{key} must be a whole number, got {shortened(value)}; download it "
                f"again"
            )
        return value

    def read(self, name: str, first: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows first to stop of a tensor, (rows, last size) float32; rows of all its other dimensions are counted."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        pitch = tensor.nbytes // rows
        count = (rows if stop is None else stop) - first
        raw = np.fromfile(tensor.path, np.uint8, count * pitch, offset=tensor.start + first * pitch)
        if len(raw) < count * pitch:
            raise CheckpointError(f"{tensor.path} has become shorter while it is read; download it again")
        try:
            values = block_values(torch.from_numpy(raw), tensor.kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: {name} is stored as {tensor.kind}, which cannot be read; use a file of another type, "
                f"such as Q8_0 or Q4_K_M"
            ) from error
        return values.view(count, tensor.shape[-1])

    @property
    def kind(self) -> str:
        """The type of most bytes in the layers' matrices, as gguf calls it ("Q4_K")."""
        total: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            if name.startswith("blk.") and len(tensor.shape) > 1:
                total[tensor.kind] = total.get(tensor.kind, 0) + tensor.nbytes
        return max(total, key=lambda kind: total[kind], default="F32")

    def is_narrow(self, name: str) -> bool:
        """Whether int4 keeps a tensor: of four bits a weight or fewer, its scales left out, in even steps."""
        tensor = self.tensors[name]
        return not UNEVEN.match(tensor.kind) and 8 * tensor.nbytes <= INT4_BITS * math.prod(tensor.shape)


def is_gguf(path: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return str(path).endswith(".gguf")


def read_gguf(path: Path) -> GgufFile:
    """Parse a GGUF file, and the other parts of a split one; kept for the next call while the file stays as it is.

    Raises:
        CheckpointError: not such a file, cut off, or a part is missing.
    """
    parts = _parts(path)
    try:
        return _read(tuple((part, part.stat().st_mtime_ns, part.stat().st_size) for part in parts))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); check the path") from error


@functools.lru_cache(maxsize=4)
def _read(parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    """Files with the time of their last change and their size."""
    metadata, tensors = Metadata(), dict[str, _Tensor]()
    for part, _, _ in parts:
        part_metadata, part_tensors = _read_one(part)
        metadata = {**part_metadata, **metadata}
        if twice := sorted(part_tensors.keys() & tensors.keys()):
            raise CheckpointError(f"{part} holds {some(twice)} a second time; download its parts again")
        tensors.update(part_tensors)
    return GgufFile(parts[0][0], metadata, tensors)


def split_names(name: str) -> list[str]:
    """The names of all parts of a split file, in order; otherwise the name alone."""
    if (match := SPLIT.match(name)) is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _parts(path: Path) -> list[Path]:
    names = split_names(path.name)
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(f"{path.parent} lacks {some(missing)} of {len(names)} parts; download them too")
    return [path.parent / name for name in names]


def _read_one(path: Path) -> tuple[Metadata, dict[str, _Tensor]]:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = memoryview(mapped)
            try:
                return _parse(_Header(path, data))
            finally:
                data.release()
    except PacelineError:
        raise
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error


def _parse(header: _Header) -> tuple[Metadata, dict[str, _Tensor]]:
    path = header.path
    if bytes(header.data[:4]) != MAGIC:
        raise header.broken("it does not begin with GGUF")
    header.at = 4
    (version,) = header.take("I")
    if version not in VERSIONS:
        raise UnsupportedModelError(
            f"{path} is GGUF version {version}, and versions 2 and 3 can be read; convert the model again"
        )
    count, fields = header.take("Q", 2)
    if count > MOST_TENSORS or fields > MOST_FIELDS:
        raise header.broken(f"{count} tensors and {fields} keys")
    metadata = {}
    for _ in range(fields):
        key = header.text()
        (kind,) = header.take("I")
        metadata[key] = header.value(kind)
    described = [_description(header) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
        raise header.broken(f"an alignment of {shortened(alignment)}")
    start = -(-header.at // alignment) * alignment
    return metadata, {name: _tensor(header, name, kind, shape, start + at) for name, shape, kind, at in described}


def _description(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name = header.text()
    (dims,) = header.take("I")
    if not 1 <= dims <= MOST_DIMS:
        raise header.broken(f"tensor {name!r} of {dims} dimensions")
    shape = tuple(reversed(header.take("Q", dims)))
    kind, offset = *header.take("I"), *header.take("Q")
    return name, shape, kind, offset


def _tensor(header: _Header, name: str, kind: int, shape: tuple[int, ...], start: int) -> _Tensor:
    import gguf

    try:
        named = gguf.GGMLQuantizationType(kind)
        block, size = gguf.GGML_QUANT_SIZES[named]
    except (KeyError, ValueError):
        raise UnsupportedModelError(
            f"{header.path}: {name} is stored as type {kind}, which is not known; update the package gguf, or use a "
            f"file of another type, such as Q8_0"
        ) from None
    count = int(np.prod(shape, dtype=object))
    if not count or shape[-1] % block:
        raise header.broken(f"{name} has rows of {shape[-1]} weights in blocks of {block}")
    nbytes = count // block * size
    if start + nbytes > len(header.data):
        raise header.broken(f"{name} ends at byte {start + nbytes} of {len(header.data)}")
    return _Tensor(header.path, named.name, shape, start, nbytes)
