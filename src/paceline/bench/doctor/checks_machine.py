"""Checks of the machine: versions, GPU, dtype, threads, other load, memory.

In: Facts. Out: complaints. Not here: measuring.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from paceline.bench.doctor.facts import Complaint, Facts

HARDWARE: Final = {
    "bfloat16": {"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}
"""Processor flags, x86's and Arm's, one of which makes a dtype fast."""

SLOWER: Final = 1.15
"""Threads that make a pass this many times slower than fewer of them are in each other's way."""

SPARE: Final = 0.5
"""CPUs' worth of other work that does not matter."""

LOW: Final = 0.05
"""Share of the memory that should stay available."""

SWAPPED: Final = 0.01
"""Share of the weights; more than this of the process in swap is read from disk again and again."""


def versions(facts: Facts) -> Iterator[Complaint]:
    """Packages that are missing or older than required."""
    for name in facts.machine.unfit:
        installed, required = facts.machine.versions[name]
        yield Complaint(f"{name} is {installed or 'missing'}, needed is {required}", f"pip install '{name}{required}'")


def gpu(facts: Facts) -> Iterator[Complaint]:
    """A GPU that PyTorch cannot use, or that is there and not used."""
    machine = facts.machine
    if machine.gpu is not None and not machine.cuda:
        why = "is a CPU build" if machine.cuda_build is None else f"(CUDA {machine.cuda_build}) cannot open it"
        do = "install a CUDA build of torch" if machine.cuda_build is None else "check the driver with nvidia-smi"
        yield Complaint(f"there is a GPU ({machine.gpu}), but torch {why}", do)
    elif machine.cuda and facts.target.device == "cpu":
        yield Complaint("torch can use a GPU, but the model runs on the CPU", "use --device cuda", hint=True)


def dtype(facts: Facts) -> Iterator[Complaint]:
    """16-bit types that the processor only emulates."""
    target, flags = facts.target, facts.machine.flags
    wanted = HARDWARE.get(target.dtype, set())
    if target.device == "cpu" and wanted and flags and not wanted & flags:
        others = [name for name in HARDWARE if HARDWARE[name] & flags]
        yield Complaint(
            f"this processor has no instructions for {target.dtype}, which is emulated",
            f"use --dtype {others[0] if others else 'float32'}",
        )


def threads(facts: Facts) -> Iterator[Complaint]:
    """More threads than CPUs, by affinity or quota; or than cores, which is seldom good."""
    machine = facts.machine
    if facts.target.device != "cpu":
        return
    allowed = machine.cpus if machine.quota is None else min(machine.cpus, machine.quota)
    if machine.threads > allowed + 0.01:
        limit = "the affinity mask allows" if allowed == machine.cpus else "the control group's quota allows"
        yield Complaint(
            f"{machine.threads} threads, but {limit} {allowed:g} CPU{'s' if allowed > 1 else ''}",
            f"use --threads {max(1, min(int(allowed), machine.cores))}",
        )
    elif machine.threads > machine.cores:
        yield Complaint(
            f"{machine.threads} threads on {machine.cores} physical cores",
            f"try --threads {machine.cores}; `paceline tune` does",
            hint=True,
        )


def busy(facts: Facts) -> Iterator[Complaint]:
    """Others who work on the cores that our threads need: every barrier waits for the slowest thread."""
    machine = facts.machine
    free = machine.cpus - machine.load
    if facts.target.device == "cpu" and machine.load > SPARE and machine.threads > free + SPARE:
        if machine.threads == 1:
            yield Complaint(f"other processes keep {machine.load:.1f} of {machine.cpus} CPUs busy", "stop them")
            return
        yield Complaint(
            f"other processes keep {machine.load:.1f} of {machine.cpus} CPUs busy, {machine.threads} threads wait "
            f"for each other",
            f"stop them, or use --threads {max(1, int(free))}",
        )


def scaling(facts: Facts) -> Iterator[Complaint]:
    """Whether fewer threads are faster."""
    machine, seconds = facts.machine, facts.machine.pass_seconds
    best = min(seconds, key=lambda number: seconds[number], default=machine.threads)
    if best < machine.threads and machine.threads in seconds and seconds[machine.threads] > SLOWER * seconds[best]:
        now, then = 1e3 * seconds[machine.threads], 1e3 * seconds[best]
        yield Complaint(
            f"a pass takes {now:.3g} ms with {machine.threads} threads, {then:.3g} ms with {best}",
            f"use --threads {best}, or find what keeps a core busy",
        )


def memory(facts: Facts) -> Iterator[Complaint]:
    """Parts of the process in swap, or next to nothing left."""
    machine = facts.machine
    if machine.swapped > SWAPPED * facts.target.weight_bytes and machine.swapped > 1 << 20:
        yield Complaint(
            f"{_size(machine.swapped)} of this process are in swap", "free memory, or take a smaller model or dtype"
        )
    if machine.memory_total and machine.memory_available < LOW * machine.memory_total:
        yield Complaint(
            f"{_size(machine.memory_available)} of {_size(machine.memory_total)} memory are left",
            "free memory, or take a smaller model, dtype or --max-model-len",
        )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**29 else f"{number / 2**20:.0f} MiB"
