"""`auto`: drafts as much as pays, by expected tokens per second; nothing where nothing pays.

A plan weighs what each drafter is expected to add (`acceptance`) against what drafting and scoring take (`costs`),
picks the best combination (`choice`), and leaves out whom outcomes speak against (`trust`). Drafters that cost next to
nothing are used in every step: which of their nodes are scored is decided when they are there, and what follows in the
text teaches even of those that are not. All that is done to learn is paid from one ledger. A plan holds for as many
steps as make planning 1 % of decoding.

Source: the common form of the methods' adaptive controllers, such as SpecDec++ (arXiv:2405.19715) and DySpec
(arXiv:2410.11744).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Final

from paceline.controllers.auto.acceptance import (
    BUCKETS,
    DEPTH_BUCKET,
    RIVAL,
    Acceptance,
    Gap,
    SequenceOdds,
    Source,
    Stopper,
)
from paceline.controllers.auto.choice import (
    Beside,
    ChosenDrafters,
    Forecast,
    Pick,
    PlannedDraft,
    choose,
    cut,
    fixed_shape,
    gains,
    levels_by_source,
    worth_scoring,
)
from paceline.controllers.auto.costs import GRID, Costs, batch_bucket
from paceline.controllers.auto.explanations import auto_words, beliefs, next_try
from paceline.controllers.auto.trust import Ledger, State, Trust
from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.controllers.explanations import NO_DRAFTER, too_many
from paceline.tree import NO_BUDGET, Budget, always_needed, select_nodes
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.controllers.auto.store import CostStore
    from paceline.tree import TokenTree

logger = logging.getLogger("paceline.controllers")

CHEAP: Final = 0.005
"""A drafter whose longest draft takes less than this share of a plain step is used in every step."""

PLAIN_EVERY: Final = 128
"""While drafting, one step in so many is plain, so that the price of plain decoding stays true; paid from the
ledger.
"""

TRY_LEVELS: Final = 4
"""Levels of a try that does not seem to pay."""

TRY_BESIDE: Final = 0.25
"""A try drafts where earlier drafters are right with no more than this chance, whatever it is expected to bring."""

TIMED: Final = 3
"""Short drafts of a drafter that was never timed before its price is believed."""

PLANNING: Final = 0.01
"""Share of a step that planning may take."""

SPREAD: Final = 0.97
"""Share of what a drafter took to read prompts that is still to be paid for after a step."""

MOST_READING: Final = 1e3
"""Seconds of a token that are no measurement."""

ENOUGH_READ: Final = 32
"""Tokens that tell what reading takes; fewer are read together with a draft."""

MOST_STEPS: Final = 64
"""Steps that a plan holds for at most; 8 while a drafter is tried."""

DRAFTING: Final = -1
"""In place of a drafter's index: drafting at all, whoever drafts."""

LIMIT: Final = 1024
"""Highest limit of nodes and levels that the options take."""


@dataclass(slots=True)
class _Sequence:
    """What is kept of one sequence across steps.

    Attributes:
        read: by drafter, tokens of its text that it has read.
    """

    own: SequenceOdds
    read: dict[int, int] = field(default_factory=dict)
    stoppers: dict[int, Stopper] = field(default_factory=dict)
    gaps: dict[int, Gap] = field(default_factory=dict)


@dataclass(slots=True)
class _Now:
    """The plan under way.

    Attributes:
        table: seconds of a step without drafting, by rows. rate: tokens per second, the price of a second.
        planned: who may draft, and how much. steps: that the plan holds. timed: a plain step that is made to be timed.
        probed: seconds of measuring passes, which are no part of decoding.
        why: the reason, where nothing is planned. sizes: per tree, nodes proposed and scored.
    """

    signals: Sequence[Signal]
    batch: list[_Sequence]
    context: int
    table: list[float]
    rate: float
    choice: ChosenDrafters
    planned: list[PlannedDraft] = field(default_factory=list)
    steps: int = 1
    timed: bool = False
    probed: float = 0.0
    why: str = ""
    sizes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return len(self.signals)

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return self.table[self.size]


