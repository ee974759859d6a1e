"""Verification inside a drafter: what a model between draft and target says to a tree.

In: trees, rows, seeds. Out: verdicts of the exact verifiers. Not here: their rules (verifiers), what drafters make of
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import DrafterError, NumericsError
from paceline.sampling import KeyedDraws
from paceline.verifiers import GreedyVerifier, RecursiveRejection

if TYPE_CHECKING:
    import torch

    from paceline.tree import TokenTree, Verdict


class ExactJudge:
    """See `drafters.base.Judge`."""

    def __init__(self) -> None:
        self._greedy, self._sampled = GreedyVerifier(), RecursiveRejection()

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], seeds: Sequence[int | None]
    ) -> list[Verdict]:
        """See `drafters.base.Judge.verify`."""
        return [self._one(*each) for each in zip(trees, rows, seeds, strict=True)]

    def _one(self, tree: TokenTree, rows_nv: torch.Tensor, seed: int | None) -> Verdict:
        if seed is None:
            (found,) = self._greedy.verify([tree], [rows_nv])
        else:
            (found,) = self._sampled.verify([tree], [rows_nv], [KeyedDraws(seed, 0)])
        if isinstance(found, NumericsError):
            raise DrafterError(f"the model that verifies drafts gave no distribution: {found}")
        return found
