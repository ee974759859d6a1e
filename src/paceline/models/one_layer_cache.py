"""Keys and values of one sequence of a one-layer model, in plain arrays.

In: numbers of heads and dimensions. Out: memory that grows. Not here: what is written into it (models.one_layer, compiled code).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

SMALLEST = 16
"""Tokens that a new sequence has room for."""


class OneLayerCache:
    """Rotated keys and values of one sequence, scratch inputs included.

    Attributes:
        length: committed tokens. keys, values: (kv heads, capacity, head dim) float32; capacity is a multiple of 16.
        places: addresses of keys and values, and the bytes of one head.
    """

    __slots__ = ("keys", "length", "places", "values")

    def __init__(self, heads: int, dim: int, capacity: int = SMALLEST) -> None:
        self.length = 0
        capacity += -capacity % 16
        self.keys: Array = np.zeros((heads, capacity, dim), np.float32)
        self.values: Array = np.zeros((heads, capacity, dim), np.float32)
        self._place()

    def _place(self) -> None:
        self.places = self.keys.ctypes.data, self.values.ctypes.data, self.keys.strides[0]

    @staticmethod
    def capacity_for(length: int, capacity: int = SMALLEST) -> int:
        """Tokens that there is room for in a sequence that had room for `capacity` and has grown to `length`."""
        while capacity < length:
            capacity *= 2
        return capacity

    def reserve(self, length: int) -> None:
        """Room for `length` tokens, at least doubling."""
        have = self.keys.shape[1]
        if length > have:
            new = self.capacity_for(length, have)
            more = ((0, 0), (0, new - have), (0, 0))
            self.keys, self.values = np.pad(self.keys, more), np.pad(self.values, more)
            self._place()

    def copy(self) -> OneLayerCache:
        """An independent sequence with the same committed tokens."""
        other = OneLayerCache(self.keys.shape[0], self.keys.shape[2], max(1, self.length))
        other.length = self.length
        other.keys[:, : self.length], other.values[:, : self.length] = self.keys[:, : self.length], self.values[:, : self.length]
        return other
