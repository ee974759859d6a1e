"""Twenty injected faults of benchmarks/serving_faults.py: each meets no other request, and the server goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

MODULES = ("common", "served", "serving_faults")


@pytest.fixture
def faults() -> Iterator[ModuleType]:
    """The script; it imports its neighbours by plain names, as scripts do."""
    kept = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        import serving_faults

        yield serving_faults
    finally:
        sys.path.remove(folder)
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def test_no_fault_crosses_requests(faults: ModuleType) -> None:
    found, lost = faults.run(argparse.Namespace(count=20, seed=1, clients=4, tokens=12))
    assert (found.wrong, lost) == ([], 0)
    assert found.equal > found.told > 0
    assert sum(found.happened.values()) > 5
