"""Compiling of hot host-side code: announced, kept on disk, each function translated once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.extending import register_jitable

from paceline.utils.progress import waiting

F = TypeVar("F", bound=Callable[..., object])

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: F) -> F:
    """Compile with numba, without the interpreter's lock and without checks of indices.

    What was compiled is kept beside the source or in the user's cache; where neither can be written, every process
    compiles anew. It takes seconds, so that the log says so from level "info" on.
    """

    class Announced(Compiler):
        """Used only for what numba's cache on disk does not hold."""

        def compile_extra(self, function: Callable[..., object]) -> Any:
            announced = waiting(f"compiling {function.__name__}", "at its first use", logging.INFO)
            with announced, optimised_once(self.state, function.__qualname__):
                return super().compile_extra(function)  # type: ignore[no-untyped-call]  # numba's

    try:
        compiled: Any = njit(cache=True, pipeline_class=Announced, **OPTIONS)(function)
    except RuntimeError:  # no folder to keep it in
        compiled = njit(pipeline_class=Announced, **OPTIONS)(function)
    return cast(F, compiled)


def part_of_compiled(function: F) -> F:
    """For functions that `compiled` ones call: compiled within each of these, once for all constants.

    Called from Python, it is what it is without this.
    """
    compiled: F = register_jitable(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return compiled


def kernel_files(package: Path) -> list[Path]:
    """What numba keeps on disk of the functions in a package's folders."""
    files: list[Path] = []
    for source in {source.parent: source for source in sorted(package.rglob("*.py"))}.values():
        code = _nothing.__code__.replace(co_filename=str(source))
        try:
            kept = Path(FunctionCache(FunctionType(code, {}, "nothing")).cache_path)  # type: ignore[no-untyped-call]
        except RuntimeError:  # no folder to keep it in
            continue
        files += [path for path in sorted(kept.iterdir()) if path.suffix in {".nbi", ".nbc"}]
    return files


def _nothing() -> None:
    """A function, for what numba says of one in a file."""


class Linked(JITCodeLibrary):
    """A function that only compiled ones call: linked into them as it is written."""

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()  # type: ignore[no-untyped-call]  # numba's
        return 0


@contextmanager
def optimised_once(state: Any, name: str) -> Iterator[None]:
    """Give machine code only to the function that is compiled, not to those within it.

    numba optimises and translates every function by itself, then within each of its callers, up to the one that
    matters, which takes twice as long. What was compiled so cannot be called from Python.

    Args:
        state: of numba's compiler.
        name: of the function's library.
    """
    codegen = state.targetctx.codegen()
    state.library = type(codegen).create_library(codegen, name)
    state.library.enable_object_caching()
    if "create_library" in vars(codegen):  # a function within another one that can be called by itself
        yield
        return

    def linked(name: str) -> Linked:
        return Linked(codegen, name)  # type: ignore[no-untyped-call]  # numba's

    def from_disk(serialized: Any) -> Any:
        del codegen.create_library
        try:
            return type(codegen).unserialize_library(codegen, serialized)
        finally:
            codegen.create_library = linked

    def set_env(variable: str, env: object) -> None:
        if codegen._engine.is_symbol_defined(variable):
            type(codegen).set_env(codegen, variable, env)

    codegen.create_library, codegen.unserialize_library, codegen.set_env = linked, from_disk, set_env
    try:
        yield
    finally:
        del codegen.create_library, codegen.unserialize_library, codegen.set_env
