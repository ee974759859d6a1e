"""The formats of compressed-tensors, as llm-compressor and vLLM use them.

pack-quantized: `weight_packed` int32 (out, in * b / 32), numbers along the inputs, lowest bits first, above half of
their range; `weight_scale` (out, groups) or (out, 1); `weight_shape`; `weight_zero_point`, packed along the outputs;
`weight_g_idx` (in,), the group of each input where columns were rounded by the size of their activations.
int-quantized: `weight` int8. float-quantized: `weight` float8_e4m3fn (scaled_floats). nvfp4-pack-quantized and
mxfp4-pack-quantized: `weight_packed` uint8 (scaled_floats). What is said of activations is not done: they keep the
precision of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from paceline.checkpoints.quantized_formats.bit_streams import unpacked_numbers, words_of
from paceline.checkpoints.quantized_formats.integer_matrix import Grid, IntegerMatrix, Reader, StoredMatrix, even_groups
from paceline.checkpoints.quantized_formats.scaled_floats import Fp4Matrix, Fp8Matrix
from paceline.checkpoints.quantized_formats.stored_parts import FLOATS, OfLinearMaps, StoredParts, refuse, whole_number
from paceline.errors import CheckpointError
from paceline.utils import shortened

LABEL: Final = "compressed-tensors"
LAYOUTS: Final = frozenset({
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
})  # fmt: skip
PACKED, PLAIN = "weight_packed", "weight"


@dataclass(frozen=True, slots=True)
class PackedIntegers(IntegerMatrix):
    """Numbers in words, or bytes; see the module.

    Attributes:
        weight: the part that holds them. size: inputs of a group.
    """

    stored: StoredParts
    weight: str
    shape: tuple[int, int]
    bits: int
    size: int

    def grid(self, read: Reader) -> Grid:
        outputs = self.shape[0]
        scales = read(self.stored.name("weight_scale"))
        scales = scales.reshape(outputs, -1) if scales.numel() >= outputs else scales.reshape(1, 1).expand(outputs, 1)
        return Grid(scales, self.zeros(read, scales.shape[1]), self._groups(read, scales.shape[1]))

    def zeros(self, read: Reader, groups: int) -> torch.Tensor:
        """(outputs, groups) int16."""
        outputs, half = self.shape[0], 1 << (self.bits - 1)
        if "weight_zero_point" not in self.stored.entries:
            return torch.tensor([[half]], dtype=torch.int16).expand(outputs, groups)
        zeros = read(self.stored.name("weight_zero_point"))
        if zeros.dtype is torch.int32:
            return unpacked_numbers(zeros.T.contiguous(), self.bits, outputs).T.to(torch.int16)
        return zeros.to(torch.int16).reshape(-1, groups).expand(outputs, groups) + half

    def _groups(self, read: Reader, count: int) -> torch.Tensor:
        inputs = self.shape[1]
        if "weight_g_idx" in self.stored.entries:
            groups = read(self.stored.name("weight_g_idx")).long()
            if int(groups.max()) >= count:
                raise CheckpointError(
                    f"{self.stored.entries['weight_g_idx'].file}: {self.stored.name('weight_g_idx')} names group "
                    f"{int(groups.max())} of {count}; download the checkpoint again"
                )
            if int(groups.min()) >= 0:  # -1: none were set
                return groups
        return even_groups(inputs, count, self.size)

    def numbers(self, read: Reader) -> torch.Tensor:
        numbers = read(self.stored.name(self.weight))
        if self.weight == PACKED:
            return unpacked_numbers(numbers, self.bits, self.shape[1])
        half = 1 << (self.bits - 1)
        if self.bits < 8 and (int(numbers.min()) < -half or int(numbers.max()) >= half):
            raise CheckpointError(
                f"{self.stored.entries[self.weight].file}: {self.stored.name(self.weight)} holds numbers of more than "
                f"{self.bits} bits; its configuration and weights do not belong together"
            )
        return (numbers.to(torch.int16) + half).to(torch.uint8)


class CompressedTensors(OfLinearMaps):
    """The format; see `stored_parts.Format`.

    Args:
        settings: `format`, `config_groups` and what is not supported.
    Raises:
        CheckpointError: a setting that is wrong. UnsupportedModelError: a layout that is not read.
    """

    label: Final = LABEL
    marks: Final = frozenset({PACKED, "weight_scale"})
    parts: Final = frozenset({
        PACKED, PLAIN, "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
    })  # fmt: skip
    others: Final = frozenset({
        "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale",
        "v_scale", "q_scale", "k_zero_point", "v_zero_point", "k_global_scale", "v_global_scale",
    })  # fmt: skip

    def __init__(self, settings: Mapping[str, Any]) -> None:
        groups = settings.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise CheckpointError(
                f"the configuration of {LABEL} weights: 'config_groups' must be an object of objects, got "
                f"{shortened(groups)}; download config.json again"
            )
        layouts = {
            str(settings.get("format") or "dense"),
            *(str(g["format"]) for g in groups.values() if g.get("format")),
        }
        if unknown := sorted(layouts - LAYOUTS):
            raise refuse(LABEL, f"format={unknown[0]!r}")
        sparsity = settings.get("sparsity_config") or {}
        if sparsity.get("format", "dense") != "dense":
            raise refuse(LABEL, f"sparsity_config of format={sparsity['format']!r}")
        if (settings.get("transform_config") or {}).get("config_groups"):
            raise refuse(LABEL, "transform_config")
        self._weights = [_weights_of(group) for group in groups.values() if group.get("weights")]
        self._activations = any(group.get("input_activations") for group in groups.values())

    @property
    def ignores(self) -> str:
        return "activations are not rounded" if self._activations else ""

    def matrix(self, stored: StoredParts, read: Reader) -> StoredMatrix:
        entry = stored.entries.get(PACKED) or stored.entries.get(PLAIN)
        dtype = "" if entry is None else entry.dtype
        if PACKED in stored.entries and dtype == "U8":
            whole = "weight_global_scale" if "weight_global_scale" in stored.entries else None
            return Fp4Matrix.of(stored, PACKED, "weight_scale", whole, divides=True)
        if PACKED in stored.entries:
            return self._integers(stored, PACKED, self._packed_shape(stored, read))
        if dtype == "F8_E4M3":
            return Fp8Matrix.of(stored, "weight_scale", self._block())
        outputs, inputs = stored.need(PLAIN, ("I8",), 2)
        bits = {weights.bits for weights in self._weights if weights.kind == "int"}
        return self._integers(stored, PLAIN, (outputs, inputs, bits.pop() if len(bits) == 1 else 8))

    def _packed_shape(self, stored: StoredParts, read: Reader) -> tuple[int, int, int]:
        """Outputs, inputs and bits of packed numbers."""
        outputs, words = stored.need(PACKED, ("I32",), 2)
        stored.need("weight_shape", ("I64", "I32"), 1)
        stored.need_shape("weight_shape", (2,))
        told, inputs = read(stored.name("weight_shape")).tolist()
        bits = sorted({weights.bits for weights in self._weights if weights.kind == "int"})
        fitting = [number for number in bits if words_of(inputs, number) == words]
        if told != outputs or not fitting:
            raise CheckpointError(
                f"{stored.entries[PACKED].file}: {stored.name(PACKED)} has shape {(outputs, words)}, which {told} "
                f"outputs of {inputs} inputs in {' or '.join(map(str, bits))} bits do not make; its configuration and "
                "weights do not belong together"
            )
        return outputs, inputs, fitting[0]

    def _integers(self, stored: StoredParts, weight: str, shape: tuple[int, int, int]) -> PackedIntegers:
        outputs, inputs, bits = shape
        scales = stored.need("weight_scale", FLOATS)
        groups = scales[1] if len(scales) == 2 else 1
        size = -(-inputs // max(1, groups))
        for weights in self._weights:
            if weights.size is not None and -(-inputs // weights.size) == groups:
                size = weights.size
        if len(scales) == 2 or scales not in {(), (1,)}:
            stored.need_shape("weight_scale", (outputs, -(-inputs // size)), *(((outputs,),) if groups == 1 else ()))
        self._check_zeros(stored, outputs, groups, bits)
        if "weight_g_idx" in stored.entries:
            stored.need("weight_g_idx", ("I32", "I64"), 1)
            stored.need_shape("weight_g_idx", (inputs,))
        return PackedIntegers(stored, weight, (outputs, inputs), bits, size)

    def _check_zeros(self, stored: StoredParts, outputs: int, groups: int, bits: int) -> None:
        if "weight_zero_point" not in stored.entries:
            return
        stored.need("weight_zero_point", ("I32", "I8"))
        if stored.entries["weight_zero_point"].dtype == "I32":
            stored.need_shape("weight_zero_point", (words_of(outputs, bits), groups))
        else:
            stored.need_shape("weight_zero_point", (outputs, groups), (outputs,), (1,), ())

    def _block(self) -> tuple[int, int] | None:
        """Outputs and inputs that share a scale, where the configuration says so."""
        return next((weights.block for weights in self._weights if weights.block is not None), None)


@dataclass(frozen=True, slots=True)
class _Weights:
    """What the configuration says of a group's weights."""

    kind: str
    bits: int
    size: int | None
    block: tuple[int, int] | None


def _weights_of(group: Mapping[str, Any]) -> _Weights:
    settings = group["weights"]
    bits, kind = whole_number(settings, "num_bits", LABEL), str(settings.get("type", "int"))
    if kind not in {"int", "float"} or bits not in ({4, 8} if kind == "float" else range(2, 9)):
        raise refuse(LABEL, f"weights of type {kind!r} and {bits} bits")
    size, block = settings.get("group_size"), settings.get("block_structure")
    if size is not None:
        size = whole_number(settings, "group_size", LABEL)
    if block is not None and not _is_block(block):
        raise CheckpointError(
            f"the configuration of {LABEL} weights: 'block_structure' must be two whole numbers, got "
            f"{shortened(block)}; download config.json again"
        )
    if block is None and size and size > 0:
        block = (1, size)
    return _Weights(kind, bits, size if size and size > 0 else None, None if block is None else (block[0], block[1]))


def _is_block(block: object) -> bool:
    return isinstance(block, Sequence) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
