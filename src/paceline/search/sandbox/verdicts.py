"""Running programs that nobody has read: do they pass tests, and nothing else comes of it.

Each test has two processes, both isolated (`isolation`): one runs the program, the other runs the test and
reaches the program through a socket, by which only plain data comes back (`processes`). A pass means: the test
held, evaluated where no code of the program's ran, of the plain values that the program's functions returned. So
nothing that a program does to its own process can forge a pass: not its builtins, frames, modules, output or exit code,
nor objects that equal everything. What it can do is return the right value for the wrong reason: it sees the arguments
of the calls, and guesses one of two truth values half of the time. The judge reports a pass by a number drawn for this
test, which the program's process is never told.

Where no isolation can be had, nothing is run unless `unsafe_execution` is chosen, which runs the same two processes
with resource limits alone: what a program then does to the machine, and to the verdict, is up to it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from paceline.errors import ConfigError
from paceline.utils import integer, need, number, strings

SYSTEM_FOLDERS: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
MOST_REPORT: Final = 4096
OPEN_FILES: Final = 64
PROBE_SECONDS: Final = 30.0
"""Even a busy machine answers within these."""

PROBED: Final = ("def twice(n):\n    return 2 * n", ("assert twice(2) == 4", "assert twice(2) == 5"))


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """What became of a program's tests.

    Attributes:
        passed: of each test. reasons: why it did not pass, in a line; empty where it did. A reason may hold text of the
            program's.
        seconds: of all its tests, those of other programs beside them.
    """

    passed: tuple[bool, ...]
    reasons: tuple[str, ...]
    seconds: float

    @property
    def share(self) -> float:
        """Of the tests that passed; 1 without any."""
        return sum(self.passed) / len(self.passed) if self.passed else 1.0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Runs programs with tests.

    Attributes:
        seconds: of wall time for one test, the start of the program included; both processes are killed then, with all
            that they started. It is also the limit of CPU time of each process.
        memory_bytes: of addresses, of each process. file_bytes: of a file; /tmp, which is empty at first and in memory,
            holds four times as much. processes: at once, threads included. output_bytes: that a program may return.
        workers: tests that run at the same time.
        unsafe_execution: run without isolation.
    Raises:
        ConfigError: a value outside its range, or a machine on which no isolation can be had.
    """

    seconds: float = 5.0
    memory_bytes: int = 2**29
    file_bytes: int = 2**22
    processes: int = 8
    output_bytes: int = 2**20
    workers: int = 2
    unsafe_execution: bool = False

    def __post_init__(self) -> None:
        number("seconds", self.seconds, 0.0, 3600.0, "be above 0 and at most 3600", open_low=True)
        integer("memory_bytes", self.memory_bytes, 2**26, 2**44)
        integer("file_bytes", self.file_bytes, 0, 2**40)
        integer("processes", self.processes, 1, 4096)
        integer("output_bytes", self.output_bytes, 1024, 2**30)
        integer("workers", self.workers, 1, 256)
        need(isinstance(self.unsafe_execution, bool), "unsafe_execution", "be True or False", self.unsafe_execution)
        need(os.name == "posix", "programs", "be run on Linux, or with unsafe_execution on macOS", sys.platform)
        if not self.unsafe_execution and available_isolation() is None:
            raise ConfigError(
                "this machine permits no sandbox (Linux with user namespaces, or bubblewrap), so that programs are not"
                " run; unsafe_execution (--unsafe-execution) runs them with resource limits alone"
            )

    def judge(self, programs: Sequence[str], tests: Sequence[str]) -> list[ProgramVerdict]:
        """A verdict for each program, all by the same tests. Interrupted, it ends with those that run."""
        tests = strings("tests", tests)
        listed = not isinstance(programs, str) and all(isinstance(program, str) for program in programs)
        need(listed, "programs", "be a list of strings", programs)
        start = time.perf_counter()
        with closing_early(ThreadPoolExecutor(self.workers)) as pool:
            waiting = [[pool.submit(self._why_not, program, test) for test in tests] for program in programs]
            verdicts = []
            for futures in waiting:
                reasons = tuple(future.result() for future in futures)
                verdicts.append(ProgramVerdict(tuple(not why for why in reasons), reasons, time.perf_counter() - start))
        return verdicts

    def _why_not(self, program: str, test: str) -> str:
        """Why a test does not pass; "" where it does."""
        nonce = secrets.token_hex(16)
        asked = json.dumps({"test": test, "nonce": nonce})
        report = _report(self, available_isolation() if not self.unsafe_execution else None, program, asked)
        if report == nonce:
            return ""
        return report.removeprefix("- ") or "the test's process ended without a verdict"


