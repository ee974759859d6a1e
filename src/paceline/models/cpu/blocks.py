"""How weights of quantised files lie in memory for models.cpu.block_products: with the numbers of their file.

A strip of 64 outputs is sub-strips of LANES outputs, each with all its inputs in groups of 32. A group begins with its
scales; then come the numbers: vectors of four bytes for each output, whose low and high halves are inputs 8j .. 8j + 3
and 8j + 4 .. 8j + 7 of each output. Numbers of 5 and 6 bits have their upper bits behind: bit i of a byte, or bits 2i
and 2i + 1, belong to the i-th four inputs. Numbers of 8 bits are bytes. K-quants have eight groups behind what they
have in common.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from paceline.models.cpu.processor import features

GROUP, SUPER = 32, 256
"""Inputs that share a scale, and that share what scales are made of."""

LANES: Final = 16 if features().get("avx512vnni") else 8
"""Outputs of a sub-strip."""


class Scales(Enum):
    """What a group's numbers are multiplied by, and what is added."""

    ALONE = "a float16 scale"
    OFFSETS = "a float16 scale and a float16 offset"
    ZEROS = "a float16 scale and a byte, the number that stands for 0"
    POWERS = "a byte, the exponent of a power of two"
    HALVES = "a float16 scale for each half"
    SUPER = "two bytes, times the float16 scale and less the float16 offset of eight groups"
    SIXTEENTHS = "a signed byte for each half, times the float16 scale of eight groups"


@dataclass(frozen=True, slots=True)
class BlockKind:
    """A quantised type.

    Attributes:
        number: in compiled code.
        bits: of a number.
        scales: see `Scales`.
        zero: the number that stands for 0, where scales do not say it. table: the numbers that four bits stand for,
            where these are codes.
    """

    number: int
    bits: int
    scales: Scales
    zero: int = 0
    table: tuple[int, ...] = ()

    @property
    def number_bits(self) -> int:
        """Of the numbers that are multiplied."""
        return max(self.table).bit_length() if self.table else self.bits

    @property
    def ready(self) -> int:
        """What tells kinds apart once their numbers are bytes and their scales float32."""
        return 7 if self.scales is Scales.HALVES else self.number_bits

    @property
    def scale_bytes(self) -> int:
        """Of a group."""
        sizes = {Scales.ALONE: 2, Scales.OFFSETS: 4, Scales.ZEROS: 3, Scales.SUPER: 2, Scales.SIXTEENTHS: 2,
                 Scales.POWERS: 1, Scales.HALVES: 4}  # fmt: skip
        return sizes[self.scales] * LANES

    @property
    def header_bytes(self) -> int:
        """Of eight groups."""
        return {Scales.SUPER: 4, Scales.SIXTEENTHS: 2}.get(self.scales, 0) * LANES

    @property
    def group_bytes(self) -> int:
        """Of a group, without what it has in common with others."""
        return self.scale_bytes + self.bits * GROUP // 8 * LANES

    @property
    def super_bytes(self) -> int:
        """Of eight groups."""
        return self.header_bytes + SUPER // GROUP * self.group_bytes

    def strip_bytes(self, inputs: int) -> int:
        """Of 64 outputs."""
        groups = inputs // GROUP
        return (groups * self.group_bytes + groups * GROUP // SUPER * self.header_bytes) * (64 // LANES)


E2M1: Final = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
"""Twice the 4-bit floats of each code, above 12."""

KINDS: Final[Mapping[str, BlockKind]] = {
    "Q4_0": BlockKind(0, 4, Scales.ALONE, 8),
    "Q4_1": BlockKind(1, 4, Scales.OFFSETS),
    "Q5_0": BlockKind(2, 5, Scales.ALONE, 16),
    "Q5_1": BlockKind(3, 5, Scales.OFFSETS),
    "Q8_0": BlockKind(4, 8, Scales.ALONE, 128),
    "Q4_K": BlockKind(5, 4, Scales.SUPER),
    "Q5_K": BlockKind(6, 5, Scales.SUPER),
    "Q6_K": BlockKind(7, 6, Scales.SIXTEENTHS, 32),
    "INT4_ZEROS": BlockKind(8, 4, Scales.ZEROS),
    "MXFP4": BlockKind(9, 4, Scales.POWERS, 12, E2M1),
    "FP4_HALVES": BlockKind(10, 4, Scales.HALVES, 12, E2M1),
}
