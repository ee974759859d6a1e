"""Steps that go as the last plan said: budgets and thresholds that stay, outcomes that are counted and learned from together.

In: a planned step of a Planner; trees and verdicts of the steps that follow. Out: budgets, cut trees, and what there is to learn.
Not here: whether to go on without planning (`controllers.auto`), any estimate.

A plan judges a token by its calibrated chance. Here the product of the confidences along a path stands for it: what calibration
made of it in planned steps is kept as one factor a level (`_Scale`), and the price of a level becomes a least product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from math import exp, inf, log
from typing import TYPE_CHECKING, NamedTuple

from paceline.controllers.acceptance import DEPTH_BUCKET, Acceptance
from paceline.controllers.counts import Counts, Step
from paceline.controllers.pick import cut, fixed_shape, keep
from paceline.controllers.prices import row_seconds
from paceline.controllers.watch import Mode
from paceline.tree.chain_columns import lone_source
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.controllers.base import Signal, StepTimes
    from paceline.controllers.planner import Planner
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

STEPS, LONGEST, SILENT = 32, 128, 512
"""Steps from one plan to the next: at first, and at most after plans that said much the same as the ones before them, while
somebody drafts and while nobody does."""

TRIAL, COLD = 28, 4
"""Steps in a row that try a sleeping drafter; of these so many that find caches cold do not count."""

_MISSES = 5
_RATE = 0.2


class Course(NamedTuple):
    """How one drafter goes on for one sequence.

    Attributes:
        budget: as long as the sequence is far from its end.
        least: per depth - 1, the product of confidences from which on a node is worth its row; empty where the drafter says the
            same of every token, so that the budget alone tells how deep it goes.
    """

    budget: Budget
    least: list[float]


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
        self.left = self.done = 0
        self.counts = Counts(drafting=[0.0] * drafters)
        self._log: list[Step] = []  # not yet in the counts
        self._keys, self._remaining = list[int](), list[int]()
        self._scales = [0.0] * drafters  # per drafter, log of the calibrated chance of a node over its confidence
        self._said: list[set[float]] = [set() for _ in range(drafters)]  # confidences that a drafter has told, two at least
        self._known: dict[int, list[list[Course | None]]] = {}  # key -> per drafter: by itself, beside an earlier one
        self._set_out([])
        self._batch: Sequence[Drafting] = ()
        self._heritage: list[list[Course | None]] | None = None  # courses of the sequence that ended last
        self._planner: Planner | None = None
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
            self._scale(planner, index, one)
            for drafter, mode in enumerate(one.modes):
                beside = one.rivals[drafter]
                if (index, drafter) in planner.worths:
                    old, new = courses[drafter][beside], None
                    if mode is Mode.ASK:
                        new = self._course(planner, index, drafter)
                    elif mode is Mode.EXPLORE:
                        new = Course(Budget(one.tried, one.tried), [])
                        self.trials.add((index, drafter))
                    courses[drafter][beside] = new
                    steady = steady and _alike(old, new)
        self._set_out(all_courses)
        self._stride = min(2 * self._stride, SILENT if self.silent else LONGEST) if steady else STEPS
        self.left, self._cold = (TRIAL, COLD) if self.trials else (self._stride, 0)

    def _scale(self, planner: Planner, index: int, one: Drafting) -> None:
        """What calibration makes of the confidences of the planned step's tree."""
        tree = planner.drafts[0][index]
        source = lone_source(tree)
        if source < 0:
            return
        confidence = tree.confidence.tolist()
        if len(self._said[source]) < 2:
            self._said[source].update(confidence)
        raw, reach, levels = 1.0, planner.acceptance.reach(one.own, tree)[-1], len(confidence)
        for sure in confidence:
            raw *= sure
        if raw > 0.0 < reach:
            self._scales[source] += _RATE * ((log(reach) - log(raw)) / levels - self._scales[source])

    def _course(self, planner: Planner, index: int, drafter: int) -> Course:
        """What follows from the plan for one drafter of one sequence."""
        one, size, line, rate = self._batch[index], len(self._batch), planner.now.lines[drafter], planner.now.rate
        best, voice = one.depths[drafter], one.voices[drafter]
        if voice is None or voice.raw == 1.0:  # it does not ask while it drafts
            if len(self._said[drafter]) == 1:
                return Course(Budget(best, best), [])
            depth = max(best, len(planner.drafts[1][index])) + 2
        else:
            depth = 2 * best + 2
        depth = min(depth, planner.max_depth)
        levels, factor = planner.acceptance.levels(one.own, drafter), exp(self._scales[drafter])
        row = row_seconds(0, size, planner.now.table)
        price = rate * (line.per_level / size + row)
        least, floors, scale = [0.0], [0.0, 0.0], factor
        for level in range(2, depth + 1):
            floors.append(price / (levels[DEPTH_BUCKET[level]] * scale))
            scale *= factor
            least.append(rate * row / scale)
        return Course(Budget(min(depth, planner.max_nodes), depth, _from(floors)), least)

    def goes_on(self, signals: Sequence[Signal]) -> bool:
        """Whether this step needs no plan: the same sequences run, or one after another, and it is not yet time."""
        if not self.left:
            return False
        if [signal.key for signal in signals] != self._keys and not self._inherits(signals):
            self.left = 0
            return False
        self.left, self.done = self.left - 1, self.done + 1
        self._remaining = [signal.remaining for signal in signals]
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
        asked[index, drafter] = asked.get((index, drafter), 0) + 1
        depth = min(budget.depth, self._remaining[index] - 1)
        return budget if depth == budget.depth else Budget(min(depth, budget.nodes), depth, budget.go_on)

    def trim(self, index: int, tree: TokenTree) -> TokenTree:
        """The tree without nodes that are not worth their rows; whole if it has drawn trials or probes."""
        source, planner = lone_source(tree), self._planner
        if source < 0 or planner is None:
            if planner is None or not len(tree) or fixed_shape(tree):
                return tree
            reach = planner.acceptance.reach(self._batch[index].own, tree)
            return keep([tree], [(reach, ())], planner.now.table, planner.now.rate)[0][0]
        levels = self.counts.levels
        levels[source] = levels.get(source, 0) + len(tree.tokens)
        course, raw, count = self._courses[index][source][0], 1.0, 0
        if course is None or not course.least:
            return tree
        for sure, least in zip(tree.confidence.tolist(), course.least, strict=False):
            raw *= sure
            if raw < least:
                break
            count += 1
        return cut(tree, range(count), len(tree.tokens))

    def count(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        """The outcome of one step, to be summed up with others': one after the other that takes a third of the time."""
        if self._cold:
            self._cold -= 1
            self.counts, self._log = Counts(drafting=[0.0] * len(self.counts.drafting)), []
            return
        self.counts.steps += 1
        self._log.append(Step(self._batch, trees, verdicts, times))
        if any(verdict.path for verdict in verdicts):
            self._misses = 0
        elif times.rows > len(trees):
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
        """Learn from a tree by several drafters, or with branches."""
        if self._planner is None:
            return
        accepted, sources = self._planner.acceptance.observe(one.own, tree, verdict.path), tree.sources.tolist()
        for drafter in set(sources):
            key = (index, drafter, sources.count(drafter), accepted[drafter])
            self.counts.mixed[key] = self.counts.mixed.get(key, 0) + 1

    def take(self, acceptance: Acceptance) -> Counts:
        """Teach `acceptance` what the chains brought; returns the counts and begins new ones."""
        made, self._log, chains = self._log, [], Counter[tuple[int, int, int, int]]()
        for _, steps in groupby(made, key=lambda step: id(step.batch)):  # a batch, and who went on as it did
            self.counts.chains = {}
            for step in steps:
                self._sum(step)
            outcomes: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
            chains.update(self.counts.chains)
            for (index, source, scored, stood), times in self.counts.chains.items():
                outcomes.setdefault((index, source), []).append((scored, stood, times))
            for (index, source), found in outcomes.items():
                acceptance.observe_chains(step.batch[index].own, source, found)
        counts, self.counts = replace(self.counts, chains=chains), Counts(drafting=[0.0] * len(self.counts.drafting))
        return counts

    def forget(self, key: int) -> None:
        """The sequence has ended. One that ran by itself leaves its courses to the next."""
        courses = self._known.pop(key, None)
        self._heritage = courses if self._keys == [key] else None
        self.left = self.left if self._heritage else 0


def _alike(one: Course | None, other: Course | None) -> bool:
    """Whether two courses draft about as deep."""
    if one is None or other is None:
        return one is other
    return abs(one.budget.depth - other.budget.depth) <= 1


def _from(floors: Sequence[float]) -> Callable[[int, float, object], bool]:
    """Go on to a level while the product of the confidences before it is above that level's floor."""

    def go_on(depth: int, confidence: float, features: object) -> bool:
        return confidence > floors[depth]

    return go_on
