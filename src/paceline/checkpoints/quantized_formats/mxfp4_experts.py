"""The experts of gpt-oss in MXFP4: of each stack NAME_blocks uint8 (experts, outputs, groups, 16), two 4-bit floats in
a byte, the first in its low half, and NAME_scales uint8 (experts, outputs, groups), exponents above 127.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from paceline.checkpoints.quantized_formats.bit_streams import fp4_numbers
from paceline.checkpoints.quantized_formats.integer_matrix import Reader
from paceline.checkpoints.quantized_formats.scaled_floats import MXFP4_GROUP, power_scales
from paceline.checkpoints.quantized_formats.stored_parts import StoredParts

PAIRS: Final = MXFP4_GROUP // 2


@dataclass(frozen=True, slots=True)
class Mxfp4Stack:
    """Matrices of all experts; see `integer_matrix.StoredMatrix`. `shape`: experts, outputs, inputs."""

    stored: StoredParts
    shape: tuple[int, int, int]
    bits: int = 4
    uniform: bool = False

    def pairs(self, read: Reader, expert: int) -> torch.Tensor:
        """(outputs, inputs / 2) uint8."""
        return read(self.stored.name("blocks"))[expert].flatten(1)

    def powers(self, read: Reader, expert: int) -> torch.Tensor:
        """(outputs, groups) uint8."""
        return read(self.stored.name("scales"))[expert]

    def fill(self, read: Reader, out: torch.Tensor) -> None:
        for expert, place in enumerate(out):
            groups = fp4_numbers(self.pairs(read, expert)).unflatten(1, (-1, MXFP4_GROUP))
            place.copy_(groups.mul_(power_scales(self.powers(read, expert))[..., None]).flatten(1))


class Mxfp4Experts:
    """The format; see `stored_parts.Format`."""

    label: Final = "MXFP4"
    marks: Final = frozenset({"blocks"})
    parts: Final = frozenset({"blocks", "scales"})
    others: Final = frozenset[str]()
    ignores: Final = ""
    separator: Final = "_"
    weight: Final = "blocks"
    is_rounded: Final = False

    def matrix(self, stored: StoredParts, read: Reader) -> Mxfp4Stack:
        experts, outputs, groups, _ = stored.need("blocks", ("U8",), 4)
        stored.need("scales", ("U8",), 3)
        stored.need_shape("blocks", (experts, outputs, groups, PAIRS))
        stored.need_shape("scales", (experts, outputs, groups))
        return Mxfp4Stack(stored, (experts, outputs, MXFP4_GROUP * groups))
