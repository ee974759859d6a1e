"""Settings of the whole suite: one thread (results of float sums then do not depend on the machine), a fixed seed, no
network.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else the threads of each process spin, and others wait for a core
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of many processes compiles all that it imports
os.environ["PACELINE_CACHE_DIR"] = tempfile.mkdtemp(prefix="paceline-tests-")

import pytest
import torch

sys.dont_write_bytecode = False  # nor does each rewrite the assertions of all files
torch.set_num_threads(1)
gc.disable()  # until all tests are collected, since what is imported stays


@pytest.fixture(autouse=True)
def _settings() -> None:
    """As above for every test, whatever the one before has set."""
    torch.manual_seed(0)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


class Backwards(pytest.Dir):
    """A folder whose files are collected from the last to the first."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        return reversed([*super().collect()])


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Every second process of pytest-xdist collects from the other end: what assertions were rewritten to is kept on
    disk, so that each of two processes rewrites half of the files and reads the others'.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return Backwards.from_parent(parent, path=path) if int(worker.removeprefix("gw")) % 2 else None


FIRST = (
    "contract/test_exactness", "contract/test_pairwise", "drafters/test_contract", "verifiers/", "tree/",
    "training/test_train", "test_bad_input", "engine/test_steering",
)  # fmt: skip
"""The two longest files; the first needs no compiled kernels, the second compiles them, the next need none. Then other
long ones, so that no process is left with one in the end.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """While one process compiles, another has enough to do that needs no kernels, so that it does not wait.

    What was imported is not searched for garbage again.
    """
    gc.freeze()
    gc.enable()
    items.sort(key=place)


def place(item: pytest.Item) -> tuple[int, Path]:
    """Where a test's file stands among the others; the same in every process."""
    return next((i for i, part in enumerate(FIRST) if part in item.nodeid), len(FIRST)), item.path
