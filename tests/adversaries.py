"""Drafters that try to harm a decoder: none of them may change a token, the output distribution, or another request.

They propose trees that are wrong, broken or too large, or raise. All are made as an engine makes drafters, from
`DrafterArgs`, so that `"adversaries:Liar"` works as a method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from toys import ToyRunner

from paceline.drafters import Context, Drafter, DrafterArgs
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Trial, Verdict


class Adversary(Drafter):
    """The quiet base: proposes nothing. `open` counts states that were begun and not ended."""

    def __init__(self, args: DrafterArgs) -> None:
        self.name = type(self).__name__.lower()
        self.args = args
        self.open = 0

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        self.open += len(contexts)
        return list(contexts)

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [self.tree(state, budget) for state, budget in zip(states, budgets, strict=True)]

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return EMPTY_TREE

    def fork(self, state: Any, context: Context) -> Any:
        self.open += 1
        return context

    def end(self, states: Sequence[Any]) -> None:
        self.open -= len(states)

    def rng(self, context: Context) -> np.random.Generator:
        return np.random.default_rng((abs(context.seed), len(context.tokens)))


def toy_target(args: DrafterArgs) -> ToyRunner:
    assert isinstance(args.target, ToyRunner), "this adversary needs a toy target"
    return args.target


class Oracle(Adversary):
    """Always right at temperature 0: the toy target's own greedy tokens, without a doubt."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        steps = min(budget.nodes, budget.depth)
        tokens = toy_target(self.args).greedy(context.tokens, steps)
        return TokenTree.chain(tokens, confidence=[1.0] * len(tokens), source=self.args.index)


class Liar(Adversary):
    """Always wrong at temperature 0: next to the toy target's greedy token at every level, without a doubt."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        text: list[int] = []
        for _ in range(min(budget.nodes, budget.depth)):
            (token,) = toy_target(self.args).greedy([*context.tokens, *text], 1)
            text.append((token + 1) % self.args.vocab_size)
        return TokenTree.chain(text, confidence=[1.0] * len(text), source=self.args.index)


class Garbage(Adversary):
    """A random tree of the largest size allowed, with confidence in everything."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        rng = self.rng(context)
        tokens, parents, depths, used = [], [], [], set()
        for _ in range(8 * budget.nodes):
            parent = int(rng.integers(-1, len(tokens)))
            token, depth = int(rng.integers(self.args.vocab_size)), 1 if parent < 0 else depths[parent] + 1
            if len(tokens) < budget.nodes and depth <= budget.depth and (parent, token) not in used:
                used.add((parent, token))
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
        counts = np.bincount(np.asarray(parents, np.int64) + 1, minlength=1)
        confidence = [0.999 / counts[parent + 1] for parent in parents]
        return TokenTree.build(tokens, parents, confidence=confidence, sources=self.args.index)


class Gambler(Adversary):
    """Drawn chains from random rows that have nothing to do with the target; exact in distribution all the same."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        rng = self.rng(context)
        steps = min(budget.nodes, budget.depth)
        rows = rng.dirichlet(np.full(self.args.vocab_size, 0.3), size=steps)
        tokens = [int(rng.choice(self.args.vocab_size, p=row)) for row in rows]
        trials = {i - 1: (Trial(i, torch.from_numpy(row.astype(np.float32))),) for i, row in enumerate(rows)}
        return (
            TokenTree.build(tokens, range(-1, steps - 1), trials=trials, sources=self.args.index)
            if steps
            else EMPTY_TREE
        )


class Maximal(Adversary):
    """All tokens of the vocabulary on every level, as far as the budget goes."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        tokens, parents, front = [], [], [-1]
        for _ in range(budget.depth):
            grown = []
            for parent in front:
                for token in range(self.args.vocab_size):
                    if len(tokens) < budget.nodes:
                        grown.append(len(tokens))
                        tokens.append(token)
                        parents.append(parent)
            front = grown
        return TokenTree.build(tokens, parents, sources=self.args.index)


