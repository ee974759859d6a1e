"""Drafts as much as pays: expected accepted tokens per second decide the number of nodes, zero included.

In: measured costs, calibrated acceptance, every step's outcome. Out: budgets, cut trees. Not here: drafting, verifying, timing.

A step is worth `gain - rate * time`: tokens that it is expected to add, minus the tokens that its extra time would have brought at
the rate reached lately. Maximising that at every step maximises the long-run rate (Dinkelbach's method for fractional programs),
and it is a sum over drafters, levels and nodes, so each is decided by itself:
  - a drafter is asked if its best depth is worth more than nothing, by its mean acceptance and its measured time;
  - while it drafts, `Voice` stops it before the level whose calibrated chance no longer pays for one more draft level and row;
  - of what was proposed, nodes are kept in order of their calibrated reach up to the best number of rows;
  - `Watch` puts a drafter to sleep whose *measured* net gain is not above zero, and tries it again at growing intervals; `Gate`
    does that to drafting as a whole, since planning and judging take time as well.
Source: the common form of the methods' adaptive controllers, such as SpecDec++ (arXiv:2405.19715) and DySpec (arXiv:2410.11744).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final

from paceline.checking import integer
from paceline.config import GREEDY_EPSILON
from paceline.controllers.acceptance import DEPTH_BUCKET, Acceptance
from paceline.controllers.base import Controller, Signal, StepTimes
from paceline.controllers.buckets import batch_bucket
from paceline.controllers.cost_model import CostModel
from paceline.controllers.ear import EVERY, TOKENS, Ear, cheap_ones
from paceline.controllers.gate import DISTURBED, Gate
from paceline.controllers.judging import Charge, judge
from paceline.controllers.outlook import Outlook
from paceline.controllers.pick import chain_count, cut, fixed_shape, keep
from paceline.controllers.prices import Prices, Rates, best_gain, row_seconds, try_cost, try_depth
from paceline.controllers.rested import Rested
from paceline.controllers.voice import Drafting, Voice, note_all
from paceline.controllers.watch import SLACK, Mode, Watch
from paceline.tree.chain_columns import lone_source
from paceline.tree.token_tree import EMPTY_TREE
from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict

CHEAP: Final = 0.01
"""A drafter whose question costs less than this share of a plain step is asked even while it sleeps."""

LIMIT: Final = 1024
"""Most nodes that a tree may be allowed: seconds are looked up for every number of rows up to that."""


class Planner(Controller):
    """Maximises expected tokens per second, thinking anew at every step.

    Args:
        cost_model: measured times; may be shared.
        drafters: their names, cheap ones first, in the order of their source index.
        max_nodes: most nodes of one sequence's tree.
        max_depth: most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
    Attributes:
        idle: nothing is drafted in this step. resting: nor in so many further ones.
        thinking: seconds that planning this step took; asking: each drafter's budgets; most: the whole step, unless interrupted.
        cruises: most steps go unplanned. turn: the only drafter that may be explored; below 0, any.
        batch: what is known of the step's sequences. drafts: their trees before and after selection.
        worths: (sequence, drafter) of the step -> worth, depth.
        now: what rows and drafters cost, and the rate to beat. gain: tokens that come without drafting for each that plain steps
            bring.
    Raises:
        ConfigError: a limit outside its range.
    """

    def __init__(
        self,
        cost_model: CostModel,
        drafters: Sequence[str],
        *,
        max_nodes: int = 32,
        max_depth: int = 16,
        disable_by_batch_size: int | None = None,
    ) -> None:
        integer("max_nodes", max_nodes, 1, LIMIT)
        integer("max_depth", max_depth, 1, len(DEPTH_BUCKET) - 1)
        self.cost, self.names = cost_model, tuple(drafters)
        self.max_nodes, self.max_depth, self.disable_by_batch_size = max_nodes, max_depth, disable_by_batch_size
        self.acceptance = Acceptance(len(self.names))
        self._known: dict[int, Drafting] = {}
        self._latest: dict[tuple[int, bool], Watch] = {}
        self._rates, self._gates = Rates(), dict[int, Gate]()
        self._yields, self.batch = [1.0] * len(self.names), list[Drafting]()
        self.worths: dict[tuple[int, int], tuple[float, int]] = {}
        self.drafts: tuple[Sequence[TokenTree], Sequence[TokenTree]] = ((), ())
        self.now, self._levels = Outlook(cost_model, self.names), list[int | None]()
        self.thinking, self.asking, self.most = 0.0, [0.0] * len(self.names), inf
        self.cruises = self.idle = self._never = False
        self.turn, self.gain, self._alone = -1, 1.0, -1  # the latter: who runs by itself
        self._size = self._context = self.resting = 0
        self.listens, self._ear, self._rested = list[int](), Ear(), Rested()

    def plan(self, signals: Sequence[Signal]) -> None:
        """Look up costs and the current rate for a batch of this size and context."""
        size = len(signals)
        self._end_rest()
        self.worths, self.drafts = {}, ((), ())
        self._size, self.batch, self._context = size, [], max([signal.length for signal in signals], default=0)
        self._never = not self.names or (self.disable_by_batch_size is not None and size >= self.disable_by_batch_size)
        gate = self._gates.setdefault(batch_bucket(size), Gate())
        alone, self._alone = self._alone, signals[0].key if size == 1 else -1
        self.idle = self._never or not gate.admits(new=size == 1 and alone != self._alone)
        if self.idle:
            self.listens = self._cheap() if size == 1 and gate.closed else []
            self.resting = EVERY - 1 if self._never else gate.rest(self._pause(signals, EVERY * (1 + min(gate.lost, 1))) - 1)
            return
        self.batch = [self.begin(signal) for signal in signals]
        if gate.starting:
            for sequence in self.batch:
                sequence.look_now()
        self.now.begin(size, self._context)
        self._levels = [None] * len(self.names)
        self.now.look(size, self._context, self.max_nodes, gate, self._rates)

    def _cheap(self) -> list[int]:
        """Who guesses while nobody drafts."""
        return cheap_ones(self.cost, self.names, self.now.lines, self.now.table)

    def _pause(self, signals: Sequence[Signal], most: int) -> int:
        """How many steps to be left alone for, this one included."""
        return most

    def passed(self, score: float, rest: float) -> None:
        """A step rested and took so long."""
        self._rested.add(score, rest)

    def _end_rest(self) -> None:
        """Learn what plain steps take that nothing interrupts; if other sequences run than could rest, give their steps back."""
        gate, size = self._gates.get(batch_bucket(self._size)), self._size
        if gate is not None:
            gate.wait += self.resting * (not self._never)
        self._rested.teach(gate, self.cost, (size, self._context), quick=self.cruises)
        self.resting = 0

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """What pays for this drafter beside what `so_far` holds; NO_BUDGET where nothing does."""
        if self.idle:
            return NO_BUDGET
        sequence = self.batch[index]
        nodes = self.max_nodes - len(so_far)
        depth = min(self.max_depth, nodes, sequence.remaining - 1)
        if depth < 1:
            return NO_BUDGET
        now, size, rival = self.now, len(self.batch), len(so_far) > 0
        watch, line = sequence.watches[drafter], now.lines[drafter]
        cheap = line.at(1) < CHEAP * now.table[size]
        special = rival or depth < min(self.max_depth, self.max_nodes)
        worth = self._worth(sequence, drafter, so_far, depth) if rival else self._worth_lately(sequence, drafter, depth)
        mode = watch.mode(worth > (0.0 if watch.asleep else -SLACK), cheap, special)
        mode = Mode.SKIP if now.hopeless[drafter] or (mode is Mode.EXPLORE and self.turn not in (-1, drafter)) else mode
        self.worths[index, drafter] = worth, depth
        sequence.modes[drafter], sequence.rivals[drafter] = mode, rival
        if mode is Mode.SKIP:
            return NO_BUDGET
        if mode is Mode.EXPLORE:
            most = sequence.depths[drafter] + 1 if self.cruises else depth
            depth = sequence.tried = min(depth, most, try_depth(line, size, now.table))
            watch.limit_to(try_cost(line, depth, size, now.table))
            self.worths[index, drafter] = worth, depth
            return Budget(self._nodes(sequence, drafter, nodes, depth), depth)
        depth = min(depth, 2 * sequence.depths[drafter] + 2) if self.cruises else depth
        price = now.rate * (line.per_level / size + row_seconds(len(so_far), size, now.table))
        voice = sequence.voices[drafter] = Voice(self.acceptance, sequence.own, drafter, price, rival)
        return Budget(self._nodes(sequence, drafter, nodes, depth), depth, voice)

    def _nodes(self, sequence: Drafting, drafter: int, most: int, depth: int) -> int:
        """Nodes to ask a drafter for: on quick models not many more than were worth their rows lately, for drafting takes time."""
        return min(most, max(depth, 2 * sequence.nodes[drafter] + 2)) if self.cruises else most

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Keep the nodes with the greatest calibrated reach, as many as are worth their rows.

        Trees with drawn trials or probes stay whole: `Voice` has already kept them short, and cutting a drawn trial for what came
        up in it would bend the law of the output.
        """
        if self.idle:
            return list(trees)
        note_all(self.batch, trees, self._yields, self._levels)
        if len(trees) == 1 and (source := lone_source(trees[0])) >= 0 and not self.batch[0].tried:
            return self._select_chain(trees, source)
        return self._select_trees(trees)

    def _select_trees(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """`select` for any trees."""
        pairs = zip(trees, self.batch, strict=True)
        found = [None if fixed_shape(t) or not len(t) else (self.acceptance.reach(o.own, t), o.forced(t)) for t, o in pairs]
        chosen, rows = keep(trees, found, self.now.table, self.now.rate)
        self.now.prepare(rows, self._context)
        self.drafts = trees, chosen
        for one, tree in zip(self.batch, chosen, strict=True):
            one.note_kept(tree)
        return chosen

    def _select_chain(self, trees: Sequence[TokenTree], source: int) -> list[TokenTree]:
        """`select` for a single chain, as it comes most often."""
        (tree,), own = trees, self.batch[0].own
        count = chain_count(self.acceptance.chances(own, source), tree.confidence.tolist(), self.now.drafted, self.now.rate)
        self.now.prepare(1 + count, self._context)
        chosen = [cut(tree, range(count), len(tree.tokens))]
        self.drafts = trees, chosen
        return chosen

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        """Learn costs, acceptance and the rate, and judge every drafter that was asked."""
        size = len(trees)
        if self.idle or self.cruises:  # most steps like this one go without planning
            times = times.without(self.thinking, self.asking)
        seconds = times.score + times.verify + sum(times.draft) + times.other
        if self.idle:
            self._guard(size, seconds)
            if not self.resting:
                self.cost.observe(size, self._context, times, always=True)
            return
        table = self.now.table
        drafting = sum(line.at(levels) for line, levels in zip(self.now.lines, self._levels, strict=True) if levels is not None)
        self.most = DISTURBED * max(table[min(times.rows, len(table) - 1)] + drafting, 2 * table[size])
        seconds = min(seconds, self.most) if self.cost.steps > 8 else seconds
        self._guard(tokens := sum(len(verdict.path) for verdict in verdicts) + size, seconds)
        accepted = [
            self.acceptance.observe(sequence.own, tree, verdict.path)
            for sequence, tree, verdict in zip(self.batch, trees, verdicts, strict=True)
        ]
        self._judge(trees, accepted, times)
        self.cost.observe(size, self._context, times, self.names, self._levels, cold=self.cruises)
        self._rates.count(size, tokens, seconds, self.now.table)

    def hear(self, drafter: int, matched: int) -> None:
        """So many tokens of an unscored guess of this drafter came true."""
        gate = self._gates[0]
        if self._ear.hear(matched, self.now.lines[drafter], self.now.table, gate.lost):
            gate.open()
            self.resting = 0
        elif (spare := self.resting - TOKENS) > 0 and self._ear.hits:  # guess again as soon as this one is decided
            gate.wait, self.resting = gate.wait + spare, TOKENS

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self._known.pop(key, None)

    def _worth(self, sequence: Drafting, drafter: int, so_far: TokenTree, depth: int) -> float:
        """Expected gain of the best depth minus the price of its time, for one sequence of the batch."""
        now, size, line = self.now, len(self.batch), self.now.lines[drafter]
        prices = Prices(now.table, size, now.rate, len(so_far), line.per_level)
        best, sequence.depths[drafter] = best_gain(self.acceptance, sequence.own, drafter, so_far, depth=depth, prices=prices)
        return self._yields[drafter] * best - now.rate / size * line.fixed

    def _worth_lately(self, sequence: Drafting, drafter: int, depth: int) -> float:
        """`_worth` beside nothing else, found anew with the costs."""
        known = sequence.worths[drafter]
        if known is not None and known[0] == self.now.seen and known[1] == depth and self.now.settled:
            return known[2]
        worth = self._worth(sequence, drafter, EMPTY_TREE, depth)
        sequence.worths[drafter] = self.now.seen, depth, worth
        return worth

    def begin(self, signal: Signal) -> Drafting:
        """What is kept of a sequence, ready for a step."""
        sequence = self._known.get(signal.key)
        if sequence is None:
            greedy = signal.temperature < GREEDY_EPSILON
            latest = [self._latest.get((drafter, greedy), Watch()) for drafter in range(len(self.names))]
            sequence = self._known[signal.key] = Drafting(greedy, [watch.for_new_sequence() for watch in latest])
        sequence.clear(signal.remaining)
        return sequence

    def shrink(self, stay: Mapping[int, int]) -> list[Drafting]:
        """Go on with these sequences of the batch alone, by their old index and their new one."""
        self.batch, self._size = [self.batch[index] for index in stay], len(stay)
        self.worths = {(stay[index], drafter): worth for (index, drafter), worth in self.worths.items() if index in stay}
        return self.batch

    def _price(self) -> float:
        """Tokens that a second is worth when a drafter is judged: the only one there is has no more than plain decoding to beat."""
        plain = self._gates[batch_bucket(self._size)].plain_seconds(self._size, self.now.table)
        return self.now.rate if len(self.names) > 1 else min(self.now.rate, self.gain * self._size / plain)

    def _guard(self, tokens: int, seconds: float) -> None:
        """Tell the gate what whole steps took."""
        if self._never or self.cost.disturbed or (self.idle and self.resting):  # asking made it dearer than the steps that rest
            return
        gate, table, admitted = self._gates[batch_bucket(self._size)], self.now.table, not self.idle
        asked = any(Mode.ASK in one.modes for one in self.batch)
        thinking = self.thinking + sum(self.asking) if self.cruises else 0.0
        gate.record(self._size, tokens, seconds, admitted=admitted, asked=asked, table=table, thinking=thinking, gain=self.gain)

    def _judge(self, trees: Sequence[TokenTree], accepted: Sequence[Sequence[int]], times: StepTimes) -> None:
        """Have every asked drafter's guard told what it brought."""
        asked = [name if self.cost.knows(name, len(trees)) else None for name in self.names]
        charge = Charge(self.now.table, self._price(), self.now.lines, self._levels)
        for drafter, sequence in judge(asked, self.batch, trees, accepted, times=times, charge=charge):
            self._latest[drafter, sequence.greedy] = sequence.watches[drafter]
