"""Trees of points from a runner that grows them in one call: the shortest way from a text to a tree.

In: settled states, plans. Out: one tree each, those of `grow` with the same policy up to nearly equal chances. Not here: runners
without `draft_trees`, sampling, rules (`grow` and the policies).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from paceline.drafters.draft_quick import stop_of
from paceline.drafters.draft_state import CHUNK, DraftState, catch_up
from paceline.models.tree_plan import GrownTree, TreePlan, TreeRunner
from paceline.tree.chain_columns import chain_columns, chain_sources
from paceline.tree.token_tree import EMPTY_TREE, TokenTree
from paceline.tree.types import Budget

if TYPE_CHECKING:
    from paceline.models.base import Runner

_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})


def quick_trees(
    runner: Runner, states: Sequence[DraftState], budgets: Sequence[Budget], plans: Sequence[TreePlan], source: int
) -> list[TokenTree]:
    """One tree per state; the caches then hold the text but for its last token, which is fed with the nodes."""
    if any(len(state.context.tokens) - state.base > CHUNK for state in states):
        catch_up(runner, states, CHUNK)
    feeds, stops = [state.context.tokens[state.base :] for state in states], [stop_of(budget) for budget in budgets]
    grown = cast(TreeRunner, runner).draft_trees([state.cache for state in states], feeds, plans, stops)
    for state, one in zip(states, grown, strict=True):
        state.base = len(state.context.tokens) - 1
        state.fed_tokens, state.fed_parents = one.fed_tokens, one.fed_parents
    return [_tree(one, source) for one in grown]


def _tree(grown: GrownTree, source: int) -> TokenTree:
    """`TokenTree.build` without its checks, for trees are well formed by their making."""
    tokens, parents, depths = grown.columns_3n
    count = len(tokens)
    if not count:
        return EMPTY_TREE
    columns = chain_columns(count)
    if depths[-1] == count and bool(np.array_equal(depths, columns.depths)):
        parents, depths = columns.parents, columns.depths
    sources = chain_sources(count, source)
    return TokenTree(tokens, parents, depths, sources, grown.confidence_n, columns.slots, columns.kinds, _NOTHING, _NOTHING)
