"""Typical acceptance, Medusa's rule: a drafted token is accepted if the target finds it plausible. Approximate by
design.

Source: Medusa, section 2.3.1 (arXiv:2401.10774): x is accepted if p(x) > min(epsilon, delta * exp(-H(p))).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import NumericsError
from paceline.tree import CANDIDATE, ROOT, IntArray, TokenTree, Verdict
from paceline.verifiers.base import Verifier, before_bad_row, sample, verify_each
from paceline.verifiers.recursive_rejection import departures_of

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws

_LOG_OF_NOTHING: Final = -1e4
"""Stands for log 0 where it is multiplied by that 0, as the entropy wants 0 * log 0 = 0."""


class TypicalAcceptance(Verifier):
    """Accepts what is typical of the target, drawn and point trials alike.

    Of all paths whose every token is plausible, the longest is taken; among equals the likeliest, then the first. The
    token after it is the target's own draw, as in plain decoding, so text that no drafter touches keeps the target's
    distribution. (Medusa takes the argmax or a draw from the typical tokens there, vLLM the argmax after a rejection.)
    At temperature 0 rows hold all weight on the argmax, H is 0, and the rule is greedy's: equal or reject.

    Args:
        posterior_threshold: epsilon, a probability at which a token is always plausible.
        posterior_alpha: delta, the factor on exp(-H). Below 1 the target's likeliest token always is.
    """

    name = "typical_acceptance_sampler"

    def __init__(self, posterior_threshold: float = 0.09, posterior_alpha: float = 0.3) -> None:
        self.posterior_threshold, self.posterior_alpha = posterior_threshold, posterior_alpha

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(self._verdict, trees, rows, draws)

    def _verdict(self, tree: TokenTree, rows_nv: torch.Tensor, draws: Draws) -> Verdict:
        path = tree.path(self._longest(tree, rows_nv)) if len(tree) else ()
        accepted = [int(tree.tokens[node]) for node in path]
        try:
            next_token = sample(draws, len(path), rows_nv[path[-1] + 1 if path else 0])
        except NumericsError:
            if path:
                return before_bad_row(path, accepted)
            raise
        return Verdict(path, tuple(accepted), next_token, departures_of(tree, path, rows_nv, draws))

    def _longest(self, tree: TokenTree, rows_nv: torch.Tensor) -> int:
        """The node at which the best accepted path ends, or ROOT."""
        inner, row_n = np.unique(tree.parents, return_inverse=True)
        plausible, logs = self.plausible(rows_nv[inner + 1], row_n, tree.tokens)
        reached = {ROOT: (0, 0.0)}
        for node, (parent, kind) in enumerate(zip(tree.parents.tolist(), tree.kinds.tolist(), strict=True)):
            if parent in reached and plausible[node] and kind == CANDIDATE:
                length, log = reached[parent]
                reached[node] = (length + 1, log + logs[node])
        return max(reached, key=lambda node: (*reached[node], -node))

    def plausible(
        self, weights_rv: torch.Tensor, row_n: npt.NDArray[np.intp], tokens_n: IntArray
    ) -> tuple[list[bool], list[float]]:
        """Whether `tokens_n[i]` is plausible under row `row_n[i]`, and its log probability; no token is under a row
        with NaN.
        """
        log_rv = torch.log_softmax(
            weights_rv, -1, dtype=torch.float64 if weights_rv.dtype == torch.float64 else torch.float32
        )
        entropy_r = -(log_rv.exp() * log_rv.clamp(min=_LOG_OF_NOTHING)).sum(-1)
        limit_r = (self.posterior_alpha * torch.exp(-entropy_r)).clamp(max=self.posterior_threshold)
        log_n = log_rv[row_n, tokens_n]
        plausible_n = log_n.exp() > limit_r[row_n]
        found, logs = torch.stack((plausible_n.to(log_n.dtype), log_n)).tolist()
        return [bool(one) for one in found], logs
