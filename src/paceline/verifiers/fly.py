"""FLy: a rejected draft is kept where the target is unsure of the token and agrees with the drafts after it.
Approximate by design.

Each draft of a chain is first judged by the exact rule: at temperature 0 equal or reject, above it sample-and-match
for points and rejection for draws. Draft i of n, rejected so, is kept all the same (*deferred*) if

- W further drafts follow it, i + W < n, and the exact rule accepts all of them, given the text with draft i in it;
- the target is unsure: -sum of p log p over its three likeliest tokens is at least theta (nats; p after all sampling
  rules and the temperature, at temperature 0 the softmax of the logits; the three are not normalised again);
- the target gives the draft a chance at all, and so does the row from which it was drawn.

Otherwise the text goes on with the token of the exact rule. So of two deferred drafts at least W accepted ones lie
between. The sum is at most log 3 = 1.0986: no draft is deferred at a theta above it, nor at temperature settings that
leave one token.

Source: Training-Free Loosely Speculative Decoding: Accepting Semantically Correct Drafts Beyond Exact Match
(arXiv:2511.22972); the sum over three tokens is that of vLLM's `rejection_sample_method` "fly", whose thresholds are
not those of the paper's normalised entropy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from paceline.errors import NumericsError
from paceline.tree import TokenTree, Verdict
from paceline.verifiers.base import ArgmaxVerifier, AtZero, Verifier, verify_each
from paceline.verifiers.kept_rejections import JudgedChain, walk_past

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws, Rows

LIKELIEST: Final = 3
"""Tokens of which the entropy is taken."""


class Fly(Verifier):
    """Keeps lone mismatches at which the target is unsure, at temperature 0 too; chains alone.

    Args:
        fly_window_size: W, how many drafts after a rejected one must be accepted for it to be kept.
        fly_entropy_threshold: theta, from which entropy of the three likeliest tokens on the target is unsure.
    Raises:
        CapabilityError: on a tree with branches.
    """

    name = "fly"
    row_by_row = True
    chains_only = True

    def __init__(self, fly_window_size: int = 6, fly_entropy_threshold: float = 0.3) -> None:
        self.fly_window_size, self.fly_entropy_threshold = fly_window_size, fly_entropy_threshold

    def at_zero(self) -> ArgmaxVerifier:
        """The same rule, judged against the likeliest tokens."""
        return AtZero(self)

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(self._verdict, trees, rows, draws)

    def _verdict(self, tree: TokenTree, rows_nv: Rows, draws: Draws) -> Verdict:
        return walk_past(self.name, tree, rows_nv, draws, self.defers)

    def defers(self, chain: JudgedChain, place: int) -> bool:
        """Whether a draft that the exact rule rejects is kept."""
        window = range(place + 1, place + self.fly_window_size + 1)
        if window.stop > len(chain):
            return False
        if (p_v := chain.possible(place)) is None or top_entropy(p_v) < self.fly_entropy_threshold:
            return False
        try:
            return all(chain.exact(later)[0] is not None for later in window)
        except NumericsError:  # a row behind it holds no distribution
            return False


def top_entropy(p_v: torch.Tensor) -> float:
    """-sum of p log p over the three likeliest tokens of (v,) probabilities, in nats."""
    top_k = p_v.topk(min(LIKELIEST, len(p_v))).values
    return float(torch.special.entr(top_k).sum())
