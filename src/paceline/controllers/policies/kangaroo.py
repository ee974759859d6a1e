"""Kangaroo's second early exit: drafting ends with the first token that the drafter is not sure of.

Source: Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (arXiv:2404.18911), section 3.2.
"""

from __future__ import annotations

from paceline.controllers.policies.base import MAX_LENGTH, ThresholdController
from paceline.utils import integer, number


class KangarooController(ThresholdController):
    """Up to `steps` tokens, none after one whose confidence is below `threshold`; that one is still verified.

    Args:
        threshold: the paper's eta, 0..1; 0 always drafts `steps` tokens.
        steps: the paper's gamma.
        num_speculative_tokens: most nodes of a step's tree; None sets no limit beside `steps`.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Raises:
        ConfigError: a value outside its range.
    Source: Kangaroo (arXiv:2404.18911).
    """

    name = "kangaroo"

    def __init__(
        self,
        *,
        threshold: float = 0.6,
        steps: int = 6,
        num_speculative_tokens: int | None = None,
        disable_by_batch_size: int | None = None,
    ) -> None:
        number("threshold", threshold, 0.0, 1.0, "be in 0..1")
        integer("steps", steps, 1, MAX_LENGTH)
        super().__init__(steps, threshold, num_speculative_tokens, disable_by_batch_size)
