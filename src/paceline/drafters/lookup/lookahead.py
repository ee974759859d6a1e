"""Lookahead decoding: Jacobi trajectories far ahead feed a pool of n-grams, which are verified when their first token
comes up.

Every step scores, beside the candidates, a window of probes: for each of the next W positions a column of up to N - 1
tokens, the first of them in a chain from the root, the others below it, each the target's answer to the one before in
an earlier step. The target's answer to a column's last token completes an n-gram for the pool and moves the column on
by one. Verifiers skip probes; they are rows of the pass that only this drafter reads. A column knows the position in
the text of its first token, so that columns that the text has overtaken are dropped and new ones begin at the far end,
with tokens drawn from the text.

The paper takes W = 15, N = 5, G = 15 on GPUs. The defaults here are smaller, since rows cost more where arithmetic is
the limit; a budget that is smaller still is shared between probes and candidates.

Source: Break the sequential dependency of LLM inference using lookahead decoding (arXiv:2402.02057).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SingleDrafter
from paceline.tree import CANDIDATE, EMPTY_TREE, PROBE, ROOT, Budget, Scores, TokenTree, Verdict
from paceline.utils import integer

MAX_WINDOW: Final = 64
MAX_NGRAM: Final = 16
MAX_KEYS: Final = 1 << 16
"""Most first tokens that the pool of one sequence keeps, the oldest dropped."""

FIRST: Final = 0.35
AFTER: Final = 0.6
"""Confidence of a first token (shared by the candidates) and of later ones; the controller calibrates both."""

Pool = OrderedDict[int, "OrderedDict[tuple[int, ...], None]"]
"""First token -> what came after it, the latest last."""


class LookaheadState:
    """One sequence: `columns` by the position of their first token, its pool of n-grams, how much of the text is in
    it.
    """

    __slots__ = ("columns", "context", "end", "pool", "random", "read", "shown")

    def __init__(self, context: Context) -> None:
        self.context, self.random = context, Random(context.seed)
        self.columns: dict[int, list[int]] = {}
        self.pool: Pool = OrderedDict()
        self.shown: list[int] = []  # positions of the columns in the last tree
        self.end = self.read = 0  # length of the text behind which they were shown, and that was read


class LookaheadDrafter(SingleDrafter[LookaheadState]):
    """Drafts n-grams that the target itself produced ahead of the text.

    Args:
        max_window_size: W, columns of the window. max_ngram_size: N, tokens of an n-gram. max_verification_set_size: G,
            n-grams to verify at once (TensorRT-LLM's names; WINDOW_SIZE, LEVEL and GUESS_SET_SIZE of the paper's code).
        pool_from_text: put the n-grams of prompt and output into the pool as well.
    Raises:
        ConfigError: a size outside its range.
    """

    name = "lookahead"
    catches_up = True
    keeps_trajectory = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        max_window_size: int = 7,
        max_ngram_size: int = 4,
        max_verification_set_size: int = 7,
        pool_from_text: bool = True,
    ) -> None:
        integer("max_window_size", max_window_size, 1, MAX_WINDOW)
        integer("max_ngram_size", max_ngram_size, 2, MAX_NGRAM)
        integer("max_verification_set_size", max_verification_set_size, 1, MAX_WINDOW)
        super().__init__(args)
        self.window, self.ngram, self.guesses = max_window_size, max_ngram_size, max_verification_set_size
        self.from_text = pool_from_text

    def _begin(self, context: Context) -> LookaheadState:
        state = LookaheadState(context)
        self._read(state)
        return state

    def _read(self, state: LookaheadState) -> None:
        """Put the n-grams that the text has got since the last time into the pool, and drop columns that it has
        overtaken.
        """
        tokens = state.context.tokens
        if self.from_text:
            for start in range(max(0, state.read - self.ngram + 1), len(tokens) - self.ngram + 1):
                self._remember(state.pool, tokens[start : start + self.ngram])
        state.read = len(tokens)
        state.columns = {position: column for position, column in state.columns.items() if position >= len(tokens)}

    def _propose(self, state: LookaheadState, budget: Budget) -> TokenTree:
        """Candidates first, then probes; a budget for less than one column of each gives candidates alone."""
        self._read(state)
        state.shown = []
        growth = _Growth(self.index)
        height = self.ngram - 1
        groups = budget.nodes // height
        columns = max(0, min(self.window, groups // 2, budget.depth - height + 1))
        pooled = list(state.pool.get(state.context.tokens[-1], ()))[::-1][: min(self.guesses, max(groups - columns, 1))]
        for tokens in pooled:
            growth.add(tokens[: min(budget.depth, budget.nodes - columns * height)], budget.nodes - columns * height)
        self._show(state, growth, columns)
        return growth.build()

    def _show(self, state: LookaheadState, growth: _Growth, columns: int) -> None:
        """Add the window as probes."""
        end, above = len(state.context.tokens), ROOT
        state.end = end
        for position in range(end, end + columns):
            column = state.columns.setdefault(position, state.random.choices(state.context.tokens))
            above = node = growth.child(above, column[0], PROBE)
            for token in column[1:]:
                node = growth.child(node, token, PROBE)
            state.shown.append(position)

    def observe(
        self,
        states: Sequence[LookaheadState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            current = state.end + len(verdict.tokens) == len(state.context.tokens)
            ends = self._ends(state, tree) if current else []
            if ends and scores is not None:
                rows = scores.of(i)[[node + 1 for _, node in ends], : self.vocab_size]
                self._grow(state, dict(zip((position for position, _ in ends), rows.argmax(-1).tolist(), strict=True)))
            self._read(state)
            state.shown = []

    def _ends(self, state: LookaheadState, tree: TokenTree) -> list[tuple[int, int]]:
        """(column's position, node of its last token in the merged tree), for the columns that were scored whole."""
        if not state.shown:
            return []
        at = {key: node for node, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
        ends: list[tuple[int, int]] = []
        above: int | None = ROOT
        for position in state.shown:
            column = state.columns[position]
            above = node = at.get((above, column[0])) if above is not None else None
            for token in column[1:]:
                node = at.get((node, token)) if node is not None else None
            if node is not None:
                ends.append((position, node))
        return ends

    def _grow(self, state: LookaheadState, answers: Mapping[int, int]) -> None:
        """Add the target's answers to their columns; a full one gives an n-gram and moves on by a token."""
        grown: dict[int, list[int]] = {}
        for start, old in state.columns.items():
            column, position = [*old, answers[start]] if start in answers else old, start
            if len(column) == self.ngram:
                self._remember(state.pool, column)
                column, position = column[1:], position + 1
            if len(column) >= len(grown.get(position, ())):
                grown[position] = column
        state.columns = grown

    def _remember(self, pool: Pool, tokens: Sequence[int]) -> None:
        """Put an n-gram into the pool, the oldest with its first token going if there are too many."""
        after = pool.setdefault(tokens[0], OrderedDict())
        after[tuple(tokens[1:])] = None
        after.move_to_end(tuple(tokens[1:]))
        if len(after) > self.guesses:
            after.popitem(last=False)
        if len(pool) > MAX_KEYS:
            pool.popitem(last=False)

    def fork(self, state: LookaheadState, context: Context) -> LookaheadState:
        other = LookaheadState(context)
        other.columns = {position: list(column) for position, column in state.columns.items()}
        other.read = state.read
        other.pool = OrderedDict((first, after.copy()) for first, after in state.pool.items())
        return other

    def end(self, states: Sequence[LookaheadState]) -> None:
        for state in states:
            state.pool, state.columns = OrderedDict(), {}


class _Growth:
    """A tree being made: candidates and probes, unique by parent and token."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.at: dict[tuple[int, int], int] = {}
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.kinds: list[int] = []

    def child(self, parent: int, token: int, kind: int) -> int:
        """The child of `parent` with this token, made if need be; a candidate stays one."""
        node = self.at.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.kinds.append(kind)
        return node

    def add(self, tokens: Sequence[int], most: int) -> None:
        """A path of candidates, as far as there is room."""
        node = ROOT
        for token in tokens:
            if len(self.tokens) >= most and (node, token) not in self.at:
                return
            node = self.child(node, token, CANDIDATE)

    def build(self) -> TokenTree:
        """The tree; siblings share the confidence of their level."""
        if not self.tokens:
            return EMPTY_TREE
        candidates = [parent for parent, kind in zip(self.parents, self.kinds, strict=True) if kind == CANDIDATE]
        shared = {parent: (FIRST if parent == ROOT else AFTER) / candidates.count(parent) for parent in set(candidates)}
        confidence = [shared[p] if kind == CANDIDATE else 0.0 for p, kind in zip(self.parents, self.kinds, strict=True)]
        return TokenTree.build(self.tokens, self.parents, confidence=confidence, sources=self.index, kinds=self.kinds)
