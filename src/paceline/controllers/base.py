"""What a controller is: decides how much each drafter may draft, for each sequence, in this step or in the next few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from paceline.tree import Budget

if TYPE_CHECKING:
    from paceline.tree import TokenTree, Verdict


class Signal(NamedTuple):
    """What a controller may know of one sequence before a step.

    Attributes:
        key: identifies the sequence across steps.
        length: committed tokens, the root included, whose key and value are not in the cache yet.
        remaining: most tokens it may still produce (max_tokens and context considered); depth beyond remaining - 1 is
            waste.
        temperature: 0 for greedy.
    """

    key: int
    length: int
    remaining: int
    temperature: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds spent in one step: `draft` per drafter (in their order), then scoring, verifying and all else.

    Attributes:
        verify: with all that steering does behind the target's pass, passes of other models among it.
        other: merging and selecting trees, and committing.
        rows: input rows of the scoring pass: roots and nodes of the whole batch, and what a drafter adds beside them.
        catching_up: per drafter, reading what it had not seen of the texts, prompts first of all.
    """

    draft: tuple[float, ...]
    score: float
    verify: float
    other: float
    rows: int
    catching_up: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.draft) + sum(self.catching_up) + self.score + self.verify + self.other


@dataclass(frozen=True, slots=True)
class Plan:
    """What is drafted until the next plan.

    Attributes:
        budgets: per sequence, in the order of the signals, a budget for each drafter, or nothing for "no drafts". The
            engine keeps every draft within what a sequence may still grow.
        steps: for so many steps the same budgets hold, unless a sequence joins or ends before.
    """

    budgets: Sequence[Sequence[Budget]]
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"a plan holds for 1 step or more, got {self.steps}")

    @property
    def drafts(self) -> bool:
        """Whether any drafter may draft anything."""
        return any(budget.nodes > 0 for budgets in self.budgets for budget in budgets)

    @classmethod
    def nothing(cls, sequences: int, steps: int = 1) -> Plan:
        """Plain decoding."""
        return cls([()] * sequences, steps)


class Share(NamedTuple):
    """What one drafter brought and took: nodes accepted and scored; seconds of drafting, and of reading prompts."""

    accepted: int
    scored: int
    drafting: float
    reading: float

    def plus(self, other: Share) -> Share:
        """The sums."""
        return Share(
            self.accepted + other.accepted,
            self.scored + other.scored,
            self.drafting + other.drafting,
            self.reading + other.reading,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a plan: the sums of its steps, and the last of them as a sample.

    Attributes:
        steps: that were made; fewer than planned where a sequence joined or ended.
        tokens: that all of them committed.
        seconds: that all of them took, with planning and learning.
        earlier: shares of those before the sample, by drafter.
        proposed: the sample's merged trees, before `select`, in the order of the plan's signals.
        trees: as they were scored. verdicts: on them.
        times: of the sample, without planning and learning.
    """

    steps: int
    tokens: int
    seconds: float
    proposed: Sequence[TokenTree]
    trees: Sequence[TokenTree]
    verdicts: Sequence[Verdict]
    times: StepTimes
    earlier: Sequence[Share] = ()

    def merged(self, earlier: Outcome) -> Outcome:
        """With the sums of the plan's earlier steps."""
        return replace(
            self,
            steps=self.steps + earlier.steps,
            tokens=self.tokens + earlier.tokens,
            seconds=self.seconds + earlier.seconds,
            earlier=earlier.shares,
        )

    @property
    def shares(self) -> list[Share]:
        """Of all steps, by drafter."""
        counts = [[0, 0] for _ in self.times.draft]
        for tree, verdict in zip(self.trees, self.verdicts, strict=True):
            sources = tree.sources.tolist()
            for source in sources:
                counts[source][1] += 1
            for node in verdict.path:
                counts[sources[node]][0] += 1
        reading = self.times.catching_up or (0.0,) * len(counts)
        took = zip(counts, self.times.draft, reading, strict=True)
        shares = [Share(accepted, scored, drafting, read) for (accepted, scored), drafting, read in took]
        if not self.earlier:
            return shares
        return [share.plus(other) for share, other in zip(shares, self.earlier, strict=True)]


class Controller:
    """Plans what is drafted for a batch of sequences and learns from the outcome.

    The engine calls `plan`, then in each of the plan's steps `select`, and `observe` once when the plan has ended,
    before the next `plan` and before `forget` of the sequences that ended with it. A policy derives from this class and
    overrides what it needs; left as it is, it drafts nothing and learns nothing.
    """

    name: str
    max_nodes: int = 0
    """Most nodes of one sequence's tree, where that is an option, which may be lowered before any plan; else 0."""
    drafters: int = 1
    """How many drafters there are; set by the engine before the first plan."""
    reads_acceptance: bool = False
    """It reads `ACCEPTANCE` of what drafters pass to `Budget.go_on`, which none but a drafter that `foretells` does."""

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """Budgets for the next steps of these sequences."""
        return Plan.nothing(len(signals))

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The merged trees, cut to the nodes worth their time; see `tree.select_nodes` for what may be cut."""
        return list(trees)

    def observe(self, outcome: Outcome) -> None:
        """What came of the last plan."""

    def forget(self, key: int) -> None:
        """The sequence has ended."""

    def plain_seconds(self) -> float | None:
        """What a step without drafts would take for the sequences of the last plan; None where that is not measured."""
        return None

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence number `index` in words, one line per decision.

        It is valid from the end of `select` until the next `plan`. Without an index: the policy, or its estimates.
        """
        return ""
