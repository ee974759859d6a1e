"""Counters for Prometheus, under vLLM's stems with a prefix of our own, or with vLLM's."""

from __future__ import annotations

from time import perf_counter
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from paceline.async_llm import AsyncLLM
from paceline.engine import RequestOutput, StreamChunk
from paceline.models import memory_of

FIRST: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
POSITIONS: Final = 32
"""Most positions of drafts that are told apart."""


class Metrics:
    """What the server counts.

    Args:
        prefix: of all names; "vllm" gives vLLM's own.
    Attributes:
        store_failures: responses that could not be stored, read or deleted.
    """

    def __init__(self, model: AsyncLLM, *, prefix: str = "paceline") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._model, self._registry, self.store_failures = model, CollectorRegistry(), 0

        def made(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            return kind(f"{prefix}:{name}", text, labels, registry=self._registry, **more)

        self.running = made(Gauge, "num_requests_running", "Requests that are decoded.")
        self.waiting = made(Gauge, "num_requests_waiting", "Requests that have not begun.")
        self.cache = made(Gauge, "kv_cache_usage_perc", "Share of the memory for keys and values in use, 0 to 1.")
        self.prompt_tokens = made(Counter, "prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = made(Counter, "prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self.tokens = made(Counter, "generation_tokens", "Generated tokens.")
        self.ended = made(Counter, "request_success", "Ended outputs by reason.", "finished_reason")
        self.rejected = made(Counter, "requests_rejected", "Requests answered with an error, by status.", "status")
        self.failures = made(Counter, "response_store_failures", "Failed uses of the file of stored responses.")
        self.first = made(Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=FIRST)
        self.between = made(Histogram, "inter_token_latency_seconds", "From token to token.", buckets=BETWEEN)
        self.whole = made(Histogram, "e2e_request_latency_seconds", "From arrival to the end.", buckets=WHOLE)
        self.drafts = made(Counter, "spec_decode_num_drafts", "Scoring passes with drafts, by request.")
        self.draft_tokens = made(
            Counter, "spec_decode_num_draft_tokens", "Drafted tokens that were verified.", "drafter"
        )
        self.accepted = made(Counter, "spec_decode_num_accepted_tokens", "Those that were accepted.", "drafter")
        self.positions = made(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", "position"
        )
        self.faults = made(Gauge, "engine_faults", "Decoding steps that failed.")

    def refused(self, status: int) -> None:
        """A request was answered with an error."""
        self.rejected.labels(str(status)).inc()

    def store_failed(self) -> None:
        """Stored responses could not be written, read or deleted."""
        self.store_failures += 1
        self.failures.inc()

    def page(self) -> bytes:
        """All of it, in Prometheus's text format."""
        llm = self._model.llm
        if llm.diffusion is None:
            scheduler = llm.engine.scheduler
            self.running.set(len(scheduler.running) + len(scheduler.filling))
            self.waiting.set(len(scheduler.waiting) + len(scheduler.paused))
            memory = memory_of(llm.runner)
            if memory is not None and memory.capacity:
                self.cache.set(memory.used / memory.capacity)
        self.faults.set(self._model.faults)
        return generate_latest(self._registry)

    def done(self, output: RequestOutput, seconds: float) -> None:
        """A request has ended."""
        metrics = output.metrics
        self.prompt_tokens.inc(len(output.prompt_token_ids))
        self.cached_tokens.inc(output.num_cached_tokens or 0)
        self.whole.observe(seconds)
        for one in output.outputs:
            self.ended.labels(one.finish_reason or "abort").inc()
        self.drafts.inc(getattr(metrics, "num_drafts", 0))
        for name, share in getattr(metrics, "drafters", {}).items():
            self.draft_tokens.labels(name).inc(share.num_draft_tokens)
            self.accepted.labels(name).inc(share.num_accepted_tokens)
        for position, count in enumerate(getattr(metrics, "num_accepted_tokens_per_pos", ())[:POSITIONS]):
            self.positions.labels(str(position)).inc(count)


class Watch:
    """Times of one request while it streams."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self.start, self._last = metrics, perf_counter(), dict[int, float]()

    def chunk(self, chunk: StreamChunk) -> None:
        """A chunk has come."""
        count = len(chunk.token_ids)
        if not count:
            return
        now = perf_counter()
        before = self._last.get(chunk.index)
        self._last[chunk.index] = now
        self._metrics.tokens.inc(count)
        if before is None:
            self._metrics.first.observe(now - self.start)
        else:
            self._metrics.between.observe((now - before) / count)

    def end(self, output: RequestOutput) -> None:
        """The request has ended."""
        self._metrics.done(output, perf_counter() - self.start)
