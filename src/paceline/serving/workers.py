"""Processes that do what a client's data may make slow or large, so that it can be ended: threads cannot be."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process that answers questions, one at a time, with the ends of its pipes."""

    process: asyncio.subprocess.Process
    questions: asyncio.StreamWriter
    answers: asyncio.StreamReader

    @classmethod
    async def start(cls) -> _Worker:
        """Start a process, which may not be ready yet."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.serving.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE,
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process was started without the pipes that were asked for")
        return cls(process, process.stdin, process.stdout)

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self.process.returncode is not None

    async def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Ask one question, which may take so many seconds of a processor, and return its answer.

        Raises:
            ConnectionError, ValueError: the process has died.
        """
        self.questions.write(await asyncio.to_thread(as_line, question | {"seconds": seconds}))
        await self.questions.drain()
        line = await self.answers.readline()
        # an empty line of a process that has died is no JSON
        answer: dict[str, Any] = await asyncio.to_thread(json.loads, line)
        return answer

    def kill(self) -> None:
        """End the process, whatever it does."""
        if not self.ended:
            self.process.kill()


class Workers:
    """Asks processes (`serving.worker`), which start when they are first needed and are replaced when one is killed."""

    def __init__(self) -> None:
        self._free: list[_Worker | None] = [None] * COUNT
        self._running: set[_Worker] = set()
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
        worker = self._free.pop()
        try:
            if worker is None or worker.ended:
                worker = None
                worker = await self._started()
            return await asyncio.wait_for(worker.ask(asked, seconds), PATIENCE)
        except TimeoutError:
            await self._end(worker)
            worker = None
            why = "this machine is too busy to prepare the request; try again later"
            raise ApiError(why, status=503, code="busy", headers={"Retry-After": "5"}) from None
        except (ConnectionError, ValueError):
            await self._end(worker)
            worker = None
            return None
        except asyncio.CancelledError:  # with an answer to come that nobody waits for
            if worker is not None:
                worker.kill()
            worker = None
            raise
        finally:
            self._free.append(worker)
            self._places.give()

    async def close(self) -> None:
        """End the processes: those of questions that are still asked, too."""
        await asyncio.gather(*(self._end(worker) for worker in list(self._running)))

    async def _started(self) -> _Worker:
        """Start a process, and wait until it answers."""
        worker = await _Worker.start()
        self._running = {running for running in self._running if not running.ended} | {worker}
        try:
            await asyncio.wait_for(worker.ask({}, START_SECONDS), START_SECONDS)
        except BaseException:
            worker.kill()
            raise
        return worker

    async def _end(self, worker: _Worker | None) -> None:
        if worker is not None:
            worker.kill()
            self._running.discard(worker)
            await worker.process.wait()
