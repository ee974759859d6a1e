"""Typical acceptance, Medusa's rule: a guess stands if the target finds it plausible. Approximate by design.

In:  trees and the target's log-weights after the rules, temperature included. Out: the longest path of plausible tokens, and a token
of the target's own after it. The output law is NOT the target's: it leans towards what drafters propose.
Not here: anything exact (`recursive_rejection`, `greedy`).

Source: Medusa, section 2.3.1 (arXiv:2401.10774): x stands if p(x) > min(epsilon, delta * exp(-H(p))).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.tree.token_tree import CANDIDATE, ROOT, TokenTree
from paceline.tree.types import Verdict
from paceline.verifiers.base import sample, verify_each

if TYPE_CHECKING:
    from paceline.errors import NumericsError
    from paceline.verifiers.base import Draws


class TypicalAcceptance:
    """Accepts what is typical of the target, drawn and point trials alike.

    Of all paths whose every token stands, the longest is taken; among equals the likeliest, then the first. The token after it is
    the target's own draw, as in plain decoding, so text that no drafter touches keeps the target's law. (Medusa takes the argmax
    or a draw from the typical tokens there, vLLM the argmax after a refusal.) At temperature 0 rows hold all weight on the argmax,
    H is 0, and the rule is greedy's: equal or reject.

    Args:
        posterior_threshold: epsilon, a probability at which a token always stands.
        posterior_alpha: delta, the factor on exp(-H). Below 1 the target's likeliest token always stands.
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
        next_token = sample(draws, len(path), rows_nv[path[-1] + 1 if path else 0])
        return Verdict(path, tuple(int(tree.tokens[node]) for node in path), next_token)

    def _longest(self, tree: TokenTree, rows_nv: torch.Tensor) -> int:
        """The node at which the best accepted path ends, or ROOT."""
        parents, kinds = tree.parents.tolist(), tree.kinds.tolist()
        stands, logs = self.plausible(rows_nv[tree.parents + 1], torch.from_numpy(tree.tokens))
        reached = {ROOT: (0, 0.0)}
        for node, parent in enumerate(parents):
            if parent in reached and stands[node] and kinds[node] == CANDIDATE:
                length, log = reached[parent]
                reached[node] = (length + 1, log + logs[node])
        return max(reached, key=lambda node: (*reached[node], -node))

    def plausible(self, weights_nv: torch.Tensor, tokens_n: torch.Tensor) -> tuple[list[bool], list[float]]:
        """Whether each token stands under its row, and its log probability; no token stands under a row with NaN."""
        dtype = torch.float64 if weights_nv.dtype == torch.float64 else torch.float32
        log_nv = torch.log_softmax(weights_nv, -1, dtype=dtype)
        entropy_n = torch.special.entr(log_nv.exp()).sum(-1)
        limit_n = (self.posterior_alpha * torch.exp(-entropy_n)).clamp(max=self.posterior_threshold)
        log_n = log_nv.gather(1, tokens_n.to(log_nv.device, torch.int64)[:, None]).squeeze(1)
        stands_n, logs_n = torch.stack(((log_n.exp() > limit_n).to(dtype), log_n)).tolist()
        return [bool(stand) for stand in stands_n], logs_n
