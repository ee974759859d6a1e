"""The line that says kernels are being compiled: where they are, and not where they come from disk."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
from numba import cfunc, types

from paceline.models.kernels import forward

SOURCE = "def entry(number):\n    pass\n"


def compiled(path: Path, **options: Any) -> Any:
    """The function of a file, as in a process that has not seen it."""
    spec = importlib.util.spec_from_file_location("entry_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return cfunc(types.void(types.int64), pipeline_class=forward.Announced, **options)(module.entry)


def test_only_compiling_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    path, told = tmp_path / "entry.py", []
    path.write_text(SOURCE)
    for cache in (True, True, False):
        with caplog.at_level(logging.WARNING, "paceline"):
            made = compiled(path, cache=cache)
        told.append((made.cache_hits, [record.getMessage()[:29] for record in caplog.records]))
        caplog.clear()
    line = ["compiling the CPU kernels, wh"]
    assert told == [(0, line), (1, []), (0, line)]


def test_the_pass_is_compiled_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(forward, "cfunc", lambda *types, **options: given.append(options) or (lambda entry: entry))
    forward.compiled.__wrapped__()
    assert [(one["pipeline_class"], one["cache"]) for one in given] == [(forward.Announced, True)]
