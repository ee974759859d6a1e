"""What a hierarchy knows of one sequence: the text with the chain that grows behind it, and the middle model's cache.

In: the target's text, verdicts of the middle model. Out: the chain so far with its rows. Not here: rounds
(`specmquant`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_rows import uniform
from paceline.drafters.common.draft_state import Follower, agreed
from paceline.drafters.growth.base import as_tree

if TYPE_CHECKING:
    import torch

    from paceline.drafters.base import Context
    from paceline.models import Runner, SequenceCache
    from paceline.tree import Budget, TokenTree, Verdict

_STEP: Final = 1 << 41
_ROUND: Final = 1 << 42
"""Numbers of draws that make seeds."""


class MiddleState(Follower):
    """See the module.

    Attributes:
        context: the sequence as the target has it. asked: the same with the chain behind it, as the small model is
        asked.
        cache: of the middle model, a prefix of that text without its last token. inner: the small model's state.
        tokens, chances, rows: of the chain: each token, its chance and (v,) probabilities where it was drawn.
    """

    __slots__ = ("_drawn", "_levels", "_read", "asked", "chances", "inner", "rows", "tokens")

    def __init__(self, context: Context, cache: SequenceCache, begin: Callable[[Context], Any]) -> None:
        super().__init__(context, cache)
        self.asked = replace(context, tokens=list(context.tokens), shape=None, taps={}, prediction=())
        self.inner = begin(self.asked)
        self._read, self._drawn, self._levels = len(context.tokens), False, 1
        self.tokens, self.chances, self.rows = list[int](), list[float](), list[Any]()

    @property
    def pending(self) -> list[int]:
        """What the middle model is to be fed: the last token, and those before it that its cache lacks."""
        return self.asked.tokens[self.cache.length :]

    @property
    def seed(self) -> int | None:
        """Of the middle model's noise in this round, which it shares with no other; None where it takes likeliest
        tokens.
        """
        return int(uniform(self.asked.seed, len(self.asked.tokens), _ROUND) * 2**53) if self._drawn else None

    def follow(self, runner: Runner, inner: Any, *, drawn: bool) -> None:
        """Take the chain back but for what the target kept of it, and begin another behind the target's text."""
        text, asked, context = self.context.tokens, self.asked, self.context
        new, old = text[self._read :], asked.tokens[self._read :]
        same = agreed(old, new)
        kept = self._read + same
        asked.tokens[kept:] = new[same:]
        if (length := min(kept, len(text) - 1)) < self.cache.length:
            runner.truncate(self.cache, length)
        if inner is not None:
            inner.rewind(self.inner, kept)
        asked.seed = int(uniform(context.seed, len(text), _STEP) * 2**53)
        asked.temperature = context.temperature if drawn else 0.0
        asked.shape = None if context.shape is None else self._shape
        self._read, self._drawn, self._levels = len(text), drawn, 1
        self.tokens, self.chances, self.rows = [], [], []

    def _shape(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """The request's rules at paths behind the chain."""
        assert self.context.shape is not None
        return self.context.shape(logits, [[*self.tokens, *path] for path in paths])

    def take(self, verdict: Verdict, rows_nv: torch.Tensor) -> None:
        """Put what the middle model said behind the chain."""
        distributions = rows_nv[[0, *(node + 1 for node in verdict.path)]].softmax(-1)
        for token, distribution_v in zip(verdict.tokens, distributions, strict=True):
            self.tokens.append(token)
            self.chances.append(min(float(distribution_v[token]), 1.0))
            self.rows.append(distribution_v)
        self.asked.tokens.extend(verdict.tokens)

    def heard(self, budget: Budget, most: int, least: int) -> bool:
        """Cut the chain after `most` tokens, or where the controller speaks against the next; whether another round is
        wanted.

        The next token is asked for before the round that would bring it; a token is cut for what comes before it alone.
        """
        count = min(len(self.tokens), most)
        wanted = count + 1 if count < min(least, most) else count
        while self._levels < wanted:
            if not budget.go_on(self._levels + 1, math.prod(self.chances[: self._levels]), None):
                count = wanted = min(count, self._levels)
                break
            self._levels += 1
        del self.tokens[count:], self.chances[count:], self.rows[count:]
        return wanted > count

    def chain(self, source: int) -> TokenTree:
        """The chain as a tree."""
        return chain_tree(self.tokens, self.chances, source, self.rows if self._drawn else ())

    def fork(self, context: Context, runner: Runner, inner: Any) -> MiddleState:
        """A state for a copy of the sequence."""
        self.follow(runner, inner, drawn=self._drawn)
        shares = runner.capabilities.fork
        cache = runner.fork(self.cache) if shares else runner.open()
        return MiddleState(context, cache, lambda asked: None if inner is None else inner.fork(self.inner, asked))


def reroot(pending: Sequence[int], tree: TokenTree) -> TokenTree:
    """A tree behind the last of some tokens, as one behind the first of them."""
    more = len(pending) - 1
    if not more:
        return tree
    tokens, parents = [*pending[1:], *tree.tokens.tolist()], [*range(-1, more - 1), *(tree.parents + more).tolist()]
    return as_tree(tokens, parents)


def paths_of(tree: TokenTree) -> list[list[int]]:
    """Tokens behind the root that lead to each row of a tree, the root's first."""
    return [[], *([int(tree.tokens[i]) for i in tree.path(node)] for node in range(len(tree)))]
