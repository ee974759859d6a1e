"""Greedy chains from a runner that drafts them in one call: the shortest way from a text to a tree.

In: settled states, how far to draft. Out: one chain each, the trees of `draft_chain`. Not here: runners without `draft_chains`,
sampling, rules, branches (`draft_chain`, `draft_tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from paceline.drafters.chain_tree import chain_tree
from paceline.drafters.draft_state import CHUNK, DraftState, catch_up
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import Budget, always_go_on

if TYPE_CHECKING:
    from paceline.models.base import Runner, SequenceCache

Stop = Callable[[int, float], bool]


@runtime_checkable
class ChainRunner(Protocol):
    """A runner with a shorter way to draft greedily."""

    def draft_chains(
        self,
        caches: Sequence[SequenceCache],
        feeds: Sequence[Sequence[int]],
        steps: Sequence[int],
        stops: Sequence[Stop | None],
    ) -> list[tuple[list[int], list[float]]]:
        """Append `feeds` and draft up to `steps` tokens each greedily; all drafted ones but the last are appended too.

        `stop(depth, confidence)` is asked before level `depth` (from 2 on) with the chance of the path so far; None never stops.
        Returns the drafted tokens and the probability of each.
        """


def quick_chains(
    runner: Runner, states: Sequence[DraftState], budgets: Sequence[Budget], steps: Sequence[int], source: int
) -> list[TokenTree]:
    """One greedy chain per state; the caches then hold the whole text and all drafted tokens but the last of each."""
    if any(len(state.context.tokens) - state.base > CHUNK for state in states):
        catch_up(runner, states, CHUNK)
    feeds, stops = [state.context.tokens[state.base :] for state in states], [stop_of(budget) for budget in budgets]
    found = cast(ChainRunner, runner).draft_chains([state.cache for state in states], feeds, steps, stops)
    trees = []
    for state, (tokens, chances) in zip(states, found, strict=True):
        state.base, state.ahead = len(state.context.tokens), tokens[:-1]
        trees.append(chain_tree(tokens, chances, source))
    return trees


def stop_of(budget: Budget) -> Stop | None:
    """A budget's `go_on` the other way round; None where it always says yes."""
    go_on = budget.go_on
    return None if go_on is always_go_on else lambda depth, reach: not go_on(depth, reach, None)
