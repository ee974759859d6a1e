"""Batches are answered beside the requests of clients, which go first: a request of a batch begins only while at most
half of the sequences that are decoded together are taken. A batch that the server's end has cut off goes on at the
next start where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.batch import (
    BatchAnswer,
    BatchRequest,
    DamagedLinesError,
    Requests,
    ResultFile,
    Sender,
    Summary,
    answer_all,
)
from paceline.errors import PacelineError
from paceline.serving.api_errors import ApiError
from paceline.serving.batch_store import BatchStore
from paceline.serving.entrance import Entrance

logger = logging.getLogger("paceline.serving")

Json = dict[str, Any]

PATIENCE: Final = 86400.0
"""Seconds for which a request is sent again where the limits of its key are reached."""

LOOK: Final = 0.02
"""Seconds between looks whether there is room for a request."""


class BatchStoppedError(Exception):
    """Raised in a batch that is cancelled, or that the server's end stops."""


class AsOwner:
    """ASGI: what comes is of this owner, as if it had come with his key."""

    def __init__(self, app: ASGIApp, owner: str) -> None:
        self._app, self._owner = app, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "owner": self._owner, "batched": True}, receive, send)


class Room:
    """Lets requests of batches begin while there is room for them, in turn.

    Args:
        running: how many requests run or wait, those of batches that have been let in among them.
        most: sequences that are decoded together.
    """

    def __init__(self, running: Callable[[], int], most: Callable[[], int]) -> None:
        self._running, self.most, self._turn, self._taken = running, most, asyncio.Lock(), 0

    async def take(self, stop: asyncio.Event) -> None:
        """Wait for room, and take it until `give`.

        Raises:
            BatchStoppedError: `stop` is set.
        """
        async with self._turn:
            while not stop.is_set() and max(self._running(), self._taken) >= max(self.most() // 2, 1):
                await asyncio.sleep(LOOK)
            if stop.is_set():
                raise BatchStoppedError
            self._taken += 1

    def give(self) -> None:
        self._taken -= 1


class _PlacedSender(Sender):
    """Sends one request, which has a place in a room but while it waits to be sent again."""

    def __init__(self, http: httpx.AsyncClient, room: Room, stop: asyncio.Event) -> None:
        super().__init__(http, patience=PATIENCE)
        self._room, self._stop, self._placed = room, stop, False

    async def take(self) -> None:
        await self._room.take(self._stop)
        self._placed = True

    def give(self) -> None:
        if self._placed:
            self._placed = False
            self._room.give()

    async def pause(self, seconds: float) -> None:
        self.give()
        await asyncio.sleep(seconds)
        await self.take()


class PoliteSender(Sender):
    """Sends requests of a batch when there is room for them.

    Args:
        stop: set where the batch is to stop.
    """

    def __init__(self, http: httpx.AsyncClient, room: Room, stop: asyncio.Event) -> None:
        super().__init__(http, patience=PATIENCE)
        self._client, self._room, self._stop = http, room, stop

    async def send(self, request: BatchRequest) -> BatchAnswer:
        sender = _PlacedSender(self._client, self._room, self._stop)
        await sender.take()
        sending = asyncio.create_task(sender.send(request))
        sending.add_done_callback(lambda _: sender.give())  # whatever ends this coroutine, and at once
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({sending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise BatchStoppedError
            return sending.result()
        finally:
            for task in (sending, stopped):
                task.cancel()
            await asyncio.gather(sending, stopped, return_exceptions=True)


class BatchRuns:
    """Runs batches in tasks of their own.

    Args:
        app: answers requests; whose they are is in their scope.
        most: requests that a batch may hold.
        refused: told the status of what was not let in.
    """

    def __init__(self, store: BatchStore, app: ASGIApp, room: Room, most: int, refused: Callable[[int], None]) -> None:
        self._store, self._app, self._room, self._most, self._refused = store, app, room, most, refused
        self._stops: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def resume(self) -> None:
        """Go on with all batches that have not ended."""
        for record in self._store.unfinished():
            self.begin(record)

    def begin(self, record: Json) -> None:
        """Begin a batch, or go on with it."""
        name = record["told"]["id"]
        self._stops[name] = asyncio.Event()
        if record["told"]["status"] == "cancelling":
            self._stops[name].set()
        task = asyncio.create_task(self._run(record))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, record: Json) -> bool:
        """Let a batch end with the answers that it has; returns whether it had not ended yet."""
        cancelled = await asyncio.to_thread(self._store.cancel_batch, record)
        if (stop := self._stops.get(record["told"]["id"])) is not None and cancelled:
            stop.set()
        return cancelled

    async def close(self) -> None:
        """Stop all batches where they are."""
        for stop in self._stops.values():
            stop.set()
        await asyncio.gather(*self._tasks)

    async def _run(self, record: Json) -> None:
        name = record["told"]["id"]
        try:
            await self._answer(record, self._stops[name])
        except BatchStoppedError:
            if record["told"]["status"] == "cancelling":
                await self._end(record, "cancelled")
        except DamagedLinesError as error:
            await self._fail(record, _faults(error))
        except (PacelineError, ApiError) as error:
            await self._fail(record, [(None, str(error))])
        except Exception as error:
            logger.error("a batch has failed", exc_info=error)
            await self._fail(record, [(None, "internal error")])
        finally:
            del self._stops[name]

    async def _answer(self, record: Json, stop: asyncio.Event) -> None:
        """Answer what has no answer yet.

        Raises:
            BatchStoppedError: the batch is to stop.
            PacelineError: its file is damaged, or answers cannot be written.
        """
        store, told, name = self._store, record["told"], record["told"]["input_file_id"]
        requests = await asyncio.to_thread(self._read, record)
        try:
            results = ResultFile(store.path(record["output"]), requests)
            failures = ResultFile(store.path(record["failures"]), requests, fresh=True)
            with results, failures:
                before = results.count
                counts = {"total": len(requests), "completed": before, "failed": 0}
                if told["status"] == "validating":
                    begun = {"status": "in_progress", "in_progress_at": int(time.time())}
                    await asyncio.to_thread(store.change_batch, record, **begun, request_counts=counts)
                told["request_counts"] = counts

                def count(summary: Summary) -> None:
                    told["request_counts"] |= {"completed": before + summary.answered, "failed": summary.failed}

                inner = Entrance(AsOwner(self._app, record["owner"]), self._refused)
                transport = httpx.ASGITransport(inner, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
                    sender = PoliteSender(http, self._room, stop)
                    await answer_all(requests, results, failures, sender, concurrency=self._room.most(), progress=count)
        finally:
            requests.close()
        logger.info(
            "batch %s: %d of %d answered, of %s", told["id"], told["request_counts"]["completed"], len(requests), name
        )
        await self._end(record, "completed")

    def _read(self, record: Json) -> Requests:
        """Read the requests of a batch.

        Raises:
            DamagedLinesError: lines that are no requests, or the first that is for another route.
            PacelineError, ApiError: the file cannot be read, or holds too many.
        """
        told = record["told"]
        requests = Requests(self._store.path(told["input_file_id"]))
        try:
            if len(requests) > self._most:
                raise ApiError(f"a batch may hold at most {self._most} requests, got {len(requests)}")
            for index in range(len(requests)):
                if (url := requests.read(index).url) != told["endpoint"]:
                    why = f"is for {url}, the batch for {told['endpoint']}"
                    raise DamagedLinesError(requests.path, {requests.line(index): why})
        except BaseException:
            requests.close()
            raise
        return requests

    async def _end(self, record: Json, status: str, **more: Any) -> None:
        """Give the owner the files of a batch that has ended; what cannot be kept is logged.

        Args:
            more: that is told of it.
        """

        def ended() -> None:
            owner, told = record["owner"], record["told"]
            more["output_file_id"] = self._store.publish(owner, record["output"], f"{told['id']}_output.jsonl")
            more["error_file_id"] = self._store.publish(owner, record["failures"], f"{told['id']}_error.jsonl")
            self._store.change_batch(record, status=status, **more, **{f"{status}_at": int(time.time())})

        try:
            await asyncio.to_thread(ended)
        except ApiError as error:
            logger.error("batch %s has ended, but its record cannot be kept: %s", record["told"]["id"], error)

    async def _fail(self, record: Json, faults: Iterable[tuple[int | None, str]]) -> None:
        """Tell why a batch has failed, without the server's paths.

        Args:
            faults: the line at fault, where it is one, and what is wrong.
        """
        data = [
            {"code": "batch_failed", "line": line, "message": self._without_paths(record, why), "param": None}
            for line, why in faults
        ]
        await self._end(record, "failed", errors={"object": "list", "data": data})

    def _without_paths(self, record: Json, why: str) -> str:
        for name in (record["told"]["input_file_id"], record["output"], record["failures"]):
            why = why.replace(repr(str(self._store.path(name))), "the file")
        return why


def _faults(error: DamagedLinesError) -> Iterator[tuple[int | None, str]]:
    """Yield each line at fault that is told of, with what is wrong with it; last, how many more there are."""
    for line, why in error.faults.items():
        yield line, f"line {line} {why}"
    if error.rest:
        yield None, error.rest
