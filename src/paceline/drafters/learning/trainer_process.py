"""The process that trains: one thread, the lowest priority, paused where it would take a core from requests."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from threading import Lock
from typing import Any, BinaryIO, Final, cast

from torch import Tensor

from paceline.drafters.learning.messages import NO_TENSORS, receive, send
from paceline.errors import ConfigError

MODULE: Final = "paceline.training.online"
LOWEST: Final = 19
"""Priority: it gets what others leave."""

ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class TrainerProcess:
    """Starts the process and opens what it is to train.

    Args:
        opening: header and tensors of the first message (`paceline.training.online`).
    Raises:
        ConfigError: it cannot be trained; what is in the way.
    """

    def __init__(self, opening: Mapping[str, Any], tensors: Mapping[str, Tensor] = NO_TENSORS) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, env=os.environ | dict.fromkeys(ONE_THREAD, "1"),
        )  # fmt: skip
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST)
        self._writing, self._wanted, self._told = Lock(), False, False
        try:
            answer = self.ask(opening, tensors)
        except (OSError, EOFError):
            answer = {"error": f"its trainer has ended ({self.ending()})"}
        if "error" in answer:
            self.close()
            raise ConfigError(f"learn must be left out: {answer['error']}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor] = NO_TENSORS) -> dict[str, Any]:
        """Send a job and wait for its result.

        Raises:
            OSError, EOFError: the process has ended.
        """
        with self._writing:
            send(cast(BinaryIO, self._process.stdin), header, tensors)
        self._settle()
        return receive(cast(BinaryIO, self._process.stdout))[0]

    def pause(self, paused: bool) -> None:
        """Let the process wait between two of its steps, or go on; never waits itself."""
        self._wanted = paused
        self._settle()

    def _settle(self) -> None:
        """Say what is wanted, unless somebody writes, who then does so."""
        pipe = cast(BinaryIO, self._process.stdin)
        while self._wanted is not self._told and self._writing.acquire(blocking=False):
            try:
                if not _has_room(pipe):
                    return
                self._told = self._wanted
                send(pipe, {"paused": self._told})
            except (OSError, ValueError):  # the process has ended, of which `ask` tells
                return
            finally:
                self._writing.release()

    def ending(self) -> str:
        """How the process has ended."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it does not answer"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process; never waits for what it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                cast(BinaryIO, pipe).close()
            except OSError:  # what was not written any more
                continue


def _has_room(pipe: BinaryIO) -> bool:
    """Whether a short message can be written without waiting for a process that has stopped reading."""
    return os.name != "posix" or bool(select.select([], [pipe], [], 0)[1])
