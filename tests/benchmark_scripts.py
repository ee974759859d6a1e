"""Scripts of `benchmarks/` as modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


@contextmanager
def imported(*names: str) -> Iterator[list[ModuleType]]:
    """The scripts, anew; they import their neighbours by plain names, which mean them in this block alone."""
    neighbours = {path.stem for path in FOLDER.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in neighbours & sys.modules.keys()}
    sys.path.insert(0, str(FOLDER))
    try:
        yield [import_module(name) for name in names]
    finally:
        sys.path.remove(str(FOLDER))
        for name in neighbours & sys.modules.keys():
            del sys.modules[name]
        sys.modules.update(kept)
