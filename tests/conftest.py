"""Settings of the whole suite: one thread (results of float sums then do not depend on the machine), a fixed seed, no
network.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # else the threads of each process spin, and others wait for a core
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of many processes compiles all that it imports
os.environ["PACELINE_CACHE_DIR"] = tempfile.mkdtemp(prefix="paceline-tests-")

import certifi
import pytest
import torch

from paceline.utils import progress

sys.dont_write_bytecode = False  # else this process rewrites the assertions of all tests at every run
torch.set_num_threads(1)
progress.PATIENCE = 3600.0  # else a busy machine adds lines to what tests look at
gc.disable()  # until all tests are collected, since what is imported stays
gc.set_threshold(20_000, 20, 10)  # else a twentieth of the time is spent on searches for garbage

AUTHORITY = tempfile.NamedTemporaryFile("w", prefix="paceline-tests-", suffix=".pem")  # noqa: SIM115  # till the end
AUTHORITY.writelines(Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")[:2])
AUTHORITY.flush()
os.environ["SSL_CERT_FILE"] = AUTHORITY.name  # every client of HTTP else reads those of all authorities, in 20 ms


@pytest.fixture(autouse=True)
def _settings() -> None:
    """As above for every test, whatever the one before has set."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes down where it was called, for devices unused
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> None:
    """What other modules have imported and made is not searched for garbage again."""
    gc.collect()
    gc.freeze()


FIRST = (
    "contract/test_exactness", "contract/test_pairwise", "drafters/test_contract", "verifiers/", "tree/",
    "training/", "test_bad_input", "engine/test_steering",
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
    items.sort(key=lambda item: next((i for i, part in enumerate(FIRST) if part in item.nodeid), len(FIRST)))
