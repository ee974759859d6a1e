"""Steps that go as the last plan said: budgets and thresholds that stay.

In: a planned step of a Planner; trees and verdicts of the steps that follow. Out: budgets, cut trees. Not here: whether to go on
without planning (`controllers.auto`), how a drafter goes on (`controllers.course`), what the steps teach (`controllers.outcomes`),
any estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from paceline.controllers.buckets import batch_bucket
from paceline.controllers.course import Course, Courses, alike
from paceline.controllers.outcomes import Outcomes
from paceline.controllers.pick import chain_count, cut, fixed_shape, keep, levels_by_source
from paceline.controllers.watch import Mode
from paceline.tree.chain_columns import lone_source
from paceline.tree.token_tree import EMPTY_TREE
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.controllers.acceptance import Acceptance
    from paceline.controllers.base import Signal, StepTimes
    from paceline.controllers.counts import Counts
    from paceline.controllers.planner import Planner
    from paceline.controllers.voice import Drafting
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

STEPS, LONGEST, SILENT = 32, 256, 512
"""Steps from one plan to the next: at first, and at most after plans that said much the same as the ones before them, while
somebody drafts and while nobody does."""

TRIAL, COLD = 28, 4
"""Steps in a row that try a sleeping drafter; of these so many that find caches cold do not count."""

NEAR, IN_A_ROW = 64, 6
"""Of so many steps the last so many draft a little less or more than planned, where drafts are all of one length. In a row, since
the first step over another number of rows takes longer than those behind it."""

_MISSES = 12


class Leg(NamedTuple):
    """How a batch went on when the sequences changed, for the next one of about its size.

    Attributes:
        courses: of each sequence, all alike. worths: by drafter, worth and depth as planned. modes: of each drafter.
        greedy: so are its sequences.
        left, stride, most: steps up to the next plan, and from plan to plan; seconds of a step unless it is interrupted.
    """

    courses: list[list[Course | None]]
    worths: dict[int, tuple[float, int]]
    modes: list[Mode]
    greedy: bool
    left: int
    stride: int
    most: float

    def suits(self, batch: Sequence[Drafting]) -> bool:
        """Whether these sequences may go on so: nobody who drafts has been put to sleep for them."""
        asked = [drafter for drafter, pair in enumerate(self.courses) if any(pair)]
        return all(one.greedy is self.greedy and not any(one.watches[i].asleep for i in asked) for one in batch)


class Cruise:
    """The steps between two plans.

    Args:
        drafters: how many there are.
    Attributes:
        left: further steps that need no plan. done: steps since the last plan. legs: by bucket, how batches of such sizes went on.
        outcomes: what they brought. trials: (sequence, drafter) of drafters that sleep and are tried.
        asks: who drafts for somebody. silent: nobody does. whole: one drafter does, and what it drafts is scored as it comes.
        deepest: most levels.
    """

    def __init__(self, drafters: int) -> None:
        self.left = self.done = self._round = 0  # the latter: steps in all, whatever the plans
        self.outcomes = Outcomes(drafters)
        self._keys, self._remaining = list[int](), list[int]()
        self._makes = Courses(drafters)
        self._known: dict[int, list[list[Course | None]]] = {}  # key -> per drafter: by itself, beside an earlier one
        self._set_out([])
        self._batch: Sequence[Drafting] = ()
        self._heritage: list[list[Course | None]] | None = None  # courses of the sequence that ended last
        self.legs: dict[int, Leg] = {}
        self._planner: Planner | None = None
        self._misses, self._stride, self._cold = 0, STEPS, 0
        self.trials: set[tuple[int, int]] = set()

    def start(self, planner: Planner, signals: Sequence[Signal], most: float) -> None:
        """Let the next steps go as the one that `planner` has just planned and seen the end of.

        Args:
            most: seconds that a step takes at most unless it was interrupted.
        """
        self.done, self._misses, steady = 0, 0, True
        self._planner, self._batch, self.outcomes.most, self.trials = planner, list(planner.batch), most, set()
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
        self._remaining = remaining = list[int]()
        for signal in signals:
            keys.append(signal.key)
            remaining.append(signal.remaining)
        if keys != self._keys and not (self._inherits(signals) or self._shrinks(keys)):
            self._leave()
            return False
        return True

    def _leave(self) -> None:
        """Keep how these sequences went on, if they all did so alike; others run now."""
        own, planner = self._courses, self._planner
        pairs = [(old, new) for other in own[1:] for a, b in zip(own[0], other, strict=True) for old, new in zip(a, b, strict=True)]
        if planner is not None and not (self.silent or self.trials) and all(alike(old, new) for old, new in pairs):
            worths = {drafter: worth for (index, drafter), worth in planner.worths.items() if not index}
            one, most = self._batch[0], self.outcomes.most
            self.legs[batch_bucket(len(own))] = Leg(own[0], worths, one.modes, one.greedy, self.left, self._stride, most)
        self.left = 0

    def resume(self, leg: Leg, signals: Sequence[Signal], batch: Sequence[Drafting]) -> None:
        """Let these sequences go on as others of about their number did."""
        self._keys, self._remaining = [signal.key for signal in signals], [signal.remaining for signal in signals]
        courses = [[[*pair] for pair in leg.courses] for _ in batch]
        self._known.update(zip(self._keys, courses, strict=True))
        self._set_out(courses)
        self._batch, self.left, self._stride, self.outcomes.most = list(batch), leg.left, leg.stride, leg.most
        self.done = self._misses = 0

    @property
    def steady(self) -> int:
        """Further steps behind this one whose budgets and trees need no look: all sequences are far from their ends then."""
        return max(min(self.left - 1, min(self._remaining) // (self.deepest + 1) - 2), 0) if self.whole else 0

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
        self._keys, self._known[key], heir.modes = [key], heritage, self._batch[0].modes
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
        flat = [(i, course) for own in courses for i, pair in enumerate(own) for course in pair if course is not None]
        self._courses, self.asks, self.silent = courses, sorted({drafter for drafter, _ in flat}), not flat
        self.whole = len(self.asks) == 1 and not any(course.least for _, course in flat)
        self.deepest = max([budget.depth for _, course in flat for budget in (course.budget, *course.near)], default=0)

    def skip(self, most: int) -> int:
        """Count up to `most` further steps as gone on, below 0 so many fewer; returns how many."""
        taken = min(self.left, most)
        self.left, self.done = self.left - taken, self.done + taken
        return taken

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """As planned, but no deeper than the sequence may still grow, and beside what there is."""
        taken = 0 if so_far is EMPTY_TREE else len(so_far)
        course, remaining = self._courses[index][drafter][taken > 0], self._remaining[index]
        if course is None or remaining < 2:
            return NO_BUDGET
        budget, asked = course.budget, self.outcomes.counts.asked
        if course.near and self._round % NEAR >= NEAR - IN_A_ROW:
            budget = course.near[self._round // NEAR % len(course.near)]
        asked[index, drafter] = asked.get((index, drafter), 0) + 1
        if remaining > (depth := budget.depth):
            return budget
        return Budget(min(remaining - 1, budget.nodes), min(remaining - 1, depth), budget.go_on)

    def trim(self, trees: Sequence[TokenTree]) -> tuple[list[TokenTree], int]:
        """The trees without nodes that are not worth their rows, whole if they have drawn trials or probes; rows of all of them."""
        if self.whole:
            return list(trees), sum([1 + len(tree.tokens) for tree in trees])
        rows, chosen = len(trees), []
        for index, tree in enumerate(trees):
            chosen.append(kept := self._trim(index, tree))
            rows += len(kept.tokens)
        return chosen, rows

    def _trim(self, index: int, tree: TokenTree) -> TokenTree:
        source = lone_source(tree)
        if source < 0:
            return self._trim_tree(index, tree)
        self.outcomes.note_levels(source, len(tree.tokens))
        course = self._courses[index][source][0]
        if course is None or not course.least:
            return tree
        return cut(tree, range(self._worth(source, tree, course)), len(tree.tokens))

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
        planner, deepest = self._planner, levels_by_source(tree)
        for source, depth in deepest.items():
            self.outcomes.note_levels(source, depth)
        if planner is None or not deepest or fixed_shape(tree):
            return tree
        if len(deepest) > 1:
            reach = planner.acceptance.reach(self._batch[index].own, tree)
            return keep([tree], [(reach, ())], planner.now.table, planner.now.rate)[0][0]
        course = self._courses[index][next(iter(deepest))][0]
        return tree if course is None or not course.least else cut(tree, course.nodes(tree), len(tree))

    def count(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes, apart: float = 0.0) -> None:
        """The outcome of one step, to be learned from with others.

        Args:
            apart: seconds within that are time spent, but say nothing of steps like this one.
        """
        self.done += 1
        self._round += 1
        if self.left:
            self.left -= 1
        if self._cold:
            self._cold -= 1
            self.outcomes.clear()
            return
        self.outcomes.add(self._batch, trees, verdicts, times, apart=apart, sole=self.asks[0] if self.whole else -1)
        if verdicts[0].path or (len(verdicts) > 1 and any(verdict.path for verdict in verdicts)):
            self._misses = 0
        elif times.rows > len(trees):
            self._misses += 1
            self.left = 0 if self._misses >= _MISSES else self.left

    def take(self, acceptance: Acceptance) -> Counts:
        """Teach `acceptance` what the chains brought; returns the counts and begins new ones."""
        return self.outcomes.take(acceptance, whole=self.whole)

    @property
    def counts(self) -> Counts:
        """What the steps since the last plan brought."""
        return self.outcomes.counts

    def forget(self, key: int) -> None:
        """The sequence has ended. One that ran by itself leaves its courses to the next; others go on without it."""
        courses = self._known.pop(key, None)
        self._heritage = courses if self._keys == [key] else None
        self.left = self.left if self._heritage or key in self._keys else 0
