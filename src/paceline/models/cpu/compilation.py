"""The entries of compiled code: made for this CPU, announced, kept on disk."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from numba import cfunc, types
from numba.core.compiler import Compiler

from paceline.models.cpu.matrix_unit import has_matrix_unit
from paceline.utils import optimised_once, waiting

log = logging.getLogger("paceline")

HINT = "which takes {}; where they can be kept on disk, once a machine"
PATIENCE, LONGEST_WAIT = 5.0, 600.0
"""Seconds after which a process says that it waits for another one, since reading takes a moment too; and after which
it compiles what that one seems to be compiling still.
"""


def machine_code(entry: Callable[..., None], name: str, duration: str, *, arguments: int = 1) -> Any:
    """A function as machine code, from numba's cache on disk where one can be read and written.

    Args:
        entry: of addresses and whole numbers, as many as `arguments`.
        name: of the kernels, as the user reads it.
        duration: of compiling, in words.
    """
    compiled: list[Any] = []

    class Once(Compiler):
        """Used only for what numba's cache on disk does not hold, and again where that cannot be written."""

        def compile_extra(self, function: Callable[..., object]) -> Any:
            if not compiled:
                with waiting(f"compiling {name}", HINT.format(duration)), optimised_once(self.state, name):
                    compiled.append(super().compile_extra(function))
            return compiled[0]

    options: dict[str, Any] = {"error_model": "numpy", "pipeline_class": Once}
    kind = types.void(*[types.int64] * arguments)
    try:
        with one_process_at_a_time(Path(entry.__code__.co_filename), name):
            return cfunc(kind, cache=True, **options)(entry)
    except (RuntimeError, OSError) as reason:
        log.debug("%s are not kept on disk: %s", name, reason)
        return cfunc(kind, **options)(entry)


@contextmanager
def one_process_at_a_time(source: Path, name: str) -> Iterator[None]:
    """While one process compiles a file, others wait for what it will leave on disk.

    Where no lock can be made, none waits.
    """
    lock = FileLock(source.parent / "__pycache__" / f"{source.stem}.lock")
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        with waiting(f"waiting for {name}", "which another process is compiling"):
            _wait_for(lock)
    except (OSError, NotImplementedError) as reason:
        log.debug("no lock for %s: %s", name, reason)
    try:
        yield
    finally:
        lock.release()


def _wait_for(lock: FileLock) -> None:
    try:
        lock.acquire(timeout=LONGEST_WAIT)
    except Timeout:
        log.warning("another process has been compiling for %.0f seconds: compiling here as well", LONGEST_WAIT)


def source_number() -> int:
    """A number that changes with any file of this package, and with what this process may use of the CPU."""
    digest = int(has_matrix_unit())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest = zlib.crc32(path.read_bytes(), digest)
    return digest or 1
