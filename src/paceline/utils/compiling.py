"""Compiling of hot host-side code, announced, with results kept on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.compiler import Compiler

from paceline.utils.progress import waiting

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile with numba, without the interpreter's lock and without checks of indices.

    What was compiled is kept beside the source or in the user's cache; where neither can be written, every process
    compiles anew. It takes seconds, so that the log says so from level "info" on.
    """

    class Announced(Compiler):
        """Used only for what numba's cache on disk does not hold."""

        def compile_extra(self, function: Callable[..., object]) -> Any:
            with waiting(f"compiling {function.__name__}", "at its first use", logging.INFO):
                return super().compile_extra(function)  # type: ignore[no-untyped-call]  # numba's

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "pipeline_class": Announced}
    try:
        made: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in
        made = njit(**options)(function)
    return cast(F, made)
