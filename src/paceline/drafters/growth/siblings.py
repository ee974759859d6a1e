"""The children of one node, one after the other, and what the next one would be worth.

In: a row of a draft model. Out: tokens, drawn without replacement or by rank, each with its trial. Not here: which node
gets its next child (`grow_dyspec`, `grow_rsd`), running the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from paceline.drafters.common.draft_rows import best_tokens, draw_for
from paceline.tree import Trial

if TYPE_CHECKING:
    from paceline.drafters.base import Context

Found = tuple[int, float, Trial | None]


class Siblings(Protocol):
    """The children of one node.

    Attributes:
        share: of the chance that the node is reached, what the next child may still win; it never grows.
    """

    share: float

    def take(self, node: int) -> Found | None:
        """The next child, to be node number `node`: token, its raw probability, its trial if drawn; None if none is
        left.
        """


class DrawnSiblings:
    """Draws without replacement; `share` is what the tokens drawn so far leave of the row.

    Source: DySpec (arXiv:2410.11744); recursive rejection without replacement (arXiv:2402.14160). How many tokens are
    drawn may depend on those drawn before, which token comes next on the draw alone.
    """

    __slots__ = ("_context", "_removed", "_row_v", "share")

    def __init__(self, context: Context, row_v: torch.Tensor) -> None:
        self._context, self._row_v, self.share = context, row_v, 1.0
        self._removed: tuple[int, ...] = ()

    def take(self, node: int) -> Found | None:
        """See `Siblings`. `node` is the number of the draw."""
        found = draw_for(self._context, self._row_v, self._removed, node)
        if found is None:
            self.share = 0.0
            return None
        token, chance = found
        trial = Trial(node, self._row_v, self._removed, order=node)
        self._removed = (*self._removed, token)
        self.share = max(self.share - chance, 0.0)
        return token, chance, trial


class RankedSiblings:
    """Takes tokens by probability; `share` is the probability of the next one."""

    __slots__ = ("_chances", "_taken", "_tokens", "share")

    def __init__(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        self._tokens, self._chances, self._taken = tokens, chances, 0
        self.share = chances[0]

    def take(self, node: int) -> Found | None:
        """See `Siblings`."""
        place = self._taken
        if not self.share > 0.0:
            return None
        self._taken += 1
        self.share = self._chances[place + 1] if place + 1 < len(self._chances) else 0.0
        return self._tokens[place], self._chances[place], None


def siblings_of(context: Context, weights_fv: torch.Tensor, *, drawn: bool, most: int) -> list[Siblings]:
    """One family per row of log-weights (f, v).

    Args:
        most: most children that any of them will be asked for.
    Raises:
        DrafterError: NaN in a row, or nothing that can be drawn.
    """
    if drawn:
        return [DrawnSiblings(context, row_v) for row_v in weights_fv.softmax(-1)]
    return [RankedSiblings(*row) for row in zip(*best_tokens(weights_fv, most), strict=True)]
