"""Memory by address as NumPy arrays, and single float64, in compiled code.

In: addresses of fields that hold addresses. Out: views. Not here: what they hold (models.kernels.draft_frame).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray, njit, types  # type: ignore[attr-defined]  # listed by numba at run time
from numba.extending import intrinsic

from paceline.models.kernels.vectors import Builder, Int, Nothing, Value, load_at, lowered, read, store_at


def _pointer(kind: Any) -> Any:
    """A function of compiled code: an address as a pointer to numbers of a kind."""

    def pointer(typing: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Builder, signature: Any, args: tuple[Value, ...]) -> Value:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), codegen

    return intrinsic(pointer)


Float64 = types.float64
_int64, _int32, _float64, _float32 = (_pointer(kind) for kind in (types.int64, types.int32, types.float64, types.float32))


@lowered(Float64, Int)
def read_double(builder: Builder, address: Value) -> Value:
    """The float64 at an address."""
    return load_at(builder, address, ir.DoubleType())


@lowered(Nothing, Int, Float64)
def write_double(builder: Builder, address: Value, value: Value) -> None:
    """A float64 to an address."""
    store_at(builder, address, value)


@njit(error_model="numpy")
def ints(field: int, count: int) -> Any:
    """(count,) int64 at the address in a field."""
    return carray(_int64(read(field)), (count,))


@njit(error_model="numpy")
def small_ints(field: int, count: int) -> Any:
    """(count,) int32 at the address in a field."""
    return carray(_int32(read(field)), (count,))


@njit(error_model="numpy")
def doubles(field: int, count: int) -> Any:
    """(count,) float64 at the address in a field."""
    return carray(_float64(read(field)), (count,))


@njit(error_model="numpy")
def floats(field: int, count: int) -> Any:
    """(count,) float32 at the address in a field."""
    return carray(_float32(read(field)), (count,))
