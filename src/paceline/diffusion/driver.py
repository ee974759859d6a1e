"""Many callers on one diffusion language model: open requests are decoded one after the other, those of different
owners in turn. Who waits for a result himself (`run`, `stream`) decodes it himself, beside these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import Final

from paceline.config import ALL_DRAFTS, DraftChoice, SamplingParams
from paceline.diffusion.engine import DiffusionEngine
from paceline.engine import BackendInfo, FairQueue, Gauges, OpenRequests, Request, StreamChunk, Turns, taken
from paceline.errors import PromptError
from paceline.models import Inputs
from paceline.utils import Advance, described, need


class DiffusionDriver:
    """The backend of diffusion language models.

    Args:
        turns: of the loaded model.
    """

    can_draft: Final = False

    def __init__(self, engine: DiffusionEngine, turns: Turns) -> None:
        self.engine, self._turns = engine, turns
        self._waiting = FairQueue[Request]()
        self._running: tuple[Request, Generator[StreamChunk]] | None = None
        self._inboxes: dict[str, deque[StreamChunk]] = {}
        self._errors: dict[str, Exception] = {}  # what ended open requests

    @property
    def info(self) -> BackendInfo:
        """See `Backend.info`."""
        engine = self.engine
        return BackendInfo(engine.vocab_size, engine.max_context, engine.declared_context)

    def context_for(self, inputs: Inputs) -> int:
        """See `Backend.context_for`."""
        if inputs.digest:
            raise PromptError(
                f"a diffusion language model takes tokens as inputs, got {inputs.described()}; leave it out"
            )
        return self.engine.max_context

    def gauges(self) -> Gauges:
        """See `Backend.gauges`."""
        return Gauges(running=int(self._running is not None), waiting=len(self._waiting), paused=0, max_running=1)

    def requests(self) -> OpenRequests:
        """See `Backend.requests`."""
        running = self._running
        return OpenRequests([] if running is None else [running[0]], list(self._waiting))

    def check_params(self, params: SamplingParams, drafts: DraftChoice) -> None:
        """See `Backend.check_params`; `check` looks at the other parameters, together with the prompt."""
        need(drafts == ALL_DRAFTS, "speculative_config", "be left out for a diffusion language model", drafts)

    def check(self, request: Request) -> None:
        """See `Backend.check`."""
        self.engine.check(request)

    def run(self, requests: Sequence[Request], advance: Advance | None = None) -> None:
        """See `Backend.run`."""
        self.engine.run(requests, advance)

    def stream(self, request: Request) -> Generator[StreamChunk]:
        """See `Backend.stream`."""
        return self.engine.stream(request)

    def open(self, request: Request) -> None:
        """See `Backend.open`."""
        with self._turns.turn():
            self._inboxes[request.id] = deque()
            self._waiting.append(request.owner, request, request.priority)

    def step(self) -> None:
        """A round of the open request whose turn it is."""
        self._turns.step(self._step, None, None)

    def _step(self, *_: None) -> None:
        if self._running is None and self._waiting:
            self._begin(self._waiting.pop(self._waiting.owners[0]))
        if self._running is None:
            return
        request, chunks = self._running
        try:
            chunk = next(chunks, None)
        except BaseException as error:
            self._running = None
            cut_short = RuntimeError(f"a step was cut short by {described(error)}")
            self._errors[request.id] = error if isinstance(error, Exception) else cut_short
            raise
        if chunk is None:
            self._running = None
        elif (inbox := self._inboxes.get(request.id)) is not None:
            inbox.append(chunk)

    def _begin(self, request: Request) -> None:
        try:
            self._running = request, self.engine.stream(request)
        except Exception as error:  # of this request alone
            self._errors[request.id] = error

    def collect(self, request_id: str) -> list[StreamChunk]:
        """See `Backend.collect`."""
        if (error := self._errors.get(request_id)) is not None:
            raise error
        return taken(self._inboxes[request_id])

    def drop(self, request_id: str) -> None:
        """See `Backend.drop`."""
        self._inboxes.pop(request_id, None)
        self._turns.soon(partial(self._abort, request_id))

    def _abort(self, request_id: str) -> None:
        """Forget a request, in a turn."""
        self._errors.pop(request_id, None)
        self._stop(request_id)

    def _stop(self, request_id: str) -> None:
        """Decode no more of a request, in a turn."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request.owner, request)
        if self._running is not None and self._running[0].id == request_id:
            running, self._running = self._running, None
            running[1].close()

    def reset_prefix_cache(self) -> bool:
        """There is no such cache."""
        return False

    def close(self) -> None:
        """End all open requests with an error."""
        for request_id in list(self._inboxes):
            self._errors.setdefault(request_id, RuntimeError("the model was closed"))
            self._turns.soon(partial(self._stop, request_id))
