"""Long waits are logged, and shown to whoever asked for it, while they last."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from paceline.utils import shown_by, waiting


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)
    caplog.set_level(logging.WARNING, "paceline")


def test_a_wait_is_logged_then_shown_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []

    @contextmanager
    def show(what: str) -> Iterator[None]:
        events.append(f"{what} after {len(caplog.records)} line")
        try:
            yield
        finally:
            events.append("over")

    with shown_by(show), suppress(ZeroDivisionError), waiting("baking", "an hour"):
        events.append("work")
        1 / 0  # noqa: B018 - it fails
    with waiting("resting", "a day"):
        events.append("work")
    assert events == ["baking after 1 line", "work", "over", "work"]
    assert [record.getMessage() for record in caplog.records] == ["baking, an hour", "resting, a day"]


def test_what_is_not_logged_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []

    @contextmanager
    def show(what: str) -> Iterator[None]:
        shown.append(what)
        yield

    with shown_by(show):
        for level in (logging.INFO, logging.WARNING):
            with waiting(f"level {level}", "a while", level):
                pass
    assert shown == ["level 30"]
