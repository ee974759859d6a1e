"""Compiling of hot host-side code, with results kept on disk.

In: a function over NumPy arrays and numbers. Out: the same function as machine code, made at its first call. Not here: the
functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile with numba, without the interpreter's lock and without checks of indices.

    What was compiled is kept beside the source or in the user's cache; where neither can be written, every process compiles anew.
    """
    try:
        made: Any = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder to keep it in
        made = njit(nogil=True, error_model="numpy")(function)
    return cast(F, made)
