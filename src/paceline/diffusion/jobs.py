"""Outputs in the making on a diffusion language model: what is being written, how far it is final, and what ends it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.diffusion.loop import FinishedCanvas
from paceline.diffusion.methods import ConfiguredMethod
from paceline.engine import CompletionOutput, Request, StopChecker, no_text
from paceline.errors import PacelineError
from paceline.models import Denoiser

logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Writing:
    """A text to be written, and how.

    Attributes:
        text: prompt, parameters and most tokens; of thoughts, and of the answer to them, a request of its own.
        method: temperature included.
        denoiser: the model, maybe with other blocks than its own.
    """

    text: Request
    method: ConfiguredMethod
    denoiser: Denoiser

    @property
    def final_once_written(self) -> bool:
        """Whether what is written stays."""
        return "edit" not in self.method.names


@dataclass(slots=True)
class Job:
    """One output in the making.

    Attributes:
        request: whose output it is.
        index: 0..n-1.
        writing: what is being written: the output, or the thoughts before it.
        outcome: its canvas, kept current by the loop.
        output: what the caller sees of it.
        final: of a stream, what is final of the text.
        thought: of an answer, how its thoughts came about.
        shown, told: of a stream, rounds of the canvas and characters of the thoughts.
        failure: why it ends, where that is not an error of its canvas.
    """

    request: Request
    index: int
    writing: Writing
    outcome: FinishedCanvas
    output: CompletionOutput
    final: FinalPrefix
    thought: FinishedCanvas | None = None
    shown: int = 0
    told: int = 0
    failure: str | None = None

    @property
    def thinks(self) -> bool:
        """Whether an answer is still to be begun."""
        return self.request.params.think is not None and self.thought is None

    def fail(self, why: str) -> None:
        """End with an error, the first of them; the rest of the canvas is not needed."""
        self.failure, self.outcome.enough = self.failure or why, True


class FinalPrefix:
    """What of an output of a stream is final while its canvas still fills: text and tokens that will not change.

    Args:
        begin: makes the checker of the output; text that may begin a stop string is held back.
    """

    __slots__ = ("_begin", "_chars", "_checker", "_tokens")

    def __init__(self, begin: Callable[[], StopChecker]) -> None:
        self._begin, self._chars, self._tokens = begin, 0, 0
        self._checker: StopChecker | None = None

    def grow(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """What is new among the tokens that are final, the ones of earlier calls included."""
        checker = self._checker = self._checker or self._begin()
        new = tuple(tokens[self._tokens :])
        if new:
            checker.push(new)
        self._tokens += len(new)
        before, self._chars = self._chars, max(self._chars, checker.safe_text_length)
        return checker.text[before : self._chars], new

    def rest(self, text: str, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """What is left of the whole output."""
        return text[self._chars :], tuple(tokens[self._tokens :])

    @property
    def text(self) -> str:
        """What has come out."""
        return self._checker.text[: self._chars] if self._checker else ""


@contextmanager
def alone(job: Job, what: str | None = None) -> Iterator[None]:
    """What code of one output raises ends that output.

    Args:
        what: fails where something does; None is its text.
    """
    try:
        yield
    except Exception as error:
        job.fail(no_text(error) if what is None else said(what, error))


def said(what: str, error: Exception) -> str:
    """What a request is told of an error of its own code."""
    logger.debug("the error of an output", exc_info=error)
    return str(error) if isinstance(error, PacelineError) else f"{what} failed ({type(error).__name__}: {error})"
