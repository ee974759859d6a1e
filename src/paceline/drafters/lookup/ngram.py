"""Prompt lookup: where did the last few tokens stand before, and what came after them?

In: the text so far. Out: a chain of point proposals copied from it. Not here: text of other requests, any model.

The longest match of the last n tokens counts, n from `prompt_lookup_max` down to `prompt_lookup_min`, and of several
places the latest: on code and prose it is right more often than the earliest (1.31 against 1.29 tokens per step at n =
2..5, 1.44 against 1.38 at n = 1..5). A match that touches the end of the text goes on copying what it has copied
itself, so that periodic text is continued periodically. Every n-gram is indexed once, when it gets its follower; a step
costs microseconds however long the text.

Source: prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding); LLMA (arXiv:2304.04487).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.drafters.base import DrafterArgs
from paceline.drafters.lookup.ngram_table import LONGEST_MATCH, CopyDrafter
from paceline.utils import integer

_MATCH: Final = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32)
_RIGHT: Final = (0.19, 0.39, 0.49, 0.59, 0.63, 0.74, 0.83, 0.90, 0.94, 0.97)
MATCH_CONFIDENCE: Final[tuple[float, ...]] = tuple(
    float(c) for c in np.interp(np.arange(1, LONGEST_MATCH + 1), _MATCH, _RIGHT).astype(np.float32)
)
"""By match length - 1: how often the token after a match was the next token, on Python sources and Markdown (50,000
tokens).
"""


class NgramDrafter(CopyDrafter):
    """Drafts by copying what followed the last tokens where they stood before.

    Args:
        prompt_lookup_min, prompt_lookup_max: lengths of the n-grams that are looked up, vLLM's names; 1 and 5 by
        default.
        num_speculative_tokens: most tokens to propose; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
    """

    name, sure = "ngram", MATCH_CONFIDENCE

    def __init__(
        self,
        args: DrafterArgs,
        *,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        highest = max(5, prompt_lookup_min or 1) if prompt_lookup_max is None else prompt_lookup_max
        lowest = 1 if prompt_lookup_min is None else prompt_lookup_min
        integer("prompt_lookup_max", highest, 1, LONGEST_MATCH)
        integer("prompt_lookup_min", lowest, 1, highest)
        super().__init__(args, (lowest, highest), num_speculative_tokens)
