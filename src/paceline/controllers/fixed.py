"""A fixed number of speculative tokens in every step.

In: the number. Out: the same budget each time, shared by the drafters in their order. Not here: any estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.checking import need
from paceline.controllers.base import Controller, Signal
from paceline.controllers.words import fixed_words
from paceline.registry import DRAFTERS
from paceline.tree.select import select
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree


class FixedController(Controller):
    """Up to `num_speculative_tokens` nodes a step and sequence; what the first drafter leaves, the next may use.

    A fusion (`rasd`) may propose as many whatever the others left. Of the joined tree those nodes stay that are most likely
    reached. Drawn tokens must not be chosen by what they are: they keep their number less what the fusion proposed, and at least
    half of it, the first ones drawn staying.

    Args:
        num_speculative_tokens: most nodes of a step's tree, and most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
        drafters: their names, in the order of their source index; without them none is a fusion.
    Raises:
        ConfigError: a negative number of tokens.
    """

    name = "fixed"
    patient = True

    def __init__(
        self, num_speculative_tokens: int, *, disable_by_batch_size: int | None = None, drafters: Sequence[str] = ()
    ) -> None:
        need(num_speculative_tokens >= 0, "num_speculative_tokens", "be 0 or more", num_speculative_tokens)
        self.num_speculative_tokens = num_speculative_tokens
        self.disable_by_batch_size = disable_by_batch_size
        self._fusions = {i for i, name in enumerate(drafters) if name in DRAFTERS and DRAFTERS[name].kind == "fusion"}
        self._signals: Sequence[Signal] = ()
        self._off = False

    def plan(self, signals: Sequence[Signal]) -> None:
        """Remember the step's sequences."""
        self._signals = signals
        self._off = self.disable_by_batch_size is not None and len(signals) >= self.disable_by_batch_size

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """The nodes that earlier drafters left, all for a fusion, no deeper than the sequence may still grow."""
        nodes = self.num_speculative_tokens - (0 if drafter in self._fusions else len(so_far))
        depth = min(self.num_speculative_tokens, self._signals[index].remaining - 1)
        return NO_BUDGET if self._off or nodes < 1 or depth < 1 else Budget(nodes, depth)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Trees within the number as they are; joined ones cut to it."""
        most = self.num_speculative_tokens
        return [tree if len(tree) <= most and not (tree.trials and self._fusions) else self._cut(tree) for tree in trees]

    def _cut(self, tree: TokenTree) -> TokenTree:
        """The number's worth of nodes. How many drawn ones may stay follows from how much was joined to them: where they fell must
        not count, so trees with drawn ones come here whatever their size."""
        most, sources = self.num_speculative_tokens, enumerate(tree.sources.tolist())
        joined = sum(not self._fusions.isdisjoint((source, *tree.also.get(node, ()))) for node, source in sources)
        return select(tree, most - sum(tree.kinds.tolist()), drawn_nodes=most - min(joined, most // 2))

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, the policy in one line."""
        limit = self.disable_by_batch_size
        if index is not None:
            return fixed_words(self.num_speculative_tokens, len(self._signals), limit, self._signals[index].remaining)
        off = "" if limit is None else f", none from {limit} running sequences on"
        return f"fixed: {self.num_speculative_tokens} speculative tokens a step{off}"
