"""Processes that do what a client's data may make slow or large, so that it can be ended: threads cannot be."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from paceline.serving.api_errors import ApiError
from paceline.serving.places import OWNER, Places
from paceline.serving.worker import as_line

COUNT: Final = 2
START_SECONDS: Final = 20.0
PATIENCE: Final = 30.0
"""Seconds for an answer, however little of them its process could work: longer than any question may take on a machine
that is not busy.
"""

MAX_LINE: Final = 2**26
"""An answer may have so many bytes."""

MAX_QUEUE: Final = 256
"""So many questions of a key may wait for a process."""

Process = asyncio.subprocess.Process


class Workers:
    """Asks processes (`serving.worker`), which start when they are first needed and are replaced when one is killed."""

    def __init__(self) -> None:
        self._free: list[Process | None] = [None] * COUNT
        self._running: set[Process] = set()
        self._places = Places(COUNT)

    async def ask(self, asked: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Return the answer to a question; None where it takes too much work, or crashes the process.

        Args:
            seconds: of a processor, that it may take.
        Raises:
            ApiError: 429, too many questions wait; 503, the machine is too busy to answer this one.
        """
        if self._places.waiting[OWNER.get()] >= MAX_QUEUE:
            raise ApiError("too many requests are being prepared; try again later", status=429, code="queue_full",
                           headers={"Retry-After": "1"})  # fmt: skip
        await self._places.take()
        process = self._free.pop()
        try:
            if process is None or process.returncode is not None:
                process = None
                process = await self._started()
            return await asyncio.wait_for(_answer(process, asked, seconds), PATIENCE)
        except TimeoutError:
            await self._ended(process)
            process = None
            why = "this machine is too busy to prepare the request; try again later"
            raise ApiError(why, status=503, code="busy", headers={"Retry-After": "5"}) from None
        except (ConnectionError, ValueError):
            await self._ended(process)
            process = None
            return None
        except asyncio.CancelledError:  # with an answer to come that nobody waits for
            if process is not None:
                _kill(process)
            process = None
            raise
        finally:
            self._free.append(process)
            self._places.give()

    async def close(self) -> None:
        """End the processes: those of questions that are still asked, too."""
        await asyncio.gather(*(self._ended(process) for process in list(self._running)))

    async def _started(self) -> Process:
        """Start a process, and wait until it answers."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.serving.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE,
        )
        self._running = {running for running in self._running if running.returncode is None} | {process}
        try:
            await asyncio.wait_for(_answer(process, {}, START_SECONDS), START_SECONDS)
        except BaseException:
            _kill(process)
            raise
        return process

    async def _ended(self, process: Process | None) -> None:
        if process is not None:
            _kill(process)
            self._running.discard(process)
            await process.wait()


def _kill(process: Process) -> None:
    if process.returncode is None:
        process.kill()


async def _answer(process: Process, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Ask a process one question, and return its answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(await asyncio.to_thread(as_line, asked | {"seconds": seconds}))
    await process.stdin.drain()
    line = await process.stdout.readline()
    # an empty line of a process that has died is no JSON
    answer: dict[str, Any] = await asyncio.to_thread(json.loads, line)
    return answer
