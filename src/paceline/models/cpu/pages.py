"""Memory for weights, keys and values in large pages where the system grants them.

A pass reads every weight once, and every key and value that is visible, so each small page costs a lookup of its
address that nothing else shares; Linux gives pages of 2 MiB to memory that asks for them. Elsewhere, and where the
kernel refuses, the memory is ordinary.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger("paceline")

SLAB = 64 * 2**20
"""Bytes mapped at a time; what is not written stays unused."""
ALIGNMENT, LARGE = 64, 2 * 2**20


class Pages:
    """Hands out memory from slabs of large pages; a slab lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> torch.Tensor:
        """(size,) uint8, aligned to a cache line."""
        if self._used + size > len(self._slab):
            self._slab, self._used = _slab(max(size, SLAB)), 0
        part = self._slab.narrow(0, self._used, size)
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return part


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, in large pages if they fill one."""
    size = math.prod(shape) * dtype.itemsize
    return torch.zeros(shape, dtype=dtype) if size < LARGE else _slab(size).view(dtype).view(shape)


def _slab(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # kernels without large pages, sandboxes
        logger.debug("no large pages: the system rejects madvise (%s)", error.strerror or error)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole.narrow(0, -whole.data_ptr() % LARGE, size)


def address(array: npt.NDArray[np.int64]) -> int:
    """Address of an array's first element."""
    return int(array.__array_interface__["data"][0])
