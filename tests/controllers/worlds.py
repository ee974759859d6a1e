"""Synthetic worlds for controllers: costs and acceptance are formulas, time is a sum, nothing is measured.

A world drafts as told by the controller's budgets, decides with its own random numbers which nodes the target accepts,
and adds up the seconds that its formulas give. Token RIGHT is what the target wants next; any other token is a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.controllers import Outcome, Plan, Signal, StepTimes
from paceline.controllers.auto import Costs
from paceline.tree import EMPTY_TREE, NO_BUDGET, Budget, TokenTree, Verdict, merge

RIGHT = 1
Chance = Callable[[int, np.random.Generator], tuple[float, float]]


def steady(chance: float) -> Chance:
    """Every node is accepted with this chance, and the drafter says so."""
    return lambda step, rng: (chance, chance)


def informed(low: float, high: float) -> Chance:
    """Easy and hard tokens in turn, told apart by the drafter's confidence."""

    def draw(step: int, rng: np.random.Generator) -> tuple[float, float]:
        chance = high if rng.random() < 0.6 else low
        return chance, chance

    return draw


def overconfident(step: int, rng: np.random.Generator) -> tuple[float, float]:
    """Always wrong and always sure."""
    return 0.0, 0.97


@dataclass
class Guesser:
    """A drafter of chains: its chances, its seconds, how often it finds anything, whether it asks `go_on`; and seconds
    of reading a prompt.
    """

    name: str
    chance: Chance
    fixed: float = 0.0
    per_level: float = 0.0
    finds: float = 1.0
    sequential: bool = True
    reading: float = 0.0

    def propose(self, step: int, budget: Budget, rng: np.random.Generator) -> tuple[list[int], list[float], int]:
        """Tokens, confidences and the number of levels that were drafted."""
        tokens: list[int] = []
        confidence: list[float] = []
        if budget.nodes < 1 or rng.random() >= self.finds:
            return tokens, confidence, 0
        right, path = True, 1.0
        for depth in range(1, min(budget.nodes, budget.depth) + 1):
            if depth > 1 and self.sequential and not budget.go_on(depth, path, None):
                break
            true, claimed = self.chance(step, rng)
            right = right and rng.random() < true
            tokens.append(RIGHT if right else 1 + len(self.name))
            confidence.append(claimed)
            path *= claimed
        return tokens, confidence, len(tokens)


def join(tree: TokenTree, tokens: Sequence[int], confidence: Sequence[float], source: int) -> TokenTree:
    """Add a chain to a tree, sharing what is already there."""
    return merge([tree, TokenTree.chain(tokens, confidence=confidence, source=source)])


def right_path(tree: TokenTree) -> tuple[int, ...]:
    """The path of RIGHT tokens."""
    path: list[int] = []
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if token == RIGHT and parent == (path[-1] if path else -1):
            path.append(node)
    return tuple(path)


def judged(tree: TokenTree, proposed: TokenTree | None = None) -> Verdict:
    """What stands of a tree; the next token is RIGHT where `proposed`, of which the tree was cut, goes on with it."""
    path = right_path(tree)
    more = proposed is not None and len(right_path(proposed)) > len(path)
    return Verdict(path, (RIGHT,) * len(path), RIGHT if more else 0)


@dataclass
class World:
    """Drafters, and the seconds of scoring so many rows; `request`: steps after which a new text begins, of `prompt`
    tokens.
    """

    drafters: Sequence[Guesser]
    seconds: Callable[[int], float]
    batch: int = 1
    jitter: float = 0.05
    outliers: float = 0.01
    remaining: int = 1000
    request: int = 0
    prompt: int = 100
    _read: set[str] = field(default_factory=set)
    _plan: Plan = field(default_factory=lambda: Plan(()))
    _left: int = 0
    _outcome: Outcome | None = None

    @property
    def names(self) -> list[str]:
        return [drafter.name for drafter in self.drafters]

    def costs(self, *, probe: bool = True) -> Costs:
        """A cost model that may probe this world."""
        return Costs(probe=(lambda counts, context: map(self.seconds, counts)) if probe else None)

    def run(self, controller: Any, steps: int, *, seed: int = 0, start: int = 0) -> float:
        """Tokens per second of true (unjittered) time over so many steps."""
        rng = np.random.default_rng(seed)
        self._left = 0  # the last plan was perhaps another controller's
        tokens = elapsed = 0.0
        for step in range(start, start + steps):
            gained, spent = self.step(controller, step, rng)
            tokens, elapsed = tokens + gained, elapsed + spent
        return tokens / elapsed

    def _signal(self, key: int, step: int) -> Signal:
        """A text of its own for every request, which comes to its end."""
        if not self.request:
            return Signal(key, self.prompt + step, self.remaining, 0.0)
        request, within = divmod(step, self.request)
        remaining = min(self.remaining, 2 * (self.request - within))
        return Signal(key + self.batch * request, self.prompt + within, remaining, 0.0)

    def step(self, controller: Any, step: int, rng: np.random.Generator) -> tuple[int, float]:
        """One step of the loop; tokens and seconds. Sequences are the same in every step, so a plan ends by itself
        alone.
        """
        if self._left < 1:
            self._plan = controller.plan([self._signal(key, step) for key in range(self.batch)])
            self._left, self._outcome = self._plan.steps, None
        self._left -= 1
        trees = [EMPTY_TREE] * self.batch
        draft, read = [], []
        if self.request and step % self.request == 0:
            self._read = set()
        for source, drafter in enumerate(self.drafters):
            budgets = [row[source] if row else NO_BUDGET for row in self._plan.budgets]
            deepest, drafting = 0, False
            for i, budget in enumerate(budgets):
                if not budget.needed(trees[i]):
                    continue
                drafting = drafting or budget.nodes > 0
                found, confidence, levels = drafter.propose(step, budget, rng)
                deepest = max(deepest, levels)
                if found:
                    trees[i] = join(trees[i], found, confidence, source)
            reading = drafter.reading if drafting and drafter.name not in self._read else 0.0
            self._read |= {drafter.name} if drafting else set()
            read.append(reading)
            draft.append(drafter.fixed + drafter.per_level * deepest if drafting else 0.0)
        proposed, trees = trees, controller.select(trees) if any(map(len, trees)) else trees
        verdicts = [judged(tree, whole) for tree, whole in zip(trees, proposed, strict=True)]
        rows = self.batch + sum(len(tree) for tree in trees)
        score = self.seconds(rows)
        noise = np.exp(self.jitter * rng.standard_normal(len(draft) + 1)) * np.where(
            rng.random(len(draft) + 1) < self.outliers, 20, 1
        )
        noisy = [seconds * factor for seconds, factor in zip([*draft, score], noise.tolist(), strict=True)]
        tokens = sum(len(verdict.path) for verdict in verdicts) + self.batch
        times = StepTimes(tuple(noisy[:-1]), noisy[-1], 0.0, 0.0, rows, tuple(read))
        outcome = Outcome(1, tokens, times.total, proposed, trees, verdicts, times)
        self._outcome = outcome if self._outcome is None else outcome.merged(self._outcome)
        if self._left < 1:
            controller.observe(self._outcome)
        return tokens, score + sum(draft) + sum(read)
