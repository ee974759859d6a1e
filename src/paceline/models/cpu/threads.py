"""PyTorch's own threads for compiled code: the OpenMP runtime that PyTorch loaded, by its GNU entry points; and on how
many of them a pass runs.

A second pool beside PyTorch's would fight it for the cores, since idle workers of both spin. Where no such runtime is
found (none on Windows), there is no team.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from paceline.models.cpu import offsets as at
from paceline.models.cpu.vectors import call, read
from paceline.utils import part_of_compiled

log = logging.getLogger("paceline")

NAMES = ("libgomp", "libomp", "libiomp5")

SLOW: Final = 1.4
"""Times the shortest of late that a pass takes where something seems to be in its way."""

OFTEN: Final = 4
"""More slow passes than others, before fewer threads are tried."""

TRIAL: Final = 3
"""Passes that decide between two numbers of threads."""

CALM: Final = 0.8
"""Times the usual at the last trial, that passes on fewer threads take where nothing is in their way any more."""

WAITS: Final = (1.0, 16.0)
"""Seconds until the next trial, the first and the longest."""


@dataclass(frozen=True, slots=True)
class Team:
    """Addresses of omp_get_thread_num, omp_get_num_threads and GOMP_barrier, and the function that starts a parallel
    region.
    """

    thread: int
    size: int
    barrier: int
    parallel: Any

    def run(self, function: int, data: int, threads: int) -> None:
        """Run a compiled function on so many threads."""
        self.parallel(function, data, threads, 0)


@dataclass(slots=True)
class _TeamTrial:
    """Of another number of threads than `before`: seconds over those that passes of the same kind took before."""

    before: int
    ratios: list[float] = field(default_factory=list)
    passes: int = 0


class TeamSize:
    """How many threads passes run on: all, or fewer while other programs hold the cores.

    The threads of a pass wait for each other some hundred times, and one that has lost its core holds up all. So where
    passes take longer than they did, half of the threads are tried, and kept if that is faster; twice as many are tried
    again later, after waits that double. What a pass computes does not depend on it, to the bit.

    Args:
        most: threads that there are. clock: seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float] = perf_counter) -> None:
        self.most = self.now = most
        self._clock, self._wait, self._next = clock, WAITS[0], 0.0
        self._lowest: dict[tuple[int, Hashable], float] = {}  # seconds by threads and kind of pass
        self._usual: dict[tuple[int, Hashable], float] = {}
        self._then: dict[tuple[int, Hashable], float] = {}  # as usual at the last trial
        self._slow = 0
        self._trial: _TeamTrial | None = None

    def took(self, kind: Hashable, seconds: float) -> None:
        """Note how long a pass took on `now` threads, and choose for the next one.

        Args:
            kind: passes of one kind do the same work, but for what lies in caches.
        """
        if self.most == 1:
            return
        key = self.now, kind
        self._usual[key] = seconds if key not in self._usual else 0.7 * self._usual[key] + 0.3 * seconds
        if self._trial is not None:
            self._judge(self._trial, kind, seconds)
            return
        lowest = self._lowest[key] = min(seconds, 1.01 * self._lowest.get(key, seconds))
        self._slow = max(0, self._slow + (1 if seconds > SLOW * lowest else -1))
        calm = self._usual[key] < CALM * self._then.get(key, 0.0)
        if self.now < self.most and (calm or self._clock() >= self._next):
            self._try(min(self.most, 2 * self.now))
        elif self.now > 1 and self._slow >= OFTEN and self._clock() >= self._next:
            self._try(max(1, self.now // 2))

    def _try(self, threads: int) -> None:
        self._trial, self.now, self._slow = _TeamTrial(self.now), threads, 0

    def _judge(self, trial: _TeamTrial, kind: Hashable, seconds: float) -> None:
        trial.passes += 1
        if (usual := self._usual.get((trial.before, kind))) is not None:
            trial.ratios.append(seconds / usual)
        if len(trial.ratios) < TRIAL and trial.passes < 5 * TRIAL:
            return
        better = len(trial.ratios) == TRIAL and sum(trial.ratios) < TRIAL
        if better:
            self._wait = WAITS[0]
        else:
            self.now, self._wait = trial.before, min(2 * self._wait, WAITS[1])
        self._trial, self._next, self._then = None, self._clock() + self._wait, dict(self._usual)
        if better and 1 < self.now < trial.before:
            self._try(self.now // 2)


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
        libraries = dict.fromkeys(line[5] for line in lines if len(line) == 6)
    else:
        libraries = dict.fromkeys(str(path) for path in (Path(torch.__file__).parent / "lib").glob("*omp*"))
    return [path for path in libraries if Path(path).name.startswith(NAMES)]


@part_of_compiled
def wait_for_all(frame: int, team: int) -> None:
    """The barrier of a pass."""
    if team > 1:
        call(read(frame + at.BARRIER))
