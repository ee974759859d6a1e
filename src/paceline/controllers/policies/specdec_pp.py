"""SpecDec++: draft until a head on the draft model's states foretells a rejection.

A head that was trained beforehand (`models.heads.AcceptanceHead`) reads the draft model's last state of each drafted
token and gives the chance c_i that token i is accepted if those before it are. Drafting stops when 1 - c_1 ... c_i >
`stop_threshold`, within `bound`. The state of token i comes with the pass that drafts token i + 1, which is part of the
draft, as in the authors' code: so whether a token is drafted depends on those before it alone.

The head is trained with rejections that weigh more than acceptances, and so its chances of a rejection are higher than
true ones: the threshold is one of the method's, no probability.

Source: SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv:2405.19715).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.controllers.policies.base import RejectionController, Token
from paceline.tree import ACCEPTANCE


class SpecDecPPController(RejectionController[None]):
    """Stops when a trained head foretells that a token of the draft is rejected; the draft model has the head.

    Drafters beside it that have no such head are not stopped before `bound`.

    Args:
        stop_threshold: the paper's h, 0..1; 0 drafts the least, 1 the most that `bound` allows.
        bound: least and most tokens of a draft, both included.
        num_speculative_tokens: most nodes of a step's tree, below `bound` too; None sets no further limit.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: SpecDec++ (arXiv:2405.19715).
    """

    name = "specdec_pp"
    reads_acceptance = True

    def __init__(
        self,
        *,
        stop_threshold: float = 0.3,
        bound: Sequence[int] = (2, 20),
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        super().__init__(stop_threshold, bound, num_speculative_tokens, disable_by_batch_size)

    def _remember(self, greedy: bool) -> None:
        return None

    def _chance(self, memory: None, token: Token) -> float:
        """Of the token before this one, whose state has been read; 1 where nothing was."""
        return float(token.features.get(ACCEPTANCE, 1.0)) if isinstance(token.features, Mapping) else 1.0
