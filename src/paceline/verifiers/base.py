"""What a verifier is: decides which guesses stand, and draws the target's own next token.

In: trees, rows of the target *after all sampling rules*, randomness. Out: verdicts.
Not here: sampling rules (constraints), drafting.

Notation follows Leviathan et al. 2023 (arXiv:2211.17192): p is the target, q the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict


class Draws(Protocol):
    """The only source of randomness of a verifier, for one sequence in one step; tests replace it by enumeration.

    `depth` counts from 0 (the token after the root); implementations key their noise by (request seed, position of that token), so
    equal positions get equal noise whatever the tree. `trial` keeps several decisions at one position apart.
    """

    def gumbel(self, depth: int, weights_v: torch.Tensor) -> int:
        """argmax(log p + Gumbel noise) of float32 log-weights (v,): a draw from softmax(weights_v), the same for all trees."""

    def bernoulli(self, depth: int, trial: int, probability: float) -> bool:
        """True with the given probability."""

    def categorical(self, depth: int, probabilities_v: torch.Tensor) -> int:
        """An index drawn from float32 probabilities (v,) that sum to 1."""


class Verifier(Protocol):
    """A rule for a batch of sequences, each with its own tree."""

    name: str

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], draws: Sequence[Draws]
    ) -> list[Verdict]:
        """One verdict per sequence.

        Args:
            trees: one per sequence, EMPTY_TREE for plain decoding.
            rows: per sequence (1 + n, v) log-weights after all rules, the root first (softmax gives p; -inf is forbidden). For the
                greedy verifier they are logits of any dtype of which only the argmax counts.
            draws: one source per sequence.
        Raises:
            NumericsError: a row on the accepted path holds NaN or nothing but -inf.
        """
