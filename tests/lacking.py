"""Runners that lack an ability of another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def without(runner: Any, *names: str) -> Any:
    """A runner with all that another one has but the attributes and methods of these names."""
    shown = [name for name in dir(runner) if not name.startswith("__") and name not in names]
    return SimpleNamespace(**{name: getattr(runner, name) for name in shown})
