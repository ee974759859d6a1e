"""Lexical units: drafts of which the model was sure when it guessed them stand without verification. Approximate by
design.

Each draft of a chain is first judged by the exact rule: at temperature 0 equal or reject, above it sample-and-match for
points and rejection for draws. Where that rejects it, it stands all the same if

- its confidence, the probability that the model gave it where it was guessed, is at least beta;
- the target, and the row from which it was drawn, give it a chance at all.

The first draft of which neither is true ends the step. So a step commits the target's own token and a run of drafts
behind it, the rest of its lexical unit. At a beta above 1 nothing stands that the exact rule rejects.

The paper feeds nothing of what is less sure than beta; here it is fed, and stands where it is the target's own, which
the same pass says.

Source: Decoding at the speed of thought: harnessing parallel decoding of lexical units for LLMs (arXiv:2405.15208); its
beta is not known to us.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.tree import TokenTree, Verdict
from paceline.verifiers.base import ArgmaxVerifier, AtZero, Verifier, verify_each
from paceline.verifiers.kept_rejections import JudgedChain, walk_past

if TYPE_CHECKING:
    from paceline.errors import NumericsError
    from paceline.verifiers.base import Draws, Rows


class LexicalUnits(Verifier):
    """Commits what the drafter was sure of, at temperature 0 too; chains alone.

    Args:
        unit_threshold: beta, from which confidence on a draft stands.
    Raises:
        CapabilityError: on a tree with branches.
    """

    name = "lexical_units"
    row_by_row = True
    chains_only = True

    def __init__(self, unit_threshold: float = 0.9) -> None:
        self.unit_threshold = unit_threshold

    def at_zero(self) -> ArgmaxVerifier:
        """The same rule, judged against the likeliest tokens."""
        return AtZero(self)

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(self._verdict, trees, rows, draws)

    def _verdict(self, tree: TokenTree, rows_nv: Rows, draws: Draws) -> Verdict:
        def stands(chain: JudgedChain, place: int) -> bool:
            sure = float(tree.confidence[chain.trials[place].node]) >= self.unit_threshold
            return sure and chain.possible(place) is not None

        return walk_past(self.name, tree, rows_nv, draws, stands)
