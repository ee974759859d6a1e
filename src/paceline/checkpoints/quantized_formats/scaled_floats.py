"""Matrices of 8-bit and 4-bit floats with scales: FP8 for tensors, outputs or blocks, MXFP4 and NVFP4.

FP8: `weight` float8_e4m3fn (out, in) times its scale, which in spite of the name holds for `weight_scale_inv`, too; one
for all, for each output, or for each block of outputs and inputs. Scales of one byte are powers of two, less 127.

FP4: two numbers in a byte, the first in its low half, times a scale for 32 inputs that is a power of two (MXFP4), or
times one for 16 inputs in float8_e4m3fn and one for all in float32 (NVFP4), by which compressed-tensors divides and
ModelOpt multiplies.

Source of MXFP4: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from paceline.checkpoints.quantized_formats.bit_streams import fp4_numbers
from paceline.checkpoints.quantized_formats.integer_matrix import AT_ONCE, Reader
from paceline.checkpoints.quantized_formats.stored_parts import FLOATS, StoredParts
from paceline.errors import CheckpointError

FP8: Final = ("F8_E4M3",)
POWERS: Final = ("U8", "F8_E8M0")
BIAS: Final = 127
"""What one-byte exponents are stored above."""

NVFP4_GROUP, MXFP4_GROUP = 16, 32


def power_scales(scales: torch.Tensor) -> torch.Tensor:
    """float32 of one-byte exponents; floats as they are."""
    if scales.dtype is torch.uint8 or (scales.element_size() == 1 and scales.dtype is not torch.float8_e4m3fn):
        exponents = scales.view(torch.uint8).int() - BIAS
        return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return scales.float()


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Floats of 8 bits; `block`: outputs and inputs that share a scale. See `integer_matrix.StoredMatrix`."""

    stored: StoredParts
    scale: str
    shape: tuple[int, int]
    block: tuple[int, int]
    bits: int = 8
    uniform: bool = False

    @classmethod
    def of(cls, stored: StoredParts, scale: str, block: tuple[int, int] | None) -> Fp8Matrix:
        """A matrix with scales of the part `scale`.

        Args:
            block: that the configuration names; None where it names none.
        """
        outputs, inputs = stored.need("weight", FP8, 2)
        shape = stored.need(scale, (*FLOATS, *POWERS))
        if shape in {(), (1,), (1, 1)}:
            return cls(stored, scale, (outputs, inputs), (outputs, inputs))
        if shape in {(outputs,), (outputs, 1)}:
            return cls(stored, scale, (outputs, inputs), (1, inputs))
        block = block or (1, inputs)
        stored.need_shape(scale, (-(-outputs // block[0]), -(-inputs // block[1])))
        return cls(stored, scale, (outputs, inputs), block)

    def fill(self, read: Reader, out: torch.Tensor) -> None:
        weight, scales = read(self.stored.name("weight")), power_scales(read(self.stored.name(self.scale)))
        (outputs, inputs), (high, wide) = self.shape, self.block
        scales = scales.reshape(-(-outputs // high), -(-inputs // wide))
        rows = max(1, AT_ONCE // inputs)
        columns = torch.arange(inputs) // wide
        for first in range(0, outputs, rows):
            part = weight[first : first + rows].float()
            which = torch.arange(first, first + len(part)) // high
            out[first : first + rows] = part.mul_(scales[which][:, columns])


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """Floats of 4 bits; see `integer_matrix.StoredMatrix`.

    Attributes:
        packed, scale: names of parts. whole: that of the scale of all, or None. divides: by it.
    """

    stored: StoredParts
    packed: str
    scale: str
    whole: str | None
    divides: bool
    shape: tuple[int, int]
    bits: int = 4
    uniform: bool = False

    @classmethod
    def of(cls, stored: StoredParts, packed: str, scale: str, whole: str | None, *, divides: bool = False) -> Fp4Matrix:
        """A matrix out of these parts."""
        outputs, pairs = stored.need(packed, ("U8",), 2)
        stored.need(scale, FP8 if whole else POWERS, 2)
        group = NVFP4_GROUP if whole else MXFP4_GROUP
        if 2 * pairs % group:
            raise CheckpointError(
                f"{stored.entries[packed].file}: {stored.name(packed)} has {2 * pairs} inputs, which groups of {group} "
                "do not divide; download the checkpoint again"
            )
        stored.need_shape(scale, (outputs, 2 * pairs // group))
        if whole:
            stored.need(whole, ("F32",))
            stored.need_shape(whole, (1,), (), (1, 1))
        return cls(stored, packed, scale, whole, divides, (outputs, 2 * pairs))

    def scales(self, read: Reader) -> torch.Tensor:
        """(outputs, groups) float32."""
        scales = power_scales(read(self.stored.name(self.scale)))
        if self.whole is None:
            return scales
        whole = read(self.stored.name(self.whole)).float().reshape(())
        if not (whole.isfinite() and whole > 0):
            raise CheckpointError(
                f"{self.stored.entries[self.whole].file}: {self.stored.name(self.whole)} is {float(whole)}; download "
                "the checkpoint again"
            )
        return scales / whole if self.divides else scales * whole

    def fill(self, read: Reader, out: torch.Tensor) -> None:
        pairs, scales = read(self.stored.name(self.packed)), self.scales(read)
        rows = max(1, AT_ONCE // self.shape[1])
        for first in range(0, len(pairs), rows):
            part = slice(first, first + rows)
            groups = fp4_numbers(pairs[part]).unflatten(1, (scales.shape[1], -1))
            out[part] = groups.mul_(scales[part, :, None]).flatten(1)
