"""AWQ's tensors in AutoAWQ's layout "gemm".

A map of `in` inputs and `out` outputs, 4 bits: `qweight` int32 (in, out / 8), `qzeros` int32 (in / group, out / 8),
`scales` (in / group, out). Outputs 8c .. 8c + 7 share a word, in an order of their own. What the method does to
activations is part of the weights and norms.

Source: AWQ: Activation-aware weight quantization for LLM compression and acceleration (arXiv:2306.00978).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from paceline.checkpoints.quantized_formats.bit_streams import unpacked_numbers
from paceline.checkpoints.quantized_formats.integer_matrix import Grid, IntegerMatrix, Reader, even_groups
from paceline.checkpoints.quantized_formats.stored_parts import FLOATS, OfLinearMaps, StoredParts, refuse, whole_number
from paceline.errors import CheckpointError

BITS, PER_WORD = 4, 8
PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs lies, in numbers of 4 bits."""


def in_order(words: torch.Tensor) -> torch.Tensor:
    """(outputs, rows) uint8 of (rows, outputs / 8) words."""
    numbers = unpacked_numbers(words, BITS, PER_WORD * words.shape[1])
    ordered = numbers.view(len(numbers), -1, PER_WORD)[:, :, list(PLACES)]
    return ordered.flatten(1).T.contiguous()


@dataclass(frozen=True, slots=True)
class AwqMatrix(IntegerMatrix):
    """See the module; `size`: inputs of a group."""

    stored: StoredParts
    shape: tuple[int, int]
    size: int
    bits: int = BITS

    def grid(self, read: Reader) -> Grid:
        scales, zeros = read(self.stored.name("scales")), in_order(read(self.stored.name("qzeros")))
        return Grid(scales.T, zeros.to(torch.int16), even_groups(self.shape[1], len(scales), self.size))

    def numbers(self, read: Reader) -> torch.Tensor:
        return in_order(read(self.stored.name("qweight")))


class Awq(OfLinearMaps):
    """The format; see `stored_parts.Format`.

    Args:
        settings: `bits`, `group_size` (-1: one group), `version`; also under the names of quant_config.json.
    Raises:
        CheckpointError: a setting that is missing or wrong. UnsupportedModelError: another layout.
    """

    label: Final = "AWQ"
    marks: Final = frozenset({"qweight"})
    parts: Final = frozenset({"qweight", "qzeros", "scales"})
    others: Final = frozenset[str]()
    ignores: Final = ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise refuse(self.label, f"version={version!r}")
        bits = whole_number(settings, "w_bit" if "w_bit" in settings else "bits", self.label, BITS)
        if bits != BITS:
            raise refuse(self.label, f"{bits} bits")
        self._size = whole_number(
            settings, "q_group_size" if "q_group_size" in settings else "group_size", self.label, 128
        )

    def matrix(self, stored: StoredParts, read: Reader) -> AwqMatrix:
        inputs, words = stored.need("qweight", ("I32",), 2)
        outputs, size = PER_WORD * words, self._size if self._size > 0 else inputs
        groups = -(-inputs // size)
        stored.need("scales", FLOATS, 2)
        stored.need("qzeros", ("I32",), 2)
        stored.need_shape("scales", (groups, outputs))
        stored.need_shape("qzeros", (groups, words))
        if inputs % size:
            raise CheckpointError(
                f"{stored.entries['qweight'].file}: {stored.name('qweight')} has {inputs} inputs, which groups of "
                f"{size} do not divide; its configuration and weights do not belong together"
            )
        return AwqMatrix(stored, (outputs, inputs), size)
