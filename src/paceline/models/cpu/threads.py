"""PyTorch's own threads for compiled code: the OpenMP runtime that PyTorch loaded, by its GNU entry points.

A second pool beside PyTorch's would fight it for the cores, since idle workers of both spin. Where no such runtime is
found (none on Windows), there is no team.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numba import njit

from paceline.models.cpu import offsets as at
from paceline.models.cpu.vectors import call, read

log = logging.getLogger("paceline")

NAMES = ("libgomp", "libomp", "libiomp5")


@dataclass(frozen=True, slots=True)
class Team:
    """Addresses of omp_get_thread_num, omp_get_num_threads and GOMP_barrier, and the function that starts a parallel
    region.
    """

    thread: int
    size: int
    barrier: int
    parallel: Any

    def run(self, function: int, data: int) -> None:
        """Run a compiled function on as many threads as PyTorch uses."""
        self.parallel(function, data, torch.get_num_threads(), 0)


@functools.cache
def find_team() -> Team | None:
    """The team over PyTorch's threads, or None."""
    for path in mapped_runtimes():
        try:
            library = ctypes.CDLL(path)
            parallel = library.GOMP_parallel
            thread, size, barrier = (
                ctypes.cast(function, ctypes.c_void_p).value or 0
                for function in (library.omp_get_thread_num, library.omp_get_num_threads, library.GOMP_barrier)
            )
        except (OSError, AttributeError) as reason:
            log.debug("%s has no usable entry points: %s", path, reason)
            continue
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return Team(thread, size, barrier, parallel)
    return None


def mapped_runtimes() -> list[str]:
    """Paths of OpenMP runtimes in this process; where the system does not list them, those that ship with PyTorch."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = (line.split(maxsplit=5) for line in maps.read_text(encoding="utf-8", errors="replace").splitlines())
        found = dict.fromkeys(line[5] for line in lines if len(line) == 6)
    else:
        found = dict.fromkeys(str(path) for path in (Path(torch.__file__).parent / "lib").glob("*omp*"))
    return [path for path in found if Path(path).name.startswith(NAMES)]


@njit(error_model="numpy")
def wait_for_all(frame: int, team: int) -> None:
    """The barrier of a pass."""
    if team > 1:
        call(read(frame + at.BARRIER))
