"""Ray Data hands requests out to actors that each have an application; else this does the same as `answer_all`.

Ray Data gives an actor that dies a successor, and its requests again to somebody. Every answer is acknowledged when it
comes, as without Ray, by the one process that has the files.

Import it inside `paceline.utils.local_ray`, which sets what Ray reads when it is imported.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any, Final

from ray.data import ActorPoolStrategy, DataContext, from_items
from ray.exceptions import RayError

from paceline.batch.inputs import BatchRequest, Requests
from paceline.batch.results import ResultFile
from paceline.batch.run import Summary
from paceline.batch.sending import BatchAnswer, Sender
from paceline.errors import ConfigError, PacelineError
from paceline.utils import alive

WINDOW: Final = 8192
WINDOW_BYTES: Final = 64 * 2**20
"""Requests, and bytes of them, that Ray has at a time; the actors load their model again for the next."""

Row = dict[str, Any]


class Worker:
    """Answers requests in a process of Ray's, with an application of its own.

    Args:
        make: a client of HTTP, and the application behind it.
        patience: as in `Sender`.
    """

    def __init__(self, make: Callable[[], tuple[Any, Any]], patience: float) -> None:
        self._error, self._stack, self._begun = "", AsyncExitStack(), False
        try:
            self._client, self._application = make()
            self._sender = Sender(self._client, patience=patience)
        except PacelineError as error:
            self._error = str(error)  # told with the first answer: another try would end in the same way

    async def __call__(self, row: Row) -> Row:
        """Answer a request, given as its index and its JSON, with the fields of a `BatchAnswer`."""
        if self._error:
            return {"index": row["index"], "error": self._error, "line": b"", "failure": None, "tokens": 0}
        if not self._begun:
            self._begun = True
            await self._stack.enter_async_context(alive(self._application))
        answer = await self._sender.send(BatchRequest.model_validate_json(row["request"]))
        return {"index": row["index"], "error": "", **asdict(answer)}


class RayRun:
    """Spreads requests over actors.

    Args:
        make: as in `Worker`; it is sent to the actors.
        actors: how many there are.
        threads: of each.
        concurrency: requests on their way to each.
    """

    def __init__(
        self, make: Callable[[], tuple[Any, Any]], *, actors: int, threads: int, concurrency: int, patience: float
    ) -> None:
        self._make, self._threads, self._patience = make, threads, patience
        self._pool = ActorPoolStrategy(
            size=actors, max_tasks_in_flight_per_actor=concurrency, max_concurrent_calls_per_actor=concurrency
        )
        context = DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def answers(self, rows: list[Row]) -> Iterator[Row]:
        """Yield answers to requests, as they come.

        Raises:
            ConfigError: an actor cannot load its model, or Ray gave up.
        """
        answered = from_items(rows, override_num_blocks=len(rows)).map(
            Worker, fn_constructor_args=(self._make, self._patience), compute=self._pool, num_cpus=self._threads
        )
        blocks = iter(answered.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"))
        try:
            for block in blocks:
                for row in block.to_pylist():
                    if row["error"]:
                        raise ConfigError(row["error"])
                    yield row
        except RayError as error:
            why = f"Ray gave up ({str(error).splitlines()[0]})"
            raise ConfigError(f"{why}; the same command goes on where it stopped") from None
        finally:
            del blocks, answered
            gc.collect()  # which ends the actors, where not all answers were taken


def answer_all_on_ray(
    requests: Requests, results: ResultFile, errors: ResultFile, run: RayRun, *, progress: Callable[[Summary], None]
) -> Summary:
    """Answer what `results` lacks; in the end both files are in the order of the requests.

    Args:
        errors: takes the answers that failed.
        progress: called after each that was acknowledged.
    Raises:
        ConfigError: the model cannot be loaded; the file of requests was changed; or an answer cannot be written.
    """
    summary = Summary()
    for window in _windows(requests, [index for index in requests.order() if index not in results]):
        for row in run.answers(window):
            answer = BatchAnswer(row["line"], row["failure"], row["tokens"])
            file = results if answer.failure is None else errors
            file.append([(row["index"], answer.line)])
            summary.add(answer, requests.line(row["index"]))
            progress(summary)
    for file in (results, errors):
        file.sort()
    return summary


def _windows(requests: Requests, indexes: list[int]) -> Iterator[list[Row]]:
    """Yield requests in windows of bounded length, as rows for Ray Data."""
    window, size = list[Row](), 0
    for index in indexes:
        text = requests.read(index).model_dump_json()
        if window and (len(window) == WINDOW or size + len(text) > WINDOW_BYTES):
            yield window
            window, size = [], 0
        window.append({"index": index, "request": text})
        size += len(text)
    if window:
        yield window
