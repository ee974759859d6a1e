"""The tensors of a GGUF file under the names of safetensors checkpoints.

Conversion to GGUF changes some weights, which is undone here: rows of queries and keys are reordered for
architectures whose rotary embedding turns neighbours, and Gemma's norms are stored with the 1 added. Tensors are read
some rows at a time, so that loading needs little more memory than its result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoints import gguf_hybrids as hybrids
from paceline.checkpoints.checkpoint import Checkpoint, TensorEntry
from paceline.checkpoints.gguf_architectures import (
    EXPERTS,
    NAMES,
    architecture_of,
    by_layer,
    layers_before_others,
)
from paceline.checkpoints.gguf_file import read_gguf
from paceline.checkpoints.gguf_metadata import TABLES
from paceline.errors import CheckpointError

ROWS = 2**16
"""Weights that are read at a time, so few that what is held for a moment hardly counts, and stays in the cache."""

BLOCK = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")
FORMED = re.compile(r"^blk\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class _TensorSource:
    """Where a tensor comes from: one of the file, an expert of it, with rows of heads to bring into order; or `values`
    beside it, see `_fill_latent`; or what `form` makes of it. A `number` is said by the metadata, and has no source.
    """

    source: str
    expert: int | None = None
    heads: int = 0
    add: float = 0.0
    values: str | None = None
    form: Callable[[torch.Tensor], torch.Tensor] | None = None
    number: float | None = None


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names that safetensors checkpoints give them; see `Checkpoint`.

    Attributes:
        folder: the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.file = read_gguf(path)
        self.folder = path
        self._architecture = architecture_of(self.file)
        self._places: dict[str, _TensorSource] = {}
        self.entries: dict[str, TensorEntry] = {}
        layers = layers_before_others(self.file)
        for name in self.file.tensors:
            block = FORMED.match(name)
            if block is None or layers is None or int(block[1]) < layers:  # others predict further tokens
                self._add(name)
        for key, (stored, shape) in self._architecture.numbers.items():
            for layer, number in enumerate(by_layer(self.file, key)):
                self._places[f"layers.{layer}.{stored}"] = _TensorSource("", number=number)
                self.entries[f"layers.{layer}.{stored}"] = TensorEntry(path, "F32", shape, 4)

    def _add(self, name: str) -> None:
        stem, _, ending = name.rpartition(".")
        if stem in TABLES or ((match := BLOCK.match(name)) is not None and match[2] in TABLES):
            return
        formed = FORMED.match(name)
        if formed is not None and formed[2] in hybrids.FORMS:
            self._place_formed(formed[1], formed[2], name)
            return
        if match is None:
            self._place(f"{NAMES.get(stem, stem)}.{ending}", _TensorSource(name, add=self._offset(stem)))
            return
        layer, part, kind = match.groups()
        if part == "attn_k_b":
            self._place_latent(layer, name)
            return
        if part == "attn_v_b":
            return
        if part in EXPERTS:
            self._place_experts(layer, EXPERTS[part], kind, name)
            return
        names = {**NAMES, **self._architecture.names}
        stored = f"layers.{layer}.{names.get(part, part)}" + ("" if part == "attn_sinks" else f".{kind}")
        self._place(stored, _TensorSource(name, None, self._turned(part), self._offset(part)))

    def _offset(self, part: str) -> float:
        return -1.0 if self._architecture.norms_plus_one and part.endswith("norm") else 0.0

    def _turned(self, part: str) -> int:
        if not self._architecture.turned or part not in {"attn_q", "attn_k"}:
            return 0
        heads = self.file.number("attention.head_count")
        counts = self.file.get("attention.head_count_kv")
        if part == "attn_q":
            return heads
        return max(counts) if isinstance(counts, list) else self.file.number("attention.head_count_kv", heads)

    def _place_formed(self, layer: str, part: str, name: str) -> None:
        tensor, (stored, form) = self.file.tensors[name], hybrids.FORMS[part]
        shape = form(torch.empty(tensor.shape, device="meta")).shape
        self._places[f"layers.{layer}.{stored}"] = _TensorSource(name, form=form)
        self.entries[f"layers.{layer}.{stored}"] = TensorEntry(tensor.path, "F32", tuple(shape), tensor.nbytes)

    def _place(self, stored: str, place: _TensorSource) -> None:
        tensor = self.file.tensors[place.source]
        shape = tensor.shape
        if stored.endswith("shared_expert_gate.weight"):
            shape = (1, shape[-1])
        self._places[stored] = place
        self.entries[stored] = TensorEntry(tensor.path, "F32", shape, tensor.nbytes)

    def _place_experts(self, layer: str, parts: Sequence[str], kind: str, name: str) -> None:
        """Experts; where two parts come after one another in each, as twice as many of half the rows."""
        tensor, count = self.file.tensors[name], len(parts)
        if len(tensor.shape) < 2 or tensor.shape[1] % count:
            raise CheckpointError(f"{self.folder}: {name} of shape {tensor.shape} holds no experts; download it again")
        shape = (tensor.shape[1] // count, *tensor.shape[2:])
        for number in range(count * tensor.shape[0]):
            stored = f"layers.{layer}.mlp.experts.{number // count}.{parts[number % count]}.{kind}"
            self._places[stored] = _TensorSource(name, expert=number)
            self.entries[stored] = TensorEntry(tensor.path, "F32", shape, tensor.nbytes)

    def _place_latent(self, layer: str, keys: str) -> None:
        """The matrix that latent attention makes keys and values of, stored in two."""
        values = keys.replace("attn_k_b", "attn_v_b")
        if values not in self.file.tensors:
            raise CheckpointError(f"{self.folder} lacks {values}; download it again")
        tensor, other = self.file.tensors[keys], self.file.tensors[values].shape
        if len(tensor.shape) != 3 or len(other) != 3 or (tensor.shape[0], tensor.shape[1]) != (other[0], other[2]):
            raise CheckpointError(f"{self.folder}: {keys} and {values} do not fit each other; download it again")
        shape = (tensor.shape[0] * (tensor.shape[2] + other[1]), tensor.shape[1])
        stored = f"layers.{layer}.self_attn.kv_b_proj.weight"
        self._places[stored] = _TensorSource(keys, values=values)
        self.entries[stored] = TensorEntry(tensor.path, "F32", shape, tensor.nbytes)

    @property
    def kind(self) -> str:
        """See `Checkpoint`."""
        return f"mostly {self.file.kind}"

    def is_narrow(self, name: str) -> bool:
        """See `Checkpoint`."""
        place = self._places[name]
        return place.number is None and self.file.is_narrow(place.source)

    def place(self, name: str) -> tuple[str, Path, int, npt.NDArray[np.int64]]:
        """Of a matrix its type, its file, the bytes before it, and (rows,) the order of its rows there."""
        place = self._places[name]
        tensor, count = self.file.tensors[place.source], self.entries[name].shape[0]
        rows = _in_order(torch.arange(count)[:, None], place.heads)[:, 0].numpy()
        return tensor.kind, tensor.path, tensor.start, rows

    def header_sizes(self) -> dict[Path, int]:
        """See `Checkpoint`."""
        positions: dict[Path, int] = {}
        for tensor in self.file.tensors.values():
            positions[tensor.path] = min(tensor.start, positions.get(tensor.path, tensor.start))
        return positions

    def dtype(self) -> torch.dtype:
        """What is computed in, whatever the file's types are."""
        return torch.bfloat16

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in float32."""
        out = torch.empty(self.entries[name].shape)
        self.fill(name, out)
        return out

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor into `out` of the same shape, some rows at a time."""
        place = self._places[name]
        if place.number is not None:
            out.fill_(place.number)
            return
        if place.values is not None:
            self._fill_latent(place.source, place.values, out)
            return
        if place.form is not None:
            out.copy_(place.form(self.file.read(place.source).view(self.file.tensors[place.source].shape)))
            return
        if out.dim() == 1:
            row = place.expert or 0
            values = self.file.read(place.source, row, row + 1).flatten().add_(place.add)
            out.copy_(_in_order(values[:, None], place.heads)[:, 0])
            return
        before = len(out) * (place.expert or 0)
        unit = len(out) // place.heads if place.heads else 1
        step = max(1, ROWS // (out.shape[1] * unit)) * unit
        for first in range(0, len(out), step):
            stop = min(len(out), first + step)
            rows = self.file.read(place.source, before + first, before + stop)
            out[first:stop].copy_(_in_order(rows, (stop - first) // unit if place.heads else 0))

    def _fill_latent(self, keys: str, values: str, out: torch.Tensor) -> None:
        """Keys (heads, rank, nope) and values (heads, value, rank), into rows of both in each head."""
        k, v = (self.file.read(name).view(self.file.tensors[name].shape) for name in (keys, values))
        out.copy_(torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1))


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose pairs are neighbours, with the pairs half a head apart as elsewhere; 0 heads: as they are."""
    if not heads:
        return rows
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