def broken(tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float]) -> TokenTree:
    """A tree that nobody checked."""
    n = len(tokens)
    depths = [1] * n
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 or parent >= i else depths[parent] + 1
    columns = {
        "tokens": tokens,
        "parents": parents,
        "depths": depths,
        "sources": [0] * n,
        "kinds": [0] * n,
    }
    ints = {name: np.asarray(values, np.int32) for name, values in columns.items()}
    return TokenTree(**ints, confidence=np.asarray(confidence, np.float32))


class Duplicates(Adversary):
    """The same child twice."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return broken([1, 1], [-1, -1], [0.5, 0.5])


class Cyclic(Adversary):
    """A node that is its child's child."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return broken([1, 2], [1, 0], [0.5, 0.5])


class NotANumber(Adversary):
    """NaN for confidence."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return broken([1], [-1], [float("nan")])


class OverBudget(Adversary):
    """More nodes than allowed."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.chain([1] * (budget.nodes + 1))


class TooDeep(Adversary):
    """More levels than allowed."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.chain([1] * (budget.depth + 1))


class OutOfRange(Adversary):
    """Token ids that the target does not have."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.chain([self.args.vocab_size])


class Negative(Adversary):
    """A token id below 0."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.chain([-1])


class WrongRow(Adversary):
    """A drawn trial whose row has another vocabulary."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        row = torch.full((self.args.vocab_size + 1,), 1.0 / (self.args.vocab_size + 1))
        return TokenTree.build([1], [-1], trials={-1: (Trial(0, row),)})


class TooFewTrees(Adversary):
    """Forgets a sequence."""

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return []


class RaisesInBegin(Adversary):
    """Never starts."""

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        raise RuntimeError("begin")


class RaisesInPropose(Adversary):
    """Raises at the third token after the prompt."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        if len(context.tokens) >= context.prompt_length + 3:
            raise RuntimeError("propose")
        return TokenTree.chain([1])


class RaisesInObserve(Adversary):
    """Proposes, then raises when told what became of it."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.chain([1])

    def observe(
        self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        raise RuntimeError("observe")


class RaisesInEnd(Adversary):
    """Cannot even leave."""

    def end(self, states: Sequence[Any]) -> None:
        raise RuntimeError("end")


class RaisesForOne(Adversary):
    """Raises for requests whose prompt begins with token 1; others must keep it."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        if context.tokens[0] == 1:
            raise ValueError("not for you")
        return TokenTree.chain([1])


class Writer(Adversary):
    """Writes into the text that it may only read, then guesses. `way` says how."""

    way = "append"

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        text: Any = context.tokens
        if self.way == "append":
            text.append(3)
        elif self.way == "clear":
            text.clear()
        elif self.way == "last":
            text[-1] = (text[-1] + 1) % self.args.vocab_size
        elif self.way == "first":
            text[0] = (text[0] + 1) % self.args.vocab_size
        else:
            context.tokens, context.temperature, context.seed = [1], 9.0, 9
        return TokenTree.chain([1])


class Forger(Adversary):
    """Fractional token ids, which must not be cut to whole ones."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return TokenTree.build([1.5], [-1])  # type: ignore[list-item]


class ForgerByHand(Adversary):
    """The same in a tree that nobody checked."""

    def tree(self, context: Context, budget: Budget) -> TokenTree:
        return broken([1], [-1], [0.5]).replace(tokens=np.asarray([1.0]))


VALID: tuple[type[Adversary], ...] = (Oracle, Liar, Garbage, Gambler, Maximal)
"""Proposals that keep the contract (Oracle and Liar need a toy target)."""

INVALID: tuple[type[Adversary], ...] = (
    Duplicates,
    Cyclic,
    NotANumber,
    OverBudget,
    TooDeep,
    OutOfRange,
    Negative,
    WrongRow,
    TooFewTrees,
)
"""Proposals that break it."""

RAISING: tuple[type[Adversary], ...] = (RaisesInBegin, RaisesInPropose, RaisesInObserve, RaisesInEnd, RaisesForOne)
