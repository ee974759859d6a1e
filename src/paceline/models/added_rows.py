"""Rows of a drafter's own in a scoring pass: they stand behind the inputs of a tree, or behind each other, are fed
states in place of tokens, and leave nothing behind.

A row sees the text, the input that it stands behind with its ancestors, and the added rows between the two; no input of
the tree sees it, so that their logits are those of a pass without it. Its position is one more than that of what it
stands behind. Its keys and values lie in scratch slots behind those of the tree, which `Runner.commit` drops.

Rows may enter before a later layer: they have no keys and values of the layers below, where nobody looks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline.models.base import Runner, SequenceCache

if TYPE_CHECKING:
    import torch

    from paceline.tree import Scores, TokenTree


@dataclass(frozen=True, slots=True)
class AddedRows:
    """Says which rows enter a pass before one layer, of all its sequences.

    Attributes:
        layer: before which they enter; 0 is the first one, whose input are embeddings.
        nodes: per sequence (m,), the node of its tree that each row stands behind; -1 is the root.
        after: per sequence (m,), the added row of this sequence that stands between the two, by its number among those
            of all `AddedRows` of the pass, in their order; -1 where there is none.
        make: from the (r, hidden) states before `layer` of the nodes that all these rows stand behind, sequence by
            sequence, the (r, hidden) states of the rows; embeddings with the family's multiplier where `layer` is 0.
    """

    layer: int
    nodes: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    make: Callable[[torch.Tensor], torch.Tensor]

    def among(self, positions: Sequence[int], count: int) -> AddedRows:
        """The same rows, for the sequences at these ascending positions of a batch of `count`; others have none."""
        nodes: list[Sequence[int]] = [()] * count
        after: list[Sequence[int]] = [()] * count
        for position, *own in zip(positions, self.nodes, self.after, strict=True):
            nodes[position], after[position] = own
        return replace(self, nodes=nodes, after=after)


@runtime_checkable
class ScoresAddedRows(Runner, Protocol):
    """A runner whose scoring passes take rows beside those of the trees."""

    def score_added(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        added: Sequence[AddedRows],
        *,
        taps: Sequence[int] = (),
    ) -> tuple[Scores, Scores]:
        """`Runner.score`, with rows beside the trees.

        Args:
            added: by ascending layer.
        Returns:
            What `score` gives, and the logits of the added rows, whose `rows` are offsets of each sequence's, in the
            order of `added`.
        Raises:
            ConfigError: as `score`, of trees and added rows.
            CapabilityError: rows that enter at a later layer of a model with recurrent states.
        """
