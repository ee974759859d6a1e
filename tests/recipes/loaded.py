"""A recipe's modules in a test: they import each other by plain names, as scripts do, and are gone afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

ROOT = Path(__file__).parents[2] / "recipes"


def ours() -> dict[str, ModuleType]:
    """Modules that come from recipes."""
    return {name: module for name, module in sys.modules.items() if str(ROOT) in str(getattr(module, "__file__", None))}


@contextmanager
def loaded(*names: str, recipe: str = "bundled_diffusion") -> Iterator[SimpleNamespace]:
    """Modules of a recipe by name."""
    kept = {name: sys.modules.pop(name) for name in ours()}
    path, threads = list(sys.path), torch.get_num_threads()
    sys.path.insert(0, str(ROOT / recipe))
    try:
        yield SimpleNamespace(**{name: __import__(name) for name in names})
    finally:
        sys.path[:] = path
        torch.set_num_threads(threads)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(kept)
