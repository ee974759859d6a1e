"""Base classes of the published policies, which decide sequence by sequence how long a draft may be.

Some stop a drafter while it drafts, by its confidence in its own tokens: drafters that ask before each token have a
`PolicyStopper`, and for those that propose everything at once (tables) the same cut is made afterwards. The token that
crosses a policy's threshold is part of the draft; nothing is drafted after it. So whether a token is drafted depends on
the tokens before it alone, and drawn trials keep their distribution: a drafter that asks has stopped by itself, and
trees with drawn trials stay whole in `select`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from paceline.config import GREEDY_EPSILON
from paceline.controllers.auto.choice import cut, fixed_shape
from paceline.controllers.base import Controller, Outcome, Plan, Signal
from paceline.controllers.explanations import LAST_TOKEN, ZERO_TOKENS, count, none_from, too_many
from paceline.tree import Budget, select_nodes
from paceline.utils import integer, need, number

if TYPE_CHECKING:
    from paceline.tree import TokenTree, Verdict

M = TypeVar("M")

MAX_LENGTH: Final = 1024
"""Highest limit of a draft's length that any option takes."""


class PolicyState(Generic[M]):
    """One sequence: what its policy keeps across steps, and the step under way.

    Attributes:
        greedy: temperature 0.
        memory: the policy's own.
        length: levels that this step's draft may have by the policy; `limited`: the end of the sequence allows fewer.
        remaining: tokens it may still produce.
        stoppers: by drafter, where the policy may stop it.
        sizes: nodes proposed and nodes scored in this step.
    """

    __slots__ = ("greedy", "length", "limited", "memory", "remaining", "sizes", "stoppers")

    def __init__(self, greedy: bool, memory: M) -> None:
        self.greedy, self.memory = greedy, memory
        self.clear(0, 0)

    def clear(self, remaining: int, length: int) -> None:
        """A new step begins."""
        self.remaining, self.length, self.limited = remaining, length, length > remaining - 1
        self.stoppers: dict[int, PolicyStopper] = {}
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
            integer("num_speculative_tokens", num_speculative_tokens, 0, MAX_LENGTH)
        self.num_speculative_tokens, self.disable_by_batch_size = num_speculative_tokens, disable_by_batch_size
        self.states: dict[int, PolicyState[M]] = {}
        self.batch: list[PolicyState[M]] = []
        self._idle = False

    # The policy's part

    @abstractmethod
    def _remember(self, greedy: bool) -> M:
        """The memory of a new sequence."""

    @abstractmethod
    def _length(self, memory: M) -> int:
        """Most levels of this step's draft."""

    def _learn(self, state: PolicyState[M], tree: TokenTree, verdict: Verdict) -> None:
        """The outcome of a step in which something was scored."""

    @abstractmethod
    def _why(self, state: PolicyState[M]) -> str:
        """The decision on a sequence in words, one sentence."""

    @abstractmethod
    def _policy(self) -> str:
        """The policy in words, without its name."""

    # The controller's part

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """Ask the policy for every sequence's length; every drafter may propose so much."""
        limit, most = self.disable_by_batch_size, self.num_speculative_tokens
        self._idle = most == 0 or (limit is not None and len(signals) >= limit)
        self.batch = []
        for signal in signals:
            state = self.states.get(signal.key)
            if state is None:
                greedy = signal.temperature < GREEDY_EPSILON
                state = self.states[signal.key] = PolicyState(greedy, self._remember(greedy))
            length = self._length(state.memory)
            state.clear(signal.remaining, length if most is None else min(length, most))
            self.batch.append(state)
        return Plan.nothing(len(signals)) if self._idle else Plan([self._budgets(state) for state in self.batch])

    def _budgets(self, state: PolicyState[M]) -> list[Budget]:
        nodes = self._most(state)
        depth = min(state.length, nodes, state.remaining - 1)
        return [] if depth < 1 else [self._grant(state, drafter, nodes, depth) for drafter in range(self.drafters)]

    def _most(self, state: PolicyState[M]) -> int:
        """Nodes of a sequence's tree."""
        most = state.length * self.width
        return most if self.num_speculative_tokens is None else min(most, self.num_speculative_tokens)

    def _grant(self, state: PolicyState[M], drafter: int, nodes: int, depth: int) -> Budget:
        return Budget(nodes, depth)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Every tree as it is: budgets keep them within the length, but for merged ones, which are cut to it."""
        chosen = []
        for state, tree in zip(self.batch, trees, strict=True):
            chosen.append(self._within(state, tree))
            state.sizes = len(tree), len(chosen[-1])
        return chosen

    def _within(self, state: PolicyState[M], tree: TokenTree) -> TokenTree:
        """Merged trees with drawn trials are cut whatever their size, which depends on where the draws fell."""
        return tree if self.drafters == 1 else select_nodes(tree, self._most(state))

    def observe(self, outcome: Outcome) -> None:
        """Tell the policy what became of every tree that had nodes."""
        for state, tree, verdict in zip(self.batch, outcome.trees, outcome.verdicts, strict=True):
            if len(tree):
                self._learn(state, tree, verdict)

    def forget(self, key: int) -> None:
        """The sequence has ended."""
        self.states.pop(key, None)

    def explain(self, index: int | None = None) -> str:
        """The last plan's decision on sequence `index` in words; without an index, the policy in one line."""
        if index is None:
            return f"{self.name}: {self._policy()}{none_from(self.disable_by_batch_size)}"
        if self.num_speculative_tokens == 0:
            return ZERO_TOKENS
        if self._idle:
            return too_many(len(self.batch), self.disable_by_batch_size)
        state = self.batch[index]
        if state.remaining <= 1:
            return LAST_TOKEN
        return self._why(state) + self._result(state)

    def _result(self, state: PolicyState[M]) -> str:
        """What came of it, as one more sentence."""
        return "" if state.sizes[0] else " Nothing was found to propose."


