"""Many callers on one engine: whoever waits for a result makes the next step, one thread at a time, for everybody."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock, get_ident
from time import sleep
from typing import Final, TypeVar

from paceline.config import OF_DIFFUSION, DraftChoice, SamplingParams
from paceline.engine.backend import BackendInfo, Gauges, OpenRequests
from paceline.engine.loop import Engine
from paceline.engine.outputs import StreamChunk, taken
from paceline.engine.request import Request
from paceline.errors import ConfigError
from paceline.models import Inputs, context_of
from paceline.utils import Advance

A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")

HANDOVER: Final = 1e-4
"""Seconds that a thread which had the last turn leaves to those that wait: enough for one of them to wake up."""


class Turns:
    """One thread at a time on a loaded model.

    Shared by all engines around the same weights, since they share its cache. A function of a request's own that is
    called in a step (a logits processor) cannot have a turn: the step's requests are neither before nor behind it.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._waiting: set[int] = set()
        self._last: int | None = None
        self._later: deque[Callable[[], None]] = deque()
        self._stepping = False  # where an interrupt cuts in, until the next turn

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the model and have it inside the block.

        Raises:
            RuntimeError: this thread is in the middle of a `step`.
        """
        me = self._queue()
        with self._lock:
            self._take(me)
            yield
        self._catch_up()

    def step(self, work: Callable[[A, B], R], first: A, second: B) -> R:
        """The same around `work(first, second)`, for every step of a decoding loop.

        A block of its own would take longer than it.

        Raises:
            RuntimeError: this thread is in the middle of one.
        """
        me = self._queue()
        with self._lock:
            self._take(me)
            self._stepping = True
            try:
                result = work(first, second)
            finally:
                self._stepping = False
        if self._later:
            self._catch_up()
        return result

    def aside(self, work: Callable[[], R]) -> R:
        """Do `work`, which uses nothing of the model, in the middle of this thread's turn, while others have theirs."""
        me, turn = get_ident(), self._lock._release_save()  # type: ignore[attr-defined]
        try:
            return work()
        finally:
            self._waiting.add(me)
            self._lock._acquire_restore(turn)  # type: ignore[attr-defined]
            self._take(me)

    def _queue(self) -> int:
        """Stand in line; returns the thread's number."""
        if self._stepping and self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "an LLM cannot be used in the middle of its own step, got a call from a function of one of the step's "
                "requests; use another LLM there"
            )
        me = get_ident()
        self._waiting.add(me)
        if self._last == me and len(self._waiting) > 1:
            sleep(HANDOVER)
        return me

    def _take(self, me: int) -> None:
        """The model is this thread's."""
        self._waiting.discard(me)
        self._last, self._stepping = me, False

    def soon(self, work: Callable[[], None]) -> None:
        """Do `work` when nobody has a turn: now, or right after the present turn.

        Never waits, so it may be called by a finalizer, which runs anywhere, even in the middle of a step of the same
        thread. `work` may be done twice if an exception cuts in.
        """
        self._later.append(work)
        self._catch_up()

    def _catch_up(self) -> None:
        # By this very thread, further up, which comes back here at the end of its turn. A flag of our own would stay
        # set where an interrupt cuts in; threading.Condition asks the lock too.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            return
        while self._later and self._lock.acquire(blocking=False):
            try:
                self._work_off()
            finally:
                self._lock.release()

    def _work_off(self) -> None:
        while self._later:
            try:
                self._later[0]()
            except Exception:
                self._later.popleft()
                raise
            self._later.popleft()


def tell(advance: Advance, requests: Sequence[Request]) -> None:
    """Report how far requests are."""
    done = sum(request.finished for request in requests)
    advance(done, sum(request.metrics.num_generation_tokens for request in requests))


