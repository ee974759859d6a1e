"""Drafts as much as pays: expected accepted tokens per second decide who drafts and how much, nothing at all included.

In: measured costs, calibrated acceptance, every step's outcome. Out: budgets, cut trees. Not here: how a step is planned
(`controllers.planner`), what is kept of a plan (`controllers.cruise`).

A plan weighs tokens that a draft is expected to add against the tokens that its time would bring at the rate reached lately. What
does not pay sleeps, and is tried again at growing intervals; where nothing pays, decoding is plain but for a few microseconds.
Planning a step, judging it and learning from it take some 100 microseconds of Python. Beside a step of a large model that is
nothing; a model of few millions of parameters decodes half a token in that time. So where steps are short and nothing is being
tried, most steps repeat the last plan: same depths, prices turned into thresholds on the drafters' own confidence, outcomes counted
and learned from all at once.
Source: the common form of the methods' adaptive controllers, such as SpecDec++ (arXiv:2405.19715) and DySpec (arXiv:2410.11744).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Final

from paceline.checking import number
from paceline.controllers.auto_learning import learn
from paceline.controllers.auto_words import explain
from paceline.controllers.base import Signal, StepTimes
from paceline.controllers.buckets import batch_bucket
from paceline.controllers.cost_model import CostModel
from paceline.controllers.cruise import Cruise
from paceline.controllers.ear import EVERY
from paceline.controllers.guesses import Guesses
from paceline.controllers.memory import Memory
from paceline.controllers.planner import Planner
from paceline.tree.chain_columns import lone_source
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.controllers.cost_store import CostStore
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

SHORT: Final = 4e-3
"""Seconds of a plain step below which not every step is planned."""

FIRST: Final = 8
"""Steps that are planned in any case."""

APART: Final = 128
"""Quick steps in which nobody drafts that go by, at most, without a word to the controller."""


class AutoController(Planner):
    """Maximises expected tokens per second.

    Args:
        cost_model: measured times; may be shared.
        drafters: their names, cheap ones first, in the order of their source index.
        max_nodes: most nodes of one sequence's tree.
        max_depth: most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
        memory: where what drafters are worth is kept between processes.
        short_step: seconds of a plain step of one sequence below which not every step is planned; 0 plans every step.
    Raises:
        ConfigError: a limit below 1, a negative time.
    """

    name = "auto"
    clock = staticmethod(perf_counter)  # what planning takes is measured here, nothing else

    def __init__(
        self,
        cost_model: CostModel,
        drafters: Sequence[str],
        *,
        max_nodes: int = 32,
        max_depth: int = 16,
        disable_by_batch_size: int | None = None,
        memory: CostStore | None = None,
        short_step: float = SHORT,
    ) -> None:
        super().__init__(
            cost_model, drafters, max_nodes=max_nodes, max_depth=max_depth, disable_by_batch_size=disable_by_batch_size
        )
        number("short_step", short_step, 0.0, inf, "be 0 or more seconds")
        self.short_step = short_step
        self.memory = Memory(memory, self.acceptance.sources, self._yields, self._latest)
        self.cruise, self.guesses = Cruise(len(self.names)), Guesses()
        self.cruising = self.bursting = False
        self._learning = 0.0  # seconds that the outcome of the step before took
        self._signals: Sequence[Signal] = ()
        self._silent = self._gone_by = 0  # steps that went by without drafts, not counted yet: at rest, and between guesses

    def plan(self, signals: Sequence[Signal]) -> None:
        """Go on as planned where that was said, else plan this step."""
        if self.cruising and self.cruise.goes_on(signals):
            self._go_on(signals)
            return
        if self.bursting and self._guesses_again(signals):
            return
        self.asks, self.steady = None, 0
        self.guesses.burst.give_back(self.resting)
        if self._silent or self._gone_by:
            self._end_silence()
        self.bursting, self.cruising = False, self.cruise.goes_on(signals) or self._resumes(signals)
        if self.cruising:
            self._go_on(signals)
            return
        start = self.clock()
        self.gain = self.guesses.gain if len(signals) == 1 else 1.0
        learn(self)
        self._signals = signals
        if self.cruises:  # a trial takes some dozen steps: one drafter at a time
            self.turn = (self.turn + 1) % max(len(self.names), 1)
        super().plan(signals)
        if self.bursting:
            self._guess(signals[0])
            return
        self.cruises = self.now.table[1] < self.short_step
        self.thinking, self.asking = self.clock() - start + self._learning, [0.0] * len(self.names)

    def _resumes(self, signals: Sequence[Signal]) -> bool:
        """Whether other sequences go on as a batch of about their number did before: planning takes as long as several steps do."""
        size, bucket = len(signals), batch_bucket(len(signals))
        leg, gate = self.cruise.legs.pop(bucket, None), self._gates.get(bucket)
        if leg is None or not leg.left or gate is None or gate.wait or size >= (self.disable_by_batch_size or inf):
            return False
        batch = [self.begin(signal) for signal in signals]
        if not leg.suits(batch):
            return False
        learn(self)
        self.batch, self._size, self._context = batch, size, max([signal.length for signal in signals])
        self._alone, self.gain = (signals[0].key, self.guesses.gain) if size == 1 else (-1, 1.0)
        self.worths = {(index, drafter): worth for index in range(size) for drafter, worth in leg.worths.items()}
        for one in batch:
            one.modes = list(leg.modes)
        self.idle, self._signals = False, signals
        self.now.look(size, self._context, self.max_nodes, gate, self._rates)
        self.cruise.resume(leg, signals, batch)
        return True

    def _go_on(self, signals: Sequence[Signal]) -> None:
        """This step goes as planned."""
        self.asks, self.steady = self.cruise.asks, self.cruise.steady
        if self.cruise.silent:
            self._rest(signals)
            return
        if self.steady:
            self.now.prepare(self._size * (self.cruise.deepest + 1), self._context)

    def _rest(self, signals: Sequence[Signal]) -> None:
        """Nobody drafts before the next plan, so that the engine need not ask in the steps up to there."""
        self.listens = self._cheap() if self._size == 1 else []
        self.cruising, self.idle, self.resting = False, True, self.cruise.skip(self._pause(signals, EVERY)) - 1
        if self.bursting:
            self._guess(signals[0])
            return
        self._silent, self.thinking, self.asking = 1 + self.resting, 0.0, [0.0] * len(self.names)

    def _pause(self, signals: Sequence[Signal], most: int) -> int:
        """Up to the next guess of a table; where it is time for one, it is made in this step."""
        if not (self.cruises and self.listens):
            return APART if self.cruises else most
        self.guesses.tables, self.listens = self.listens, []
        burst = self.guesses.begin(signals[0].key)
        self.bursting = burst.wait == 0
        return 1 if self.bursting else burst.pause(APART)

    def _guesses_again(self, signals: Sequence[Signal]) -> bool:
        """Whether this step needs no plan: it comes soon after a guess, with which it makes one burst."""
        guesses = self.guesses
        if guesses.paused:
            left, self.resting = self.resting, 0
            steps = guesses.end_pause(left)
            self._rates.count(1, steps, steps * guesses.plain, self.now.table, steps)
            self._take(-left)
        if len(signals) != 1 or not guesses.goes_on(signals[0].key, self._spare):
            return False
        self.batch[0].remaining, wait = signals[0].remaining, guesses.pause()
        self.idle, self.resting = wait > 0, max(wait - 1, 0)
        self._take(wait or 1)
        return True

    def _pass_by(self) -> None:
        """Let the engine go on by itself up to the next guess, if that needs no plan."""
        guesses = self.guesses
        if guesses.burst.wait and guesses.goes_on(guesses.burst.key, self._spare):
            self.resting = guesses.pause()
            self._take(self.resting)

    @property
    def _spare(self) -> int:
        """Steps from now on in which nobody drafts for certain."""
        if self.cruise.left:
            return self.cruise.left if self.cruise.silent else 0
        return self._gates[batch_bucket(1)].wait

    def _take(self, steps: int) -> None:
        """So many of these steps go by, or below 0 are given back: not to an open gate, if the plan they came from has ended."""
        gate = self._gates[batch_bucket(1)]
        if self.cruise.left:
            self._gone_by += self.cruise.skip(steps)
        elif gate.wait:
            gate.wait -= steps

    def _guess(self, signal: Signal) -> None:
        """Let the tables guess in this step, which is plain otherwise."""
        self.idle, self.batch, self.asks = False, [self.begin(signal)], self.guesses.tables
        self.guesses.plain = self._gates[batch_bucket(1)].plain_seconds(1, self.now.table)
        self.worths, self.thinking, self.asking = {}, 0.0, [0.0] * len(self.names)

    def _end_silence(self) -> None:
        """Count the steps that went by, and give back those that did not."""
        steps, self._silent = self._silent - self.resting, 0
        self.cruise.skip(-self.resting)
        self.resting = 0
        self._end_rest()
        plain = self._gates[batch_bucket(self._size)].plain_seconds(self._size, self.now.table)
        self._rates.count(self._size, self._size * steps, steps * plain, self.now.table, steps)
        if self._size == 1:
            self.guesses.burst.count(steps, steps, steps)
        by, self._gone_by = steps + self._gone_by, 0
        self._gates[batch_bucket(self._size)].passed(by)
        for one in self.batch:
            for watch in one.watches:
                watch.passed(by)

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """What pays for this drafter beside what `so_far` holds; NO_BUDGET where nothing does."""
        if self.cruising:
            return self.cruise.budget(index, drafter, so_far)
        if self.bursting and not self.idle:
            depth = min(self.guesses.most(self.now.lines[drafter]), self.max_depth, self.max_nodes, self.batch[0].remaining - 1)
            return Budget(depth, depth) if drafter in self.guesses.tables and depth > 0 and not len(so_far) else NO_BUDGET
        start = self.clock()
        found = super().budget(index, drafter, so_far)
        self.asking[drafter] += self.clock() - start
        return found

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Keep the nodes that are worth their rows."""
        if self.bursting:
            source = lone_source(trees[0])
            (worth,) = self._select_trees(trees) if source < 0 else self._select_chain(trees, source)
            return [self.guesses.select(trees[0], worth)]
        if self.cruising:
            chosen, rows = self.cruise.trim(trees)
            self.now.prepare(rows, self._context)
            self.drafts = trees, chosen
            return chosen
        start = self.clock()
        found = super().select(trees)
        self.thinking += self.clock() - start
        return found

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        """Count the outcome, or learn from it and say how the next steps go."""
        if self.cruising:
            if self.cruise.whole:
                self.drafts = trees, trees
            self.cruise.count(trees, verdicts, times, self._learning)
            self._learning = 0.0
            if not self.cruise.left:
                self.steady = 0
            return
        if self.bursting:
            if not self.idle:
                start = self.clock()
                brought = self.guesses.learn(trees[0], verdicts[0], times, (self.acceptance, self.batch[0].own))
                self._rates.count(1, *brought, self.now.table)
                self._pass_by()
                self.guesses.learning = self.clock() - start
            return
        start = self.clock()
        super().observe(trees, verdicts, times)
        if self.cruises and not self.idle and self.cost.steps >= FIRST and not self._gates[batch_bucket(self._size)].closed:
            self.cruise.start(self, self._signals, self.most)
        self._learning = 0.0 if self.resting else self.clock() - start  # told as time of the step that follows

    def forget(self, key: int) -> None:
        """The sequence has ended. Where the next one may go on as it did, what it taught is learned with the next plan."""
        start = self.clock()
        self.cruise.forget(key)
        if not self.cruise.left or self.cruise.trials or self.memory.is_due or len(self.batch) > 1:
            learn(self)
        if (gate := self._gates.get(batch_bucket(self._size))) is not None and gate.closed:
            self.cruise.left = 0
        self.memory.keep()
        super().forget(key)
        self._learning += self.clock() - start

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, what it believes at present."""
        return explain(self, index)
