"""How far a peer's tokens agree with ours.

In: two lists of token ids. Out: `Agreement`. Not here: judging it; a peer in another precision may differ at near ties,
and greedy text that has once gone another way stays different, so both figures are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAgreement:
    """Comparison of two outputs.

    Attributes:
        first_difference: index of the first token that differs, or None if one output begins with the other and both
        are as long.
        equal_share: positions with the same token over the longer length, in 0..1; 1 for two empty outputs.
        length: tokens compared (the longer length).
    """

    first_difference: int | None
    equal_share: float
    length: int

    @property
    def identical(self) -> bool:
        """Whether all tokens are equal."""
        return self.first_difference is None


def agreement_with(ours: Sequence[int], theirs: Sequence[int]) -> PeerAgreement:
    """Compare token by token; a missing token counts as different."""
    length = max(len(ours), len(theirs))
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    same += [False] * (length - len(same))
    first = same.index(False) if False in same else None
    return PeerAgreement(first_difference=first, equal_share=sum(same) / length if length else 1.0, length=length)
