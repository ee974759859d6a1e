"""What a controller is: decides how much each drafter may guess, for each sequence and step.

In: signals (acceptance, sizes, measured times). Out: budgets. Not here: drafting, verifying, any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from paceline.tree.types import NO_BUDGET, Budget

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Verdict


class Signal(NamedTuple):
    """What a controller may know of one sequence before a step.

    Attributes:
        key: identifies the sequence across steps.
        length: committed tokens.
        remaining: most tokens it may still produce (max_tokens and context considered); depth beyond remaining - 1 is waste.
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
        rows: input rows of the scoring pass (roots and nodes of the whole batch).
    """

    draft: tuple[float, ...]
    score: float
    verify: float
    other: float
    rows: int

    def without(self, thinking: float, asking: Sequence[float]) -> StepTimes:
        """The same step without seconds that went into planning it, and into the budgets of each drafter."""
        draft = tuple(max(seconds - asked, 0.0) for seconds, asked in zip(self.draft, asking, strict=True))
        return replace(self, draft=draft, other=max(self.other - thinking, 0.0))


class Controller:
    """Plans the drafting of one step for a batch of sequences and learns from its outcome.

    A policy derives from this class and overrides what it needs; left as it is, it drafts nothing and learns nothing.

    Attributes:
        idle: true from `plan` on where no sequence gets a budget in this step: nobody is asked then, neither for budgets nor for
            drafts.
        listens: drafters, one of whom is asked for a guess that is not scored while the policy is idle on a single sequence; `hear`
            later says what came of it (`engine.listening`).
        resting: set by `plan` or `observe`: for so many further steps of the same sequences nothing is drafted, and neither of the
            two is called, only `passed`; the engine counts it down.
        steady: set by `plan`: for so many further steps of the same sequences neither `plan` nor `select` is called: budgets stay,
            trees are scored as they come; the engine counts it down.
        patient: the engine may set `resting` too, for as long as all drafters say that they have nothing to propose.
        asks: drafters who may get a budget in this step, set by `plan`; nobody else is asked. None: any may.
    """

    name: str
    idle: bool = False
    listens: Sequence[int] = ()
    resting: int = 0
    steady: int = 0
    patient: bool = False
    asks: Sequence[int] | None = None

    def plan(self, signals: Sequence[Signal]) -> None:
        """A new step begins with these sequences; called before any budget is asked for."""

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """How much drafter number `drafter` may propose for sequence `index` of the plan, given what the drafters before it have
        proposed (cheap drafters come first). NO_BUDGET skips it."""
        return NO_BUDGET

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The merged trees, cut to the nodes worth their verification time (see `tree.select` for what may be cut)."""
        return list(trees)

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        """The outcome of the step, sequences in the order of the plan."""

    def passed(self, score: float, rest: float) -> None:
        """One of the steps that rested took so many seconds for scoring, and for all else."""

    def hear(self, drafter: int, matched: int) -> None:
        """So many tokens of a guess that was not scored came true."""

    def forget(self, key: int) -> None:
        """The sequence has ended."""

    def explain(self, index: int) -> str:
        """The decision on sequence number `index` of the last plan in words, a line per decision, true from the end of `select`
        until the next `plan`; called for logs and explanations only."""
        return ""
