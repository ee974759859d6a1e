"""Many callers on one engine's searches: one pass over all branches that they ask for, in turns with other requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from threading import get_ident
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Final

from paceline.config import ALL_DRAFTS, DraftChoice, SamplingParams
from paceline.engine import (
    BackendInfo,
    CompletionOutput,
    EngineDriver,
    FairQueue,
    Gauges,
    OpenRequests,
    Request,
    StreamChunk,
    Turns,
    taken,
    tell,
)
from paceline.errors import CapabilityError, PacelineError
from paceline.models import Inputs
from paceline.registry import ABILITIES
from paceline.search.forest import Forest
from paceline.search.running import RunningSearch, SearchRequest
from paceline.utils import described, need

if TYPE_CHECKING:
    from paceline.drafters import Models
    from paceline.utils import Advance

PAUSE: Final = 1e-3
"""Seconds between two looks of a thread while another one is in the middle of a step."""


class SearchDriver:
    """The backend of requests with a search: those of all threads share their passes, as many at once as the engine
    decodes requests, and as have room for their prompts. Owners take turns to begin.

    A turn reads a piece of the prompts and makes one pass, so that requests without a search go on beside.

    Args:
        driver: of the engine whose model, tokenizer and end tokens count. turns: of the model, taken for each pass.
        models: opens models beside the engine's.
    """

    can_draft: Final = False

    def __init__(self, driver: EngineDriver, turns: Turns, models: Models) -> None:
        self._driver, self._turns, self._models = driver, turns, models
        self._waiting = FairQueue[SearchRequest]()
        self._reading: list[RunningSearch] = []  # their prompts
        self._running: list[RunningSearch] = []
        self._inboxes: dict[str, deque[StreamChunk]] = {}
        self._stepper: int | None = None  # the thread that is in the middle of a step
        self._later: list[Callable[[], None]] = []  # what came in the middle of a step
        self._whole = True  # the last step came to its end

    @cached_property
    def _forest(self) -> Forest:
        engine = self._driver.engine
        config = engine.scheduler.config
        return Forest(engine.parts.runner, config.max_num_batched_tokens, share_prompts=config.enable_prefix_caching)

    @property
    def info(self) -> BackendInfo:
        """See `Backend.info`."""
        return self._driver.info

    def context_for(self, inputs: Inputs) -> int:
        """See `Backend.context_for`."""
        return self._driver.context_for(inputs)

    def gauges(self) -> Gauges:
        """See `Backend.gauges`."""
        going = len(self._reading) + len(self._running)
        return Gauges(going, len(self._waiting), 0, self._driver.engine.scheduler.config.max_num_seqs)

    def requests(self) -> OpenRequests:
        """See `Backend.requests`."""
        return OpenRequests([run.request for run in [*self._reading, *self._running]], list(self._waiting))

    def check_params(self, params: SamplingParams, drafts: DraftChoice) -> None:
        """See `Backend.check_params`; what a search cannot honour `SearchConfig.check` rejects."""
        self._driver.check_params(params, drafts)

    def check(self, request: Request) -> None:
        """Reject a request that cannot be searched for, and open what its search needs beside the model.

        Raises:
            ConfigError, PromptError: a request that cannot be decoded.
            PacelineError: a search that this model, or one beside it, is not fit for.
        """
        request, engine = _searched(request), self._driver.engine
        engine.check(request)
        need(not request.prediction, "prediction", "be left out with search, which drafts nothing", request.prediction)
        need(request.drafts == ALL_DRAFTS, "speculative_config", "be left out of a prompt with search", request.drafts)
        runner, search = engine.parts.runner, request.search
        if not runner.capabilities.truncate:
            raise CapabilityError(
                f"search needs a model that {ABILITIES['truncate']}; {runner.info.name} is not one as it runs here; "
                "decode without search"
            )
        search.tokenizer, search.runner, search.models = engine.scheduler.tokenizer, runner, self._models
        search.turns = self._turns
        search.prepare()

    def run(self, requests: Sequence[Request], advance: Advance | None = None) -> None:
        """Search for every request's outputs, which it then has; all are taken back if anything is raised.

        Args:
            advance: told after every step how many are done and how many tokens there are.
        Raises:
            PacelineError: as `check`, before anything runs.
        """
        if self._stepper == get_ident():  # a function of a search searches itself
            self._another().run(requests, advance)
            return
        for request in requests:
            request.streamed = False
            self.check(request)
        try:
            for request in requests:
                self._queue(request)
            while self._advance(requests):
                if advance is not None:
                    tell(advance, requests)
            if advance is not None:
                tell(advance, requests)
        finally:
            for request in requests:
                self.drop(request.id)

    def stream(self, request: Request) -> Generator[StreamChunk]:
        """See `Backend.stream`."""
        if self._stepper == get_ident():
            yield from self._another().stream(request)
            return
        try:
            self.open(request)
            inbox = self._inboxes[request.id]
            while self._advance([request], inbox):
                while inbox:
                    yield inbox.popleft()
        finally:
            self.drop(request.id)

    def _another(self) -> SearchDriver:
        return SearchDriver(self._driver, self._turns, self._models)

    def open(self, request: Request) -> None:
        """See `Backend.open`."""
        if request.rules is None:
            self.check(request)
        self._inboxes[request.id] = deque()
        self._queue(request)

    def _queue(self, request: Request) -> None:
        request.metrics.num_prompt_tokens = len(request.prompt_ids)
        request.metrics.arrival_time = request.metrics.arrival_time or perf_counter()
        with self._turns.turn():
            self._waiting.append(request.owner, _searched(request), request.priority)

    def step(self) -> None:
        """See `Backend.step`."""
        with self._turns.turn():
            worked = self._step()
        if not worked:
            self._wait()

    def collect(self, request_id: str) -> list[StreamChunk]:
        """See `Backend.collect`."""
        return taken(self._inboxes[request_id])

    def drop(self, request_id: str) -> None:
        """See `Backend.drop`."""
        self._inboxes.pop(request_id, None)
        self._turns.soon(partial(self._abort, request_id))

    def reset_prefix_cache(self) -> bool:
        """See `Backend.reset_prefix_cache`."""
        return self._driver.reset_prefix_cache()

    def close(self) -> None:
        """End all requests, in a turn; streams of theirs end with what they have."""
        if self._stepper is not None:
            self._later.append(self.close)
            return
        for request in list(self._waiting):
            self._waiting.remove(request.owner, request)
            request.outputs[:] = [CompletionOutput(0, finish_reason="abort")]
            self._deliver([StreamChunk(0, (), (), "abort", request.result())])
        going = [*self._reading, *self._running]
        for run in going:
            run.abort()
        self._let_go(going)

    def _advance(self, requests: Sequence[Request], inbox: Sequence[StreamChunk] = ()) -> bool:
        """One step, unless another thread's has brought what was awaited; False if nothing is left to wait for."""
        with self._turns.turn():
            if inbox:
                return True
            if all(request.finished for request in requests):
                return False
            worked = self._step(requests)
        if not worked:
            self._wait()
        return True

    def _wait(self) -> None:
        """Where others hold the memory that searches wait for, make a step for those; else let time pass."""
        if self._waiting and self._stepper is None:
            self._driver.step()
        else:
            sleep(PAUSE)

    def _step(self, mine: Sequence[Request] = ()) -> bool:
        """In a turn, read a piece of the prompts and make one pass for all; False where there was nothing to do.

        Whatever else than an error of a search cuts it short ends all that have begun.

        Args:
            mine: requests of who makes the step; where he interrupts it, they are aborted.
        """
        if self._stepper is not None:
            return False
        if not self._whole:  # even what follows an error was cut short
            self._give_up(InterruptedError("an exception"))
        self._whole, self._stepper = False, get_ident()
        try:
            self._admit()
            worked = bool(self._reading or self._running)
            self._read()
            self._pass()
        except BaseException as error:
            self._give_up(error, () if isinstance(error, Exception) else [request.id for request in mine])
            raise
        finally:
            self._stepper = None
            while self._later:
                self._later.pop(0)()
        self._whole = True
        return worked

    def _give_up(self, error: BaseException, interrupted: Sequence[str] = ()) -> None:
        going = [*self._reading, *self._running]
        for run in [run for run in going if not run.ended]:
            if run.request.id in interrupted:
                run.abort()
            else:
                run.fail(f"a step was cut short by {described(error)}")
        self._let_go(going)
        self._forest.close()
        self._whole = True

    def _admit(self) -> None:
        """Begin those whose prompts fit. Where none goes on, they wait as long as other requests hold the memory."""
        forest, scheduler = self._forest, self._driver.engine.scheduler
        going = [*self._reading, *self._running]
        free, room = scheduler.config.max_num_seqs - len(going), forest.room()
        for run in self._reading:
            room = None if room is None else room - forest.blocks(run.root.size)
        while self._waiting and free > 0:
            owner = self._waiting.owners[0]
            if room is not None:
                room -= forest.blocks(len(self._waiting.first(owner).prompt_ids))
                if room < 0 and (going or scheduler.running):
                    return
            self._begin(self._waiting.pop(owner))
            going, free = [*self._reading, *self._running], free - 1

    def _begin(self, request: SearchRequest) -> None:
        try:
            self._reading.append(RunningSearch(self._driver.engine, request))
        except Exception as error:  # of the tokenizer, which looks for stop strings
            why = f"the search cannot begin ({described(error)})"
            request.outputs[:] = [CompletionOutput(0, finish_reason="error", error=why)]
            self._deliver([StreamChunk(0, (), (), "error", request.result())])

    def _read(self) -> None:
        """Read a piece of the prompts; those that were read to their end begin to search."""
        if not self._reading:
            return
        try:
            left = self._forest.read([run.root for run in self._reading])
        except PacelineError as error:
            longest = max(self._reading, key=lambda run: run.root.size)
            longest.fail(str(error))
            self._let_go([longest])
            return
        ready = [run for run in self._reading if run.root not in left]
        for run in ready:
            self._reading.remove(run)
            self._running.append(run)
            run.begin()
        self._settle()

    def _pass(self) -> None:
        """One pass for all; where memory is short, the searches that ask for most end with an error."""
        going, roots = list(self._running), [run.root for run in self._reading]
        while going:
            try:
                kept = [branch for run in going for branch in run.search.kept]
                taps = sorted({layer for run in going for layer in run.search.taps})
                asked = [branch for run in going for branch in run.asked]
                rows, errors = self._forest.rows(asked, [*kept, *roots], taps)
                break
            except PacelineError as error:
                widest = max(going, key=lambda run: len(run.asked))
                widest.fail(str(error))
                self._forest.close(widest.request.id)
                going.remove(widest)
        start = 0
        for run in going:
            at = slice(start, start + len(run.asked))
            start = at.stop
            run.send(rows.at(at), errors)
        self._settle()

    def _settle(self) -> None:
        """Deliver what searches have told, and let go of those that have ended."""
        for run in self._running:
            self._deliver(run.chunks)
        self._let_go([run for run in self._running if run.ended])

    def _let_go(self, ended: Sequence[RunningSearch]) -> None:
        """Free the caches of searches that have ended; the lists forget them last."""
        for run in ended:
            self._deliver(run.chunks)
            self._forest.close(run.request.id)
        self._reading = [run for run in self._reading if run not in ended]
        self._running = [run for run in self._running if run not in ended]

    def _deliver(self, chunks: list[StreamChunk]) -> None:
        """Put chunks into the inboxes of those who wait, and take them out of the list."""
        for chunk in chunks:
            if (inbox := self._inboxes.get(chunk.output.request_id)) is not None:
                inbox.append(chunk)
        chunks.clear()

    def _abort(self, request_id: str) -> None:
        """End a request, in a turn; one that nobody knows is ignored."""
        if self._stepper is not None:
            self._later.append(partial(self._abort, request_id))
            return
        for request in [waiting for waiting in self._waiting if waiting.id == request_id]:
            self._waiting.remove(request.owner, request)
        mine = [run for run in [*self._reading, *self._running] if run.request.id == request_id]
        for run in mine:
            run.abort()
        self._let_go(mine)


def _searched(request: Request) -> SearchRequest:
    assert isinstance(request, SearchRequest), "LLM makes these where a search is given"
    return request
