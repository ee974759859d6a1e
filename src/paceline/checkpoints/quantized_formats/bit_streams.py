"""Numbers of 2 to 8 bits in 32-bit words, and pairs of 4-bit floats in bytes."""

from __future__ import annotations

from math import gcd
from typing import Final

import torch

WORD: Final = 32

FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of e2m1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats Specification 1.0)."""


def unpacked_numbers(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """(..., count) uint8 of numbers that follow each other in (..., n) int32 words, the lowest bits first; a number may
    begin in one word and end in the next.
    """
    step = WORD // gcd(WORD, bits)  # numbers behind which one begins with a word again
    each = step * bits // WORD
    runs = -(-count // step)
    if (lacking := runs * each - words.shape[-1]) > 0:
        words = torch.nn.functional.pad(words, (0, lacking))
    words, mask = words[..., : runs * each], (1 << bits) - 1
    out = torch.empty(*words.shape[:-1], runs * step, dtype=torch.uint8)
    for place in range(step):
        word, shift = divmod(place * bits, WORD)
        number = words[..., word::each] >> shift
        if shift + bits > WORD:
            here = WORD - shift
            number = (number & ((1 << here) - 1)) | (words[..., word + 1 :: each] << here)
        out[..., place::step] = number & mask
    return out[..., :count]


def words_of(count: int, bits: int) -> int:
    """Words that so many numbers fill, the last one perhaps in part."""
    return -(-count * bits // WORD)


def fp4_numbers(pairs: torch.Tensor) -> torch.Tensor:
    """(..., 2n) float32 of (..., n) bytes, each with two numbers, the first in its low half."""
    return torch.tensor(FP4)[torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).int()]
