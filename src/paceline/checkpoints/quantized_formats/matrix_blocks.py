"""Quantised matrices as blocks that compiled passes multiply (checkpoints.block_types): the same numbers, zeros and
powers of two, and scales in float16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoints.block_types import Bytes, Ints
from paceline.checkpoints.gguf_blocks import block_bytes
from paceline.checkpoints.quantized_formats.integer_matrix import Grid, IntegerMatrix, Reader, StoredMatrix
from paceline.checkpoints.quantized_formats.mxfp4_experts import Mxfp4Stack
from paceline.checkpoints.quantized_formats.scaled_floats import Fp4Matrix
from paceline.errors import CheckpointError

BLOCK: Final = 32
"""Inputs of a block."""

NO_NUMBER: Final = 255
"""The exponent of scales that are no numbers."""

ZERO_OF: Final = {"Q4_0": 8, "Q8_0": 128}
"""The number that stands for 0 in types without zeros of their own, before it is taken away."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How blocks keep a matrix.

    Attributes:
        kinds: types that do, the smallest first. order: (inputs,) the input that each number of a row belongs to; None:
            in order. make: gives the blocks of a type, (bytes,), of a stack those of one expert.
    """

    kinds: tuple[str, ...]
    order: Ints | None
    make: Callable[[str, int], Bytes]


def block_form(matrix: StoredMatrix | None, read: Reader) -> BlockForm | None:
    """How blocks keep a matrix; None where they do not.

    Raises:
        CheckpointError: contents that contradict each other.
    """
    if isinstance(matrix, Mxfp4Stack):
        return BlockForm(("MXFP4",), None, partial(stack_blocks, matrix, read))
    if isinstance(matrix, Fp4Matrix):
        kinds = ("MXFP4" if matrix.whole is None else "FP4_HALVES",) if matrix.shape[1] % BLOCK == 0 else ()
        return BlockForm(kinds, None, partial(fp4_blocks, matrix, read))
    if isinstance(matrix, IntegerMatrix):
        grid = matrix.grid(read)
        order = order_of(grid.groups)
        return BlockForm(kinds_of_blocks(matrix.bits, grid), order, partial(integer_blocks, matrix, read, order))
    return None


def order_of(groups: torch.Tensor) -> Ints | None:
    """(inputs,) the order in which inputs of a group stand side by side; None where they do."""
    if bool((groups[1:] >= groups[:-1]).all()):
        return None
    order: npt.NDArray[np.int64] = groups.argsort(stable=True).numpy()
    return order


def kinds_of_blocks(bits: int, grid: Grid) -> tuple[str, ...]:
    """The types of blocks that keep a matrix, the smallest first; none where zeros or groups do not allow it."""
    ordered = grid.groups if (order := order_of(grid.groups)) is None else grid.groups[torch.from_numpy(order)]
    if len(ordered) % BLOCK or not bool((ordered[::BLOCK] == ordered[BLOCK - 1 :: BLOCK]).all()):
        return ()
    least, most, top = int(grid.zeros.min()), int(grid.zeros.max()), (1 << bits) - 1
    fits = {kind: least == most <= half and top - least < half for kind, half in ZERO_OF.items()}
    fits["INT4_ZEROS"] = bits <= 4 and least >= 0 and most <= 255
    return tuple(kind for kind in ("Q4_0", "INT4_ZEROS", "Q8_0") if fits[kind])


def integer_blocks(matrix: IntegerMatrix, read: Reader, columns: Ints | None, kind: str, expert: int = 0) -> Bytes:
    """The rows of a matrix in blocks, (bytes,).

    Args:
        columns: the input that each number of a row belongs to; None: in order. expert: 0, since there is one matrix.
    Raises:
        CheckpointError: contents that contradict each other, or a scale that is no number in float16.
    """
    grid, numbers = matrix.grid(read), matrix.numbers(read)
    groups = grid.groups
    if columns is not None:
        order = torch.from_numpy(columns)
        numbers, groups = numbers[:, order], groups[order]
    scales, zeros = _half(grid.scales[:, groups[::BLOCK]]), grid.zeros[:, groups[::BLOCK]]
    numbers = numbers.unflatten(1, (-1, BLOCK))
    out = torch.empty(*numbers.shape[:2], block_bytes(kind), dtype=torch.uint8)
    out[..., :2] = scales.contiguous().view(torch.uint8).view(*scales.shape, 2)
    if kind in ZERO_OF:
        numbers = numbers + (ZERO_OF[kind] - int(zeros[0, 0]))
    else:
        out[..., 2] = zeros
    if kind == "Q8_0":
        out[..., 2:] = numbers ^ 128
    else:
        _put_nibbles(numbers, out)
    whole: Bytes = out.flatten().numpy()
    return whole


def fp4_blocks(matrix: Fp4Matrix, read: Reader, kind: str, expert: int = 0) -> Bytes:
    """The rows of a matrix of 4-bit floats in blocks, (bytes,).

    Args:
        expert: 0, since there is one matrix.
    Raises:
        CheckpointError: a scale that is no number.
    """
    scales = read(matrix.stored.name(matrix.scale)) if kind == "MXFP4" else _half(matrix.scales(read))
    return _fp4_blocks(read(matrix.stored.name(matrix.packed)), scales, kind)


def stack_blocks(stack: Mxfp4Stack, read: Reader, kind: str, expert: int) -> Bytes:
    """The rows of one expert in blocks, (bytes,).

    Raises:
        CheckpointError: a scale that is no number.
    """
    return _fp4_blocks(stack.pairs(read, expert), stack.powers(read, expert), kind)


def _fp4_blocks(pairs: torch.Tensor, scales: torch.Tensor, kind: str) -> Bytes:
    """Blocks of (outputs, inputs / 2) bytes, with exponents or float16 scales (outputs, groups)."""
    codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1).unflatten(1, (-1, BLOCK))
    out = torch.empty(*codes.shape[:2], block_bytes(kind), dtype=torch.uint8)
    raw = scales.contiguous().view(torch.uint8)
    if kind == "MXFP4" and int(raw.max()) == NO_NUMBER:
        raise CheckpointError("a quantised matrix has scales that are no numbers; download it again")
    out[..., : -BLOCK // 2] = raw.view(*codes.shape[:2], -1)
    _put_nibbles(codes, out)
    whole: Bytes = out.flatten().numpy()
    return whole


def _half(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float16.

    Raises:
        CheckpointError: one that is no number there.
    """
    half = scales.half()
    if not bool(half.isfinite().all()):
        raise CheckpointError("a quantised matrix has scales that are too large, or no numbers; download it again")
    return half


def _put_nibbles(numbers: torch.Tensor, out: torch.Tensor) -> None:
    """Write (..., 32) numbers of 4 bits to the ends of blocks, the first sixteen in low halves of bytes."""
    low, high = numbers[..., : BLOCK // 2], numbers[..., BLOCK // 2 :]
    torch.bitwise_or(low, high << 4, out=out[..., -BLOCK // 2 :])
