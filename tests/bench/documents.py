"""Made-up benchmark documents, for what draws and prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NOTHING: dict[str, Any] = {"p50": None, "p90": None, "p99": None, "mean": None, "count": 0}
SPLIT = ("prefill", "draft", "score", "verify", "commit", "other", "outside")


def estimate(value: float, spread: float = 0.1) -> dict[str, Any]:
    return {"value": value, "low": value * (1 - spread), "high": value * (1 + spread), "level": 0.95, "n": 8}


def quantiles(middle: float, count: int = 40) -> dict[str, Any]:
    return {"p50": middle, "p90": 1.5 * middle, "p99": 3 * middle, "mean": 1.1 * middle, "count": count}


def row(prompt: str = "p", turn: int = 0, **other: Any) -> dict[str, Any]:
    counts = {"group": 0, "repeat": 0, "prompt_tokens": 9, "tokens": 8, "steps": 4, "drafts": 4, "draft_tokens": 12}
    times = {"seconds": 0.02, "latency": 0.02, "time_to_first_token": 0.004}
    rest = {"accepted_tokens": 4, "finish_reason": "length", "error": None}
    return {"prompt": prompt, "turn": turn, **counts, **times, **rest, **other}


def equality(identical: int = 8, differences: Sequence[dict[str, Any]] = (), **other: Any) -> dict[str, Any]:
    counts = {
        "compared": identical + len(differences),
        "identical": identical,
        "near_ties": 0,
        "different": len(differences),
    }
    return {"mode": "tokens", **counts, "allowed": True, "label": "compared", "differences": list(differences), **other}


def difference(prompt: str, *, near_tie: bool) -> dict[str, Any]:
    where = {"prompt": prompt, "turn": 0, "repeat": 0, "position": 5, "baseline_token": 7, "token": None}
    return where | {"gap": 0.01, "epsilon": 0.02, "near_tie": near_tie}


def cell(setting: str, gain: float = 1.0, *, tasks: Sequence[str] = ("code", "story"), **other: Any) -> dict[str, Any]:
    """A setting that is `gain` times as fast as plain decoding's 100 tokens/s; "plain" is the baseline."""
    figures = {"prompts": 4, "failed": 0, "tokens_per_second": estimate(100 * gain), "speedup": estimate(gain)}
    own = setting == "plain"
    positions = [{"position": i, "proposed": 100 // i, "accepted": 70 // (i * i)} for i in range(1, 7)]
    drafter = {"name": setting, "proposed": 245, "accepted": 104, "seconds": 0.1, "positions": positions}
    limit = {"bytes_per_step": 1e7, "floor_tokens_per_second": 900.0, "share_of_step": 0.4, "share_of_score": 0.6}
    known = {
        "setting": setting,
        "workload": "bundled",
        "temperature": 0.0,
        "batch": 1,
        **figures,
        "repeats": 2,
        "equality": equality(mode="baseline") if own else equality(),
        "comparable": True,
        "reason": None,
        "speedup_total": estimate(gain),
        "time_to_first_token": quantiles(0.004),
        "inter_token_latency": quantiles(0.01 / gain),
        "latency": quantiles(0.1),
        "latency_histogram": {"edges": [0.001, 0.002, 0.004, 0.01], "counts": [5, 20, 15]},
        "tokens": 64,
        "steps": 32,
        "mean_acceptance_length": 1.0 if own else 2.0,
        "acceptance_by_position": [],
        "drafters": [] if own else [drafter],
        "time_split": {part: 0.1 * (i + 1) for i, part in enumerate(SPLIT)},
        "memory": {"rss_peak_bytes": 10**9, "rss_scope": "runs", "cuda_peak_bytes": None},
        "energy": {"joules": None, "joules_per_token": None, "source": None, "reason": "no counter"},
        "limit": limit,
        "tasks": [{"task": task, **figures, "mean_acceptance_length": 2.0} for task in tasks],
        "rows": [row("p", repeat=i) for i in range(2)],
        "notes": [],
    }
    return known | other


def withheld(setting: str, reason: str, **other: Any) -> dict[str, Any]:
    """A cell without any speed."""
    none = dict.fromkeys(("tokens_per_second", "speedup", "speedup_total"))
    empty = {"latency_histogram": {"edges": [], "counts": []}}
    times = dict.fromkeys(("time_to_first_token", "inter_token_latency", "latency"), NOTHING)
    found = cell(setting, **none, **times, **empty, comparable=False, reason=reason)
    found["tasks"] = [task | {"tokens_per_second": None, "speedup": None} for task in found["tasks"]]
    return found | other


def load_run(setting: str, rate: float, **other: Any) -> dict[str, Any]:
    times = {name: quantiles(0.01 * rate) for name in ("latency", "time_to_first_token", "inter_token_latency")}
    one = {"arrival": 0.0, "prompt_tokens": 9, "tokens": 8, "latency": 0.1, "time_to_first_token": 0.01, "error": None}
    counts = {"repeat": 0, "requests": 1, "failed": 0, "seconds": 1.0, "tokens": 8, "tokens_per_second": 8.0 * rate}
    rest = {"mean_acceptance_length": 1.5, "length_scale": 1.0, "rows": [one]}
    return {"setting": setting, "workload": "trace", "rate": rate, **counts, **times, **rest, **other}


def peer(name: str, setting: str = "plain", speed: float | None = 80.0, **other: Any) -> dict[str, Any]:
    one = {"prompt": "p", "turn": 0, "repeat": 0, "group": 0, "seconds": 0.1, "time_to_first_token": None, "tokens": 8}
    known = {
        "name": name,
        "setting": setting,
        "version": f"{name} 1.2",
        "precision": "bfloat16",
        "threads": 2,
        "options": {"method": setting},
        "workload": "bundled",
        "batch": 1,
        "temperature": 0.0,
        "prompts": 4,
        "failed": 0,
        "equality": equality(),
        "equal_share": 1.0,
        "first_difference": None,
        "comparable": True,
        "reason": None,
        "tokens_per_second": None if speed is None else estimate(speed),
        "speedup": None if speed is None else estimate(speed / 100),
        "mean_acceptance_length": None,
        "time_to_first_token": NOTHING,
        "rows": [one | {"error": None}],
    }
    return known | other


def document(cells: Sequence[dict[str, Any]] = (), **other: Any) -> dict[str, Any]:
    """A document of these cells, with nothing else in it but what `other` gives."""
    names = list(dict.fromkeys(one["setting"] for one in cells)) or ["plain"]
    claimed = {"greedy": "bit-equal up to near ties", "sampled": "equal in distribution"}
    rest = {"claimed": claimed, "acceptance": None, "drafters": []}
    settings = [{"name": n, "config": {"method": n}, "baseline": n == "plain", **rest} for n in names]
    machine = {"system": "Linux", "cpu": "A processor", "cores": 2, "threads": 2, "memory_bytes": 10**10, "gpu": None}
    model = {"name": "m", "family": "llama", "dtype": "bfloat16", "device": "cpu", "weight_bytes": 10**7}
    sizes = {"cache_bytes_per_token": None, "vocab_size": 100, "hidden_size": 8, "num_layers": 2, "max_context": 64}
    options = {"max_tokens": 8, "repeats": 2, "batches": [1], "temperatures": [0.0], "rates": [1.0], "limit": None}
    known = {
        "format": "paceline-bench",
        "version": 1,
        "interrupted": False,
        "provenance": {
            "command": "paceline bench",
            "date": "2026-01-02T03:04:05+00:00",
            "seed": 0,
            "paceline": "0.2.0",
            "python": "3.12",
            "packages": {"torch": "2.13"},
            "machine": machine | {"capability": "AVX512"},
        },
        "model": model | sizes | {"fingerprint": "f", "random": False},
        "options": options | {"ignore_eos": False, "chat": True, "quick": False},
        "bandwidth": None,
        "baseline": "plain",
        "settings": settings,
        "skipped": [],
        "workloads": [],
        "prompts": [],
        "cells": list(cells),
        "load": [],
        "peers": [],
        "peers_skipped": [],
    }
    return known | other
