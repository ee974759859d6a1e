"""Marian's translation models (Bergamot's students) as folders of plain tensors; for `real_models.py`.

The binary, version 1, little endian: u64 version, u64 count of items; for each item u64 length of its name, type, rank
and bytes; all names, which end with 0; all shapes, of i32; u64 count of bytes to be skipped, and these; all values.
Types are float32, int8 (a text in YAML, the model's settings) and intgemm8: int8 values, of which behind the last one
stands the float32 number that the weights were multiplied by. Its matrices lie transposed, but for the embeddings.
Items that end with _QuantMultA are the numbers by which a matrix's input is multiplied; that of the embeddings may be
an intgemm8, too, and none_QuantMultA is of the output layer, whose matrix are the embeddings.

What is written, `write_marian`:
    model.safetensors   every tensor in float32 by Marian's own name and in Marian's shape, [in, out] for matrices and
                        [tokens, width] for embeddings (Wemb); what was int8 is value / multiplier. For each of these
                        there is NAME.multiplier, float32 of shape [1]: round(tensor * multiplier) is the int8 matrix
    config.json         {"format": "marian", "version": 1, "settings": what special:model.yml says, "decoding": how the
                        model is meant to be decoded, "quantised": names of the matrices that were int8}
    vocab.spm, tokenizer.json, lex.bin
                        the vocabulary, of both languages, as SentencePiece and tokenizers read it; the short list
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import yaml
from safetensors.torch import save_file

FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, (0x4101, 0x10001)
SETTINGS = "special:model.yml"
UNTRANSPOSED = "Wemb"


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a file, its values as they lie there.

    Attributes:
        kind: a number of its type.
        shape: as the file says.
        data: of the values, and what stands behind them.
    """

    kind: int
    shape: tuple[int, ...]
    data: memoryview

    @property
    def count(self) -> int:
        return int(np.prod(self.shape))


def read_items(path: Path) -> dict[str, Item]:
    """Name -> item.

    Raises:
        ValueError: another version, or a file that ends too early.
    """
    whole = memoryview(path.read_bytes())
    version, count = struct.unpack_from("<2Q", whole)
    if version != 1:
        raise ValueError(f"{path} must be Marian's binary of version 1, got {version}")
    headers = [struct.unpack_from("<4Q", whole, 16 + 32 * place) for place in range(count)]
    place = 16 + 32 * count
    names, shapes = [], []
    for length, *_ in headers:
        names.append(bytes(whole[place : place + length]).rstrip(b"\0").decode())
        place += length
    for _, _, rank, _ in headers:
        shapes.append(struct.unpack_from(f"<{rank}i", whole, place))
        place += 4 * rank
    place += 8 + struct.unpack_from("<Q", whole, place)[0]
    found = {}
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        if place + size > len(whole):
            raise ValueError(f"{path} ends before {name}")
        found[name] = Item(kind, shape, whole[place : place + size])
        place += size
    return found


def int8_values(name: str, item: Item) -> tuple[npt.NDArray[np.int8], float]:
    """The integers of a matrix in the shape that the file says, and the number that the weights were multiplied by."""
    flat = np.frombuffer(item.data, np.int8, item.count)
    (multiplier,) = struct.unpack_from("<f", item.data, item.count)
    if name.endswith(UNTRANSPOSED) or len(item.shape) < 2:
        return flat.reshape(item.shape), multiplier
    rows, columns = item.shape
    return flat.reshape(columns, rows).T, multiplier


def tensors(items: Mapping[str, Item]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and float32 tensors, the multipliers of int8 matrices among them.

    Raises:
        ValueError: a type that is not known here.
    """
    for name, item in items.items():
        if item.kind == FLOAT32:
            yield name, torch.frombuffer(bytearray(item.data), dtype=torch.float32)[: item.count].reshape(item.shape)
        elif item.kind in INTGEMM8:
            integers, multiplier = int8_values(name, item)
            yield name, torch.from_numpy(integers.astype(np.float32) / np.float32(multiplier)).contiguous()
            yield f"{name}.multiplier", torch.tensor([multiplier])
        elif name != SETTINGS:
            raise ValueError(f"{name} has the type {item.kind:#x}, which is none of float32 and intgemm8")


def settings_of(items: Mapping[str, Item]) -> dict[str, Any]:
    """What the file says of the model's shape."""
    text = bytes(items[SETTINGS].data).split(b"\0")[0].decode()
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def write_marian(folder: Path, model: Path, decoding: Path, others: Sequence[Path]) -> None:
    """Write a folder as it is described above.

    Args:
        model: Marian's binary.
        decoding: its settings of decoding, in YAML.
        others: vocabularies and the short list, which are copied.
    Raises:
        ValueError: as `read_items` and `tensors`.
    """
    items = read_items(model)
    folder.mkdir(parents=True)
    save_file(dict(tensors(items)), folder / "model.safetensors")
    config = {
        "format": "marian",
        "version": 1,
        "settings": settings_of(items),
        "decoding": yaml.safe_load(decoding.read_text(encoding="utf-8")),
        "quantised": sorted(name for name, item in items.items() if item.kind in INTGEMM8),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in others:
        shutil.copyfile(file, folder / file.name)
