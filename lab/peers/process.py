"""A peer's driver as a subprocess: start, JSON lines both ways, time-outs, an end that always comes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, Any

from paceline.errors import PacelineError

TAIL = 400  # characters of standard error in a message
GRACE = 5.0  # seconds to end by itself


class PeerError(PacelineError):
    """A peer is missing, crashed, took too long or answered nonsense."""


class DriverProcess:
    """One running driver, a context manager.

    Args:
        name: for messages.
        command: what is started.
        environment: variables put over this process's own.
    Raises:
        PeerError: the command cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process, closed with it
        variables = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        try:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=variables | dict(environment or {}),
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"peer {name} cannot be started: {command[0]}: {error.strerror or error}") from error
        self._lines: Queue[str | None] = Queue()
        Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True).start()
        self._finish = weakref.finalize(self, _end, self._process, self._errors)

    @property
    def pid(self) -> int:
        """Of the driver's process."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send one request and wait for its answer, `timeout` seconds at most; after a failure the process is ended.

        Raises:
            PeerError: the driver failed, ended, took too long or sent something other than a JSON object.
        """
        if not self._finish.alive:
            raise PeerError(f"peer {self.name} is closed; open it again")
        try:
            stream = self._process.stdin
            assert stream is not None
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            line = self._lines.get(timeout=timeout)
        except (BrokenPipeError, ConnectionResetError):
            line = None
        except Empty:
            raise self._failed(
                f"gave no answer to {request['op']!r} within {timeout:g} s; raise the time-out or request fewer tokens"
            ) from None
        except BaseException:
            self.close()  # an interrupt must not leave a process that works on
            raise
        if line is None:
            raise self._failed("ended unexpectedly" + self._exit_code())
        return self._checked(line)

    def _checked(self, line: str) -> dict[str, Any]:
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise self._failed(f"answered outside its protocol: {line.strip()[:120]!r}")
        if not answer["ok"]:
            raise self._failed(f"failed: {' '.join(str(answer.get('error')).split())[:TAIL]}", tail=False)
        return answer

    def _exit_code(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f" with exit code {self._process.wait(GRACE)}"
        return ""

    def _failed(self, what: str, *, tail: bool = True) -> PeerError:
        last = self._last_words() if tail else ""
        self.close()
        return PeerError(f"peer {self.name} {what}" + (f"; it said: {last}" if last else ""))

    def _last_words(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        size = self._errors.tell()
        self._errors.seek(max(0, size - TAIL))
        return " ".join(self._errors.read().decode("utf-8", "replace").split())

    def close(self) -> None:
        """End the driver and everything it started; may be called again."""
        self._finish()

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pump(stream: IO[str] | None, lines: Queue[str | None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _end(process: subprocess.Popen[str], errors: IO[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()
    try:
        process.wait(0.5)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    _signal(process, signal.SIGKILL if os.name == "posix" else signal.SIGTERM)  # what it started, too
    process.wait()
    errors.close()


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
