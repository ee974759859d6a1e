"""What the blocks of GGUF's quantised types mean, as float32, equal to `gguf.dequantize` bit for bit, and those that
checkpoints.block_types adds to them.

The types that most files have are written out here in PyTorch, two to three times as fast as in NumPy by the package
`gguf` (MIT), which reads the others. Products and sums stay apart, since a fused one would round differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from paceline.checkpoints.quantized_formats.bit_streams import FP4

OWN_SIZES: Mapping[str, int] = {"INT4_ZEROS": 19, "FP4_HALVES": 20}
"""Bytes of blocks that are not GGUF's."""


@functools.cache
def block_bytes(kind: str) -> int:
    """Of a block."""
    import gguf

    if kind in OWN_SIZES:
        return OWN_SIZES[kind]
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])


def block_values(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights (count,) float32 of whole blocks.

    Args:
        raw: bytes (n,).
        kind: the type's name, such as "Q4_K".
    Raises:
        NotImplementedError: a type that nothing here reads.
    """
    import gguf

    if kind in PLAIN:
        return raw.view(PLAIN[kind]).float()
    if kind in BLOCKS:
        return BLOCKS[kind](raw.view(-1, block_bytes(kind))).flatten()
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block, (n, 1) float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """(..., m) bytes as (..., 2, m): all low halves, then all high ones."""
    return torch.stack((packed & 15, packed >> 4), -2)


def _bits(packed: torch.Tensor, step: int) -> torch.Tensor:
    """(..., m) bytes as (..., 8 / step, m): their lowest `step` bits, then the next."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8)[:, None]
    return (packed.unsqueeze(-2) >> shifts) & ((1 << step) - 1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """(n, 4) bytes as (n, 32): every bit, as 0 or 16, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed[..., None] >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).flatten(1).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).flatten(1).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _int4_zeros(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 3:]).flatten(1).float().sub_(blocks[:, 2:3]).mul_(_half(blocks, 0))


def _fp4_halves(blocks: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor(FP4)[_nibbles(blocks[:, 4:]).int()]  # (n, 2, 16): the halves
    return numbers.mul_(blocks[:, :4].contiguous().view(torch.float16).float()[..., None])


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    whole = _nibbles(blocks[:, 6:]).flatten(1).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return whole.float().sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    whole = _nibbles(blocks[:, 8:]).flatten(1).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return whole.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _scaled(blocks: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Whole numbers (n, 8, 32) times the scales, less the offsets, that begin blocks of Q4_K and Q5_K: two factors in
    float16, then 8 scales and 8 offsets of 6 bits in 12 bytes.
    """
    low, middle, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (mixed & 15) | ((low >> 2) & 48)), 1).float().mul_(_half(blocks, 0))
    offsets = torch.cat((middle & 63, (mixed >> 4) | ((middle >> 2) & 48)), 1).float().mul_(_half(blocks, 2))
    return whole.float().mul_(scales[..., None]).sub_(offsets[..., None])


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).flatten(1, 2))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1, 2)
    return _scaled(blocks, low.bitwise_or_(_bits(blocks[:, 16:48], 1) << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).view(-1, 16, 16)
    high = _bits(blocks[:, 128:192].unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_half(blocks, 208))
    return low.bitwise_or_(high << 4).float().sub_(32).mul_(scales[..., None])


PLAIN: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BLOCKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "INT4_ZEROS": _int4_zeros,
    "FP4_HALVES": _fp4_halves,
}
"""Blocks (n, bytes) -> weights (n, ...)."""
