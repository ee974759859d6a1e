"""CopySpec: what followed the last tokens where they occurred first in the history?

All grams of `copyspec_gamma` tokens are indexed as they get a follower, so the gram at the end of the text never finds
itself; the first position of a gram is kept for good. Where the paper and its code leave room: gamma is 3, as in all of
its evaluation scripts (its decoder class alone says 5), and it stays so near the limit of tokens (there the reference
shortens it, to grams that nobody has indexed); a copy that reaches the end of the text goes on with what it has copied
itself, where the reference stops short.

Source: CopySpec: Speculative Copy-and-Paste (arXiv:2502.08923).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.drafters.base import DrafterArgs
from paceline.drafters.lookup.ngram import LONGEST_MATCH, CopyDrafter
from paceline.utils import integer

LONGEST_GRAM: Final = 32

_MATCH: Final = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 24, 32)
_RIGHT: Final = (0.2, 0.36, 0.5, 0.6, 0.66, 0.7, 0.72, 0.76, 0.85, 0.86, 0.88, 0.91)
COPY_CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(1, LONGEST_MATCH + 1), _MATCH, _RIGHT).astype(np.float32)
)
"""By match length - 1: how often the copied token was the next token, on Python sources and Markdown (94,000 tokens,
gamma 3; the values for 1 and 2 are extrapolated).
"""


class CopySpecDrafter(CopyDrafter):
    """Drafts by copying what followed the last tokens where they occurred first.

    Args:
        copyspec_gamma: how many tokens must match, 1..32.
        num_speculative_tokens: most tokens to copy at a time, within the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name, sure, keep_first = "copyspec", COPY_CONFIDENCE, True

    def __init__(self, args: DrafterArgs, *, copyspec_gamma: int = 3, num_speculative_tokens: int = 10) -> None:
        integer("copyspec_gamma", copyspec_gamma, 1, LONGEST_GRAM)
        super().__init__(args, (copyspec_gamma, copyspec_gamma), num_speculative_tokens)
