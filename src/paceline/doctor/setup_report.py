"""What a report of a problem should say of a setup, as lines to paste: versions, machine, model, folders, switches."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.doctor.facts import SetupFacts
from paceline.utils import kernel_files, user_cache
from paceline.version import __version__

if TYPE_CHECKING:
    from paceline.llm import LLM

PACKAGE = Path(__file__).parents[1]
TOLD = ("torch", "transformers", "numba", "tokenizers", "safetensors", "numpy", "llguidance")
"""Packages whose versions matter most often."""

SWITCHES = ("PACELINE_", "HF_HUB_", "OMP_", "MKL_", "ONEDNN_", "NUMBA_", "ATEN_", "CUDA_VISIBLE")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""Beginnings of environment variables that matter, and parts of the names of those that are nobody's business."""


def about(llm: LLM, facts: SetupFacts) -> Iterator[tuple[str, str]]:
    """(what, value) of each line; the user's home is written as ~, values of secrets are left out."""
    machine, passes, info = facts.machine, facts.passes, llm.runner.info
    yield "paceline", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.release()}"
    processor = platform.processor() or platform.machine()
    if passes is not None:
        processor = f"{passes.processor}, {passes.instructions or 'this model uses none of its instructions'}"
    yield "processor", f"{processor}; {machine.cores} cores, {machine.threads} threads"
    total, free = machine.memory_total / 1e9, machine.memory_available / 1e9
    yield "memory", f"{total:.1f} GB, {free:.1f} GB free"
    yield "GPU", f"CUDA {machine.cuda_build}" if machine.cuda else machine.gpu or "none"
    versions = ((name, machine.versions[name][0]) for name in TOLD if name in machine.versions)
    yield "packages", ", ".join(f"{name} {installed or 'missing'}" for name, installed in versions) or "not installed"
    form = f"{form_of(llm, facts)} on {facts.target.device}"
    yield "model", f"{_short(info.name)} ({info.family}), {form}, {info.passes} passes"
    kernels = kernel_files(PACKAGE)
    yield "kernels", _folder(kernels[0].parent) if kernels else "none kept on disk"
    yield "cache", _folder(user_cache(""))
    switches = ((name, value) for name, value in sorted(os.environ.items()) if name.startswith(SWITCHES))
    told = (f"{name}={'...' if any(part in name for part in SECRET) else _short(value)}" for name, value in switches)
    yield "switches", " ".join(told) or "none"


def form_of(llm: LLM, facts: SetupFacts) -> str:
    """What the weights of the target are kept as: a dtype, or a kind of quantised weights."""
    return llm.runner.info.quantization or facts.target.dtype


def _short(text: str) -> str:
    return text.replace(str(PACKAGE / "bundled"), "bundled").replace(str(Path.home()), "~")


def _folder(path: Path) -> str:
    """A folder and whether it can be written."""
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return _short(str(path)) + ("" if os.access(there, os.W_OK) else ", which cannot be written")
