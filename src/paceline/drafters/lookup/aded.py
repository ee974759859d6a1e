"""Drafting with a table of tri-grams that follows what the target says.

In: the text so far. Out: trees of point proposals. Not here: the table (`aded_table`), the search (`aded_search`),
tenants (`tables`).

The table counts prompts and what the target has committed; tokens that were drafted and refused never enter it. It
starts empty (the paper counts a corpus first; `tables` keeps it between runs instead). Nothing else is kept of a
request, so that requests of one tenant learn from each other.

Source: ADED: Adaptive Draft-Verification for Efficient LLM Decoding (arXiv:2407.12021).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.chains import tree_of
from paceline.drafters.common.tables import MAX_TENANTS, Tables
from paceline.drafters.common.text import SingleDrafter
from paceline.drafters.lookup.aded_search import grow
from paceline.drafters.lookup.aded_table import WAYS, TrigramTable
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict
from paceline.utils import integer, number

MOST_ROWS: Final = 2**24
MOST_FOLLOWERS: Final = 64
MOST_SIMULATIONS: Final = 4096
CONTEXT: Final = 2


class _State:
    """A sequence, and how many of its tokens the table has counted."""

    __slots__ = ("context", "done")

    def __init__(self, context: Context, done: int = 0) -> None:
        self.context, self.done = context, done


class AdedDrafter(SingleDrafter[_State]):
    """Drafts the paths that a tree search over tri-grams visits most.

    Args:
        table_rows: pairs of tokens that a tenant's table holds; the longest unused go first.
        table_width: followers of a pair.
        simulations: of the search, in a step; None takes four for each node of the budget.
        exploration: weight of the part of the score that spreads the visits; 0 follows the likeliest path alone.
        num_speculative_tokens: most levels to draft; None leaves it to the budget.
        tables: folder where tables are read at the start and written by `LLM.save_tables`.
        shared_tables: one table for all tenants. max_tenants: most tables at a time (64), the least recently used goes
        first.
    Raises:
        ConfigError: a value outside its range. DrafterError: tables that do not fit or are damaged.
    """

    name = "aded"
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        table_rows: int = 2**16,
        table_width: int = 8,
        simulations: int | None = None,
        exploration: float = 1.0,
        num_speculative_tokens: int | None = None,
        tables: str | None = None,
        shared_tables: bool = False,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        super().__init__(args, num_speculative_tokens)
        integer("table_rows", table_rows, WAYS, MOST_ROWS)
        integer("table_width", table_width, 1, MOST_FOLLOWERS)
        if simulations is not None:
            integer("simulations", simulations, 1, MOST_SIMULATIONS)
        number("exploration", exploration, 0.0, 1e6, "be in 0..1e6")
        self.simulations, self.exploration = simulations, float(exploration)
        new = partial(TrigramTable, -(-table_rows // WAYS) * WAYS, table_width, args.vocab_size)
        self.tables: Tables[TrigramTable] = Tables(
            "aded", args, new, folder=tables, shared=shared_tables, max_tenants=max_tenants
        )
        self._compile()

    def _begin(self, context: Context) -> _State:
        state = _State(context)
        self._catch_up(state)
        return state

    def observe(
        self, states: Sequence[_State], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        for state in states:
            self._catch_up(state)

    def fork(self, state: _State, context: Context) -> _State:
        return _State(context, state.done)

    def end(self, states: Sequence[_State]) -> None:
        for state in states:
            self._catch_up(state)

    def _catch_up(self, state: _State) -> TrigramTable:
        """Count what the text has got since the last time."""
        table, text = self.tables.of(state.context.tenant), state.context.tokens
        if state.done < len(text):
            table.learn(text[max(state.done - CONTEXT, 0) :])
            state.done = len(text)
        return table

    def _propose(self, state: _State, budget: Budget) -> TokenTree:
        table = self._catch_up(state)
        if len(state.context.tokens) < CONTEXT:
            return EMPTY_TREE
        first, second = state.context.tokens[-CONTEXT:]
        return self._search(table, first, second, budget.nodes, self._steps(budget))

    def _search(self, table: TrigramTable, first: int, second: int, nodes: int, depth: int) -> TokenTree:
        simulations = min(4 * nodes, MOST_SIMULATIONS) if self.simulations is None else self.simulations
        links, chances = np.empty((nodes, 3), np.int32), np.empty(nodes, np.float32)
        limits, want = (simulations, depth), (nodes, self.chains_only)
        count = grow(table.rows, (first, second), limits, self.exploration, want, (links, chances))
        return tree_of(links[:count], chances[:count], self.index)

    def _compile(self) -> None:
        """Compile, or read what was compiled, before the first request."""
        table = TrigramTable(WAYS, 1, self.vocab_size)
        table.learn([0, 0, 0])
        self._search(table, 0, 0, 1, 1)
