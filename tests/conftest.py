"""Settings of the whole suite: one thread (results of float sums then do not depend on the machine), a fixed seed, no
network.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PACELINE_CACHE_DIR"] = tempfile.mkdtemp(prefix="paceline-tests-")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _settings() -> None:
    """As above for every test, whatever the one before has set."""
    torch.manual_seed(0)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file comes first: it needs no compiled kernels, so that one process compiles them meanwhile and no
    other waits for that.
    """
    items.sort(key=lambda item: "contract/test_exactness" not in item.nodeid)
