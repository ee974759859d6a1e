"""Outcomes of steps that nobody planned, kept until they are learned from together.

In: trees, verdicts and times, a step at a time. Out: counts of them, and what their chains teach of acceptance. Not here: what is
learned from the counts (`controllers.auto_learning`), budgets (`controllers.cruise`).

Keeping a step takes a third of the time that counting it would: it comes between two passes, when no cache holds this code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING

from paceline.controllers.counts import Counts, Single, Singles, Step
from paceline.controllers.pick import levels_by_source
from paceline.tree.chain_columns import chain_columns, lone_source

if TYPE_CHECKING:
    from paceline.controllers.acceptance import Acceptance
    from paceline.controllers.base import StepTimes
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

ALL, TAUGHT = 64, 4
"""Trees with branches of which each teaches what to expect of such, and of further ones each how-manieth."""


class Outcomes:
    """What steps brought since this was last asked.

    Args:
        drafters: how many there are.
    Attributes:
        counts: of the steps, but for what the log still holds. most: seconds that a step takes at most unless it was interrupted.
    """

    __slots__ = ("_log", "_trees", "counts", "most")

    def __init__(self, drafters: int) -> None:
        self.counts, self.most = Counts(drafting=[0.0] * drafters), inf
        self._log: list[Step | Single] = []
        self._trees = 0  # with branches, so far

    def clear(self) -> None:
        """Forget it all."""
        self.counts, self._log = Counts(drafting=[0.0] * len(self.counts.drafting)), []

    def note_levels(self, drafter: int, levels: int) -> None:
        """So many were proposed; the step may score fewer."""
        known = self.counts.levels
        known[drafter] = known.get(drafter, 0) + levels

    def add(
        self,
        batch: Sequence[Drafting],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        times: StepTimes,
        *,
        apart: float,
        sole: int,
    ) -> None:
        """One more step.

        Args:
            apart: seconds within that are time spent, but say nothing of steps like this one.
            sole: the only drafter that was asked, of a sequence by itself; below 0 nobody knows.
        """
        if apart:
            times, self.counts.seconds = times.without(apart, (0.0,) * len(times.draft)), self.counts.seconds + apart
        self.counts.steps += 1
        if len(trees) > 1:
            self._log.append(Step(batch, trees, verdicts, times))
            return
        (tree,) = trees
        scored, source = len(tree.tokens), -1
        if scored:
            source = sole if sole >= 0 and tree.parents is chain_columns(scored).parents else lone_source(tree)
        one = source >= 0 or not scored
        self._log.append(
            Single(batch, source, scored, len(verdicts[0].path), times) if one else Step(batch, trees, verdicts, times)
        )

    def take(self, acceptance: Acceptance, *, whole: bool) -> Counts:
        """Teach `acceptance` what the chains brought; returns the counts and begins new ones.

        Args:
            whole: all that was proposed was scored, and its levels were not noted.
        """
        made, self._log, chains = self._log, [], Counter[tuple[int, int, int, int]]()
        for _, steps in groupby(made, key=_whose):  # a batch, and who went on as it did
            self.counts.chains, singles = {}, Singles(self.most)
            for step in steps:
                if isinstance(step, Single):
                    singles.add(step, self.counts.drafting)
                else:
                    self._sum(step, acceptance, whole)
            self.counts.join(singles)
            outcomes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
            chains.update(self.counts.chains)
            for (index, source, scored, stood), times in self.counts.chains.items():
                outcomes.setdefault((index, source), []).append((scored, stood, times))
                if whole:
                    self.note_levels(source, scored * times)
            for (index, source), found in outcomes.items():
                acceptance.observe_chains(step.batch[index].own, source, found)
        counts = replace(self.counts, chains=chains)
        self.clear()
        return counts

    def _sum(self, step: Step, acceptance: Acceptance, whole: bool) -> None:
        """Add one step's outcome to the counts."""
        batch, trees, verdicts, times = step
        counts, drafting, accepted, most = self.counts, self.counts.drafting, 0, self.most
        for index, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            if scored := len(tree.tokens):
                accepted += (stood := len(verdict.path))
                source = lone_source(tree)
                if source < 0:
                    self._mixed(index, batch[index], tree, verdict, acceptance)
                    for drafter, levels in levels_by_source(tree).items() if whole else ():
                        self.note_levels(drafter, levels)
                else:
                    key = (index, source, scored, stood)
                    counts.chains[key] = counts.chains.get(key, 0) + 1
        for drafter, seconds in enumerate(times.draft):
            drafting[drafter] += min(seconds, most)
        counts.tokens += accepted + len(trees)
        rest = times.verify + times.other
        counts.seconds += min(times.score + sum(times.draft) + rest, most)
        times_seen, score, others = counts.scoring.get(times.rows, (0, 0.0, 0.0))
        counts.scoring[times.rows] = times_seen + 1, score + min(times.score, most / 2), others + min(rest, most / 2)

    def _mixed(self, index: int, one: Drafting, tree: TokenTree, verdict: Verdict, acceptance: Acceptance) -> None:
        """Count a tree by several drafters, or with branches; a part of them teach, for learning from one takes long."""
        sources, self._trees = tree.sources.tolist(), self._trees + 1
        if self._trees <= ALL or not self._trees % TAUGHT:
            acceptance.observe(one.own, tree, verdict.path)
        stood = Counter(sources[node] for node in verdict.path)
        for drafter, scored in Counter(sources).items():
            key = (index, drafter, scored, stood[drafter])
            self.counts.mixed[key] = self.counts.mixed.get(key, 0) + 1


def _whose(step: Step | Single) -> int:
    return id(step.batch)
