"""Processes that do what a client's data may make slow or large, so that it can be ended: threads cannot be."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Final

from paceline.serving.protocol import ApiError

COUNT: Final = 2
START_SECONDS: Final = 20.0
PATIENCE: Final = 30.0
"""Seconds for an answer, however little of them its process could work: longer than any question may take on a machine
that is not busy.
"""

MAX_LINE: Final = 2**26
"""Bytes of an answer."""

MAX_QUEUE: Final = 256
"""Questions that wait for a process."""

Process = asyncio.subprocess.Process


class Workers:
    """Asks processes (`serving.worker`), which start when they are first needed and are replaced when one is killed."""

    def __init__(self) -> None:
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()
        for _ in range(COUNT):
            self._free.put_nowait(None)
        self._waiting = 0

    async def ask(self, asked: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to a question; None where it takes too much work, or crashes the process.

        Args:
            seconds: of a processor, that it may take.
        Raises:
            ApiError: 429, too many questions wait; 503, the machine is too busy to answer this one.
        """
        if self._waiting >= MAX_QUEUE:
            raise ApiError("too many requests are being prepared; try again later", status=429, code="queue_full",
                           headers={"Retry-After": "1"})  # fmt: skip
        self._waiting += 1
        try:
            process = await self._free.get()
        finally:
            self._waiting -= 1
        try:
            if process is None or process.returncode is not None:
                process = None
                process = await _started()
            return await asyncio.wait_for(_answer(process, asked, seconds), PATIENCE)
        except TimeoutError:
            if process is not None:
                await _ended(process)
            process = None
            why = "this machine is too busy to prepare the request; try again later"
            raise ApiError(why, status=503, code="busy", headers={"Retry-After": "5"}) from None
        except (ConnectionError, ValueError):
            if process is not None:
                await _ended(process)
            process = None
            return None
        except asyncio.CancelledError:  # with an answer to come that nobody waits for
            if process is not None and process.returncode is None:
                process.kill()
            process = None
            raise
        finally:
            self._free.put_nowait(process)

    async def close(self) -> None:
        """End the processes that are idle; others end with their questions."""
        while not self._free.empty():
            process = self._free.get_nowait()
            if process is not None:
                await _ended(process)


async def _started() -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "paceline.serving.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=MAX_LINE,
    )
    try:
        await asyncio.wait_for(_answer(process, {}, START_SECONDS), START_SECONDS)
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    return process


async def _answer(process: Process, asked: dict[str, Any], seconds: float) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asked | {"seconds": seconds}).encode() + b"\n")
    await process.stdin.drain()
    line = await process.stdout.readline()
    found: dict[str, Any] = json.loads(line)  # an empty line of a process that has died is no JSON
    return found


async def _ended(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
