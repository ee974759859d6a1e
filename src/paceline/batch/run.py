"""All requests that have no answer yet are sent, some at a time, and each answer is acknowledged as it comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from paceline.batch.inputs import Requests
from paceline.batch.results import ResultFile
from paceline.batch.sending import BatchAnswer, Sender


@dataclass(slots=True)
class Summary:
    """Counts what a run has done so far.

    Attributes:
        failures: in words -> how often.
        first: in words -> the first line of the file that failed so.
    """

    answered: int = 0
    failed: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)

    def add(self, answer: BatchAnswer, line: int) -> None:
        """Count an answer."""
        self.tokens += answer.tokens
        if answer.failure is None:
            self.answered += 1
        else:
            self.failed += 1
            self.failures[answer.failure] += 1
            self.first[answer.failure] = min(line, self.first.get(answer.failure, line))


async def answer_all(
    requests: Requests,
    results: ResultFile,
    errors: ResultFile,
    sender: Sender,
    *,
    concurrency: int,
    progress: Callable[[Summary], None],
) -> Summary:
    """Answer what `results` lacks; in the end both files are in the order of the requests.

    Args:
        errors: takes the answers that failed.
        concurrency: requests on their way at a time.
        progress: called after each that were acknowledged.
    Raises:
        ConfigError: the server is away, or lets us not in; the file of requests was changed; or an answer cannot be
            written.
    """
    summary = Summary()
    left = (index for index in requests.order() if index not in results)
    running: dict[asyncio.Task[BatchAnswer], int] = {}
    try:
        while True:
            for index in islice(left, concurrency - len(running)):
                running[asyncio.create_task(sender.send(requests.read(index)))] = index
            if not running:
                break
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            answers = [(running[task], task.result()) for task in ended]
            for task in ended:
                del running[task]
            await asyncio.to_thread(_append, answers, results, errors)
            for index, answer in answers:
                summary.add(answer, requests.line(index))
            progress(summary)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for file in (results, errors):
        await asyncio.to_thread(file.sort)
    return summary


def _append(answers: Sequence[tuple[int, BatchAnswer]], results: ResultFile, errors: ResultFile) -> None:
    """Write answers, given with the indexes of their requests: those that failed to `errors`, others to `results`."""
    for file, failed in ((results, False), (errors, True)):
        lines = [(index, answer.line) for index, answer in answers if (answer.failure is not None) == failed]
        if lines:
            file.append(lines)