class Token(NamedTuple):
    """A drafted token as its drafter sees it.

    Attributes:
        depth: from 1 on.
        confidence: chance of this token after the ones before it; reach: of the path up to and with it.
        features: what the drafter passed beside it; a mapping of numbers, or None.
    """

    depth: int
    confidence: float
    reach: float
    features: object


Follow = Callable[[float, Token], tuple[float, bool]]


class PolicyStopper:
    """Asks the policy before each token of one draft (`Budget.go_on`).

    Attributes:
        features: what the drafter passed, by depth - 1.
        stopped: level that was not drafted, or 0.
    """

    __slots__ = ("_carried", "_follow", "_reach", "features", "stopped")

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._carried = self._reach = 1.0
        self.features: list[object] = []
        self.stopped = 0

    def __call__(self, depth: int, confidence: float, features: object) -> bool:
        """Whether level `depth` is drafted, after a path with this chance as its drafter sees it."""
        last = min(confidence / self._reach, 1.0) if self._reach > 0.0 else 0.0
        self._reach = confidence
        self.features.append(features)
        self._carried, more = self._follow(self._carried, Token(depth - 1, last, confidence, features))
        if not more:
            self.stopped = depth
        return more


class StopController(LengthController[M]):
    """Base of the policies that stop by confidence."""

    @abstractmethod
    def _follow(self, memory: M, carried: float, token: Token) -> tuple[float, bool]:
        """What to carry on, and whether a token may follow this one; `carried` is what came of the token before, 1 at
        the root.
        """

    def _grant(self, state: PolicyState[M], drafter: int, nodes: int, depth: int) -> Budget:
        stopper = state.stoppers[drafter] = PolicyStopper(partial(self._follow, state.memory))
        return Budget(nodes, depth, stopper)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Trees of points without the nodes below one that crossed the threshold; those with drawn trials or probes
        whole.
        """
        chosen = []
        for state, tree in zip(self.batch, trees, strict=True):
            kept = tree if not len(tree) or fixed_shape(tree) else cut(tree, self._kept(state, tree))
            chosen.append(self._within(state, kept))
            state.sizes = len(tree), len(chosen[-1])
        return chosen

    def _kept(self, state: PolicyState[M], tree: TokenTree) -> list[int]:
        """The nodes whose path never stopped before them, in their order."""
        carried, kept = {-1: 1.0}, []
        for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tokens_of(state, tree), strict=True)):
            if parent in carried:
                value, more = self._follow(state.memory, carried[parent], token)
                kept.append(node)
                if more:
                    carried[node] = value
                elif len(kept) == node + 1 and tree.is_chain:
                    break
        return kept

    def _result(self, state: PolicyState[M]) -> str:
        """What came of it."""
        proposed, scored = state.sizes
        if not proposed:
            return " Nothing was found to propose."
        if scored < proposed:
            return f" Of {proposed} proposed nodes, {scored} {'is' if scored == 1 else 'are'} scored."
        stopped = max((stopper.stopped for stopper in state.stoppers.values()), default=0)
        return f" It was stopped before level {stopped}." if stopped else ""


class ThresholdController(StopController[None]):
    """Base of the policies whose rule is one number: nothing is drafted after a token whose confidence is below it.

    Args:
        levels: most levels of a draft.
        threshold: least confidence of a token that another one may follow.
        num_speculative_tokens, disable_by_batch_size: of `LengthController`.
    """

    def __init__(
        self, levels: int, threshold: float, num_speculative_tokens: int | None, disable_by_batch_size: int | None
    ) -> None:
        super().__init__(num_speculative_tokens, disable_by_batch_size)
        self.levels, self.threshold = levels, threshold

    def _remember(self, greedy: bool) -> None:
        return None

    def _length(self, memory: None) -> int:
        return self.levels

    def _follow(self, memory: None, carried: float, token: Token) -> tuple[float, bool]:
        return carried, token.confidence >= self.threshold

    def _why(self, state: PolicyState[None]) -> str:
        return f"Up to {count(state.length, 'level')}, none after a token whose confidence is below {self.threshold:g}."

    def _policy(self) -> str:
        return f"up to {self.levels} levels, none after a token below a confidence of {self.threshold:g}"


class RejectionController(StopController[M]):
    """Base of the policies that stop where a rejection somewhere in the draft is too likely: under costs of a draft
    step and of a verification, a threshold on that chance is the optimal policy.

    Args:
        stop_threshold: largest chance of a rejection behind which another token follows; 0 drafts the least, 1 the most
            that `bound` allows.
        bound: least and most tokens of a draft, both included.
        num_speculative_tokens, disable_by_batch_size: of `LengthController`.
    Raises:
        ConfigError: a value outside its range.
    Source: SpecDec++ (arXiv:2405.19715), theorem 3.1.
    """

    def __init__(
        self,
        stop_threshold: float,
        bound: Sequence[int],
        num_speculative_tokens: int | None,
        disable_by_batch_size: int | None,
    ) -> None:
        number("stop_threshold", stop_threshold, 0.0, 1.0, "be in 0..1")
        pair = isinstance(bound, list | tuple) and len(bound) == 2
        need(pair, "bound", "be two integers, the least and the most", bound)
        integer("bound[1]", bound[1], 1, MAX_LENGTH)
        integer("bound[0]", bound[0], 1, bound[1])
        super().__init__(num_speculative_tokens, disable_by_batch_size)
        self.stop_threshold, self.bound = stop_threshold, (bound[0], bound[1])

    @abstractmethod
    def _chance(self, memory: M, token: Token) -> float:
        """The factor of a token in the chance that nothing is rejected."""

    def _length(self, memory: M) -> int:
        return self.bound[1]

    def _follow(self, memory: M, carried: float, token: Token) -> tuple[float, bool]:
        chance = carried * self._chance(memory, token)
        return chance, token.depth < self.bound[0] or 1.0 - chance <= self.stop_threshold

    def _why(self, state: PolicyState[M]) -> str:
        least, most = (min(bound, state.length) for bound in self.bound)
        return f"{least} to {count(most, 'level')}, {self._until()}."

    def _policy(self) -> str:
        return f"{self.bound[0]} to {self.bound[1]} levels, {self._until()}"

    def _until(self) -> str:
        return f"until the chance of a rejection exceeds {self.stop_threshold:g}"


def tokens_of(state: PolicyState[M], tree: TokenTree) -> Iterator[Token]:
    """The nodes of a tree with what their drafters said of them, one after the other."""
    reached: list[float] = []
    columns = zip(
        tree.parents.tolist(), tree.depths.tolist(), tree.sources.tolist(), tree.confidence.tolist(), strict=True
    )
    for parent, depth, source, confidence in columns:
        stopper = state.stoppers.get(source)
        features = stopper.features[depth - 1] if stopper is not None and depth <= len(stopper.features) else None
        reached.append(confidence if parent < 0 else confidence * reached[parent])
        yield Token(depth, confidence, reached[-1], features)
