"""Figures from the steps of a run: times between tokens, acceptance by depth and drafter, time split, bytes read.

Definitions:
    time to first token      from the arrival of the request to the end of the step that gave its first token
    inter-token latency      of the k tokens that one step gives a request, each is given the time since the request's
                             step before, divided by k: tokens that come together share their time. Tokens of a
                             request's first step belong to the time to first token and have none.
    mean acceptance length   1 + accepted / steps, by the target's own token counts
    offered, reached         steps whose tree has nodes at a depth; those of them whose path was accepted up to the
                             depth before it
    bytes of a step          the weights once, and the keys and values of every committed token of the batch
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from paceline.engine import StepRecord, TimeSplit
from paceline.tree import TokenTree, Verdict

EDGES = tuple(float(f"{10 ** (power / 10):.3g}") for power in range(-50, 21))
"""Of the histogram, 10 microseconds to 100 seconds, ten bins a decade."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What is kept of a step while the clock runs; logits and caches are let go."""

    time: float
    keys: tuple[str, ...]
    added: tuple[int, ...]
    context: int
    trees: Sequence[TokenTree]
    verdicts: Sequence[Any]
    names: Sequence[str]
    draft_seconds: Sequence[float]
    times: TimeSplit


class StepLog:
    """A watcher (`engine.record.watching`) that keeps little and computes nothing until the run is over."""

    def __init__(self) -> None:
        self.steps: list[StepFigures] = []

    def __call__(self, record: StepRecord) -> None:
        now = perf_counter()
        self.steps.append(
            StepFigures(
                now,
                tuple(f"{s.request.id}/{s.index}" for s in record.sequences),
                tuple(
                    len(s.context.tokens) - before for s, before in zip(record.sequences, record.lengths, strict=True)
                ),
                sum(record.lengths),
                record.trees,
                record.verdicts,
                record.drafters,
                record.draft_seconds,
                record.times,
            )
        )

    def token_latencies(self) -> list[float]:
        """Inter-token latencies of all requests (see the module's docstring)."""
        last: dict[str, float] = {}
        latencies: list[float] = []
        for step in self.steps:
            for key, added in zip(step.keys, step.added, strict=True):
                if key in last and added:
                    latencies += [(step.time - last[key]) / added] * added
                if added:
                    last[key] = step.time
        return latencies


@dataclass(slots=True)
class Depth:
    """Counts drafted, reached and accepted nodes at one depth of the trees."""

    offered: int = 0
    reached: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DrafterShare:
    """One drafter's share: nodes that were verified and accepted, by depth, and its seconds."""

    seconds: float = 0.0
    proposed: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    accepted: dict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(slots=True)
class Totals:
    """Sums up the runs of one cell.

    Attributes:
        steps: passes of the target, each sequence of a batch counted.
        passes: passes of the target, a batch counted once.
        bytes_read: that the passes could not avoid reading.
    """

    steps: int = 0
    passes: int = 0
    accepted: int = 0
    bytes_read: int = 0
    latencies: list[float] = field(default_factory=list)
    depths: dict[int, Depth] = field(default_factory=lambda: defaultdict(Depth))
    shares: dict[str, DrafterShare] = field(default_factory=lambda: defaultdict(DrafterShare))
    times: TimeSplit = field(default_factory=TimeSplit)
    outside: float = 0.0

    def add(self, log: StepLog, *, wall: float, split: TimeSplit, weight_bytes: int, cache_bytes: int) -> None:
        """Add one run.

        Args:
            wall: seconds of the run. split: what the engine's clock gives for it.
            weight_bytes, cache_bytes: read by a pass, and of the cache per token.
        """
        self.times.add(split)
        self.outside += max(0.0, wall - split.total)
        self.latencies += log.token_latencies()
        for step in log.steps:
            self.passes += 1
            self.bytes_read += weight_bytes + cache_bytes * step.context
            for index, seconds in enumerate(step.draft_seconds):
                self.shares[step.names[index]].seconds += seconds
            for tree, verdict in zip(step.trees, step.verdicts, strict=True):
                if isinstance(verdict, Verdict):
                    self._add_tree(tree, verdict, step.names)

    def _add_tree(self, tree: TokenTree, verdict: Verdict, names: Sequence[str]) -> None:
        self.steps += 1
        self.accepted += len(verdict.path)
        if not len(tree):
            return
        for depth in range(1, tree.max_depth + 1):
            counts = self.depths[depth]
            counts.offered += 1
            counts.reached += len(verdict.path) >= depth - 1
            counts.accepted += len(verdict.path) >= depth
        depths, sources = tree.depths.tolist(), tree.sources.tolist()
        for depth, source in zip(depths, sources, strict=True):
            self.shares[names[source]].proposed[depth] += 1
        for node in verdict.path:
            self.shares[names[sources[node]]].accepted[depths[node]] += 1

    @property
    def mean_acceptance_length(self) -> float:
        return 1.0 + self.accepted / self.steps if self.steps else 1.0

    def by_position(self) -> list[dict[str, int]]:
        """Give acceptance by depth."""
        return [
            {"position": depth, "offered": d.offered, "reached": d.reached, "accepted": d.accepted}
            for depth, d in sorted(self.depths.items())
        ]

    def by_drafter(self) -> list[dict[str, Any]]:
        """Give acceptance by drafter and depth."""
        return [
            {
                "name": name,
                "proposed": sum(share.proposed.values()),
                "accepted": sum(share.accepted.values()),
                "seconds": share.seconds,
                "positions": [
                    {"position": depth, "proposed": share.proposed[depth], "accepted": share.accepted.get(depth, 0)}
                    for depth in sorted(share.proposed)
                ],
            }
            for name, share in self.shares.items()
        ]

    def limit(self, bandwidth: float | None) -> dict[str, float | None]:
        """Share of the physical limit: reading what must be read at the measured bandwidth, over what the steps
        took.
        """
        decode = self.times.total - self.times.prefill
        known = bool(bandwidth) and self.passes > 0 and decode > 0
        floor = self.bytes_read / bandwidth if known and bandwidth else 0.0
        per_pass = self.bytes_read / self.passes if self.passes else 0.0
        sequences = self.steps / self.passes if self.passes else 0.0
        return {
            "bytes_per_step": per_pass,
            "floor_tokens_per_second": sequences * self.passes / floor if floor else None,
            "share_of_step": floor / decode if known else None,
            "share_of_score": floor / self.times.score if known and self.times.score > 0 else None,
        }

    def split(self) -> dict[str, float]:
        """Seconds by what they were spent on."""
        return {**self.times.to_dict(), "outside": self.outside}


def quantiles(values: Sequence[float]) -> dict[str, Any]:
    """p50, p90, p99, mean and count; nulls without values."""
    if not len(values):
        return {"p50": None, "p90": None, "p99": None, "mean": None, "count": 0}
    p50, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99]).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "mean": float(np.mean(values)), "count": len(values)}


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """Counts in logarithmic bins, empty ones at both ends left out.

    What lies beyond the ends counts in the last bin.
    """
    if not len(values):
        return {"edges": [], "counts": []}
    counts = np.histogram(np.clip(values, EDGES[0], EDGES[-1]), EDGES)[0]
    used = np.flatnonzero(counts)
    first, last = int(used[0]), int(used[-1]) + 1
    return {"edges": list(EDGES[first : last + 1]), "counts": counts[first:last].tolist()}
