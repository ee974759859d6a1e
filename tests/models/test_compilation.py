"""The line that says kernels are being compiled: where they are, once, and not where they come from disk."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from numba import cfunc, types
from numba.core import caching

from paceline.models.cpu import compilation as entry
from paceline.models.cpu import forward
from paceline.models.cpu.compilation import machine_code
from paceline.utils import compiled

SOURCE = "def entry(number):\n    pass\n"
LINE = "compiling the test, which takes no time; where they can be kept on disk, once a machine"


def function_of(path: Path) -> Any:
    """The function of a file, as in a process that has not seen it."""
    spec = importlib.util.spec_from_file_location("entry_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.entry


@pytest.fixture
def path(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a function; what Paceline logs is kept."""
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    caplog.set_level(logging.INFO, "paceline")
    found = tmp_path / "entry.py"
    found.write_text(SOURCE)
    return found


def test_only_compiling_is_announced(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for _ in range(2):
        made = machine_code(function_of(path), "the test", "no time")
        told.append((made.cache_hits, [record.getMessage() for record in caplog.records]))
        caplog.clear()
    assert told == [(0, [LINE]), (1, [])]


@pytest.mark.parametrize("fails", ["ensure_cache_path", "save", "load"])
def test_where_nothing_can_be_kept_it_is_said_once(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def forbidden(*arguments: object) -> None:
        raise PermissionError("read-only")

    locator = caching._CacheLocator  # private: numba names the base of its locators so
    owner = locator if fails == "ensure_cache_path" else caching.IndexDataCacheFile
    monkeypatch.setattr(owner, fails, forbidden)
    made = machine_code(function_of(path), "the test", "no time")
    assert [record.getMessage() for record in caplog.records] == [LINE]
    assert made.ctypes(3) is None  # it runs
    assert not list(path.parent.rglob("*.nbc"))


def test_while_another_process_compiles_this_one_waits_and_then_reads(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second lock on the same file is to this process what another process's is."""
    monkeypatch.setattr(entry, "PATIENCE", 0.05)
    theirs, made = FileLock(path.parent / "__pycache__" / "entry.lock"), []
    theirs.acquire()
    ours = threading.Thread(target=lambda: made.append(machine_code(function_of(path), "the test", "no time")))
    ours.start()
    while not caplog.records:
        assert ours.is_alive()
    assert not made
    compiled_by_them = cfunc(types.void(types.int64), cache=True, error_model="numpy")(function_of(path))
    theirs.release()
    ours.join()
    assert (compiled_by_them.cache_hits, made[0].cache_hits) == (0, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the test, which another process is compiling"
    ]


def test_a_process_that_reads_is_waited_for_in_silence(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PATIENCE", 600.0)  # however long this machine stands still
    machine_code(function_of(path), "the test", "no time")
    caplog.clear()
    theirs = FileLock(path.parent / "__pycache__" / "entry.lock")
    theirs.acquire()
    ours = threading.Thread(target=lambda: machine_code(function_of(path), "the test", "no time"))
    ours.start()
    time.sleep(0.2)
    assert ours.is_alive()
    theirs.release()
    ours.join()
    assert not caplog.records


@pytest.mark.parametrize("reason", [PermissionError("read-only"), NotImplementedError("no locks here")])
def test_where_no_lock_can_be_made_it_is_compiled_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, reason: Exception
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise reason

    monkeypatch.setattr(FileLock, "acquire", forbidden)
    assert machine_code(function_of(path), "the test", "no time").ctypes(3) is None


def test_who_waits_too_long_compiles_itself(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "PATIENCE", 0.01)
    monkeypatch.setattr(entry, "LONGEST_WAIT", 0.01)
    with FileLock(path.parent / "__pycache__" / "entry.lock"):
        assert machine_code(function_of(path), "the test", "no time").cache_hits == 0
    assert LINE in [record.getMessage() for record in caplog.records]


def test_the_kernels_are_made_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(forward, "machine_code", lambda entry, name, duration: names.append(name))
    forward.compiled.__wrapped__()
    assert names[0].startswith("the ")


def test_other_functions_are_announced_from_info_on(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    for _ in range(2):
        compiled(function_of(path))(3)
        told.append([(record.levelno, record.getMessage()) for record in caplog.records])
        caplog.clear()
    assert told == [[(logging.INFO, "compiling entry, at its first use")], []]
