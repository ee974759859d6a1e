"""Speculative retrieval: what an index will find is guessed from a local cache, and several guesses are checked at
once.

The plain loop asks the index in every step and goes on with what it finds. Here a round is

1. some steps (the stride) with what the local cache finds, which ranks its entries as the index ranks all;
2. one search of the index for the queries of these steps together;
3. up to the first wrong guess all stands; there the text is taken back, and goes on with what was found.

All that is found, and what lies beside it, joins the cache. So the text is the plain loop's, token by token, whatever
is guessed; only verified text is told. With `asynchronous` a further step is made while the index is asked, in a thread
of its own. Source: RaLMSpec, Accelerating Retrieval-Augmented Language Model Serving with Speculation
(arXiv:2401.14021).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from paceline.errors import NumericsError
from paceline.retrieval import Hits, Index, LocalCache, StrideScheduler, opened
from paceline.search.base import Search, Steps, mean_logprob
from paceline.search.branch import Branch, Found
from paceline.search.results import RetrievalReport
from paceline.utils import integer, need, number

if TYPE_CHECKING:
    from pathlib import Path

OS3: Final = "os3"
LONGEST_STRIDE: Final = 64


class Ends(Protocol):
    """A text, which may have ended."""

    @property
    def ended(self) -> bool: ...


T = TypeVar("T", bound=Ends)


@dataclass(slots=True)
class Guess(Generic[T]):
    """A step with what the local cache has found.

    Attributes:
        before, after: the text. query: that the index is asked with; None where the step failed before there was one.
        error: why the model or a rule gave no distribution in it; it is raised where the step turns out to be right.
    """

    before: T
    after: T
    query: Any = None
    error: NumericsError | None = None


class Retrieving(Search, Generic[T]):
    """A text that is written with what an index finds.

    Args:
        index: folder of an index, or the index itself.
        speculate: guess what it finds; False is the plain loop.
        stride: guesses of a round, or "os3", which chooses the number that brings the most per second.
        asynchronous: make a further guess while the index is asked.
        prefetch: entries that a search brings into the cache.
        most_chance: most that "os3" takes the chance of a right guess for, in 0..1 without 1.
    """

    one_text = keeps_beginnings = needs_code = True
    retrieval: RetrievalReport

    def __init__(
        self, index: Any, *, speculate: bool, stride: int | str, asynchronous: bool, prefetch: int, most_chance: float
    ) -> None:
        super().__init__()
        need(index is not None, "index", "be the folder of an index (`paceline retrieval build`)", index)
        for name, value in (("speculate", speculate), ("asynchronous", asynchronous)):
            need(isinstance(value, bool), name, "be True or False", value)
        if stride != OS3:
            need(not isinstance(stride, str), "stride", f"be a number of steps or {OS3!r}", stride)
            integer("stride", stride, 1, LONGEST_STRIDE)
        integer("prefetch", prefetch, 1, 4096)
        number("most_chance", most_chance, 0.0, 0.999, "be in 0..0.999")
        self.most_chance = most_chance
        self.given: Index[Any] | str | Path = index
        self.speculates, self.fixed, self.asynchronous, self.prefetch = speculate, stride, asynchronous, prefetch
        self.retrieval = RetrievalReport()
        self._pool: ThreadPoolExecutor | None = None

    def prepare(self) -> None:
        self.index: Index[Any] = opened(self.given)
        self.cache: LocalCache[Any] = self.index.cache()
        self.scheduler = StrideScheduler(asynchronous=self.asynchronous, most_chance=self.most_chance)

    @abstractmethod
    def beginning(self, root: Branch) -> Steps[T]:
        """The text before its first token."""

    @abstractmethod
    def guess(self, text: T) -> Steps[Guess[T]]:
        """A step with what the cache finds; one that fails has the error in it."""

    @abstractmethod
    def agrees(self, guess: Guess[T], found: Hits) -> bool:
        """Whether the step with what the index has found is the one that was made."""

    @abstractmethod
    def corrected(self, guess: Guess[T], found: Hits) -> Steps[T]:
        """The text with that step."""

    @abstractmethod
    def plain_step(self, text: T) -> Steps[T]:
        """A step of the plain loop."""

    @abstractmethod
    def branch_of(self, text: T) -> Branch:
        """What of a text is told."""

    def close(self, text: T) -> None:
        """Note of a text that has ended what belongs into the report."""

    @abstractmethod
    def keep(self, text: T, trail: Sequence[Guess[T]]) -> None:
        """Keep the caches of what may be gone back to: a verified text, and the guesses behind it."""

    @abstractmethod
    def neighbours(self, ids: Iterable[int]) -> Iterable[int]:
        """Entries that join the cache with those that were found."""

    def steps(self, root: Branch) -> Steps[None]:
        try:
            text = yield from self.beginning(root)
            while not text.ended:
                self.alive = [self.branch_of(text)]
                if self.speculates:
                    text = yield from self._rounds(text)
                else:
                    self.keep(text, ())
                    text = yield from self.plain_step(text)
            self.close(text)
            branch = self.branch_of(text)
            self.alive, self.kept, self.found = [], [], [Found(branch, mean_logprob(branch))]
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _rounds(self, text: T) -> Steps[T]:
        """Rounds until a guess is wrong, or the text has ended; the text then, verified."""
        trail: list[Guess[T]] = []
        while not text.ended:
            trail = yield from self._speculated(text, trail)
            found, right, ahead = yield from self._verified(text, trail)
            if right < len(found):
                wrong = trail[right]
                self._take_back(wrong, trail[-1] if ahead is None else ahead, len(trail) - right + (ahead is not None))
                self.alive = [self.branch_of(wrong.before)]
                return (yield from self.corrected(wrong, found[right]))
            if trail[-1].error is not None:
                raise trail[-1].error
            text, trail = trail[-1].after, [] if ahead is None else [ahead]
            self.alive = [self.branch_of(text)]
        return text

    def _speculated(self, text: T, trail: list[Guess[T]]) -> Steps[list[Guess[T]]]:
        """Guesses behind a text, as many as the stride says; those that are there count."""
        stride = self.scheduler.stride() if self.fixed == OS3 else int(self.fixed)
        self.retrieval.strides.append(stride)
        while not (trail and (trail[-1].error or trail[-1].after.ended)) and len(trail) < stride:
            self.keep(text, trail)
            trail.append((yield from self._timed_guess(trail[-1].after if trail else text)))
        return trail

    def _timed_guess(self, text: T) -> Steps[Guess[T]]:
        begin = perf_counter()
        guess = yield from self.guess(text)
        self.scheduler.observe_step(perf_counter() - begin)
        self.retrieval.speculated += 1
        return guess

    def _verified(self, text: T, trail: Sequence[Guess[T]]) -> Steps[tuple[list[Hits], int, Guess[T] | None]]:
        """What the index finds for the guesses, how many are right, and the one that was made meanwhile."""
        queries = [guess.query for guess in trail if guess.query is not None]
        if not queries:
            return [], 0, None
        ahead: Guess[T] | None = None
        if self.asynchronous and trail[-1].error is None and not trail[-1].after.ended:
            self._pool = self._pool or ThreadPoolExecutor(1, "paceline-retrieval")
            future = self._pool.submit(self._timed_search, queries)
            self.keep(text, trail)
            ahead = yield from self._timed_guess(trail[-1].after)
            waiting = perf_counter()
            found, seconds = self.aside(future.result)
            self.retrieval.seconds += perf_counter() - waiting
        else:
            found, seconds = self.aside(lambda: self._timed_search(queries))
            self.retrieval.seconds += seconds
        self._note(found)
        right = next((i for i, hits in enumerate(found) if not self.agrees(trail[i], hits)), len(found))
        self.scheduler.observe(right, len(found), seconds)
        return found, right, ahead

    def search(self, query: Any) -> Hits:
        """What the index finds for one query, which joins the cache where that is in use."""
        (found,), seconds = self.aside(lambda: self._timed_search([query]))
        self.retrieval.seconds += seconds
        self._note([found])
        return found

    def _timed_search(self, queries: Sequence[Any]) -> tuple[list[Hits], float]:
        begin = perf_counter()
        found = self.index.search(queries, self.prefetch if self.speculates else self.wanted)
        return found, perf_counter() - begin

    @property
    def wanted(self) -> int:
        """Entries that a step needs."""
        return 1

    def _note(self, found: Sequence[Hits]) -> None:
        self.retrieval.searches += 1
        self.retrieval.queries += len(found)
        if self.speculates:
            for hits in found:
                self.cache.add(self.neighbours(hits.ids))

    def _take_back(self, wrong: Guess[T], last: Guess[T], count: int) -> None:
        """Count what is lost: so many guesses, from a wrong one to the last."""
        self.retrieval.taken_back += count
        lost = self.branch_of(last.after).length - self.branch_of(wrong.before).length
        self.retrieval.tokens_lost += lost
