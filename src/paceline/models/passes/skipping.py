"""Passes some of whose rows leave out layers.

The rows of a sequence up to its border (models.state.skipping_cache) run all layers, and so do those behind it that a
method says; the others are *reduced*. Rows that are alike run together, and a sequence's rows in order, since later
ones read what earlier ones have left: so a prompt or a plain step is one pass, and a draft is cut where rows change.
What a row gives depends on its own text alone, whatever is fed beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, cast

import numpy as np
import torch

from paceline.models.attention.segments import Segment, offsets
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.passes.base import Passes
from paceline.models.state.skipping_cache import SkippingCache

Fed = Sequence[int] | torch.Tensor


class RowSkipping(ABC):
    """Which rows run which layers, and what the others have in their place.

    Attributes:
        left_out: layers that reduced rows do not run, ascending.
        keeps_anchors: reduced rows need what these layers gave at the last row that ran them.
    """

    left_out: tuple[int, ...] = ()
    keeps_anchors: ClassVar[bool] = False

    @abstractmethod
    def runs_all(self, behind: int) -> bool:
        """Whether a row so many positions behind the border runs all layers; the first one is 0 behind it."""

    def last_whole(self, behind: int) -> int:
        """The last row not behind this one that runs all layers, counted alike, where anchors are kept."""
        while not self.runs_all(behind):
            behind -= 1
        return behind

    @abstractmethod
    def run(self, passes: Passes, rows: ReducedRows, taps: Collection[int], logits: Sequence[int] | None) -> PassResult:
        """Run reduced rows; `taps` and `logits` as of `Passes.run`."""


@dataclass(frozen=True, slots=True)
class ReducedRows:
    """Rows that leave out layers.

    Attributes:
        segments: whose rows these are. fed: their tokens or embeddings.
        anchors: (rows, layers left out, hidden); (rows, 0, 0) of methods that keep none.
    """

    segments: Sequence[Segment]
    fed: Fed
    anchors: torch.Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Inputs first .. stop - 1 of a segment, which are alike."""

    first: int
    stop: int
    whole: bool


def runs_of(segment: Segment, skipping: RowSkipping) -> list[Run]:
    """The fed inputs of a segment in order, cut where rows that run all layers meet reduced ones."""
    cache = cast(SkippingCache, segment.cache)
    border, inputs = cache.border, range(segment.done, segment.slots)
    if border is None or not skipping.left_out:
        return [Run(segment.done, segment.slots, True)]
    positions = segment.depths + cache.length

    def whole(one: int) -> bool:
        behind = int(positions[one]) - border
        return behind < 0 or skipping.runs_all(behind)

    found = []
    for kind, group in groupby(inputs, whole):
        members = list(group)
        found.append(Run(members[0], members[-1] + 1, kind))
    return found


@dataclass(slots=True)
class _Gathered:
    """What the rows of a pass have given so far, by the numbers of the rows."""

    rows: list[int] = field(default_factory=list)
    picked: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    best: list[int] | None = field(default_factory=list)
    taps: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, result: PassResult, rows: Sequence[int], picked: Sequence[int]) -> None:
        self.rows += rows
        self.picked += picked
        self.logits.append(result.logits)
        self.best = None if self.best is None or result.best is None else [*self.best, *result.best]
        for layer, states in result.taps.items():
            self.taps.setdefault(layer, []).append(states)

    def result(self) -> PassResult:
        """All of it in the order of the rows."""
        order, by_row = np.argsort(self.picked, kind="stable").tolist(), np.argsort(self.rows, kind="stable")
        logits = torch.cat(self.logits)
        index, at = (torch.tensor(one, dtype=torch.int64, device=logits.device) for one in (order, by_row.tolist()))
        best = None if self.best is None else [self.best[one] for one in order]
        taps = {layer: torch.cat(states)[at] for layer, states in self.taps.items()}
        return PassResult(logits[index], logits.new_empty(0, 0), taps, best)


