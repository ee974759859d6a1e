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
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.controllers.auto.choice import levels_by_source
from paceline.controllers.auto.costs import Costs, batch_bucket, context_bucket
from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.controllers.explanations import LAST_TOKEN, NO_DRAFTER, count, too_many
from paceline.tree import PRIOR, Budget, RankAcceptance, Shape, StaticTreeSize, best_shapes, choose_shape, select_nodes
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.tree import TokenTree, Verdict

CHOICE_STEPS, EARLY_CHOICE_STEPS, EARLY_STEPS = 16, 4, 64
"""Steps from one choice to the next: CHOICE_STEPS, or EARLY_CHOICE_STEPS until EARLY_STEPS steps were made."""

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


@dataclass(slots=True)
class _Situation:
    """What was chosen for batches and contexts of one size.

    Attributes:
        made: the choice, its shape, and a larger one; None where it is to be made. made_at: the step.
        hopeless: not even drafts that are always accepted would pay.
        plain, wait: steps since the last try, and how many of them pass before the next one.
    """

    made: tuple[StaticTreeSize, Shape, Shape] | None = None
    made_at: int = 0
    hopeless: bool = False
    plain: int = 0
    wait: int = FIRST_WAIT

    def rests(self) -> bool:
        """Whether this step is plain: nothing would pay, and it is not yet time for a try.

        A try's outcome is looked at at once; then come twice as many plain steps.
        """
        rests = self.plain < self.wait
        self.plain += 1
        if self.plain >= self.wait + TRIAL_STEPS:
            self.made, self.plain = None, 0
            self.wait = HOPELESS_WAIT if self.hopeless else min(2 * self.wait, LONGEST_WAIT)
        return rests


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
        hopeless: at the last choice not even drafts that are always accepted would have paid.
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
        self._situations: dict[tuple[int, int], _Situation] = {}
        self.steps = 0
        self.choice = StaticTreeSize(0, 0, 0.0, 0.0)
        self._shape = best_shapes([], 0)
        self._levels: list[int | None] = []
        self.hopeless = self._looks_further = False

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
        here = self._situations.setdefault((batch_bucket(size), context_bucket(context)), _Situation())
        self.choice, best, wide = self._chosen(here, size, context)
        self._looks_further = self.steps % EXPLORATION_STEPS == 0
        self._shape = wide if self._looks_further else best
        if self.choice.nodes:
            here.plain, here.wait = 0, FIRST_WAIT
        elif here.rests():
            self._idle = True
            return Plan.nothing(size)
        return Plan([self._budgets(signal) for signal in signals])

    def _chosen(self, here: _Situation, size: int, context: int) -> tuple[StaticTreeSize, Shape, Shape]:
        """What was chosen lately, or is chosen now; the former while plain steps pass, which teach nothing."""
        if here.made is not None:
            waiting = not here.made[0].nodes and here.plain < here.wait
            every = EARLY_CHOICE_STEPS if self.steps < EARLY_STEPS else CHOICE_STEPS
            if waiting or self.steps - here.made_at < every:
                return here.made
        here.made, here.made_at = self.choose(size, context), self.steps
        here.hopeless = self.hopeless
        return here.made

    def _budgets(self, signal: Signal) -> list[Budget]:
        """The chosen shape for every drafter, no deeper than the sequence may grow."""
        depth = min(int(self._shape.depths_n.max(initial=0)), signal.remaining - 1)
        if depth < 1:
            return []
        shape = self._shape.cut(len(self._shape), depth)
        return [Budget(len(shape), depth, shape=shape) for _ in self.names]

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
        if index is None:
            chances = " ".join(f"{chance:.2f}" for chance in self.acceptance.chances()[0, :4])
            trees = f"ppd: trees of {count(self.choice.nodes, 'node')}"
            return f"{trees}; at depth 1 the target takes ranks 0 to 3 with chances {chances}"
        if self._off:
            return too_many(len(self._signals), self.disable_by_batch_size) if self.names else NO_DRAFTER
        if self._signals[index].remaining <= 1:
            return LAST_TOKEN
        return self._decided(self._budgets(self._signals[index]))

    def _decided(self, budgets: Sequence[Budget]) -> str:
        rates = f"{self.choice.rate:.0f} tokens/s expected, {self.choice.plain:.0f} without drafts"
        if self._idle or not budgets:
            return f"Nothing would pay: {rates}."
        tree = f"static tree of up to {count(budgets[0].nodes, 'node')} and {count(budgets[0].depth, 'level')}"
        if not self.choice.nodes:
            return f"Nothing would pay: {rates}. A {tree} is tried to learn."
        if self._looks_further:
            return f"A {tree}, to learn, and not the best one: {rates}."
        return f"A {tree}: {rates}."

    # Estimates

    def choose(self, size: int, context: int) -> tuple[StaticTreeSize, Shape, Shape]:
        """The best size, its shape, and a larger one which looks at more ranks; small ones where nothing pays."""
        chances = self.acceptance.chances()
        shapes = best_shapes(chances, self.max_nodes, max_depth=self.max_depth)
        table, drafting = self.costs(size, context)
        fastest = choose_shape(shapes, table, level_seconds=drafting, size=size)
        self.hopeless = (
            not fastest.nodes
            and not choose_shape(
                _certain(min(self.max_depth, self.max_nodes)), table, level_seconds=drafting, size=size
            ).nodes
        )
        nodes, depth = fastest[:2] if fastest.nodes else TRIAL_SIZE
        more = min(nodes + 1, self.max_nodes), min(depth + 1, self.max_depth)
        wide = best_shapes(np.maximum(chances, PRIOR), more[0], max_depth=more[1])
        return fastest, shapes.cut(nodes, depth), wide

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
