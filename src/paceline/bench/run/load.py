"""Latency under load: a request trace replayed through the running engine, in real or scaled time.

Prompts are cut from a text to the lengths of the trace, which are scaled to fit the model. Requests wait in the engine,
so that latency counts from the moment of arrival.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.run.harness import Harness
from paceline.bench.run.measures import StepLog, Totals, quantiles
from paceline.bench.run.workloads import bundled_workload
from paceline.config import SamplingParams
from paceline.engine import Request, TimeSplit, check_prompt, watching
from paceline.errors import PromptError
from paceline.llm import LLM
from paceline.sampling import draw_seed
from paceline.utils import Arrival, Workload

NAP = 0.02
"""Seconds of one sleep while nothing is to be done, so that Ctrl-C is heard."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A request of the trace: seconds after the start, prompt, most new tokens; or why it cannot be made."""

    time: float
    tokens: list[int]
    output: int
    error: str | None = None


def load_sweep(harness: Harness, workload: Workload) -> None:
    """Replay a trace at every rate with every setting, repeat by repeat; results go to the harness, Ctrl-C flags
    them.
    """
    options, results = harness.options, harness.results
    settings = [setting for setting in harness.settings if not setting.needs_record]
    done, total = 0, len(options.rates) * options.repeats * len(settings)
    try:
        for rate in options.rates:
            planned, scale = _plan(harness.llm, workload, rate)
            engines = [setting.open(harness.llm) for setting in settings]
            for engine in engines:
                _replay(
                    engine,
                    [_Planned(0.0, arrival.tokens, min(arrival.output, 8), arrival.error) for arrival in planned[:2]],
                    options.seed,
                )
            for repeat in range(options.repeats):
                for setting, engine in zip(settings, engines, strict=True):
                    harness.progress(f"{workload.name}: rate {rate:g}", done, total)
                    replayed = _replay(engine, planned, options.seed)
                    who = {"setting": setting.name, "workload": workload.name, "rate": rate, "repeat": repeat}
                    results.load.append(who | {"length_scale": scale} | _record(replayed))
                    done += 1
        harness.progress(f"{workload.name}: load", total, total)
    except KeyboardInterrupt:
        results.interrupted = True


def _plan(llm: LLM, workload: Workload, rate: float) -> tuple[list[_Planned], float]:
    """The requests of a trace for this model, their prompts cut from the bundled ones."""
    info = llm.runner.info
    arrivals, scale = fit_arrivals(workload.arrivals or (), info.max_context)
    text = [token for c in bundled_workload().conversations for token in llm.tokenizer.encode(c.turns[0])]
    planned = []
    for arrival, tokens in zip(arrivals, trace_prompts(arrivals, text, info.vocab_size), strict=True):
        try:
            output, border = arrival.output_length, info.rope_border
            check_prompt(tokens, info.vocab_size, info.max_context, output, rope_border=border)
            planned.append(_Planned(arrival.time / rate, tokens, arrival.output_length))
        except PromptError as error:
            planned.append(_Planned(arrival.time / rate, tokens, arrival.output_length, str(error)))
    return planned, scale


@dataclass(frozen=True, slots=True)
class _Replayed:
    """Outcome of one replay: seconds, what the steps reported, the requests (None where they could not be made)."""

    seconds: float
    totals: Totals
    planned: Sequence[_Planned]
    requests: Sequence[Request | None]


def _replay(llm: LLM, planned: Sequence[_Planned], seed: int) -> _Replayed:
    """Feed the engine as time goes by, until everything is done; Ctrl-C ends all requests first."""
    engine, log, requests = llm.engine, StepLog(), _requests(planned, seed)
    waiting = [
        (arrival.time, request) for arrival, request in zip(planned, requests, strict=True) if request is not None
    ]
    start, begun = time.perf_counter(), 0
    with watching(engine, log):
        try:
            while begun < len(waiting) or engine.has_work:
                now = time.perf_counter() - start
                while begun < len(waiting) and waiting[begun][0] <= now:
                    due, request = waiting[begun]
                    request.metrics.arrival_time = start + due
                    engine.add(request)
                    begun += 1
                if engine.has_work:
                    engine.step()
                elif begun < len(waiting):
                    time.sleep(min(NAP, max(0.0, waiting[begun][0] - now)))
        finally:
            for _, request in waiting[:begun]:
                engine.abort(request.id)
    seconds, totals = time.perf_counter() - start, Totals()
    totals.add(log, wall=seconds, split=TimeSplit(), weight_bytes=0, cache_bytes=0)
    return _Replayed(seconds, totals, planned, requests)


def _requests(planned: Sequence[_Planned], seed: int) -> list[Request | None]:
    requests: list[Request | None] = []
    for number, arrival in enumerate(planned):
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True, detokenize=False)
        request = Request(f"trace-{number}", None, arrival.tokens, params, draw_seed(seed, number), arrival.output)
        requests.append(request if arrival.error is None else None)
    return requests


def _record(replayed: _Replayed) -> dict[str, Any]:
    rows = [_row(arrival, request) for arrival, request in zip(replayed.planned, replayed.requests, strict=True)]
    tokens = sum(row["tokens"] for row in rows)
    return {
        "requests": len(rows),
        "failed": sum(row["error"] is not None for row in rows),
        "seconds": replayed.seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / replayed.seconds,
        "latency": quantiles([row["latency"] for row in rows if row["latency"] is not None]),
        "time_to_first_token": quantiles(
            [row["time_to_first_token"] for row in rows if row["time_to_first_token"] is not None]
        ),
        "inter_token_latency": quantiles(replayed.totals.latencies),
        "mean_acceptance_length": replayed.totals.mean_acceptance_length,
        "rows": rows,
    }


def _row(planned: _Planned, request: Request | None) -> dict[str, Any]:
    row: dict[str, Any] = {"arrival": planned.time, "prompt_tokens": len(planned.tokens), "tokens": 0, "latency": None}
    row |= {"time_to_first_token": None, "error": planned.error}
    if request is None:
        return row
    metrics, output = request.metrics, request.outputs[0]
    error = output.error or (None if output.finish_reason in ("stop", "length") else f"ended by {output.finish_reason}")
    if error is not None:
        return row | {"error": error}
    ended = (metrics.first_step_time or metrics.arrival_time) + metrics.generation_time
    times: dict[str, Any] = {
        "latency": ended - metrics.arrival_time,
        "time_to_first_token": metrics.time_to_first_token,
    }
    return row | times | {"tokens": len(output.token_ids)}


def fit_arrivals(arrivals: Sequence[Arrival], max_context: int) -> tuple[list[Arrival], float]:
    """The arrivals with lengths scaled by one factor, at most 1, so that the longest fits the context; and the
    factor.
    """
    longest = max(arrival.input_length + arrival.output_length for arrival in arrivals)
    scale = min(1.0, (max_context - 2) / longest)
    if scale == 1.0:
        return list(arrivals), 1.0
    return [
        Arrival(a.time, max(1, int(a.input_length * scale)), max(1, int(a.output_length * scale))) for a in arrivals
    ], scale


def trace_prompts(arrivals: Sequence[Arrival], text: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Token ids of each arrival's length, cut from `text` at different places (repeated where it is too short)."""
    base = [token % vocab_size for token in text]
    prompts = []
    for number, arrival in enumerate(arrivals):
        start = (number * 997) % len(base)
        turned = base[start:] + base[:start]
        prompts.append((turned * (arrival.input_length // len(base) + 1))[: arrival.input_length])
    return prompts
