"""Counters for Prometheus, under vLLM's stems with a prefix of our own, or with vLLM's names and labels."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any, Final, TypeVar

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from paceline.async_llm import AsyncLLM
from paceline.engine import RequestMetrics, RequestOutput, StreamChunk
from paceline.serving.request_log import LogFields
from paceline.version import __version__

FIRST: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)
LENGTHS: Final = (1, 2, 5, *(digit * 10**power for power in range(1, 5) for digit in (1, 2, 5)), 100_000, 200_000)
"""These are the bounds of buckets, in seconds and tokens."""

Kind = TypeVar("Kind", Counter, Gauge, Histogram)

POSITIONS: Final = 32
"""So many positions of drafts are told apart."""


class Registry:
    """Holds the counters of one process, and what tells how the process is.

    Args:
        model_name: all names and labels are vLLM's, with this name of the model; None: names are our own.
    """

    def __init__(self, model_name: str | None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prefix = "paceline" if model_name is None else "vllm"
        self._labels = {} if model_name is None else {"model_name": model_name, "engine": "0"}
        self._counters, self._process = CollectorRegistry(), CollectorRegistry()
        ProcessCollector(registry=self._process)
        about = {"version": __version__, "python": platform.python_version(), "torch": torch.__version__}
        build = Gauge("paceline:build_info", "Versions of this server.", [*about], registry=self._process)
        build.labels(**about).set(1)

    def new(self, kind: type[Kind], name: str, text: str, *labels: str, **more: Any) -> Kind:
        """Make a new counter, gauge or histogram under the prefix of all."""
        return kind(f"{self._prefix}:{name}", text, labels, registry=self._counters, **more)

    def page(self) -> bytes:
        """Return all of it, in Prometheus's text format."""
        counters = generate_latest(Labelled(self._counters.collect(), self._labels))
        return counters + generate_latest(self._process)


class Labelled:
    """Adds labels to the samples of metrics.

    Args:
        families: of metrics.
        labels: for all samples.
    """

    def __init__(self, families: Iterable[Metric], labels: Mapping[str, str]) -> None:
        self._families, self._labels = families, labels

    def collect(self) -> Iterable[Metric]:
        """Yield the same families, whose samples have these labels too."""
        for family in self._families:
            labelled = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                labelled.add_sample(sample.name, {**sample.labels, **self._labels}, sample.value)
            yield labelled


