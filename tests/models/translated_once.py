"""numba's `njit` for tests of single kernels: what they call is compiled with them, as in a pass of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.compiler import Compiler

from paceline.utils import optimised_once


class Once(Compiler):
    def compile_extra(self, function: Callable[..., object]) -> Any:
        with optimised_once(self.state, function.__qualname__):
            return super().compile_extra(function)


def translated_once(function: Callable[..., None]) -> Any:
    """Not kept on disk, since kernels in other files would change unseen."""
    return njit(error_model="numpy", pipeline_class=Once)(function)
