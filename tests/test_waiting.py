"""Long waits are logged, and shown to whoever asked for it, while they last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from time import sleep

import pytest

from paceline.utils import parts_of, shown_by, waiting


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


def test_work_in_parts_shows_its_share_where_it_takes_long() -> None:
    shares: list[float] = []
    seen, rest = Event(), Event()

    def move(share: float) -> None:
        shares.append(share)
        if share == (1.0 if rest.is_set() else 0.25):
            seen.set()

    @contextmanager
    def show(what: str) -> Iterator[Callable[[float], None]]:
        assert what == "baking"
        yield move
        shares.append(-1.0)

    with shown_by(show), parts_of(40, "baking", patience=0.0) as done:
        done(10)
        assert seen.wait(20)
        seen.clear()
        rest.set()
        done(20)
        done(10)
        assert seen.wait(20)
    assert {0.25, 1.0} <= {*shares} <= {0.0, 0.25, 0.75, 1.0, -1.0}
    assert shares[-1] == -1.0
    assert shares[:-1] == sorted(shares[:-1])


def test_where_nothing_can_be_shown_work_in_parts_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with parts_of(8, "baking", patience=0.0, every=0.01) as done:
        done(2)
        for _ in range(2000):
            if any(record.getMessage().startswith("baking: 25 % after ") for record in caplog.records):
                break
            sleep(0.01)
        else:
            pytest.fail("nothing was logged")


def test_short_work_is_not_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []

    @contextmanager
    def show(what: str) -> Iterator[None]:
        shown.append(what)
        yield

    with shown_by(show), suppress(ZeroDivisionError), parts_of(2, "baking") as done:
        done(1)
        1 / 0  # noqa: B018 - it fails
    assert not shown
    assert not caplog.records
