"""Retrieval: what follows the last tokens in a datastore of texts?

In: the text so far, a datastore made by `paceline datastore build`. Out: trees of point proposals. Not here: looking it
up (`retrieval`).

Source: REST: Retrieval-Based Speculative Decoding (arXiv:2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafters.retrieval.base import RetrievalDrafter, TextState
from paceline.tree import Budget, TokenTree


class RestDrafter(RetrievalDrafter):
    """Drafts what followed the longest match of the last tokens in a datastore.

    Args:
        datastore: path of a file made by `paceline datastore build` with the target's tokenizer.
        max_match_length, min_match_length: tokens of a match; the longest counts. 32 and 2 by default.
        max_matches: places of a match that are counted; of more, as many spread evenly.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range. DrafterError: no datastore, a damaged one, or one of another tokenizer.
    """

    name = "rest"

    def propose(
        self, states: Sequence[TextState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        return self._retrieve(states, budgets, [None] * len(states))