class SkippingPasses:
    """See `Passes`; whole passes from tokens or embeddings to logits, of sequences with a `SkippingCache`.

    Args:
        passes: run the layers. skipping: says which.
    """

    def __init__(self, passes: Passes, skipping: RowSkipping) -> None:
        self.passes, self.skipping, self.name = passes, skipping, passes.name
        self.embed, self.head, self.row_invariant = passes.embed, passes.head, passes.row_invariant

    def run(
        self,
        segments: Sequence[Segment],
        fed: Fed,
        lengths: Sequence[tuple[int, int]],
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """See `Passes.run`."""
        whole_pass = plan is ALL_LAYERS and not lengths and not states and added_qkv is None
        assert whole_pass, "a part of a pass"
        for segment in segments:
            if not segment.known:
                cast(SkippingCache, segment.cache).begin_scored(segment.done)
        turns = [runs_of(segment, self.skipping) for segment in segments]
        starts, gathered = offsets(segments), _Gathered()
        wanted = None if logits is None else set(logits)
        for turn in range(max(map(len, turns))):
            for whole in (True, False):
                taken = [i for i, runs in enumerate(turns) if len(runs) > turn and runs[turn].whole is whole]
                if not taken:
                    continue
                parts = [segments[i].part(turns[i][turn].first, turns[i][turn].stop) for i in taken]
                rows = [
                    row
                    for i, part in zip(taken, parts, strict=True)
                    for row in range(
                        starts[i] + part.done - segments[i].done, starts[i] + part.slots - segments[i].done
                    )
                ]
                local = None if wanted is None else [place for place, row in enumerate(rows) if row in wanted]
                result = self._group(whole, parts, _of(fed, rows), taps, local)
                if len(rows) == starts[-1]:
                    return result
                gathered.add(result, rows, rows if local is None else [rows[place] for place in local])
        return gathered.result()

    def _group(
        self, whole: bool, parts: Sequence[Segment], fed: Fed, taps: Collection[int], logits: Sequence[int] | None
    ) -> PassResult:
        """Rows that are alike."""
        skipping = self.skipping
        if not whole:
            anchors = _anchors_of(parts, skipping) if skipping.keeps_anchors else torch.empty(0, 0, 0)
            return skipping.run(self.passes, ReducedRows(parts, fed, anchors), taps, logits)
        kept = skipping.left_out if skipping.keeps_anchors and any(_behind_border(part) for part in parts) else ()
        result = self.passes.run(parts, fed, (), ALL_LAYERS, tuple({*taps, *kept}), logits=logits)
        if kept:
            _keep_anchors(parts, torch.stack([result.taps[layer] for layer in kept], 1))
        if len(result.taps) == len(taps):
            return result
        return PassResult(result.logits, result.states, {layer: result.taps[layer] for layer in taps}, result.best)


def _of(fed: Fed, rows: Sequence[int]) -> Fed:
    if len(rows) == len(fed):
        return fed
    return fed[list(rows)] if isinstance(fed, torch.Tensor) else [fed[row] for row in rows]


def _behind_border(part: Segment) -> bool:
    """Whether any fed row lies behind the border."""
    cache = cast(SkippingCache, part.cache)
    return cache.border is not None and cache.length + int(part.depths[part.done :].max()) >= cache.border


def _keep_anchors(parts: Sequence[Segment], states: torch.Tensor) -> None:
    """Keep (rows, layers left out, hidden) of the rows behind the borders."""
    rows = iter(states.unbind(0))
    for part in parts:
        cache = cast(SkippingCache, part.cache)
        for one, position in enumerate(part.positions(), part.done):
            anchor = next(rows)
            if cache.border is None or position < cache.border:
                continue
            if part.known:
                cache.anchors[position] = anchor.clone()
            else:
                cache.scored[one] = anchor.clone()


def _anchors_of(parts: Sequence[Segment], skipping: RowSkipping) -> torch.Tensor:
    """(rows, layers left out, hidden) what reduced rows go on from."""
    found = []
    for part in parts:
        cache, depths, sees = cast(SkippingCache, part.cache), part.depths, part.sees
        assert cache.border is not None, "reduced rows before the border"
        for one, position in enumerate(part.positions(), part.done):
            place = cache.border + skipping.last_whole(position - cache.border)
            if place < cache.length or part.known:
                found.append(cache.anchors[place])
            else:
                found.append(cache.scored[int(np.nonzero(sees[one] & (depths == place - cache.length))[0][0])])
    return torch.stack(found)
