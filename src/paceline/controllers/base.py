"""What a controller is: decides how much each drafter may guess, for each sequence and step.

In: signals (acceptance, sizes, measured times). Out: budgets. Not here: drafting, verifying, any model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from paceline.tree.token_tree import TokenTree
    from paceline.tree.types import Budget, Verdict


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


class Controller(Protocol):
    """Plans the drafting of one step for a batch of sequences and learns from its outcome.

    A controller may also have `explain(index: int) -> str`: its decision on sequence number `index` of the last plan in words, a
    line per decision, true from the end of `select` until the next `plan`. Nobody calls it but logs and explanations; without it
    they say nothing (`words.decision`). It may have `idle: bool`, true from `plan` on where no sequence gets a budget in this step:
    nobody is asked then, neither for budgets nor for drafts. While it is idle on a single sequence, it may name drafters in
    `listens`; one of them is then asked for a guess that is not scored, and `hear(drafter, matched)` later says how many of its
    tokens came true (`engine.listening`). It may have `resting: int`, set by `plan`: for so many further steps of the same
    sequences nothing is drafted, and it needs neither `plan` nor `observe`; the engine counts it down.
    """

    name: str

    def plan(self, signals: Sequence[Signal]) -> None:
        """A new step begins with these sequences; called before any budget is asked for."""

    def budget(self, index: int, drafter: int, so_far: TokenTree) -> Budget:
        """How much drafter number `drafter` may propose for sequence `index` of the plan, given what the drafters before it have
        proposed (cheap drafters come first). NO_BUDGET skips it."""

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """The merged trees, cut to the nodes worth their verification time (see `tree.select` for what may be cut)."""

    def observe(self, trees: Sequence[TokenTree], verdicts: Sequence[Verdict], times: StepTimes) -> None:
        """The outcome of the step, sequences in the order of the plan."""

    def forget(self, key: int) -> None:
        """The sequence has ended."""
