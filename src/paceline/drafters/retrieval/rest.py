"""REST: what follows the last tokens in a datastore of texts, and the base of drafters that look this up.

The datastore is mapped and never written; nothing is kept per sequence, so that any number of requests and processes
share it.

Source: REST: Retrieval-Based Speculative Decoding (arXiv:2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import TextDrafter
from paceline.drafters.retrieval.datastore import Datastore
from paceline.drafters.retrieval.trie import LONGEST_MATCH, FirstTokens, drafted
from paceline.tree import Budget, TokenTree
from paceline.utils import integer

MOST_PLACES: Final = 65536


class TextState:
    """Keeps a sequence, of which only the text is known."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context


class RetrievalDrafter(TextDrafter[TextState]):
    """Drafts from a datastore; a drafter says how it reads one.

    Args:
        args: of the drafter.
        datastore, max_match_length, min_match_length, max_matches, num_speculative_tokens: see `RestDrafter`.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: no datastore, or one that does not fit the target.
    """

    def __init__(
        self,
        args: DrafterArgs,
        *,
        datastore: str | None = None,
        max_match_length: int = 32,
        min_match_length: int | None = None,
        max_matches: int = 128,
        num_speculative_tokens: int | None = None,
    ) -> None:
        super().__init__(args, num_speculative_tokens)
        integer("max_match_length", max_match_length, 1, LONGEST_MATCH)
        shortest = min(2, max_match_length) if min_match_length is None else min_match_length
        integer("min_match_length", shortest, 1, max_match_length)
        integer("max_matches", max_matches, 1, MOST_PLACES)
        self.store, self.longest = Datastore.of(datastore, args.fingerprint()), max_match_length
        self._options = (shortest, max_matches, args.vocab_size, self.chains_only)
        self._retrieve([TextState(Context("", [0], 1))], [Budget(1, 1)], [None])  # compiles, or reads what was compiled

    def _begin(self, context: Context) -> TextState:
        return TextState(context)

    def fork(self, state: TextState, context: Context) -> TextState:
        return TextState(context)

    def _retrieve(
        self, states: Sequence[TextState], budgets: Sequence[Budget], rules: Sequence[FirstTokens | None]
    ) -> list[TokenTree]:
        """One tree per sequence within its budget.

        Args:
            rules: per sequence the first tokens that are allowed, with their chances; None allows all.
        """
        tails = [state.context.tokens[-self.longest :] for state in states]
        wants = np.array([(budget.nodes, self._steps(budget)) for budget in budgets], np.int64)
        return drafted(self.store.data, self.store.shards, tails, wants, self._options, rules=rules, source=self.index)


class RestDrafter(RetrievalDrafter):
    """Drafts what followed the longest match of the last tokens in a datastore.

    Args:
        datastore: path of a file made by `paceline datastore build` with the target's tokenizer.
        max_match_length, min_match_length: tokens of a match; the longest counts. 32 and 2 by default.
        max_matches: positions of a match that are counted; of more, as many spread evenly.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: no datastore, a damaged one, or one of another tokenizer.
    """

    name = "rest"

    def propose(
        self, states: Sequence[TextState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        return self._retrieve(states, budgets, [None] * len(states))
