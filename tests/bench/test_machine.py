"""Meters against a made-up platform, provenance without folders."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from paceline.bench import provenance, read_bandwidth
from paceline.bench.machine import EnergyMeter

CPU = torch.device("cpu")


def rapl(root: Path, name: str, energy: int, highest: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{highest}\n")
    return folder / "energy_uj"


def test_rapl_packages_add_up_parts_do_not_and_counters_wrap(tmp_path: Path) -> None:
    one, two = rapl(tmp_path, "intel-rapl:0", 900_000), rapl(tmp_path, "intel-rapl:1", 5)
    core = rapl(tmp_path, "intel-rapl:0:0", 7)
    meter = EnergyMeter(CPU, tmp_path)
    meter.start()
    one.write_text("100000")
    two.write_text("500005")
    core.write_text("999999")
    assert meter.source == "RAPL, 2 package domains"
    assert meter.reason is None
    assert meter.stop() == 0.7


def test_without_counters_there_is_a_reason(tmp_path: Path) -> None:
    meter = EnergyMeter(CPU, tmp_path / "none")
    meter.start()
    assert (meter.source, meter.stop()) == (None, None)
    assert meter.reason == "the platform has no RAPL counters"


HELD = """
import torch
from paceline.bench import machine

meter = machine.MemoryMeter(torch.device("cpu"))
meter.start()
low, cuda = meter.stop()
meter.start()
torch.ones(64 * 1024 * 1024 // 4).sum().item()
high, _ = meter.stop()
assert cuda is None
assert low and high
assert meter.scope == "process" or high - low > 32 * 1024 * 1024, (low, high)
"""


def test_peak_memory_sees_what_was_held_for_a_moment() -> None:
    """In a process of its own: memory that others freed before would be used again without growing."""
    found = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_provenance_names_no_folders() -> None:
    found = provenance(3, ["bench", "-w", "/home/me/data/x.jsonl", "gsm8k=/home/me/y.jsonl", '--json={"a": "/b"}'])
    assert found["command"] == 'paceline bench -w x.jsonl gsm8k=y.jsonl --json={"a": "/b"}'
    assert found["seed"] == 3
    assert found["machine"]["cores"] >= 1


def test_bandwidth_is_a_positive_median() -> None:
    found = read_bandwidth(CPU, megabytes=4, repeats=3)
    assert min(found["samples"]) <= found["bytes_per_second"] <= max(found["samples"])
