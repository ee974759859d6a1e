"""Commands in processes of their own that need not import anything: forked from one that has, which takes it three
seconds of a processor.

They get signals and have exit codes, streams and terminals as any process has. What is about the start of a command
begins with Python itself instead.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TESTS = Path(__file__).parent
PACELINE = "import sys; from paceline.cli.main import main; sys.exit(main())"


@cache
def _context() -> Any:
    """Of processes that are forked from one in which `forked_imports` was imported."""
    with_tests = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = with_tests
    try:
        context = get_context("forkserver")
        context.set_forkserver_preload(["forked_imports"])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class _Stream:
    """A file descriptor that goes along to a new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(given: Any) -> int:
    return int(given.detach())


def _start(program: str, arguments: list[str], environment: dict[str, str], streams: list[int | None]) -> None:
    """In the new process: what `python -c program arguments` does."""
    for number, stream in enumerate(streams):
        if stream is not None:
            os.dup2(stream, number)
            os.close(stream)
    os.setsid()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115  # till the end
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})


class Forked:
    """A process, with what tests use of `subprocess.Popen`.

    Args:
        arguments: of the program.
        program: Python; by default the command line.
        stdin, stdout, stderr: files or their numbers, `subprocess.PIPE` or `DEVNULL`; None: those of the tests. A
            terminal as standard input is that of the process.
        env: the environment; None: that of the tests.
        text: pipes give text.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        program: str = PACELINE,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        text: bool = False,
    ) -> None:
        self.stdin, source = self._stream(stdin, text=text, into=True)
        self.stdout, output = self._stream(stdout, text=text)
        self.stderr, errors = self._stream(stderr, text=text)
        streams = [source, output, errors]
        given = [None if one is None else _Stream(one if isinstance(one, int) else one.fileno()) for one in streams]
        words, environment = [str(one) for one in arguments], dict(os.environ if env is None else env)
        self._process = _context().Process(target=_start, args=(program, words, environment, given), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid
        for end, stream in ((source, stdin), (output, stdout), (errors, stderr)):
            if stream in (subprocess.PIPE, subprocess.DEVNULL):
                os.close(end)

    @staticmethod
    def _stream(wanted: Any, *, text: bool, into: bool = False) -> tuple[Any, Any]:
        """Our end and theirs."""
        if wanted == subprocess.DEVNULL:
            return None, os.open(os.devnull, os.O_RDWR)
        if wanted != subprocess.PIPE:
            return None, wanted
        ours, theirs = os.pipe()[:: -1 if into else 1]
        return open(ours, ("w" if into else "r") + ("" if text else "b")), theirs

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("paceline", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """All of standard output and of standard error, which is to be short; then the process is to end in time."""
        out, err = (stream and stream.read() for stream in (self.stdout, self.stderr))
        self.wait(timeout)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_module(command: Sequence[str], **more: Any) -> Forked:
    """In place of `subprocess.Popen`, for `python -m MODULE`."""
    *_, flag, module = command
    assert flag == "-m", command
    return Forked([], program=f"import runpy; runpy.run_module({module!r}, run_name='__main__')", **more)


FORKING = SimpleNamespace(**vars(subprocess) | {"Popen": run_module})
"""In place of `subprocess`, where a module of ours is started."""
