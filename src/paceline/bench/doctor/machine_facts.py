"""Facts of the machine for the doctor: threads, CPUs, quota, other load, processor flags, memory, GPU, versions.

In: this process and /proc, /sys. Out: checks_facts.Machine. Not here: judgement.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from paceline.bench.doctor.facts import MachineFacts

ROOT = Path("/")
WATCHED = 0.3
"""Seconds of sleep in which the others' load is measured."""


def gather(pass_seconds: Mapping[int, float], root: Path = ROOT) -> MachineFacts:
    """The machine now.

    Args:
        pass_seconds: number of threads -> seconds of a pass of the target, measured before.
        root: of the file system.
    """
    import torch

    cpus = allowed_cpus()
    memory = psutil.virtual_memory()
    found, unfit = versions()
    return MachineFacts(
        threads=torch.get_num_threads(),
        cpus=len(cpus),
        cores=cores(cpus, root),
        quota=quota(root),
        load=load(cpus),
        pass_seconds=pass_seconds,
        flags=flags(root),
        memory_total=memory.total,
        memory_available=memory.available,
        swapped=swapped(root),
        gpu=gpu(root),
        cuda=torch.cuda.is_available(),
        cuda_build=torch.version.cuda,
        versions=found,
        unfit=unfit,
    )


def allowed_cpus() -> frozenset[int]:
    """Numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores(cpus: frozenset[int], root: Path = ROOT) -> int:
    """Physical cores among some CPUs."""
    siblings = {_text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") for cpu in cpus}
    if None in siblings:
        return min(len(cpus), psutil.cpu_count(logical=False) or len(cpus))
    return len(siblings)


def quota(root: Path = ROOT) -> float | None:
    """CPUs' worth of time of the process's control group, version 2 or 1; None without a limit."""
    own = re.findall(r"^0::(/.*)$", _text(root / "proc/self/cgroup") or "", re.MULTILINE)
    base = root / "sys/fs/cgroup"
    limits = []
    for folder in {base, *(base / name.strip("/") for name in own)}:
        words = (_text(folder / "cpu.max") or "").split()
        if len(words) == 2 and words[0].isdecimal():
            limits.append(int(words[0]) / int(words[1]))
    microseconds, period = (_text(base / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if microseconds and period and microseconds.isdecimal():
        limits.append(int(microseconds) / int(period))
    return min(limits, default=None)


def load(cpus: frozenset[int]) -> float:
    """CPUs' worth of work on some CPUs while this process sleeps."""
    percent = psutil.cpu_percent(interval=WATCHED, percpu=True)
    return sum(value for cpu, value in enumerate(percent) if cpu in cpus) / 100


def flags(root: Path = ROOT) -> frozenset[str]:
    """Of the processor, as Linux spells them; empty elsewhere."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return frozenset(found.group(1).split() if found else ())


def swapped(root: Path = ROOT) -> int:
    """Bytes of this process in swap."""
    found = re.search(r"^VmSwap:\s*(\d+) kB", _text(root / "proc/self/status") or "", re.MULTILINE)
    return 1024 * int(found.group(1)) if found else 0


def gpu(root: Path = ROOT) -> str | None:
    """What shows that there is an NVIDIA GPU; None where nothing does."""
    if (root / "proc/driver/nvidia/version").exists():
        return "driver loaded"
    if sorted(root.glob("dev/nvidia[0-9]*")):
        return "/dev/nvidia0"
    return "nvidia-smi" if root == ROOT and shutil.which("nvidia-smi") else None


def versions() -> tuple[dict[str, tuple[str | None, str]], list[str]]:
    """What this package requires: name -> (installed, required), and the names that do not fit."""
    try:
        needed = [Requirement(line) for line in requires("paceline") or ()]
    except PackageNotFoundError:  # run from a folder that was not installed
        return {}, []
    found: dict[str, tuple[str | None, str]] = {}
    for one in needed:
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            try:
                found[one.name] = (version(one.name), str(one.specifier))
            except PackageNotFoundError:
                found[one.name] = (None, str(one.specifier))
    wanted = {one.name: one.specifier for one in needed}
    unfit = [
        name for name, (has, _) in found.items() if has is None or not wanted[name].contains(has, prereleases=True)
    ]
    return found, unfit


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
