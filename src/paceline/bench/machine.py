"""What a figure must come with: machine, versions, command; and what the machine gives: bandwidth, memory, energy."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.utils import repeated
from paceline.version import __version__

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "numpy", "tokenizers", "safetensors")
POWERCAP = Path("/sys/class/powercap")
PROCESS = Path("/proc/self")


def provenance(seed: int, arguments: Sequence[str] | None = None, program: str = "paceline") -> dict[str, Any]:
    """Command, date, versions and machine; paths in the command keep their last part only.

    Args:
        arguments: of the program; None takes the process's own.
        program: what was run.
    """
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "absent"
    words = sys.argv[1:] if arguments is None else list(arguments)
    return {
        "command": " ".join([program, *map(_last_part, words)]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "paceline": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "machine": machine_facts(),
    }


def _last_part(word: str) -> str:
    """A word of a command without the folders of a path in it."""
    name, equals, value = word.partition("=")
    if equals and not word.startswith("{"):
        return f"{name}={_last_part(value)}"
    return Path(word).name if word.startswith(("/", "~", "..")) else word


def machine_facts() -> dict[str, Any]:
    """Describe the machine in figures and names."""
    import psutil
    import torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def read_bandwidth(device: torch.device, *, megabytes: int = 256, repeats: int = 9) -> dict[str, Any]:
    """Speed of reading memory: bytes per second of a sum over a large float32 tensor by all threads, median of
    `repeats`.

    Good kernels read somewhat faster than this, and a model that fits into a cache reads faster still: shares of the
    limit may exceed 1.
    """
    import torch

    megabytes *= 1 if device.type == "cpu" else 16
    size = megabytes * 1024 * 1024
    data = torch.ones(size // 4, device=device)
    rates = [size / seconds for seconds in repeated(lambda: data.sum().item(), repeats)]
    method = (
        f"sum of a {megabytes} MiB float32 tensor, {torch.get_num_threads() if device.type == 'cpu' else 'all'} threads"
    )
    return {"bytes_per_second": median(rates), "method": method, "samples": rates}


class MemoryMeter:
    """Peak memory of stretches of this process: `start()`, then `stop()` -> (rss bytes or None, cuda bytes or None).

    Attributes:
        scope: "runs" where Linux resets the peak (`/proc/self/clear_refs`), else "process": since the process began.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device if device.type == "cuda" else None
        self.scope = "runs" if self._reset() else "process"

    def _reset(self) -> bool:
        try:
            (PROCESS / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def start(self) -> None:
        """Forget the peak so far."""
        self._reset()
        if self.cuda is not None:
            import torch

            torch.cuda.reset_peak_memory_stats(self.cuda)

    def stop(self) -> tuple[int | None, int | None]:
        """Give the peaks since `start`."""
        cuda = None
        if self.cuda is not None:
            import torch

            cuda = int(torch.cuda.max_memory_allocated(self.cuda))
        return _peak_rss(), cuda


def _peak_rss() -> int | None:
    try:
        for line in (PROCESS / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


class EnergyMeter:
    """Joules of stretches of time, from the counters of the platform.

    They count the whole package or GPU, other processes too.

    Attributes:
        source: which counters; None where there are none.
        reason: why there are none.
    """

    def __init__(self, device: torch.device, powercap: Path = POWERCAP) -> None:
        self.source: str | None = None
        self.reason: str | None = None
        self._domains: list[tuple[Path, int]] = []
        self._nvml: Any = None
        if device.type == "cuda":
            self._open_nvml(device.index or 0)
        else:
            self._open_rapl(powercap)
        self._begin = self._read()

    def _open_rapl(self, powercap: Path) -> None:
        for folder in sorted(powercap.glob("*-rapl:*")) if powercap.exists() else []:
            if folder.name.count(":") > 1:  # a part of a package that is counted already
                continue
            try:
                int((folder / "energy_uj").read_text())
                self._domains.append((folder / "energy_uj", int((folder / "max_energy_range_uj").read_text())))
            except (OSError, ValueError) as error:
                self.reason = f"RAPL counters cannot be read: {getattr(error, 'strerror', None) or error}"
        if self._domains:
            self.source, self.reason = f"RAPL, {len(self._domains)} package domains", None
        elif self.reason is None:
            self.reason = "the platform has no RAPL counters"

    def _open_nvml(self, index: int) -> None:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self.reason = "no NVML library"
            return
        handle = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            self.reason = "NVML does not know the device"
            return
        energy = ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
            self.reason = "the GPU has no energy counter"
            return
        self._nvml, self.source = (nvml, handle), "NVML, total of the GPU"

    def _read(self) -> list[int]:
        """Counters in microjoules."""
        if self._nvml is not None:
            nvml, handle = self._nvml
            energy = ctypes.c_ulonglong()
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
            return [energy.value * 1000]
        return [int(path.read_text()) for path, _ in self._domains]

    def start(self) -> None:
        """Remember the counters."""
        if self.source is not None:
            self._begin = self._read()

    def stop(self) -> float | None:
        """Joules since `start`, or None; a counter that wrapped around once is put right."""
        if self.source is None:
            return None
        ranges = [wrap for _, wrap in self._domains] or [0]
        spent = [
            now - then if now >= then else now - then + wrap
            for now, then, wrap in zip(self._read(), self._begin, ranges, strict=True)
        ]
        return sum(spent) / 1e6
