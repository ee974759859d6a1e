"""Decoding on a thread of its own, for requests that event loops wait for.

A step's chunks go to each event loop in one call, since waking a loop costs more than handing over a chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from threading import Condition, Thread, current_thread
from time import perf_counter
from typing import Final

from paceline.engine.backend import Backend
from paceline.engine.fairness import FairQueue
from paceline.engine.outputs import StreamChunk
from paceline.engine.request import Request
from paceline.utils import described

logger = logging.getLogger("paceline.engine")

Delivery = list[tuple["Mailbox", list[StreamChunk]]]

ASIDE: Final = 0.01
"""Seconds between two steps for what requests need before they begin: a thousand that come at once hold nobody up."""

PATIENCE: Final = 1.0
"""Seconds that closing waits for the step under way, which may be compiling or measuring something."""


class Mailbox:
    """Where a coroutine waits for the chunks of its request; made in its event loop.

    Attributes:
        ended: outputs that have ended for the coroutine. posted: likewise, for the thread that decodes.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ended = self.posted = 0
        self._whole = False
        self.loop = asyncio.get_running_loop()
        self._chunks: deque[StreamChunk] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunks: list[StreamChunk], error: BaseException | None = None) -> None:
        """Chunks have come, or what ends the request without one; called in the event loop."""
        self._chunks.extend(chunks)
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> StreamChunk | None:
        """The next chunk; None behind the last one.

        Raises:
            BaseException: what ended the request before it began.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._whole:
                return None
            self._waiter = self.loop.create_future()
            await self._waiter
        chunk = self._chunks.popleft()
        self.ended += chunk.finish_reason is not None
        self._whole = self.ended == len(chunk.output.outputs)
        return chunk


class DecodingWorker:
    """Decodes requests on a thread, which starts with the first one.

    Args:
        backend: other threads may use it too.
    Attributes:
        faults: steps that raised, each of which ended the requests that had begun.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.faults = backend, 0
        self._wake = Condition()
        self._todo = FairQueue[Callable[[], None]]()
        self._mail: dict[str, Mailbox] = {}
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, mailbox: Mailbox) -> None:
        """Decode a request; its chunks go to its mailbox."""
        self._do(mailbox.request.owner, lambda: self._begin(mailbox))

    def cancel(self, request: Request) -> None:
        """End a request before the next step; unknown and ended ones are ignored."""
        with self._wake:
            if self._closed:
                return
        self._do(request.owner, lambda: self._end(request.id))

    def close(self) -> None:
        """End all requests with what they have, and the thread; a step that takes long is not waited for."""
        with self._wake:
            self._closed, thread = True, self._thread
            self._wake.notify()
        if thread is not None and thread is not current_thread():
            thread.join(PATIENCE)

    def _do(self, owner: str, work: Callable[[], None]) -> None:
        with self._wake:
            if self._closed:
                raise RuntimeError("this AsyncLLM is closed; open a new one")
            self._todo.append(owner, work)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="paceline-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._todo or self._closed or self._mail):
                    self._wake.wait()
                closed = self._closed
            self._work_off(inf if closed else ASIDE)
            if closed:
                self._backend.close()
                self._post(self._collected())
                return
            self._guarded(self._backend.step)
            self._post(self._collected())

    def _work_off(self, seconds: float) -> None:
        """Do what there is to do, of owners in turn, and for longer than this only where there is nothing to decode."""
        end = perf_counter() + seconds
        while self._todo:
            with self._wake:
                work = self._todo.pop(self._todo.owners[0])
            self._guarded(work)
            if perf_counter() > end and self._mail:
                return

    def _guarded(self, work: Callable[[], None]) -> None:
        """Nothing that raises ends the thread: not a `sys.exit()` of a user's function either, since nobody but
        such a function interrupts this thread.
        """
        try:
            work()
        except BaseException as error:
            self.faults += 1
            logger.error("a decoding step failed (%s); its requests have ended", described(error))
            logger.debug("the error of the step", exc_info=error)

    def _post(self, delivery: Delivery) -> None:
        """Hand chunks over, one call for each event loop; a loop that was closed meanwhile wants none."""
        loops: dict[asyncio.AbstractEventLoop, Delivery] = {}
        for mailbox, chunks in delivery:
            loops.setdefault(mailbox.loop, []).append((mailbox, chunks))
        for loop, mine in loops.items():
            _tell(loop, partial(_put, mine))

    def _reject(self, mailbox: Mailbox, error: BaseException) -> None:
        _tell(mailbox.loop, partial(mailbox.put, [], error))

    def _begin(self, mailbox: Mailbox) -> None:
        """Take a request in; one that cannot be decoded is rejected."""
        try:
            self._backend.open(mailbox.request)
        except Exception as error:  # of this request alone
            self._backend.drop(mailbox.request.id)
            self._reject(mailbox, error)
        else:
            self._mail[mailbox.request.id] = mailbox

    def _end(self, request_id: str) -> None:
        """Let go of a request."""
        if self._mail.pop(request_id, None) is not None:
            self._backend.drop(request_id)

    def _collected(self) -> Delivery:
        """What the step has made, whoever made it; requests that have ended are let go."""
        delivery = []
        for request_id, mailbox in list(self._mail.items()):
            try:
                chunks = self._backend.collect(request_id)
            except Exception as error:
                self._end(request_id)
                self._reject(mailbox, error)
                continue
            if chunks:
                delivery.append((mailbox, chunks))
                mailbox.posted += sum(chunk.finish_reason is not None for chunk in chunks)
            if mailbox.posted and mailbox.posted == len(mailbox.request.outputs):
                self._end(request_id)
        return delivery


def _put(delivery: Delivery) -> None:
    for mailbox, chunks in delivery:
        mailbox.put(chunks)


def _tell(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(work)
    except RuntimeError:
        logger.debug("an event loop was closed before its requests ended")
