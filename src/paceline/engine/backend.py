"""What decodes requests, whatever kind of model it is of: all that its callers may ask of it.

A request is checked and made by `LLM.request`. Then either somebody waits for it (`run`, `stream`), or it is one of
many that a thread decodes for others (`engine.worker`):

    backend.open(request)
    while ...:
        backend.step()
        chunks = backend.collect(request.id)
    backend.drop(request.id)
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.config import DraftChoice, SamplingParams
from paceline.engine.outputs import StreamChunk
from paceline.engine.request import Request
from paceline.models import Inputs
from paceline.utils import Advance


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """The model, as far as requests depend on it.

    Attributes:
        vocab_size: token ids lie below it.
        max_context: most tokens of a prompt and its output together, without inputs beside them.
        declared_context: most that the checkpoint allows; None where it does not say.
        rope_border: see `models.ModelInfo`; None where no text has such a border.
    """

    vocab_size: int
    max_context: int
    declared_context: int | None = None
    rope_border: int | None = None


@dataclass(frozen=True, slots=True)
class Gauges:
    """How busy a backend is. A report: other threads may ask in the middle of a step.

    Attributes:
        running: sequences that are decoded, or whose prompts are read; a request of a diffusion language model is one.
        waiting: requests that have not begun.
        paused: sequences that had begun, and made way.
        max_running: most sequences that are decoded at a time.
        cache_usage: share of the memory for keys and values in use, 0 to 1; None where it is not counted.
    """

    running: int
    waiting: int
    paused: int
    max_running: int
    cache_usage: float | None = None


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """The requests that have not ended.

    Attributes:
        running: those with a sequence that is decoded, or whose prompt is read, each once.
        waiting: those that have not begun, and one for each sequence that made way.
    """

    running: list[Request]
    waiting: list[Request]


class Backend(Protocol):
    """Decodes requests of many threads on one loaded model."""

    @property
    def can_draft(self) -> bool:
        """Whether it drafts and verifies, by the methods of a `speculative_config`. Such a backend is around an
        `Engine`, whose steps can be watched, and its model has what searches, rollouts and self-tests need.
        """

    @property
    def info(self) -> BackendInfo:
        """The model."""

    def context_for(self, inputs: Inputs) -> int:
        """Most tokens of a prompt and its output together, where the request has these inputs.

        Raises:
            PromptError: inputs that the model does not take.
        """

    def gauges(self) -> Gauges:
        """How busy it is."""

    def requests(self) -> OpenRequests:
        """What it decodes at present. A report, as `gauges`."""

    def check_params(self, params: SamplingParams, drafts: DraftChoice) -> None:
        """Reject what this kind of model does not take, whatever the prompt.

        Raises:
            ConfigError: the first of it.
        """

    def check(self, request: Request) -> None:
        """Reject a request that would wait in vain, as far as that is known before it begins.

        Raises:
            ConfigError, PromptError: it cannot be decoded.
        """

    def run(self, requests: Sequence[Request], advance: Advance | None = None) -> None:
        """Decode requests to their ends.

        Args:
            advance: told now and then how many are done and how many tokens there are.
        Raises:
            ConfigError, PromptError: one of them cannot be decoded.
        """

    def stream(self, request: Request) -> Generator[StreamChunk]:
        """Decode one request and yield its chunks; closing or forgetting the iterator cancels it.

        Raises:
            ConfigError, PromptError: it cannot be decoded; at once or with the first chunk.
        """

    def open(self, request: Request) -> None:
        """Queue a request whose chunks wait to be collected, whoever makes the steps; `drop` it in any case.

        Raises:
            ConfigError, PromptError: it cannot be decoded.
        """

    def step(self) -> None:
        """Decode a little of what is open, if there is something."""

    def collect(self, request_id: str) -> list[StreamChunk]:
        """The chunks of an open request since the last time, whose last one for an output has its `finish_reason`.

        Raises:
            Exception: what ended the request without such a chunk.
        """

    def drop(self, request_id: str) -> None:
        """Cancel an open request before the next step, or forget an ended one."""

    def reset_prefix_cache(self) -> bool:
        """Forget the keys and values of ended requests; whether there was such a cache."""

    def close(self) -> None:
        """End all open requests."""
