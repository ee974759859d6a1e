"""PyTorch's own threads for compiled code: the OpenMP runtime that PyTorch loaded, by its GNU entry points.

A second pool beside PyTorch's would fight it for the cores, since idle workers of both spin. Where no such runtime is
found (none on Windows), there is no team.

Threads meet at a barrier of our own, some hundred times a pass, which looks for a while and then yields: on a busy
machine the thread that is waited for may need the very core.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit

from paceline.models.cpu import offsets as at
from paceline.models.cpu.vectors import I32, I64, Builder, Int, Nothing, Value, call_named, lowered, pointer, read

log = logging.getLogger("paceline")

NAMES = ("libgomp", "libomp", "libiomp5")


@dataclass(frozen=True, slots=True)
class Team:
    """Addresses of omp_get_thread_num, omp_get_num_threads and sched_yield, and the function that starts a parallel
    region.
    """

    thread: int
    size: int
    yielding: int
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
            thread, size, yielding = (
                ctypes.cast(function, ctypes.c_void_p).value or 0
                for function in (library.omp_get_thread_num, library.omp_get_num_threads, ctypes.CDLL(None).sched_yield)
            )
        except (OSError, AttributeError) as reason:
            log.debug("%s has no usable entry points: %s", path, reason)
            continue
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return Team(thread, size, yielding, parallel)
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


LINE = 64
"""Bytes between what threads count and what they watch, so that counting does not disturb those that watch."""

LOOKS = 100_000
"""How often a waiting thread looks before it yields: milliseconds, longer than any wait of a quiet machine takes. Linux
takes the rest of its time from a thread that yields, so that yielding early costs more than it brings: with two busy
processes on two cores SmolLM2 made 4 tokens/s with 200 looks, 28 with these.
"""


class Meeting:
    """Memory for one team's barrier: how many have come, and how often all did."""

    def __init__(self) -> None:
        self._memory = np.zeros(3 * LINE, np.uint8)
        self.address = -(-self._memory.ctypes.data // LINE) * LINE


@lowered(Nothing, Int, Int, Int, outlined=True)
def _meet(builder: Builder, meeting: Value, team: Value, yielding: Value) -> Any:
    """Return when `team` threads have come, each with the same addresses of a `Meeting` and of sched_yield."""
    come, times = (builder.bitcast(pointer(builder, meeting, at), I64.as_pointer()) for at in (0, LINE))
    zero, one = ir.Constant(I64, 0), ir.Constant(I64, 1)
    before = builder.load_atomic(times, "monotonic", 8)
    last, waits, look, rest, done = (builder.append_basic_block() for _ in range(5))
    number = builder.add(builder.atomic_rmw("add", come, one, "acq_rel"), one)
    builder.cbranch(builder.icmp_signed("==", number, team), last, waits)
    builder.position_at_end(last)
    builder.store_atomic(zero, come, "monotonic", 8)
    builder.store_atomic(builder.add(before, one), times, "release", 8)
    builder.branch(done)
    builder.position_at_end(waits)
    builder.branch(look)
    builder.position_at_end(look)
    looks = builder.phi(I64)
    looks.add_incoming(zero, waits)
    seen = builder.load_atomic(times, "acquire", 8)
    builder.cbranch(builder.icmp_signed("==", seen, before), rest, done)
    builder.position_at_end(rest)
    _pause(builder)
    with builder.if_then(builder.icmp_signed(">=", looks, ir.Constant(I64, LOOKS)), likely=False):
        builder.call(builder.inttoptr(yielding, ir.FunctionType(I32, []).as_pointer()), [])
    looks.add_incoming(builder.add(looks, one), builder.block)
    builder.branch(look)
    builder.position_at_end(done)


def _pause(builder: Builder) -> None:
    """Emit the instruction that tells the processor that a loop waits, where one is known."""
    machine = binding.get_process_triple().split("-")[0]
    if machine in ("x86_64", "i686"):
        call_named(builder, "llvm.x86.sse2.pause", ir.VoidType())
    elif machine in ("aarch64", "arm64"):
        call_named(builder, "llvm.aarch64.hint", ir.VoidType(), ir.Constant(I32, 1))


@njit(error_model="numpy")
def wait_for_all(frame: int, team: int) -> None:
    """The barrier of a pass."""
    if team > 1:
        _meet(read(frame + at.MEETING), team, read(frame + at.YIELD))
