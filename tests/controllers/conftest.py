"""What the tests of controllers share."""

from __future__ import annotations

import pytest

from paceline.controllers.auto import AutoController


@pytest.fixture(autouse=True)
def no_time_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All seconds are the worlds'."""
    monkeypatch.setattr(AutoController, "clock", staticmethod(lambda: 0.0))
