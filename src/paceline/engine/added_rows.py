"""A drafter's own rows in the scoring pass of a step (models.added_rows): asked for before it, handed over behind it.

Of each sequence as many are asked for as there is memory and context for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.drafter_set import DrafterSet
from paceline.engine.reflecting import Fit
from paceline.engine.sequence import DecodingSequence
from paceline.models import AddedRows
from paceline.tree import Scores, TokenTree


@dataclass(frozen=True, slots=True)
class DrafterRows:
    """The rows that a drafter adds to one pass.

    Attributes:
        index: of the drafter. positions: of its sequences in the batch. rows: of these sequences.
    """

    index: int
    positions: Sequence[int]
    rows: Sequence[AddedRows]

    def among(self, count: int) -> list[AddedRows]:
        """For a pass over so many sequences, those of the batch first."""
        return [rows.among(self.positions, count) for rows in self.rows]

    def read(self, drafter_set: DrafterSet, batch: Sequence[DecodingSequence], scores: Scores) -> None:
        """Hand what a pass made of them to the drafter, and drop one that raises."""
        logits: list[torch.Tensor] = [scores.of(position) for position in self.positions]
        sequences = [batch[position] for position in self.positions]
        try:
            drafter_set.drafters[self.index].read_rows([one.states[self.index] for one in sequences], logits)
        except Exception as error:
            for sequence in sequences:
                drafter_set.drop(self.index, sequence, error)


def drafter_rows(
    drafter_set: DrafterSet,
    batch: Sequence[DecodingSequence],
    trees: Sequence[TokenTree],
    shown: Sequence[TokenTree],
    *,
    fit: Fit,
    context: int,
) -> DrafterRows | None:
    """What is added beside the trees of a step; None where nothing is.

    Args:
        shown: the trees that are scored, which begin with those of the step.
        fit: cuts trees to the memory that there is. context: most tokens of a sequence.
    """
    index, granted = drafter_set.adding, drafter_set.granted
    if index is None or not granted:
        return None
    drafter = drafter_set.drafters[index]
    positions = [i for i, one in enumerate(batch) if id(one) in granted and one.states[index] is not None]
    if not positions:
        return None
    most = [drafter.rows_beside(1 + len(tree)) for tree in trees]
    rooms = _rooms(batch, shown, most, fit, context)
    states = [batch[i].states[index] for i in positions]
    try:
        rows = drafter.added_rows(states, [trees[i] for i in positions], [rooms[i] for i in positions])
    except Exception as error:
        for i in positions:
            drafter_set.drop(index, batch[i], error)
        return None
    return DrafterRows(index, positions, rows) if rows else None


def _rooms(
    batch: Sequence[DecodingSequence], shown: Sequence[TokenTree], most: Sequence[int], fit: Fit, context: int
) -> list[int]:
    """How many rows of at most so many each sequence has room for, even behind one another, beside its tree."""
    wide = [TokenTree.chain([0] * (len(tree) + more)) for tree, more in zip(shown, most, strict=True)]
    return [
        max(0, min(len(cut) - len(tree), context - len(one.context.tokens) - tree.max_depth))
        for one, tree, cut in zip(batch, shown, fit(batch, wide), strict=True)
    ]