@contextmanager
def closing_early(pool: ThreadPoolExecutor) -> Iterator[ThreadPoolExecutor]:
    """In the end, what has not begun does not begin any more."""
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def run_tests(
    program: str,
    tests: Sequence[str],
    *,
    seconds: float = 5.0,
    memory_bytes: int = 2**29,
    file_bytes: int = 2**22,
    processes: int = 8,
    output_bytes: int = 2**20,
    unsafe_execution: bool = False,
) -> ProgramVerdict:
    """Whether a program of Python passes tests, each with a process of its own in which the program has run first.

    Only the standard library can be imported. In tests, names are built-in ones, else the program's, and modules of the
    standard library where an attribute is taken of them (`math.isclose`). Values that are not plain (None, numbers,
    strings, bytes, lists, tuples, sets, dicts and what derives from them) can be called, indexed, iterated over and
    asked for attributes, not compared. Functions of a test cannot be handed to the program.

    Args:
        program: its source.
        tests: sources of tests, `assert f(1) == 2` or several statements; one passes if it raises nothing.
        seconds, memory_bytes, file_bytes, processes, output_bytes, unsafe_execution: see `Sandbox`.
    Raises:
        ConfigError: as of `Sandbox`.
    """
    box = Sandbox(
        seconds, memory_bytes, file_bytes, processes, output_bytes, unsafe_execution=unsafe_execution
    )  # fmt: skip
    return box.judge([program], tests)[0]


@cache
def available_isolation() -> str | None:
    """What isolation this machine permits, found out once by running a program in it: "unshare" (namespaces of
    Linux), else "bwrap" (bubblewrap, where it is installed and paceline does not run as root); None for none.
    """
    if not sys.platform.startswith("linux"):
        return None
    box = Sandbox(PROBE_SECONDS, unsafe_execution=True)  # which asks for no isolation; the reports below have it
    for kind in ("unshare", "bwrap"):
        reports = []
        for test in PROBED[1]:
            asked = json.dumps({"test": test, "nonce": "passed"})
            with suppress(OSError):  # no such program
                reports.append(_report(box, kind, PROBED[0], asked))
        if reports == ["passed", "- AssertionError: "]:
            return kind
    return None


# ------------------------------------------------------------------------------------------------ processes


def _report(box: Sandbox, kind: str | None, program: str, asked: str) -> str:
    """What the judge of a test reports; "" where it does not."""
    deadline = time.monotonic() + box.seconds
    with ExitStack() as stack:
        folder = None if kind else stack.enter_context(TemporaryDirectory(prefix="paceline-"))
        started = []
        for role, end in zip(("program", "judge"), socket.socketpair(), strict=True):
            with end:
                started.append(_started(box, kind, role, end.fileno(), folder))
            stack.callback(_ended, started[-1])
        runner, judge = started
        assert runner.stdin is not None
        with suppress(BrokenPipeError), runner.stdin:  # where it has died already, the judge will tell
            runner.stdin.write(program.encode(errors="surrogatepass"))
        try:
            output, _ = judge.communicate(asked.encode(), timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"- no verdict within {box.seconds:g} s"
        return output[:MOST_REPORT].decode(errors="replace")


def _started(box: Sandbox, kind: str | None, role: str, file: int, folder: str | None) -> subprocess.Popen[bytes]:
    limits = {
        "output_bytes": box.output_bytes, "isolated": kind is not None, "CPU": int(box.seconds) + 1,
        "AS": box.memory_bytes, "FSIZE": box.file_bytes, "NOFILE": OPEN_FILES, "CORE": 0,
    }  # fmt: skip
    if kind:
        limits["NPROC"] = box.processes + 1  # and the namespace's first; without one it would count all of the user's
    source = Path(__file__).with_name("processes.py").read_text()
    command = [_interpreter(), "-I", "-S", "-X", "utf8", "-c", source, role, str(file), json.dumps(limits)]
    return subprocess.Popen(
        _behind(kind, command, 4 * box.file_bytes), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE if role == "judge" else subprocess.DEVNULL,
        pass_fds=[file], env={}, cwd=folder or "/", start_new_session=True,
    )  # fmt: skip


def _interpreter() -> str:
    return os.path.realpath(sys.executable)


def _behind(kind: str | None, command: list[str], scratch_bytes: int) -> list[str]:
    """The command that runs another isolated."""
    binds = [path for path in SYSTEM_FOLDERS if os.path.lexists(path)]
    if not any(Path(sys.base_prefix).is_relative_to(path) for path in binds):
        binds.append(os.path.realpath(sys.base_prefix))
    scratch = max(scratch_bytes, 4096)
    if kind == "unshare":
        script = str(Path(__file__).with_name("isolation.py"))
        settings = {"binds": binds, "scratch_bytes": scratch, "command": command}
        return [_interpreter(), "-I", "-S", script, json.dumps(settings)]
    if kind == "bwrap":
        shown = [part for path in binds for part in ("--ro-bind", path, path)]
        return [
            *(
                shutil.which("bwrap") or "bwrap",
                "--unshare-all",
                "--unshare-user",
                "--uid",
                "65534",
                "--gid",
                "65534",
                "--die-with-parent",
            ),
            *("--new-session", "--cap-drop", "ALL", "--size", str(scratch), "--tmpfs", "/tmp", *shown),
            *("--dev", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--", *command),
        ]
    return command


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and with it its namespace; without one, its session's group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
