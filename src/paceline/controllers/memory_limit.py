"""Speculation within a limit of memory: how many nodes fit, and a controller that keeps to it.

What speculation takes beside plain decoding is, for each sequence of t tokens with a tree of n nodes, n keys and values
in the target's cache, n rows of logits (above temperature 0 also their log-weights, and what each token was drawn
from), and t + n - 1 tokens in the caches of draft models. Caches grow with the text and stay when drafting stops, so
they count until the sequence ends: where they leave no room, those that have run longest go on drafting and the others
decode plainly. With n = 0 from the start nothing is taken.

Source: SpecMemo, Speculative decoding is in your pocket (arXiv:2506.01986): memory as a function of nodes, batch and
length, and the largest tree within it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.tree import PROBE, Budget, select_nodes

if TYPE_CHECKING:
    from paceline.tree import TokenTree

logger = logging.getLogger("paceline.controllers")

MAX_NODES: Final = 1024
"""Nodes of a tree, whatever the memory."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that speculation takes.

    Attributes:
        slot: keys and values of a node in the target's cache. row: its logits.
        drawn: more for a node above temperature 0.
        caches: bytes that draft models hold for a sequence of so many tokens.
        ahead: how many times a tree's nodes are in those caches.
        beside: rows of a drafter's own in a pass over so many roots and nodes of a sequence, with logits of their own.
    """

    slot: int
    row: int
    drawn: int
    caches: Callable[[int], int]
    ahead: int = 1
    beside: Callable[[int], int] = lambda inputs: 0

    def nodes(self, count: int, temperature: float) -> int:
        """Of a tree's nodes, and of the rows beside them."""
        each = self.slot + self.row
        return count * (each + (self.drawn if temperature > 0 else 0)) + self.beside(1 + count) * each

    def drafts(self, length: int, count: int) -> int:
        """Of draft models, for a text and a tree; the last drafted token is not in their caches."""
        return self.caches(length + self.ahead * count - 1)

    def sequence(self, length: int, count: int, temperature: float) -> int:
        """Of one sequence; 0 without nodes."""
        return self.nodes(count, temperature) + self.drafts(length, count) if count else 0

    def batch(self, signals: Sequence[Signal], count: int) -> int:
        """Of sequences with a tree of `count` nodes each, which is what a step takes at its peak."""
        return sum(self.sequence(signal.length, count, signal.temperature) for signal in signals)


class LimitedController(Controller):
    """Another controller, kept within a limit.

    Args:
        inner: decides how much to draft. limit: bytes.
    Attributes:
        nodes: most nodes of each sequence of the last plan.
    """

    def __init__(self, inner: Controller, footprint: Footprint, limit: int) -> None:
        self.inner, self.footprint, self.limit = inner, footprint, limit
        self.name = inner.name
        self.nodes: list[int] = []
        self._signals: Sequence[Signal] = ()
        self._held: dict[int, int] = {}  # key -> bytes in caches of draft models
        self._most = inner.max_nodes
        self._told = False
        self._opened = footprint.caches(0)

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """Find out what fits, and let the other plan within it, for one step: texts grow."""
        self.inner.drafters = self.drafters
        self._signals = signals
        self._fit(signals)
        if self._most:
            self.inner.max_nodes = max(min(self._most, max(self.nodes, default=0)), 1)
        plan = self.inner.plan(signals)
        return Plan([self._within(index, budgets) for index, budgets in enumerate(plan.budgets)])

    def _within(self, index: int, budgets: Sequence[Budget]) -> list[Budget]:
        """The other's budgets, as far as they fit."""
        signal, most = self._signals[index], self.nodes[index]
        nodes = max((budget.nodes for budget in budgets), default=0)
        if nodes < 1 or most < 1:
            return []
        reached = self.footprint.drafts(signal.length, min(nodes, most))
        self._held[signal.key] = max(self._held.get(signal.key, 0), reached)
        return [replace(budget, nodes=min(budget.nodes, most), depth=min(budget.depth, most)) for budget in budgets]

    def _fit(self, signals: Sequence[Signal]) -> None:
        """As many sequences as fit with one node, then as many nodes as fit for these."""
        taking = self._first(signals)
        low, high = (1, MAX_NODES) if taking else (0, 0)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._total(taking, middle) <= self.limit else (low, middle - 1)
        keys = {signal.key for signal in taking}
        self.nodes = [low if signal.key in keys else 0 for signal in signals]
        if len(taking) < len(signals) and not self._told:
            self._told = True
            logger.warning(
                "speculative_memory_bytes=%d has room for drafts of %d of %d sequences of this length; "
                "the others decode plainly",
                self.limit, len(taking), len(signals),
            )  # fmt: skip

    def _first(self, signals: Sequence[Signal]) -> Sequence[Signal]:
        count = len(signals)
        while count and self._total(signals[:count], 1) > self.limit:
            count -= 1
        return signals[:count]

    def _total(self, taking: Sequence[Signal], count: int) -> int:
        """Bytes where these have trees of `count` nodes, and all others keep what they hold."""
        held_bytes = {signal.key: self._opened for signal in self._signals} | self._held
        nodes = 0
        for signal in taking:
            held = self.footprint.drafts(signal.length, count)
            held_bytes[signal.key] = max(held, held_bytes.get(signal.key, 0))
            nodes += self.footprint.nodes(count, signal.temperature)
        return nodes + sum(held_bytes.values())

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The other's, cut where several drafts together went beyond what fits; those with drawn trials whatever their
        size, which depends on where the draws fell.
        """
        return [
            tree
            if len(tree) <= nodes and not tree.trials
            else select_nodes(tree, nodes - int((tree.kinds == PROBE).sum()))
            for tree, nodes in zip(self.inner.select(trees), self.nodes, strict=True)
        ]

    def observe(self, outcome: Outcome) -> None:
        self.inner.observe(outcome)

    def forget(self, key: int) -> None:
        self._held.pop(key, None)
        self.inner.forget(key)

    def plain_seconds(self) -> float | None:
        return self.inner.plain_seconds()

    def explain(self, index: int | None = None) -> str:
        """The other's decision, and what fits."""
        if index is None:
            return f"{self.inner.explain()}\nspeculation within {self.limit} bytes of memory"
        most = f"at most {self.nodes[index]} nodes within {self.limit} bytes of memory"
        return f"{self.inner.explain(index)}\n{most}"