class AutoController(Controller):
    """Maximises expected tokens per second.

    Args:
        cost_model: measured times; may be shared.
        drafters: their names, in the order of their source index.
        max_nodes: most nodes of one sequence's tree.
        max_depth: most levels.
        disable_by_batch_size: no drafts at or above this number of sequences.
        memory: where acceptance and costs of drafters are stored between processes.
    Raises:
        ConfigError: a limit outside its range.
    """

    name = "auto"
    clock = staticmethod(perf_counter)

    def __init__(
        self,
        cost_model: Costs,
        drafters: Sequence[str],
        *,
        max_nodes: int = 32,
        max_depth: int = 16,
        disable_by_batch_size: int | None = None,
        memory: CostStore | None = None,
    ) -> None:
        integer("max_nodes", max_nodes, 1, LIMIT)
        integer("max_depth", max_depth, 1, LIMIT)
        self.costs, self.names, self.memory = cost_model, tuple(drafters), memory
        self.max_nodes, self.max_depth, self.disable_by_batch_size = max_nodes, max_depth, disable_by_batch_size
        self.acceptance, self.ledger = Acceptance(len(self.names)), Ledger()
        self._trust: dict[tuple[int, int], Trust] = {}
        self.sequences: dict[int, _Sequence] = {}
        self._beside = [Beside()] * len(self.names)
        self._debts = [0.0] * len(self.names)
        self._reading = [0.0] * len(self.names)  # seconds of a token of a text that a drafter has not seen
        self._speedups: dict[int, float] = {}
        self._planning = 0.0
        self._since_plain = self._ended = 0
        self._now: _Now | None = None
        self._recall()

    # The step

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """The budgets with the most expected tokens per second."""
        start = self.clock()
        size, context = len(signals), max((signal.length for signal in signals), default=0)
        limit = self.disable_by_batch_size
        most = min(size * (1 + self.max_nodes), max(GRID[-1], 2 * size))
        table = self.costs.table(size, context, most, hopeful=True)
        rate = max(self._speedups.get(batch_bucket(size), 1.0), 1.0) * size / table[size]
        batch = [self._sequence(signal.key) for signal in signals]
        self._now = now = _Now(
            signals, batch, context, table, rate, ChosenDrafters((), float(size), table[size], float(size))
        )
        if not self.names or not signals or (limit is not None and size >= limit):
            now.why = too_many(size, limit) if self.names and signals else NO_DRAFTER
            return Plan.nothing(size, MOST_STEPS)
        if all(signal.remaining <= 1 for signal in signals):
            now.why = "Nothing is drafted: only one token is left."
            return Plan.nothing(size)
        if self._must_time(now):
            return Plan.nothing(size, now.steps)
        drafting = self._trusted(size, DRAFTING)
        if drafting.state is State.OFF:
            now.why = f"Nothing is drafted: drafting has cost more time than it saved lately; {next_try(drafting)}."
            return Plan.nothing(size, min(max(drafting.wait, 1), MOST_STEPS))
        budgets = self._budgets(now)
        trying = any(draft.state is State.TRIED for draft in now.planned)
        share = (self._planning + self.clock() - start) / (PLANNING * table[size])
        untimed = any(self.costs.line(draft.name, size).count < TIMED for draft in now.planned)
        now.steps = min(max(int(share), 1), 1 if untimed else 8 if trying else MOST_STEPS)
        self._planning = 0.0
        return Plan(budgets, now.steps)

    def _must_time(self, now: _Now) -> bool:
        """Whether this step is plain to be timed: nothing is known, or it is long since plain decoding was last
        seen.
        """
        now.timed = True
        if not self.costs.knows(now.size, now.context):
            now.why = "Nothing is drafted: plain steps are timed first."
            return True
        loss = max(now.rate * now.plain / now.size - 1.0, 0.0) * now.plain
        if self._since_plain >= PLAIN_EVERY and self.ledger.affords(loss):
            self._since_plain = 0
            self.ledger.spend(loss)
            now.why = "Nothing is drafted: a plain step is timed."
            return True
        now.timed = False
        return False

    def _budgets(self, now: _Now) -> list[list[Budget]]:
        """A budget for every sequence and drafter."""
        forecasts = [self._forecast(now, drafter) for drafter in range(len(self.names))]
        states = [self._trusted(now.size, drafter).state for drafter in range(len(self.names))]
        open_ = [forecast for forecast in forecasts if states[forecast.drafter] is not State.OFF]
        now.choice = choose(open_, now.table, now.size)
        self._probe(now)
        picks = {pick.drafter: pick for pick in now.choice.picks}
        for forecast in forecasts:
            pick, state = picks.get(forecast.drafter), states[forecast.drafter]
            timed = self.costs.line(self.names[forecast.drafter], now.size).count >= TIMED
            cheap = timed and forecast.seconds[-1] <= CHEAP * now.plain
            if not timed and len(forecast.gains) > 1:
                pick, state = Pick(forecast.drafter, min(TRY_LEVELS, len(forecast.gains) - 1)), State.TRIED
            elif cheap:
                pick = Pick(forecast.drafter, len(forecast.gains) - 1)
            elif pick is None and state is State.TRIED:
                pick = self._try(now, forecast)
            if pick is not None:
                price = forecast.price(pick.levels, now.table, now.size, now.rate)
                most = 1.0 if cheap else forecast.most_covered(pick.levels, price)
                if state is State.TRIED:
                    most = max(most, TRY_BESIDE)
                gain = forecast.finds * forecast.gains[pick.levels] - price
                now.planned.append(
                    PlannedDraft(self.names[forecast.drafter], forecast.drafter, state, pick, gain, most, cheap)
                )
        return [self._of_sequence(now, sequence) for sequence in now.batch]

    def _forecast(self, now: _Now, drafter: int) -> Forecast:
        """What is expected of a drafter, by levels."""
        remaining = max(signal.remaining for signal in now.signals) - 1
        width = self.acceptance.sources[drafter].width
        depth = max(min(self.max_depth, self.max_nodes, remaining), 0)
        levels = [[self.acceptance.level(sequence.own, drafter, b) for b in range(BUCKETS)] for sequence in now.batch]
        line, finds = self.costs.line(self.names[drafter], now.size), self.acceptance.sources[drafter].finds
        expected = gains(levels, 1, depth, DEPTH_BUCKET)
        reading = self._reading[drafter] * self._unread(now, drafter)
        share = reading / max(sum(signal.remaining for signal in now.signals), 1)  # of it that each token bears
        return Forecast(
            drafter,
            expected,
            gains(levels, RIVAL, depth, DEPTH_BUCKET),
            [0.0, *(line.at(level) + share * (now.size + expected[level]) for level in range(1, depth + 1))],
            finds,
            width,
            self._beside[drafter],
            reading,
        )

    def _unread(self, now: _Now, drafter: int) -> int:
        """Tokens of the texts that a drafter has not read."""
        pairs = zip(now.signals, now.batch, strict=True)
        return sum(max(signal.length - sequence.read.get(drafter, 0), 0) for signal, sequence in pairs)

    def _probe(self, now: _Now) -> None:
        """Measure the grid point past what the plan scores, if the ledger pays for it."""
        rows = int(now.choice.rows) if now.choice.picks else now.size + 1
        point = self.costs.unmeasured(now.size, now.context, rows)
        if point is not None and self.ledger.affords(self.costs.probing(now.size, now.context, point)):
            start = self.clock()
            self.costs.measure(now.size, now.context, point)
            took = self.clock() - start
            self.ledger.spend(took)
            self._planning -= took
            now.probed = took
            now.table = self.costs.table(now.size, now.context, len(now.table) - 1, hopeful=True)

    def _try(self, now: _Now, forecast: Forecast) -> Pick | None:
        """A short draft by a drafter that does not seem to pay, if the ledger bears the loss of all of it."""
        levels = min(TRY_LEVELS, len(forecast.gains) - 1)
        if levels < 1:
            return None
        rows = min(now.size * (1 + levels), len(now.table) - 1)
        loss = forecast.seconds[levels] + forecast.reading + now.table[rows] - now.plain
        return Pick(forecast.drafter, levels) if self.ledger.affords(loss) else None

    def _of_sequence(self, now: _Now, sequence: _Sequence) -> list[Budget]:
        """Its budgets, with a stopper each for drafters that call `go_on` before every level."""
        budgets = [NO_BUDGET] * len(self.names)
        sequence.stoppers, sequence.gaps = {}, {}
        off = {draft.drafter for draft in now.planned if draft.state is State.OFF}
        for draft in now.planned:
            drafter = draft.drafter
            levels = self._most_levels(draft)
            width = self.acceptance.sources[drafter].width
            prices = self._prices(now, draft, levels)
            stopper = sequence.stoppers[drafter] = Stopper(self.acceptance, sequence.own, drafter, prices)
            nodes = min(self.max_nodes, levels if width < 1.1 else int(2 * width * levels) + 1)
            gap = sequence.gaps[drafter] = Gap(self.acceptance, sequence.own, drafter, draft.most, off)
            needed = gap if draft.most < 1.0 else always_needed
            budgets[drafter] = Budget(nodes, min(levels, nodes), stopper, needed)
        return budgets

    def _most_levels(self, draft: PlannedDraft) -> int:
        """Levels that a drafter may draft: more than planned, where the stopper finds that they pay."""
        levels = draft.pick.levels
        more = 0 if draft.cheap else 1 if draft.state is not State.ON else levels + 1
        return min(levels + more, self.max_depth)

    def _prices(self, now: _Now, draft: PlannedDraft, levels: int) -> list[float]:
        """Tokens that the time of each level, from 1 on, brings otherwise: of drafting it and of scoring its row.

        A single sequence's rows are known one by one; those of a batch lie anywhere, so that they cost what rows cost
        on average.
        """
        size, table = now.size, now.table
        last, per_level = len(table) - 1, self.costs.line(draft.name, size).per_level / size
        if size > 1:
            rows = min(max(int(now.choice.rows), 2 * size), last)
            return [now.rate * (per_level + (table[rows] - table[rows - size]) / size)] * levels
        source = self.acceptance.sources[draft.drafter]
        others = now.choice.rows - source.finds * draft.pick.levels * source.width if now.choice.picks else 1.0
        first = max(int(others), 1)
        at = [table[min(first + round(level * source.width), last)] for level in range(levels + 1)]
        return [now.rate * (per_level + more - less) for less, more in pairwise(at)]

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The nodes that are worth their rows; trees with drawn trials whole, for what came up must not decide."""
        now = self._now
        if now is None:
            return list(trees)
        off = {draft.drafter for draft in now.planned if draft.state is State.OFF}
        reaches: list[list[float] | None] = []
        chosen = list(trees) if len(now.planned) == 1 else [self._within(tree) for tree in trees]
        for tree, sequence in zip(chosen, now.batch, strict=True):
            if not len(tree) or fixed_shape(tree):
                reaches.append(None)
                continue
            reaches.append(self.acceptance.reach(sequence.own, tree, off))
        rows = now.size + sum(len(tree) for tree, reach in zip(chosen, reaches, strict=True) if reach is None)
        kept = worth_scoring(reaches, now.table, rows, now.rate, self.max_nodes)
        chosen = [
            tree if reach is None else cut(tree, nodes)
            for tree, reach, nodes in zip(chosen, reaches, kept, strict=True)
        ]
        now.sizes = [(len(tree), len(kept_tree)) for tree, kept_tree in zip(trees, chosen, strict=True)]
        return chosen

    def _within(self, tree: TokenTree) -> TokenTree:
        """A merged tree cut to the most nodes that one may have; which drawn ones stay does not depend on their tokens,
        nor does it on the tree's size, which depends on where they fell.
        """
        return select_nodes(tree, self.max_nodes - sum(tree.kinds.tolist())) if fixed_shape(tree) else tree

    # Learning

    def observe(self, outcome: Outcome) -> None:
        """Learn what was accepted, what it took, and who paid."""
        start, now = self.clock(), self._now
        if now is None or not now.signals:
            return
        self._learn_costs(now, outcome)
        self._learn_beside(now, outcome)
        self._learn_reading(now, outcome)
        if now.timed:  # so far a pass was the unit of time, or its price was old
            now.table = self.costs.table(now.size, now.context, len(now.table) - 1, hopeful=True)
        for sequence, proposed, tree, verdict in zip(
            now.batch, outcome.proposed, outcome.trees, outcome.verdicts, strict=True
        ):
            drawn = bool(len(proposed)) and fixed_shape(proposed)
            about = tree if drawn else proposed
            self.acceptance.observe(sequence.own, about, verdict.tokens, verdict.path, drawn=drawn)
        seconds = max(outcome.seconds - now.probed, 1e-9)
        bucket, weight = batch_bucket(now.size), 1.0 - 0.97**outcome.steps
        known, new = self._speedups.get(bucket, 1.0), outcome.tokens / seconds * now.plain / now.size
        self._speedups[bucket] = known + weight * (min(new, 4.0 * max(known, 1.0)) - known)
        self.ledger.earn(seconds, now.plain)
        self._update_trust(now, outcome, seconds)
        self._planning += self.clock() - start

    def _learn_costs(self, now: _Now, outcome: Outcome) -> None:
        levels: list[int | None] = [None] * len(self.names)
        proposed = [levels_by_source(tree) for tree in outcome.proposed]
        for draft in now.planned:
            if not _was_asked(outcome, draft.drafter) and any(proposed):
                continue
            deepest = proposing = asked = 0
            for sequence, tree, levels_of in zip(now.batch, outcome.proposed, proposed, strict=True):
                asked += sequence.gaps[draft.drafter](tree)
                depth = levels_of.get(draft.drafter, 0)
                proposing += depth > 0
                stopper = sequence.stoppers.get(draft.drafter)
                if depth and stopper is not None and stopper.stopped:
                    depth = max(depth, stopper.levels)
                deepest = max(deepest, depth)
            if asked:
                source = self.acceptance.sources[draft.drafter]
                levels[draft.drafter] = deepest
                source.finds += 0.05 * (min(proposing / asked, 1.0) - source.finds)
        self.costs.observe(now.size, now.context, outcome.times, self.names, levels)

    def _learn_reading(self, now: _Now, outcome: Outcome) -> None:
        """What a drafter takes to read a token, and which texts it has read now."""
        for drafter, share in enumerate(outcome.shares):
            if share.reading > 0.0:
                unread, known = self._unread(now, drafter), self._reading[drafter]
                if unread >= ENOUGH_READ:
                    price = share.reading / unread
                    self._reading[drafter] = price if not known else known + 0.3 * (min(price, 4.0 * known) - known)
                for signal, sequence in zip(now.signals, now.batch, strict=True):
                    sequence.read[drafter] = signal.length

    def _learn_beside(self, now: _Now, outcome: Outcome) -> None:
        """What earlier drafters left to those behind them."""
        for draft in now.planned[1:]:
            for sequence, tree in zip(now.batch, outcome.proposed, strict=True):
                covered = sequence.gaps[draft.drafter].covered(tree)
                asked = covered is None or covered <= draft.most
                self._beside[draft.drafter] = self._beside[draft.drafter].moved(covered, 0.05 / now.size, asked=asked)

    def _update_trust(self, now: _Now, outcome: Outcome, seconds: float) -> None:
        """Tell each trust what was saved, in plain steps, and charge the ledger with what learning lost."""
        steps, price, shares = outcome.steps, now.plain / now.size, outcome.shares
        rows = sum(share.scored for share in shares) / steps
        more = now.table[min(now.size + round(rows), len(now.table) - 1)] - now.plain
        per_row = more / rows if rows > 0.0 else 0.0
        planned = {draft.drafter: draft for draft in now.planned}
        dues = 0.0
        for drafter, share in enumerate(shares):
            trust, draft = self._trusted(now.size, drafter), planned.get(drafter)
            if draft is None or not (share.scored or share.drafting):
                trust.skip(steps, known=now.why != "" or draft is not None)
                continue
            saved = share.accepted * price - share.scored * per_row - share.drafting
            if share.scored or not draft.cheap:
                due = self._due(drafter, share.reading, steps)
                dues += due
                trust.record((saved - due) / now.plain, steps)
            else:
                trust.skip(steps, known=True)
            if draft.state is not State.ON or (draft.cheap and not share.scored):
                self.ledger.spend(max(-saved, 0.0))
        everything = self._trusted(now.size, DRAFTING)
        if rows:
            self._since_plain += steps
            spent = seconds - sum(share.reading for share in shares) + dues
            everything.record((outcome.tokens * price - spent) / now.plain, steps)
        else:
            self._since_plain = 0
            everything.skip(steps, known=True)

    def _due(self, drafter: int, reading: float, steps: int) -> float:
        """Seconds of reading prompts that such steps have to pay for: it is spread over the next ones."""
        debt = self._debts[drafter] + reading
        due = debt * (1.0 - SPREAD**steps)
        self._debts[drafter] = debt - due
        return due

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self.sequences.pop(key, None)
        self._ended += 1
        if self.memory is not None and self._ended & (self._ended - 1) == 0:
            sources = [source.to_list() for source in self.acceptance.sources]
            self.memory.save({"sources": sources, "drafts": self.costs.drafts(), "reading": self._reading})

    def _recall(self) -> None:
        """Take over what an earlier process learned, all of it or nothing."""
        kept = self.memory.load() if self.memory is not None else None
        if kept is None:
            return
        try:
            sources = [Source.restore(source) for source in kept["sources"]]
            if len(sources) != len(self.names):
                raise ValueError("it is for other drafters")
            reading = [float(price) for price in kept["reading"]]
            if len(reading) != len(self.names) or not all(0.0 <= price < MOST_READING for price in reading):
                raise ValueError("reading takes no such time")
            self.costs.restore_drafts(kept["drafts"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            logger.warning("the stored acceptance of drafters is not valid (%s); starting from scratch", error)
            return
        self.acceptance.sources, self._reading = sources, reading

    def _sequence(self, key: int) -> _Sequence:
        return self.sequences.setdefault(key, _Sequence(SequenceOdds(len(self.names))))

    def _trusted(self, size: int, drafter: int) -> Trust:
        """The trust in a drafter at this batch size, or of `DRAFTING`."""
        return self._trust.setdefault((batch_bucket(size), drafter), Trust())

    # Told

    def plain_seconds(self) -> float | None:
        return None if self._now is None or not self.costs.knows(self._now.size, self._now.context) else self._now.plain

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, what it believes at present."""
        now = self._now
        if index is None:
            size = 1 if now is None else now.size
            speedup = self._speedups.get(batch_bucket(size), 1.0)
            return "\n".join(beliefs(speedup, self.names, self.acceptance, self._states(size)))
        if now is None or now.why:
            return "" if now is None else now.why
        trusts = {
            drafter: self._trust.get((batch_bucket(now.size), drafter), Trust()) for drafter in range(len(self.names))
        }
        stopped = now.batch[index].stoppers
        sizes, remaining = now.sizes[index] if now.sizes else (0, 0), now.signals[index].remaining
        rates = now.rate, now.size / now.plain
        return auto_words(now.planned, self.names, trusts, stopped, remaining=remaining, sizes=sizes, rates=rates)

    def _states(self, size: int) -> list[str]:
        bucket = batch_bucket(size)
        return [
            self._trust[bucket, i].state.value if (bucket, i) in self._trust else "new" for i in range(len(self.names))
        ]


def _was_asked(outcome: Outcome, drafter: int) -> bool:
    """Whether a planned drafter was used indeed: not behind others where the model scores chains only, nor without a
    state.
    """
    return outcome.times.draft[drafter] > 0.0 or any(drafter in tree.sources for tree in outcome.proposed)
