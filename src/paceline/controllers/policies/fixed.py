"""A fixed number of speculative tokens in every step, for one drafter or for several in the order of the user's
list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.controllers.auto.acceptance import Acceptance, SequenceOdds
from paceline.controllers.auto.choice import fixed_shape
from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.controllers.explanations import LAST_TOKEN, ZERO_TOKENS, count, none_from, too_many
from paceline.registry import DRAFTERS
from paceline.tree import Budget, select_nodes
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.tree import TokenTree

POINTS: Final = ("table", "fusion")
"""Kinds of drafters that never draw their tokens."""


class FixedController(Controller):
    """Up to `num_speculative_tokens` nodes a step and sequence, from every drafter.

    Of the merged tree of several drafters as many nodes stay as one may propose: those most likely to be accepted, by
    calibrated confidence, an earlier drafter's where they are equally likely. Drawn tokens must not be chosen by what
    they are: they keep the number less what the others proposed, and at least half of it, the first ones drawn staying.

    Args:
        num_speculative_tokens: most nodes of a step's tree, and most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
        drafters: their names, in the order of their source index.
    Raises:
        ConfigError: a negative number of tokens.
    """

    name = "fixed"

    def __init__(
        self, num_speculative_tokens: int, *, disable_by_batch_size: int | None = None, drafters: Sequence[str] = ("",)
    ) -> None:
        need(num_speculative_tokens >= 0, "num_speculative_tokens", "be 0 or more", num_speculative_tokens)
        self.num_speculative_tokens = num_speculative_tokens
        self.disable_by_batch_size = disable_by_batch_size
        self._points = {i for i, name in enumerate(drafters) if name in DRAFTERS and DRAFTERS[name].kind in POINTS}
        self._budgets = [Budget(num_speculative_tokens, num_speculative_tokens)] * len(drafters)
        self._acceptance = Acceptance(len(drafters))
        self.odds: dict[int, SequenceOdds] = {}
        self._signals: Sequence[Signal] = ()

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """The same for everybody."""
        self._signals = signals
        limit = self.disable_by_batch_size
        if not self.num_speculative_tokens or (limit is not None and len(signals) >= limit):
            return Plan.nothing(len(signals))
        return Plan([self._budgets] * len(signals))

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Trees within the number as they are; merged ones cut to it."""
        if len(self._budgets) == 1:
            return list(trees)
        most, chosen = self.num_speculative_tokens, []
        for signal, tree in zip(self._signals, trees, strict=True):
            fits = len(tree) <= most and not tree.trials
            chosen.append(tree if fits else self._cut(tree, self._own(signal.key)))
        return chosen

    def _cut(self, tree: TokenTree, odds: SequenceOdds) -> TokenTree:
        """Nodes up to the number. How many drawn ones may stay follows from how many others there are: where they fell
        must not count, so trees with drawn ones come here whatever their size.
        """
        most, sources = self.num_speculative_tokens, enumerate(tree.sources.tolist())
        joined = sum(not self._points.isdisjoint((source, *tree.also.get(node, ()))) for node, source in sources)
        reach_n = np.asarray(self._acceptance.reach(odds, tree))
        return select_nodes(
            tree, most - sum(tree.kinds.tolist()), drawn_nodes=most - min(joined, most // 2), reach_n=reach_n
        )

    def observe(self, outcome: Outcome) -> None:
        """With several drafters, learn how likely the nodes of each are accepted."""
        if len(self._budgets) == 1:
            return
        rows = zip(self._signals, outcome.proposed, outcome.trees, outcome.verdicts, strict=True)
        for signal, proposed, tree, verdict in rows:
            drawn = fixed_shape(proposed)
            about = tree if drawn else proposed
            self._acceptance.observe(self._own(signal.key), about, verdict.tokens, verdict.path, drawn=drawn)

    def _own(self, key: int) -> SequenceOdds:
        return self.odds.setdefault(key, SequenceOdds(len(self._budgets)))

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self.odds.pop(key, None)

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, the policy in one line."""
        number, limit = self.num_speculative_tokens, self.disable_by_batch_size
        if index is None:
            return f"fixed: {number} speculative tokens a step{none_from(limit)}"
        running, remaining = len(self._signals), self._signals[index].remaining
        if limit is not None and running >= limit:
            return too_many(running, limit)
        if number == 0:
            return ZERO_TOKENS
        if remaining <= 1:
            return LAST_TOKEN
        deepest = count(remaining - 1, "level")
        cut = f", at most {deepest} since {remaining} tokens may still come" if remaining <= number else ""
        return f"The number is fixed: up to {count(number, 'node')} in every step{cut}."