class EngineDriver:
    """The backend of autoregressive models: runs requests of many threads on one engine, all of them together.

    Args:
        turns: of the loaded model.
    """

    can_draft: Final = True

    def __init__(self, engine: Engine, turns: Turns) -> None:
        self.engine, self._turns = engine, turns
        self.inboxes: dict[str, deque[StreamChunk]] = {}
        self._whole = True  # the last step, or removal of a request, came to its end

    @property
    def info(self) -> BackendInfo:
        """See `Backend.info`."""
        info = self.engine.parts.runner.info
        return BackendInfo(info.vocab_size, info.max_context, info.declared_context, info.rope_border)

    def context_for(self, inputs: Inputs) -> int:
        """See `Backend.context_for`."""
        return context_of(self.engine.parts.runner, inputs)

    def gauges(self) -> Gauges:
        """See `Backend.gauges`."""
        scheduler = self.engine.scheduler
        memory = scheduler.memory
        return Gauges(
            running=len(scheduler.running) + len(scheduler.filling),
            waiting=len(scheduler.waiting),
            paused=len(scheduler.paused),
            max_running=scheduler.config.max_num_seqs,
            cache_usage=memory.used / memory.capacity if memory is not None and memory.capacity else None,
        )

    def requests(self) -> OpenRequests:
        """See `Backend.requests`."""
        scheduler = self.engine.scheduler
        paused, filling = list(scheduler.paused), list(scheduler.filling)
        running = [*(each.first for each in filling), *list(scheduler.running)]
        waiting = [*(each.first.request for each in paused), *list(scheduler.waiting)]
        return OpenRequests(list({sequence.request.id: sequence.request for sequence in running}.values()), waiting)

    def check_params(self, params: SamplingParams, drafts: DraftChoice) -> None:
        """See `Backend.check_params`; choices of drafters are looked at in `check`."""
        for key in OF_DIFFUSION:
            if getattr(params, key) is not None:
                raise ConfigError(f"{key} cannot be used with an autoregressive model; leave it out")

    def check(self, request: Request) -> None:
        """See `Backend.check`."""
        self.engine.check(request)

    def run(self, requests: Sequence[Request], advance: Advance | None = None) -> None:
        """Decode requests to their ends; all of them are taken back if anything is raised.

        Args:
            advance: told after every step how many are done and how many tokens there are.
        """
        try:
            with self._turns.turn():
                for request in requests:
                    request.streamed = False
                    self.engine.add(request)
            while self._advance(requests):
                if advance is not None:
                    tell(advance, requests)
            if advance is not None:
                tell(advance, requests)
        finally:
            self._cancel(request.id for request in requests)

    def stream(self, request: Request) -> Generator[StreamChunk]:
        """Decode one request and yield its chunks; closing or forgetting the iterator cancels it."""
        try:
            self.open(request)
            inbox = self.inboxes[request.id]
            while self._advance([request], inbox):
                while inbox:
                    yield inbox.popleft()
        finally:
            self.drop(request.id)

    def open(self, request: Request) -> None:
        """Queue a request whose chunks wait to be collected, whoever makes the steps; `drop` it in any case.

        Raises:
            ConfigError, PromptError: it cannot be decoded.
        """
        self.inboxes[request.id] = deque()
        with self._turns.turn():
            self.engine.add(request)

    def step(self) -> None:
        """One step, where there is work."""
        self._turns.step(self._step_if, None, None)

    def _step_if(self, *_: None) -> None:
        if self.engine.has_work:
            self._step(())

    def resume(self, request: Request, park_at: int) -> None:
        """Let the outputs of an open request go on until they have so many tokens."""
        with self._turns.turn():
            request.park_at = park_at
            self.engine.scheduler.resume(request.id)

    def collect(self, request_id: str) -> list[StreamChunk]:
        """The chunks of an open request since the last time."""
        return taken(self.inboxes[request_id])

    def drop(self, request_id: str) -> None:
        """Cancel an open request, or forget an ended one."""
        self.inboxes.pop(request_id, None)
        self._cancel([request_id])

    def reset_prefix_cache(self) -> bool:
        """See `Backend.reset_prefix_cache`."""
        scheduler = self.engine.scheduler
        if scheduler.memory is None or scheduler.prefixes is None:
            return False
        with self._turns.turn():
            scheduler.memory.forget()
        return True

    def close(self) -> None:
        """End all requests, in a turn; streams of theirs end with what they have."""
        self._deliver(self.engine.close())

    def _advance(self, requests: Sequence[Request], inbox: Sequence[StreamChunk] = ()) -> bool:
        """One step, unless another thread's step has brought what was awaited; False if nothing is left to wait for."""
        return self._turns.step(self._step_for, requests, inbox)

    def _step_for(self, requests: Sequence[Request], inbox: Sequence[StreamChunk]) -> bool:
        """What `_advance` does in its turn."""
        if inbox:
            return True
        for request in requests:
            if not request.finished:
                self._step(requests)
                return True
        return False

    def _cancel(self, ids: Iterable[str]) -> None:
        for request_id in list(ids):
            self._turns.soon(partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        whole, self._whole = self._whole, False
        self.engine.abort(request_id)
        self._whole = whole

    def _step(self, requests: Sequence[Request]) -> None:
        """One step of the engine for these requests; open streams get their chunks, whoever made the step."""
        if not self._whole:  # even `fail_started` was cut short
            self._deliver(self.engine.fail_started(InterruptedError("an exception")))
        self._whole = False
        try:
            chunks = self.engine.step()
            if self.inboxes:
                self._deliver(chunks)
        except BaseException as error:
            interrupted = () if isinstance(error, Exception) else [request.id for request in requests]
            self._deliver(self.engine.fail_started(error, interrupted))
            self._whole = True
            raise
        self._whole = True

    def _deliver(self, chunks: Iterable[StreamChunk]) -> None:
        for chunk in chunks:
            inbox = self.inboxes.get(chunk.output.request_id)
            if inbox is not None:
                inbox.append(chunk)
