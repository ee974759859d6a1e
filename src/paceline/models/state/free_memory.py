"""How much memory a device has left for this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, usage and reclaimable part, in versions 2 and 1."""


def available(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, within the limit of this process's control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = int(psutil.virtual_memory().available)
    limited = cgroup_available(Path("/sys/fs/cgroup"))
    return free if limited is None else min(free, limited)


def cgroup_available(root: Path) -> int | None:
    """Bytes left under the limit of a control group, file cache counted as free; None where there is no limit."""
    for limit_file, usage_file, reclaimable in CGROUPS:
        limit, usage = _integer(root / limit_file), _integer(root / usage_file)
        if limit is not None and usage is not None:
            stat = _statistics((root / limit_file).parent / "memory.stat")
            return max(0, limit - usage + stat.get(reclaimable, 0))
    return None


def _integer(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistics(path: Path) -> Mapping[str, int]:
    try:
        lines = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}
