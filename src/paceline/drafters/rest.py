"""Retrieval: what follows the last tokens in a datastore of texts?

In: the text so far, a datastore made by `paceline datastore build`. Out: trees of point proposals. Not here: the datastore's file
(`datastore`), search and trie (`rest_trie`).

The datastore is mapped and never written; nothing is kept per sequence, so that any number of requests and processes share it.

Source: REST: Retrieval-Based Speculative Decoding (arXiv:2311.08252).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from paceline.checking import integer
from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.datastore import Datastore
from paceline.drafters.rest_trie import LONGEST_MATCH, drafted
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget, Scores, Verdict

MOST_PLACES: Final = 65536


class Retriever:
    """Drafts from one datastore; the part that `rest` and `rasd` share.

    Args:
        args: of the drafter.
        datastore, max_match_length, min_match_length, max_matches, num_speculative_tokens: see `RestDrafter`.
    Raises:
        ConfigError: a value outside its range. DrafterError: no datastore, or one that does not fit the target.
    """

    def __init__(
        self,
        args: DrafterArgs,
        *,
        datastore: object,
        max_match_length: int,
        min_match_length: int | None,
        max_matches: int,
        num_speculative_tokens: int | None,
    ) -> None:
        integer("max_match_length", max_match_length, 1, LONGEST_MATCH)
        shortest = min(2, max_match_length) if min_match_length is None else min_match_length
        integer("min_match_length", shortest, 1, max_match_length)
        integer("max_matches", max_matches, 1, MOST_PLACES)
        if num_speculative_tokens is not None:
            integer("num_speculative_tokens", num_speculative_tokens, 0)
        self.store = Datastore.of(datastore, args.fingerprint())
        self.index, self.limit, self.longest = args.index, num_speculative_tokens, max_match_length
        chains_only = args.target is not None and not args.target.capabilities.trees
        self.options = (shortest, max_matches, args.vocab_size, chains_only)
        self._draft([[0]], [Budget(1, 1)], None)  # compiles, or reads what was compiled

    def propose(
        self,
        contexts: Sequence[Context],
        budgets: Sequence[Budget],
        rules: Sequence[tuple[Sequence[int], Sequence[float]] | None] | None = None,
    ) -> list[TokenTree]:
        """One tree per context within its budget.

        Args:
            rules: per context the first tokens that are allowed, with their chances; None allows all.
        """
        if not len(self.store.data) or not any(budget.nodes > 0 and budget.depth > 0 for budget in budgets):
            return [EMPTY_TREE] * len(contexts)
        return self._draft([context.tokens[-self.longest :] for context in contexts], budgets, rules)

    def _draft(
        self,
        tails: Sequence[Sequence[int]],
        budgets: Sequence[Budget],
        rules: Sequence[tuple[Sequence[int], Sequence[float]] | None] | None,
    ) -> list[TokenTree]:
        most = 2**31 if self.limit is None else self.limit
        wants = np.array([(budget.nodes, min(budget.depth, budget.nodes, most)) for budget in budgets], np.int64)
        return drafted(self.store.data, self.store.shards, tails, wants, self.options, rules=rules, source=self.index)


class RestDrafter:
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
    catches_up = True
    taps: Sequence[int] = ()

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
        self.retriever = Retriever(
            args,
            datastore=datastore,
            max_match_length=max_match_length,
            min_match_length=min_match_length,
            max_matches=max_matches,
            num_speculative_tokens=num_speculative_tokens,
        )

    def begin(self, contexts: Sequence[Context]) -> list[RestState]:
        return [RestState(context) for context in contexts]

    def propose(self, states: Sequence[RestState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return self.retriever.propose([state.context for state in states], budgets)

    def observe(
        self, states: Sequence[RestState], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """Nothing: `propose` reads the end of the text."""

    def fork(self, state: RestState, context: Context) -> RestState:
        return RestState(context)

    def end(self, states: Sequence[RestState]) -> None:
        """Nothing is held."""


class RestState:
    """A sequence: only its text."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context
