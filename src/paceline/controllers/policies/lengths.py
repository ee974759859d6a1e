"""What the published policies share that decide sequence by sequence how long a draft may be.

In: signals, trees, verdicts. Out: budgets of so many levels, whole trees. Not here: any policy (one file each),
stopping a drafter while it drafts (`stops`), measured costs: these policies follow acceptance alone, and none notices
when drafting does not pay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from paceline.config import GREEDY_EPSILON
from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.controllers.words import count
from paceline.tree import Budget, select_nodes
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.controllers.policies.stoppers import Voice
    from paceline.tree import TokenTree, Verdict

M = TypeVar("M")

MOST: Final = 1024
"""Highest limit of a draft's length that any option takes."""


class Course(Generic[M]):
    """One sequence: what its policy keeps across steps, and the step under way.

    Attributes:
        greedy: temperature 0.
        memory: the policy's own.
        length: levels that this step's draft may have by the policy; `limited`: the end of the sequence allows fewer.
        remaining: tokens it may still produce.
        voices: by drafter, where the policy may stop it.
        sizes: nodes proposed and nodes scored in this step.
    """

    __slots__ = ("greedy", "length", "limited", "memory", "remaining", "sizes", "voices")

    def __init__(self, greedy: bool, memory: M) -> None:
        self.greedy, self.memory = greedy, memory
        self.clear(0, 0)

    def clear(self, remaining: int, length: int) -> None:
        """A new step begins."""
        self.remaining, self.length, self.limited = remaining, length, length > remaining - 1
        self.voices: dict[int, Voice] = {}
        self.sizes = (0, 0)


class LengthController(Controller, ABC, Generic[M]):
    """Base of the policies: per sequence a length, learned from verdicts.

    Args:
        num_speculative_tokens: most nodes of a step's tree; None leaves the policy's own limit.
        disable_by_batch_size: no drafts at or above this number of sequences.
    """

    width = 1
    """Nodes that a level may have."""

    def __init__(self, num_speculative_tokens: int | None, disable_by_batch_size: int | None) -> None:
        if num_speculative_tokens is not None:
            integer("num_speculative_tokens", num_speculative_tokens, 0, MOST)
        self.num_speculative_tokens, self.disable_by_batch_size = num_speculative_tokens, disable_by_batch_size
        self._courses: dict[int, Course[M]] = {}
        self._batch: list[Course[M]] = []
        self._idle = False

    # The policy's part

    @abstractmethod
    def _remember(self, greedy: bool) -> M:
        """The memory of a new sequence."""

    @abstractmethod
    def _length(self, memory: M) -> int:
        """Most levels of this step's draft."""

    def _learn(self, course: Course[M], tree: TokenTree, verdict: Verdict) -> None:
        """The outcome of a step in which something was scored."""

    @abstractmethod
    def _why(self, course: Course[M]) -> str:
        """The decision on a sequence in words, one sentence."""

    @abstractmethod
    def _policy(self) -> str:
        """The policy in words, without its name."""

    # The controller's part

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """Ask the policy for every sequence's length; every drafter may propose so much."""
        limit, most = self.disable_by_batch_size, self.num_speculative_tokens
        self._idle = most == 0 or (limit is not None and len(signals) >= limit)
        self._batch = []
        for signal in signals:
            course = self._courses.get(signal.key)
            if course is None:
                greedy = signal.temperature < GREEDY_EPSILON
                course = self._courses[signal.key] = Course(greedy, self._remember(greedy))
            length = self._length(course.memory)
            course.clear(signal.remaining, length if most is None else min(length, most))
            self._batch.append(course)
        return Plan.nothing(len(signals)) if self._idle else Plan([self._budgets(course) for course in self._batch])

    def _budgets(self, course: Course[M]) -> list[Budget]:
        nodes = self._most(course)
        depth = min(course.length, nodes, course.remaining - 1)
        return [] if depth < 1 else [self._grant(course, drafter, nodes, depth) for drafter in range(self.drafters)]

    def _most(self, course: Course[M]) -> int:
        """Nodes of a sequence's tree."""
        most = course.length * self.width
        return most if self.num_speculative_tokens is None else min(most, self.num_speculative_tokens)

    def _grant(self, course: Course[M], drafter: int, nodes: int, depth: int) -> Budget:
        return Budget(nodes, depth)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Every tree as it is: budgets keep them within the length, but for merged ones, which are cut to it."""
        chosen = []
        for course, tree in zip(self._batch, trees, strict=True):
            chosen.append(self._within(course, tree))
            course.sizes = len(tree), len(chosen[-1])
        return chosen

    def _within(self, course: Course[M], tree: TokenTree) -> TokenTree:
        """Merged trees with drawn trials are cut whatever their size, which depends on where the draws fell."""
        return tree if self.drafters == 1 else select_nodes(tree, self._most(course))

    def observe(self, outcome: Outcome) -> None:
        """Tell the policy what became of every tree that had nodes."""
        for course, tree, verdict in zip(self._batch, outcome.trees, outcome.verdicts, strict=True):
            if len(tree):
                self._learn(course, tree, verdict)

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self._courses.pop(key, None)

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, the policy in one line."""
        if index is None:
            limit = self.disable_by_batch_size
            off = "" if limit is None else f", none from {limit} running sequences on"
            return f"{self.name}: {self._policy()}{off}"
        if self.num_speculative_tokens == 0:
            return "Nothing is drafted: 0 speculative tokens are plain decoding."
        if self._idle:
            running = count(len(self._batch), "sequence")
            return f"Nothing is drafted: {running} at once, and disable_by_batch_size is {self.disable_by_batch_size}."
        course = self._batch[index]
        if course.remaining <= 1:
            return "Nothing is drafted: this is the last token."
        return self._why(course) + self._result(course)

    def _result(self, course: Course[M]) -> str:
        """What came of it, as one more sentence."""
        return "" if course.sizes[0] else " Nothing was found to propose."