class Metrics:
    """Counts what the server does, and asks the engine how busy it is.

    Args:
        model_name: all names and labels are vLLM's, with this name of the model; None: names are our own.
    Attributes:
        store_failures: responses that could not be stored, read or deleted.
    """

    def __init__(self, model: AsyncLLM, model_name: str | None = None) -> None:
        self._model, self._registry, self.store_failures = model, Registry(model_name), 0
        new = self._registry.new
        self.running = new(Gauge, "num_requests_running", "Requests that are decoded.")
        self.waiting = new(Gauge, "num_requests_waiting", "Requests that have not begun.")
        self.cache = new(Gauge, "kv_cache_usage_perc", "Share of the memory for keys and values in use, 0 to 1.")
        self.prompt_tokens = new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.looked_up = new(Counter, "prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.")
        self.cached_tokens = new(Counter, "prefix_cache_hits", "Tokens of prompts found in the prefix cache.")
        self.tokens = new(Counter, "generation_tokens", "Generated tokens.")
        self.ended = new(Counter, "request_success", "Ended outputs by reason.", "finished_reason")
        self.rejected = new(Counter, "requests_rejected", "Requests answered with an error, by status.", "status")
        self.failures = new(Counter, "response_store_failures", "Failed uses of the file of stored responses.")
        self.text_requests = new(Counter, "text_requests", "Answered embeddings, rankings and scores.", "kind")
        self.text_tokens = new(Counter, "text_tokens", "Tokens that were read for them.", "kind")
        self.audio_requests = new(Counter, "audio_requests", "Answered transcriptions and translations.", "kind")
        self.audio_seconds = new(Counter, "audio_seconds", "Seconds of audio that were understood.", "kind")
        self._make_times()
        self.prompt = new(Histogram, "request_prompt_tokens", "Tokens of a prompt.", buckets=LENGTHS)
        self.output = new(Histogram, "request_generation_tokens", "Generated tokens of an output.", buckets=LENGTHS)
        self.drafts = new(Counter, "spec_decode_num_drafts", "Scoring passes with drafts, by request.")
        self.draft_tokens = new(
            Counter, "spec_decode_num_draft_tokens", "Drafted tokens that were verified.", "drafter"
        )
        self.accepted = new(Counter, "spec_decode_num_accepted_tokens", "Those that were accepted.", "drafter")
        self.positions = new(
            Counter, "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by position in the draft.", "position"
        )
        self.faults = new(Gauge, "engine_faults", "Decoding steps that failed.")
        self._make_learning()

    def _make_learning(self) -> None:
        """Make the gauges of drafters that learn from requests."""
        new = self._registry.new
        self.versions = new(Gauge, "drafter_version", "Highest version that drafts, of all tenants.", "drafter")
        self.rounds = new(Gauge, "drafter_training_rounds", "Rounds of its trainer.", "drafter")
        self.rollbacks = new(Gauge, "drafter_rollbacks", "Versions that were taken back.", "drafter")
        self.kept_bytes = new(Gauge, "drafter_traffic_bytes", "Memory for what requests have taught.", "drafter")
        self.trainers = new(Gauge, "drafter_trainer_running", "1 until its trainer has ended.", "drafter")

    def _make_times(self) -> None:
        """Make the histograms of what requests took."""
        new = self._registry.new
        self.first = new(Histogram, "time_to_first_token_seconds", "From arrival to the first token.", buckets=FIRST)
        self.between = new(Histogram, "inter_token_latency_seconds", "From token to token.", buckets=BETWEEN)
        self.whole = new(Histogram, "e2e_request_latency_seconds", "From arrival to the end.", buckets=WHOLE)
        self.queue = new(Histogram, "request_queue_time_seconds", "Before the prompt is read.", buckets=FIRST)
        self.prefill = new(Histogram, "request_prefill_time_seconds", "From there to the first token.", buckets=FIRST)
        self.decode = new(Histogram, "request_decode_time_seconds", "From there to the last token.", buckets=WHOLE)
        self.inference = new(
            Histogram, "request_inference_time_seconds", "Of reading the prompt and of decoding.", buckets=WHOLE
        )

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self.rejected.labels(str(status)).inc()

    def read_texts(self, kind: str, tokens: int) -> None:
        """Count an answered request that decodes nothing: embeddings, rerank or score."""
        self.text_requests.labels(kind).inc()
        self.text_tokens.labels(kind).inc(tokens)

    def store_failed(self) -> None:
        """Count a response that could not be written, read or deleted."""
        self.store_failures += 1
        self.failures.inc()

    def page(self) -> bytes:
        """Return all of it, in Prometheus's text format."""
        llm = self._model.llm
        if not llm.closed:
            gauges, every = llm.backend.gauges(), [backend.gauges() for backend in llm.backends]
            self.running.set(sum(one.running for one in every))
            self.waiting.set(sum(one.waiting + one.paused for one in every))
            if gauges.cache_usage is not None:
                self.cache.set(gauges.cache_usage)
            self._set_learning()
        self.faults.set(self._model.faults)
        return self._registry.page()

    def _set_learning(self) -> None:
        """Say how far drafters have learned."""
        llm = self._model.llm
        for one in llm.engine.parts.drafter_set.learning() if llm.backend.can_draft else ():
            gauges = (self.versions, self.rounds, self.rollbacks, self.kept_bytes, self.trainers)
            values = (one.version, one.rounds, one.rolled_back, one.bytes, int(one.running))
            for gauge, value in zip(gauges, values, strict=True):
                gauge.labels(one.drafter).set(value)

    def done(self, output: RequestOutput, seconds: float) -> None:
        """Count a request that has ended."""
        prompt = output.num_prompt_tokens
        self.prompt_tokens.inc(prompt)
        self.prompt.observe(prompt)
        if output.num_cached_tokens is not None:
            self.looked_up.inc(prompt)
            self.cached_tokens.inc(output.num_cached_tokens)
        self.whole.observe(seconds)
        for completion in output.outputs:
            self.ended.labels(completion.finish_reason or "abort").inc()
            self.output.observe(len(completion.token_ids) + len(completion.reasoning_token_ids))
        self._add_times(output.metrics)
        self._add_drafts(output.metrics)

    def _add_times(self, metrics: RequestMetrics) -> None:
        """Count how long the parts of a request took, if it has brought forth a token."""
        begun, read = metrics.scheduled_time, metrics.first_step_time
        if begun is None or read is None or metrics.time_to_first_token is None:
            return
        first, last = metrics.arrival_time + metrics.time_to_first_token, read + metrics.generation_time
        self.queue.observe(begun - metrics.arrival_time)
        self.prefill.observe(first - begun)
        self.decode.observe(last - first)
        self.inference.observe(last - begun)

    def _add_drafts(self, metrics: RequestMetrics) -> None:
        self.drafts.inc(metrics.num_drafts)
        for name, share in metrics.drafters.items():
            self.draft_tokens.labels(name).inc(share.num_draft_tokens)
            self.accepted.labels(name).inc(share.num_accepted_tokens)
        for position, count in enumerate(metrics.num_accepted_tokens_per_pos[:POSITIONS]):
            self.positions.labels(str(position)).inc(count)


class Watch:
    """Takes the times of one request while it streams, for the metrics and the log.

    Args:
        facts: for the log.
    """

    def __init__(self, metrics: Metrics, facts: LogFields) -> None:
        self._metrics, self._facts, self.start, self._last = metrics, facts, perf_counter(), dict[int, float]()

    def chunk(self, chunk: StreamChunk) -> None:
        """Count a chunk that has come."""
        count = len(chunk.token_ids)
        if not count:
            return
        now = perf_counter()
        before = self._last.get(chunk.index)
        self._last[chunk.index] = now
        self._metrics.tokens.inc(count)
        self._facts.use(count)
        if before is None:
            self._metrics.first.observe(now - self.start)
            self._facts.begun()
        else:
            self._metrics.between.observe((now - before) / count)

    def end(self, output: RequestOutput) -> None:
        """Count the request, which has ended."""
        completion_tokens = sum(
            len(completion.token_ids) + len(completion.reasoning_token_ids) for completion in output.outputs
        )
        if output.search is not None:  # what it has computed beside the texts that come back
            self._facts.use(max(0, output.search.num_tokens - completion_tokens))
        self._facts.count(output.num_prompt_tokens, output.num_cached_tokens or 0, completion_tokens)
        self._metrics.done(output, perf_counter() - self.start)
