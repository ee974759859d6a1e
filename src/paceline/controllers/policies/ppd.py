"""PPD's choice of static trees: the shape by what the target takes at each rank, its size by what rows cost on this
machine.

Acceptance by depth and rank is learned from what became of the trees: the rank of a node is its place among its
siblings, as all drafters order them. Every so many steps the best shapes are found anew, and of these the number of
nodes and levels with the most expected tokens per second, drafting included. What is never tried is never learned: now
and then a tree of one more node and level is shaped as if no rank were worse than at first thought, and where plain
decoding is fastest, drafts are tried at growing intervals. Shapes depend on earlier steps alone, so drawn trees under
this controller keep the output distribution.

Source: Hardware-Aware Parallel Prompt Decoding (arXiv:2405.18628), which does this once, offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.controllers.auto.choice import levels_by_source
from paceline.controllers.auto.costs import Costs, batch_bucket, context_bucket
from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.controllers.explanations import LAST_TOKEN, NO_DRAFTER, count, too_many
from paceline.tree import PRIOR, Budget, Choice, RankAcceptance, Shape, best_shapes, choose_shape, select_nodes
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.tree import TokenTree, Verdict

CHOICE_STEPS, EARLY_CHOICE_STEPS, EARLY_STEPS = 16, 4, 64
"""Steps from one choice to the next: CHOICE_STEPS, or EARLY_CHOICE_STEPS until EARLY_STEPS steps were made."""

CALIBRATION_STEPS: Final = 32
"""Steps at first that draft whatever was seen, unless not even drafts that are always accepted would pay."""

FIRST_WAIT, TRIAL_STEPS = 16, 8
"""Plain steps before the first try, and drafting steps of a try."""

EXPLORATION_STEPS: Final = 8
"""One drafting step in so many looks at ranks that the best shape may lack."""

LONGEST_WAIT, HOPELESS_WAIT = 128, 1024
"""Most plain steps between two tries, and where not even drafts that are always accepted would pay."""

TRIAL_SIZE: Final = 2, 2
"""Nodes and levels of a try."""

DECAY: Final = 0.98
"""Of what was seen, at each new sight of its depth: the last 35 weigh as much as all before, since texts differ."""

LIMIT: Final = 1024

_Buckets = tuple[int, int]


class PPDController(Controller):
    """The static tree with the most expected tokens per second.

    Args:
        cost_model: measured times; may be shared.
        drafters: their names, cheap ones first, in the order of their source index.
        max_nodes: most nodes of one sequence's tree.
        max_depth: most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Attributes:
        acceptance: what was learned, over all sequences and drafters.
    Raises:
        ConfigError: a limit outside its range.
    Source: PPD (arXiv:2405.18628).
    """

    name = "ppd"

    def __init__(
        self,
        cost_model: Costs,
        drafters: Sequence[str],
        *,
        max_nodes: int = 32,
        max_depth: int = 8,
        disable_by_batch_size: int | None = None,
    ) -> None:
        integer("max_nodes", max_nodes, 1, LIMIT)
        integer("max_depth", max_depth, 1, LIMIT)
        self.cost, self.names = cost_model, tuple(drafters)
        self.max_nodes, self.max_depth, self.disable_by_batch_size = max_nodes, max_depth, disable_by_batch_size
        self.acceptance = RankAcceptance(decay=DECAY)
        self._off = self._idle = False
        self._signals: Sequence[Signal] = ()
        self._choices: dict[
            _Buckets, tuple[int, Choice, Shape, Shape]
        ] = {}  # batch and context -> step when made, `choose`
        self.steps = self._plain = 0
        self._wait = FIRST_WAIT
        self.choice = Choice(0, 0, 0.0, 0.0)
        self._shape = best_shapes([], 0)
        self._levels: list[int | None] = []
        self.hopeless = False  # not even drafts that are always accepted would pay

    # The step

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """Find the size for a batch and context like this one, or take the one found lately."""
        size, limit = len(signals), self.disable_by_batch_size
        self._signals, self._levels = signals, [None] * len(self.names)
        self.steps += 1
        self._off = self._idle = not self.names or (limit is not None and size >= limit)
        if self._off or not signals:
            return Plan.nothing(size)
        context = max(signal.length for signal in signals)
        buckets = batch_bucket(size), context_bucket(context)
        made = self._choices.get(buckets)
        waiting = made is not None and not made[1].nodes and self._plain < self._wait
        if made is None or (
            not waiting and self.steps - made[0] >= (EARLY_CHOICE_STEPS if self.steps < EARLY_STEPS else CHOICE_STEPS)
        ):
            made = self._choices[buckets] = (self.steps, *self.choose(size, context))
        _, self.choice, best, wide = made
        self._shape = best if self.steps % EXPLORATION_STEPS else wide
        if self.choice.nodes or (self.steps <= CALIBRATION_STEPS and not self.hopeless):
            self._plain, self._wait = 0, FIRST_WAIT
        else:
            self._wait_or_try(buckets)
        return Plan.nothing(size) if self._idle else Plan([self._budgets(signal) for signal in signals])

    def _wait_or_try(self, buckets: _Buckets) -> None:
        """Nothing would pay: plain steps, then a try, whose outcome is looked at at once; then twice as many plain
        steps.
        """
        self._idle = self._plain < self._wait
        self._plain += 1
        if self._plain >= self._wait + TRIAL_STEPS:
            self._plain, self._wait = 0, HOPELESS_WAIT if self.hopeless else min(2 * self._wait, LONGEST_WAIT)
            del self._choices[buckets]

    def _budgets(self, signal: Signal) -> list[Budget]:
        """The chosen shape for every drafter, no deeper than the sequence may grow."""
        nodes, depth = len(self._shape), min(int(self._shape.depths_n.max(initial=0)), signal.remaining - 1)
        if nodes < 1 or depth < 1:
            return []
        return [Budget(nodes, depth, shape=self._shape.cut(nodes, depth)) for _ in self.names]

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Every tree as it is: budgets keep them within the size, but for merged ones, which are cut to it; those with
        drawn trials whatever their size, which depends on where the draws fell.
        """
        for tree in trees:
            for source, levels in levels_by_source(tree).items() if len(tree) else ():
                self._levels[source] = max(self._levels[source] or 0, levels)
        most = len(self._shape)
        return list(trees) if len(self.names) == 1 else [select_nodes(tree, most) for tree in trees]

    def observe(self, outcome: Outcome) -> None:
        """Learn what the target took of which rank, and what the step cost."""
        context = max((signal.length for signal in self._signals), default=0)
        self.cost.observe(len(outcome.trees), context, outcome.times, self.names, self._levels)
        for tree, verdict in zip(outcome.trees, outcome.verdicts, strict=True):
            if len(tree):
                self._learn(tree, verdict)

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, what is believed at present."""
        now = self.choice
        if index is None:
            chances = " ".join(f"{chance:.2f}" for chance in self.acceptance.chances()[0, :4])
            return (
                f"ppd: trees of {count(now.nodes, 'node')}; at depth 1 the target takes ranks 0 to 3 with chances "
                f"{chances}"
            )
        if self._off:
            return too_many(len(self._signals), self.disable_by_batch_size) if self.names else NO_DRAFTER
        if self._signals[index].remaining <= 1:
            return LAST_TOKEN
        rates = f"{now.rate:.0f} tokens/s expected, {now.plain:.0f} without drafts"
        if not now.nodes:
            tried = "" if self._idle else f" A tree of {count(len(self._shape), 'node')} is tried to learn."
            return f"Nothing would pay: {rates}.{tried}"
        return f"A static tree of {count(now.nodes, 'node')} and {count(now.depth, 'level')}: {rates}."

    # Estimates

    def choose(self, size: int, context: int) -> tuple[Choice, Shape, Shape]:
        """The best size, its shape, and a larger one which looks at more ranks; small ones where nothing pays."""
        chances = self.acceptance.chances()
        shapes = best_shapes(chances, self.max_nodes, max_depth=self.max_depth)
        table, drafting = self.costs(size, context)
        found = choose_shape(shapes, table, level_seconds=drafting, size=size)
        self.hopeless = (
            not found.nodes
            and not choose_shape(_certain(self.max_depth), table, level_seconds=drafting, size=size).nodes
        )
        nodes, depth = found[:2] if found.nodes else TRIAL_SIZE
        more = min(nodes + 1, self.max_nodes), min(depth + 1, self.max_depth)
        wide = best_shapes(np.maximum(chances, PRIOR), more[0], max_depth=more[1])
        return found, shapes.cut(nodes, depth), wide

    def costs(self, size: int, context: int) -> tuple[list[float], list[float]]:
        """Seconds of a step apart from drafting by rows, measured up to the largest tree, and of drafting by levels."""
        rows = size * (1 + self.max_nodes)
        self.cost.measure_up_to(size, context, rows)
        lines = [self.cost.line(name, size) for name in self.names]
        drafting = [0.0, *(sum(line.at(depth) for line in lines) for depth in range(1, self.max_depth + 1))]
        return self.cost.table(size, context, rows), drafting

    def _learn(self, tree: TokenTree, verdict: Verdict) -> None:
        """Evidence comes from the root and the accepted path: one child of each was taken, or none."""
        accepted = set(verdict.path)
        for depth, parent in enumerate((-1, *verdict.path), start=1):
            children = tree.children(parent)
            if not children:
                return
            self.acceptance.learn(
                depth, len(children), next((rank for rank, node in enumerate(children) if node in accepted), None)
            )


@lru_cache(maxsize=16)
def _certain(depth: int) -> Shape:
    """The chain of tokens that are always accepted."""
    return best_shapes([1.0], depth, max_depth=depth)
