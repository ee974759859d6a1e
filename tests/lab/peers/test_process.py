"""The wire to a driver: answers, failures in one line, processes that always end."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from lab.peers import DriverProcess, PeerError

ECHO = "import sys, json\nfor line in sys.stdin: print(json.dumps({'ok': True, 'got': json.loads(line)}), flush=True)"


def start(code: str) -> DriverProcess:
    return DriverProcess("fake", [sys.executable, "-c", code])


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie would still answer)."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_requests_and_answers_keep_their_order() -> None:
    with start(ECHO) as driver:
        for i in range(3):
            assert driver.ask({"op": "x", "i": i}, 20)["got"] == {"op": "x", "i": i}
        pid = driver.pid
        os.kill(pid, 0)  # alive
    assert gone(pid)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; print('out of luck', file=sys.stderr); sys.exit(7)", "exit code 7; it said: out of luck"),
        ("import time; input(); time.sleep(60)", "no answer to 'open' within 0.5 s"),
        ("input(); print('hello')", "answered outside its protocol: 'hello'"),
        ("input(); print('[1]')", "answered outside its protocol"),
        ('input(); print(\'{"ok": false, "error": "no\\\\nroom"}\')', "failed: no room"),
    ],
)
def test_every_failure_is_one_line_and_ends_the_process(code: str, message: str) -> None:
    driver = start(code)
    with pytest.raises(PeerError, match="peer fake") as caught:
        driver.ask({"op": "open"}, 0.5 if "sleep" in code else 20)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert gone(driver.pid)
    with pytest.raises(PeerError, match="is closed"):
        driver.ask({"op": "open"}, 1)


def test_what_a_driver_started_ends_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    child = (
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'w').write(str(p.pid))\n"
    )
    with start(child + ECHO) as driver:
        driver.ask({"op": "x"}, 20)
    assert gone(int(note.read_text()))


def test_a_command_that_is_missing_is_named() -> None:
    with pytest.raises(PeerError, match="cannot be started: /no/such/python: No such file"):
        DriverProcess("fake", ["/no/such/python"])
