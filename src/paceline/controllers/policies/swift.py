"""SWIFT's confidence-aware drafting: stop after a doubtful token, and keep more candidates where the drafter doubts.

Source: SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv:2410.06916), "confidence-aware
inference"; constants from its published code. All side branches hang off the chain of most likely tokens. Chains have
no side branches: there, only the stop counts. Drafters whose trees have fewer candidates than called for keep all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from paceline.controllers.policies.base import MAX_LENGTH, ThresholdController
from paceline.utils import integer, number

if TYPE_CHECKING:
    from paceline.controllers.policies.base import PolicyState
    from paceline.tree import TokenTree

EDGES: Final = (0.95, 0.8, 0.5)
GREEDY_CANDIDATES: Final = (3, 5, 8, 10)
SAMPLED_CANDIDATES: Final = (1, 3, 5, 10)
"""Candidates of a level whose best token has a confidence above each edge, and below all."""


class SwiftController(ThresholdController):
    """Up to `max_step_draft` levels, none after a token whose confidence is below `stop_threshold`.

    That one is still verified.

    Trees of points are cut to 3, 5, 8 or 10 candidates a level (1, 3, 5 or 10 above temperature 0): more where the best
    one's confidence is lower, and nothing below any but the best.

    Args:
        stop_threshold: 0..1; 0 always drafts `max_step_draft` levels.
        max_step_draft: most levels.
        num_speculative_tokens: most nodes of a step's tree; None allows 10 a level.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: SWIFT (arXiv:2410.06916).
    """

    name = "swift"
    width = GREEDY_CANDIDATES[-1]

    def __init__(
        self,
        *,
        stop_threshold: float = 0.8,
        max_step_draft: int = 25,
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        number("stop_threshold", stop_threshold, 0.0, 1.0, "be in 0..1")
        integer("max_step_draft", max_step_draft, 1, MAX_LENGTH)
        super().__init__(max_step_draft, stop_threshold, num_speculative_tokens, disable_by_batch_size)

    def _kept(self, state: PolicyState[None], tree: TokenTree) -> list[int]:
        """The best node of each level of each drafter's chain, and beside it as many as its confidence calls for."""
        kept = super()._kept(state, tree)
        if tree.is_chain:
            return kept
        parents, sources, confidence = tree.parents.tolist(), tree.sources.tolist(), tree.confidence.tolist()
        families: dict[tuple[int, int], list[int]] = {}
        for node in kept:
            families.setdefault((parents[node], sources[node]), []).append(node)
        table = GREEDY_CANDIDATES if state.greedy else SAMPLED_CANDIDATES
        stays, best = set(), {-1}
        for (parent, _), family in families.items():
            if parent in best:
                ranked = sorted(family, key=lambda node: -confidence[node])
                best.add(ranked[0])
                stays.update(ranked[: table[sum(confidence[ranked[0]] <= edge for edge in EDGES)]])
        return [node for node in kept if node in stays]
