"""Steps that go as the last plan said: budgets and thresholds that stay, outcomes that are counted and learned from together.

In: a planned step of a Planner; trees and verdicts of the steps that follow. Out: budgets, cut trees, and what there is to learn.
Not here: whether to go on without planning (`controllers.auto`), how a drafter goes on (`controllers.course`), any estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING

from paceline.controllers.acceptance import Acceptance
from paceline.controllers.buckets import batch_bucket
from paceline.controllers.counts import Counts, Single, Singles, Step
from paceline.controllers.course import Course, Courses, alike
from paceline.controllers.pick import chain_count, cut, fixed_shape, keep, levels_by_source
from paceline.controllers.watch import Mode
from paceline.tree.chain_columns import lone_source
from paceline.tree.token_tree import EMPTY_TREE
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.controllers.base import Signal, StepTimes
    from paceline.controllers.planner import Planner
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

STEPS, LONGEST, SILENT = 32, 256, 512
"""Steps from one plan to the next: at first, and at most after plans that said much the same as the ones before them, while
somebody drafts and while nobody does."""

TRIAL, COLD = 28, 4
"""Steps in a row that try a sleeping drafter; of these so many that find caches cold do not count."""

ALL, TAUGHT = 64, 4
"""Trees with branches of which each teaches what to expect of such, and of further ones each how-manieth."""

NEAR, IN_A_ROW = 64, 6
"""Of so many steps the last so many draft a little less or more than planned, where drafts are all of one length. In a row, since
the first step over another number of rows takes longer than those behind it."""

_MISSES = 12


class Cruise:
    """The steps between two plans.

    Args:
        drafters: how many there are.
    Attributes:
        left: further steps that need no plan. done: steps since the last plan.
        counts: what they brought. trials: (sequence, drafter) of drafters that sleep and are tried.
        silent: nobody drafts for anybody.
    """

    def __init__(self, drafters: int) -> None:
        self.left = self.done = self._round = 0  # the latter: steps in all, whatever the plans
        self.counts = Counts(drafting=[0.0] * drafters)
        self._log: list[Step | Single] = []  # not yet in the counts
        self._last = EMPTY_TREE, -1  # the tree that was trimmed last, and who proposed all of it
        self._keys, self._remaining = list[int](), list[int]()
        self._makes = Courses(drafters)
        self._known: dict[int, list[list[Course | None]]] = {}  # key -> per drafter: by itself, beside an earlier one
        self._set_out([])
        self._batch: Sequence[Drafting] = ()
        self._heritage: list[list[Course | None]] | None = None  # courses of the sequence that ended last
        self._planner: Planner | None = None
        self._trees = 0  # with branches, so far
        self._misses, self._most, self._stride, self._cold = 0, inf, STEPS, 0
        self.trials: set[tuple[int, int]] = set()

    def start(self, planner: Planner, signals: Sequence[Signal], most: float) -> None:
        """Let the next steps go as the one that `planner` has just planned and seen the end of.

        Args:
            most: seconds that a step takes at most unless it was interrupted.
        """
        self.done, self._misses, steady = 0, 0, True
        self._planner, self._batch, self._most, self.trials = planner, list(planner.batch), most, set()
        self._keys = [signal.key for signal in signals]
        all_courses = [self._known.setdefault(key, [[None, None] for _ in planner.names]) for key in self._keys]
        for index, (one, courses) in enumerate(zip(self._batch, all_courses, strict=True)):
            self._makes.note(planner, index)
            for drafter, mode in enumerate(one.modes):
                beside = one.rivals[drafter]
                if (index, drafter) in planner.worths:
                    old, new = courses[drafter][beside], None
                    if mode is Mode.ASK:
                        new = self._makes.course(planner, index, drafter)
                    elif mode is Mode.EXPLORE:
                        new = Course(Budget(one.tried, one.tried), [])
                        self.trials.add((index, drafter))
                    courses[drafter][beside] = new
                    steady = steady and alike(old, new)
        self._set_out(all_courses)
        self._stride = min(2 * self._stride, SILENT if self.silent else LONGEST) if steady else STEPS
        self.left, self._cold = (TRIAL, COLD) if self.trials else (self._stride, 0)

    def goes_on(self, signals: Sequence[Signal]) -> bool:
        """Whether this step needs no plan: the same sequences run, or one after another, and it is not yet time."""
        if not self.left:
            return False
        keys: list[int] = []
        remaining: list[int] = []
        for signal in signals:
            keys.append(signal.key)
            remaining.append(signal.remaining)
        if keys != self._keys and not (self._inherits(signals) or self._shrinks(keys)):
            self.left = 0
            return False
        self.left, self.done, self._round, self._remaining = self.left - 1, self.done + 1, self._round + 1, remaining
        return True

    def _inherits(self, signals: Sequence[Signal]) -> bool:
        """Whether a sequence that runs by itself follows one that did, and may go on as that one did."""
        heritage, planner = self._heritage, self._planner
        self._heritage = None
        if heritage is None or planner is None or len(signals) != 1:
            return False
        heir = planner.begin(signals[0])
        if heir.greedy is not self._batch[0].greedy:
            return False
        key = signals[0].key
        self._keys, self._known[key] = [key], heritage
        self._set_out([heritage])
        self._batch = planner.batch = [heir]
        return True

    def _shrinks(self, keys: list[int]) -> bool:
        """Whether some sequences of the batch have ended, and the others may go on as they did."""
        planner, old = self._planner, self._keys
        if planner is None or not keys or batch_bucket(len(keys)) != batch_bucket(len(old)) or not set(keys) < set(old):
            return False
        stay = {old.index(key): index for index, key in enumerate(keys)}
        self._keys = keys
        self._set_out([self._courses[index] for index in stay])
        self._batch = planner.shrink(stay)
        return True

    def _set_out(self, courses: list[list[list[Course | None]]]) -> None:
        """Take these courses from now on."""
        self._courses = courses
        self.silent = all(course is None for own in courses for pair in own for course in pair)

    def skip(self, most: int) -> int:
        """Count up to `most` further steps as gone on, below 0 so many fewer; returns how many."""
        taken = min(self.left, most)
        self.left, self.done = self.left - taken, self.done + taken
        return taken

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """As planned, but no deeper than the sequence may still grow, and beside what there is."""
        taken = len(so_far)
        course = self._courses[index][drafter][taken > 0]
        if course is None or self._remaining[index] < 2:
            return NO_BUDGET
        budget, asked = course.budget, self.counts.asked
        if course.near and self._round % NEAR >= NEAR - IN_A_ROW:
            budget = course.near[self._round // NEAR % len(course.near)]
        asked[index, drafter] = asked.get((index, drafter), 0) + 1
        depth = min(budget.depth, self._remaining[index] - 1)
        return budget if depth == budget.depth else Budget(min(depth, budget.nodes), depth, budget.go_on)

    def trim(self, trees: Sequence[TokenTree]) -> tuple[list[TokenTree], int]:
        """The trees without nodes that are not worth their rows, whole if they have drawn trials or probes; rows of all of them."""
        rows, chosen = len(trees), []
        for index, tree in enumerate(trees):
            chosen.append(kept := self._trim(index, tree))
            rows += len(kept.tokens)
        return chosen, rows

    def _trim(self, index: int, tree: TokenTree) -> TokenTree:
        source = lone_source(tree)
        if source < 0:
            return self._trim_tree(index, tree)
        levels = self.counts.levels
        levels[source] = levels.get(source, 0) + len(tree.tokens)
        course = self._courses[index][source][0]
        if course is not None and course.least:
            tree = cut(tree, range(self._worth(source, tree, course)), len(tree.tokens))
        self._last = tree, source
        return tree

    def _worth(self, source: int, tree: TokenTree, course: Course) -> int:
        """How many nodes of a chain are worth their rows, one at least, so that misses show: of a sequence by itself by calibrated
        chances, else by its course."""
        planner, confidence = self._planner, tree.confidence.tolist()
        if planner is None or len(self._batch) > 1:
            return course.count(confidence)
        known, now = planner.acceptance.chances(self._batch[0].own, source), planner.now
        return max(chain_count(known, confidence, now.drafted, now.rate), 1)

    def _trim_tree(self, index: int, tree: TokenTree) -> TokenTree:
        """`_trim` for a tree with branches, or by several drafters."""
        planner, levels, deepest = self._planner, self.counts.levels, levels_by_source(tree)
        for source, depth in deepest.items():
            levels[source] = levels.get(source, 0) + depth
        if planner is None or not deepest or fixed_shape(tree):
            return tree
        if len(deepest) > 1:
            reach = planner.acceptance.reach(self._batch[index].own, tree)
            return keep([tree], [(reach, ())], planner.now.table, planner.now.rate)[0][0]
        course = self._courses[index][next(iter(deepest))][0]
        return tree if course is None or not course.least else cut(tree, course.nodes(tree), len(tree))

    def count(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes, apart: float = 0.0) -> None:
        """The outcome of one step, to be summed up with others': one after the other that takes a third of the time.

        Args:
            apart: seconds within that are time spent, but say nothing of steps like this one.
        """
        if self._cold:
            self._cold -= 1
            self.counts, self._log = Counts(drafting=[0.0] * len(self.counts.drafting)), []
            return
        if apart:
            times, self.counts.seconds = times.without(apart, (0.0,) * len(times.draft)), self.counts.seconds + apart
        self.counts.steps += 1
        known, source = self._last
        size, scored, stood = len(trees), len(trees[0].tokens), len(verdicts[0].path)
        if size == 1 and trees[0] is not known:
            source = lone_source(trees[0])
        if size == 1 and (source >= 0 or not scored):
            self._log.append(Single(self._batch, source, scored, stood, times))
        else:
            self._log.append(Step(self._batch, trees, verdicts, times))
        if stood or (size > 1 and any(verdict.path for verdict in verdicts)):
            self._misses = 0
        elif times.rows > size:
            self._misses += 1
            self.left = 0 if self._misses >= _MISSES else self.left

    def _sum(self, step: Step) -> None:
        """Add one step's outcome to the counts."""
        batch, trees, verdicts, times = step
        counts, drafting, accepted = self.counts, self.counts.drafting, 0
        for index, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
            if scored := len(tree.tokens):
                accepted += (stood := len(verdict.path))
                source = lone_source(tree)
                if source < 0:
                    self._mixed(index, batch[index], tree, verdict)
                else:
                    key = (index, source, scored, stood)
                    counts.chains[key] = counts.chains.get(key, 0) + 1
        for drafter, seconds in enumerate(times.draft):
            drafting[drafter] += min(seconds, self._most)
        counts.tokens += accepted + len(trees)
        rest = times.verify + times.other
        counts.seconds += min(times.score + sum(times.draft) + rest, self._most)
        times_seen, score, others = counts.scoring.get(times.rows, (0, 0.0, 0.0))
        counts.scoring[times.rows] = times_seen + 1, score + min(times.score, self._most / 2), others + min(rest, self._most / 2)

    def _mixed(self, index: int, one: Drafting, tree: TokenTree, verdict: Verdict) -> None:
        """Count a tree by several drafters, or with branches; a part of them teach, for learning from one takes long."""
        sources, self._trees = tree.sources.tolist(), self._trees + 1
        if self._planner is not None and (self._trees <= ALL or not self._trees % TAUGHT):
            self._planner.acceptance.observe(one.own, tree, verdict.path)
        stood = Counter(sources[node] for node in verdict.path)
        for drafter, scored in Counter(sources).items():
            key = (index, drafter, scored, stood[drafter])
            self.counts.mixed[key] = self.counts.mixed.get(key, 0) + 1

    def take(self, acceptance: Acceptance) -> Counts:
        """Teach `acceptance` what the chains brought; returns the counts and begins new ones."""
        made, self._log, chains = self._log, [], Counter[tuple[int, int, int, int]]()
        for _, steps in groupby(made, key=_whose):  # a batch, and who went on as it did
            self.counts.chains, singles = {}, Singles(self._most)
            for step in steps:
                if isinstance(step, Single):
                    singles.add(step, self.counts.drafting)
                else:
                    self._sum(step)
            self.counts.join(singles)
            outcomes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
            chains.update(self.counts.chains)
            for (index, source, scored, stood), times in self.counts.chains.items():
                outcomes.setdefault((index, source), []).append((scored, stood, times))
            for (index, source), found in outcomes.items():
                acceptance.observe_chains(step.batch[index].own, source, found)
        counts, self.counts = replace(self.counts, chains=chains), Counts(drafting=[0.0] * len(self.counts.drafting))
        return counts

    def forget(self, key: int) -> None:
        """The sequence has ended. One that ran by itself leaves its courses to the next; others go on without it."""
        courses = self._known.pop(key, None)
        self._heritage = courses if self._keys == [key] else None
        self.left = self.left if self._heritage or key in self._keys else 0


def _whose(step: Step | Single) -> int:
    return id(step.batch)
