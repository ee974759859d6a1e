"""A scoring pass with rows beside those of the trees (models.added_rows): layers run up to where rows enter, then for
all rows.

Of each sequence the rows of the tree come first, then the added ones, so that a tree keeps its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from paceline.models.added_rows import AddedRows
from paceline.models.attention.segments import Segment, TreeShape, offsets
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.tree import Scores

Run = Callable[[Sequence[Segment], Sequence[int] | torch.Tensor, LayerPlan, Collection[int], bool], PassResult]
"""Of segments, what they are fed, a plan and taps: states, or else all logits."""


def make_room(segments: Sequence[Segment], added: Sequence[AddedRows]) -> None:
    """Have slots for the added rows, too, before any layer runs."""
    for i, segment in enumerate(segments):
        slots = segment.slots + sum(len(rows.nodes[i]) for rows in added)
        segment.cache.reserve(slots)
        segment.cache.scratch = slots
        if segment.recurrent is not None:
            segment.recurrent.scored = slots


def widened(segment: Segment, nodes: Sequence[int], after: Sequence[int], inputs: int) -> Segment:
    """The segment with rows more.

    Args:
        nodes, after: as of `AddedRows`. inputs: root and nodes of the tree, which come first.
    """
    if not nodes:
        return segment
    slots = segment.slots + len(nodes)
    depths, sees = np.zeros(slots, np.int64), np.zeros((slots, slots), np.bool_)
    depths[: segment.slots], sees[: segment.slots, : segment.slots] = segment.depths, segment.sees
    for row, (node, before) in enumerate(zip(nodes, after, strict=True), start=segment.slots):
        parent = 1 + node if before < 0 else inputs + before
        depths[row], sees[row] = depths[parent] + 1, sees[parent]
        sees[row, row] = True
    return replace(segment, slots=slots, tree=TreeShape(depths, sees))


@dataclass(slots=True)
class AddedPass:
    """One pass, layer by layer where rows enter.

    Args:
        run: runs layers. embed: of tokens. segments: of the trees, with room for all rows. fed: their tokens.
    Attributes:
        taps: (r, hidden) of the trees' rows.
    """

    run: Run
    embed: Callable[[Sequence[int]], torch.Tensor]
    segments: Sequence[Segment]
    fed: Sequence[int] | torch.Tensor
    layer: int = 0
    taps: dict[int, torch.Tensor] = field(default_factory=dict)

    def scores(self, added: Sequence[AddedRows], taps: Collection[int]) -> tuple[Scores, Scores]:
        """See `ScoresAddedRows.score_added`."""
        inputs = [segment.slots for segment in self.segments]
        for rows in added:
            self._run_to(rows.layer, taps, inputs)
            self._enter(rows, inputs)
        plan = LayerPlan(first=self.layer) if self.layer else ALL_LAYERS
        wanted = [tap for tap in taps if tap >= self.layer or (tap < 0 and not self.layer)]
        result = self.run(self.segments, self.fed, plan, wanted, False)
        of_trees, of_added = (self._places(inputs, trees=trees) for trees in (True, False))
        self.taps |= {layer: _rows(states, of_trees) for layer, states in result.taps.items()}
        more = [segment.slots - count for segment, count in zip(self.segments, inputs, strict=True)]
        return (
            Scores(_rows(result.logits, of_trees), _offsets(inputs), self.taps, _best(result, of_trees)),
            Scores(_rows(result.logits, of_added), _offsets(more)),
        )

    def _run_to(self, layer: int, taps: Collection[int], inputs: Sequence[int]) -> None:
        """Have the states before a layer."""
        if layer > self.layer:
            wanted = [tap for tap in taps if self.layer <= tap < layer or (tap < 0 and not self.layer)]
            result = self.run(self.segments, self.fed, LayerPlan(first=self.layer, stop=layer), wanted, True)
            of_trees = self._places(inputs, trees=True)
            self.taps |= {tap: _rows(states, of_trees) for tap, states in result.taps.items()}
            self.fed, self.layer = result.states, layer

    def _enter(self, rows: AddedRows, inputs: Sequence[int]) -> None:
        """Let rows enter here."""
        x = self.fed if isinstance(self.fed, torch.Tensor) else self.embed(self.fed)
        starts = offsets(self.segments)
        behind = [start + 1 + node for start, nodes in zip(starts, rows.nodes, strict=False) for node in nodes]
        made = rows.make(x[torch.tensor(behind, dtype=torch.int64, device=x.device)]).to(x)
        pairs = zip(x.split([s.rows for s in self.segments]), made.split([len(n) for n in rows.nodes]), strict=True)
        self.fed = torch.cat([part for pair in pairs for part in pair])
        each = zip(self.segments, rows.nodes, rows.after, inputs, strict=True)
        self.segments = [widened(*one) for one in each]

    def _places(self, inputs: Sequence[int], *, trees: bool) -> list[range]:
        """Rows of the trees, or of what was added, sequence by sequence."""
        starts = offsets(self.segments)
        return [
            range(start, start + count) if trees else range(start + count, start + segment.slots)
            for start, count, segment in zip(starts, inputs, self.segments, strict=False)
        ]


def _rows(values: torch.Tensor, places: Sequence[range]) -> torch.Tensor:
    """Those rows, a view where they lie together."""
    if len(places) == 1:
        return values[places[0].start : places[0].stop]
    return values[torch.tensor([row for rows in places for row in rows], dtype=torch.int64, device=values.device)]


def _best(result: PassResult, places: Sequence[range]) -> list[int] | None:
    return None if result.best is None else [result.best[row] for rows in places for row in rows]


def _offsets(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(accumulate(counts, initial=0))
