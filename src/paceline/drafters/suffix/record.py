"""Several arrays handed to compiled code as one: where each lies and how large it is.

In: arrays. Out: a record of their addresses and shapes; inside compiled code the arrays again. Not here: what they
hold.

Every array that is passed costs a step as much as copying some hundred tokens, and a tuple of arrays as much again.
Whoever makes a record keeps its arrays alive, and makes a new one where an array is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray, types  # type: ignore[attr-defined]  # listed by numba at run time
from numba.extending import intrinsic

from paceline.drafters.suffix.nodes import Int, Ints, Longs
from paceline.utils import compiled

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]


def record_of(arrays: Iterable[npt.NDArray[Any]]) -> Longs:
    """(arrays, 3) int64: address, rows and columns of each; of one row of numbers the columns are 1.

    Raises:
        ValueError: an array that is not contiguous.
    """
    rows = []
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError("only contiguous arrays can be read by their address")
        rows.append((array.ctypes.data, len(array), array.shape[1] if array.ndim > 1 else 1))
    return np.array(rows, np.int64)


def _pointer(kind: Any) -> Any:
    """A function of compiled code: an address as a pointer to numbers of a kind."""

    def pointer(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen  # type: ignore[no-untyped-call]  # numba's

    return intrinsic(pointer)


_int32, _int64, _float32, _float64 = (
    _pointer(kind) for kind in (types.int32, types.int64, types.float32, types.float64)
)


@compiled
def ints(record: Longs, at: Int) -> Ints:
    """(rows,) int32: array number `at` of a record."""
    found: Ints = carray(_int32(record[at, 0]), (record[at, 1],))
    return found


@compiled
def int_table(record: Longs, at: Int) -> Ints:
    """(rows, columns) int32."""
    found: Ints = carray(_int32(record[at, 0]), (record[at, 1], record[at, 2]))
    return found


@compiled
def longs(record: Longs, at: Int) -> Longs:
    """(rows,) int64."""
    found: Longs = carray(_int64(record[at, 0]), (record[at, 1],))
    return found


@compiled
def singles(record: Longs, at: Int) -> Singles:
    """(rows,) float32."""
    found: Singles = carray(_float32(record[at, 0]), (record[at, 1],))
    return found


@compiled
def floats(record: Longs, at: Int) -> Floats:
    """(rows,) float64."""
    found: Floats = carray(_float64(record[at, 0]), (record[at, 1],))
    return found


@compiled
def float_table(record: Longs, at: Int) -> Floats:
    """(rows, columns) float64."""
    found: Floats = carray(_float64(record[at, 0]), (record[at, 1], record[at, 2]))
    return found
