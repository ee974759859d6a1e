"""Drafting trees with a draft model: a beam of nodes is expanded on each level, one forward pass a level for the whole batch.

In: settled states, how much to draft. Out: one tree each. Not here: chains (`draft_chain`), upkeep of caches (`draft_state`).

*Point* trees take the `width` most likely tokens of every expanded node and keep the nodes most likely reached (EAGLE-2,
arXiv:2406.16858). *Drawn* trees draw `width` tokens of every expanded node without replacement (recursive rejection sampling,
arXiv:2402.14160): how many are drawn where is settled before the draws of the level are made, and nothing is cut afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from paceline.drafters.draft_chain import GoOn
from paceline.drafters.draft_rows import best, draws, fit, weights
from paceline.drafters.draft_state import DraftState, catch_up
from paceline.tree.select import select
from paceline.tree.token_tree import EMPTY_TREE, ROOT, TokenTree, Trial

if TYPE_CHECKING:
    from paceline.models.base import Runner

FEW: Final = 16
"""A text that lacks no more tokens than this in the draft's cache is fed together with the tree."""


@dataclass(slots=True)
class TreeDraft:
    """One tree under construction.

    Attributes:
        nodes, depth: limits. width: children of a node, and nodes expanded on a level. drawn: sample instead of taking the best.
        fed: node -> its place among the inputs that were fed.
        front: nodes whose children come next.
    """

    state: DraftState
    nodes: int
    depth: int
    width: int
    go_on: GoOn
    drawn: bool
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    trials: dict[int, list[Trial]] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=dict)
    front: list[int] = field(default_factory=lambda: [ROOT])
    level: int = 0

    def expand(self, logits: torch.Tensor) -> None:
        """Give the front its children, from (front, v) logits, and choose the next front."""
        first = len(self.tokens)
        above = [() if node == ROOT else self.paths[node] for node in self.front]
        rows = weights(self.state.context, logits, above)
        if self.drawn:
            self._draw(rows.softmax(-1))
        else:
            for parent, tokens, chances in zip(self.front, *best(rows, self.width), strict=True):
                self._add(parent, tokens, chances)
        self.level += 1
        self.front = self._next_front(first)

    def _add(self, parent: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        reach, path = (1.0, ()) if parent == ROOT else (self.reach[parent], self.paths[parent])
        for token, chance in zip(tokens, chances, strict=True):
            if chance > 0.0:
                self.tokens.append(token)
                self.parents.append(parent)
                self.confidence.append(chance)
                self.reach.append(reach * chance)
                self.paths.append((*path, token))

    def _draw(self, q_rv: torch.Tensor) -> None:
        for parent, row_v in zip(self.front, q_rv, strict=True):
            start = len(self.tokens)
            numbers = range(start, min(start + self.width, self.nodes))
            trials, tokens, chances = draws(self.state.context, row_v, numbers, start)
            if trials:
                self.trials[parent] = trials
                self._add(parent, tokens, chances)

    def _next_front(self, first: int) -> list[int]:
        """The nodes of the last level worth expanding, most likely reached first; none when the tree is done."""
        new = sorted(range(first, len(self.tokens)), key=lambda node: -self.reach[node])[: self.width]
        if not new or self.level >= self.depth or (self.drawn and len(self.tokens) >= self.nodes):
            return []
        if not self.drawn and len(self.tokens) >= self.nodes:
            bar = sorted(self.reach, reverse=True)[self.nodes - 1]
            new = [node for node in new if self.reach[node] > bar]
        return new if new and self.go_on(self.level + 1, self.reach[new[0]], None) else []

    def tree(self, source: int) -> TokenTree:
        if not self.tokens:
            return EMPTY_TREE
        trials = {parent: tuple(found) for parent, found in self.trials.items()}
        tree = TokenTree.build(self.tokens, self.parents, confidence=self.confidence, sources=source, trials=trials)
        return tree if self.drawn else select(tree, self.nodes)


def draft_trees(runner: Runner, drafts: Sequence[TreeDraft], vocab_size: int, source: int) -> list[TokenTree]:
    """One tree per draft; what was fed stays in the caches' scratch slots until the states settle."""
    catch_up(runner, [draft.state for draft in drafts], FEW)
    active = list(drafts)
    while active:
        for draft, logits in zip(active, _feed(runner, active), strict=True):
            draft.expand(fit(logits, vocab_size))
        active = [draft for draft in active if draft.front]
    return [draft.tree(source) for draft in drafts]


def _feed(runner: Runner, drafts: Sequence[TreeDraft]) -> list[torch.Tensor]:
    """Score the fronts; (front, v) logits each."""
    inputs = [_inputs(draft) for draft in drafts]
    computed = [len(draft.state.fed_tokens) for draft in drafts]
    for draft in drafts:
        draft.state.fed_tokens, draft.state.fed_parents = [], []
    trees = [TokenTree.build(tokens[1:], [p - 1 for p in parents[1:]]) for tokens, parents in inputs]
    scores = runner.score([d.state.cache for d in drafts], [tokens[0] for tokens, _ in inputs], trees, computed=computed)
    found = []
    for i, (draft, (tokens, parents)) in enumerate(zip(drafts, inputs, strict=True)):
        draft.state.fed_tokens, draft.state.fed_parents = tokens, parents
        found.append(scores.of(i)[-len(draft.front) :])
    return found


def _inputs(draft: TreeDraft) -> tuple[list[int], list[int]]:
    """All inputs with their parents' places: those fed before and the front, or at first what the cache lacks of the text."""
    state = draft.state
    if draft.front == [ROOT]:
        tokens = state.pending
        draft.fed[ROOT] = len(tokens) - 1
        return tokens, list(range(-1, len(tokens) - 1))
    tokens, parents = list(state.fed_tokens), list(state.fed_parents)
    for node in draft.front:
        draft.fed[node] = len(tokens)
        tokens.append(draft.tokens[node])
        parents.append(draft.fed[draft.parents[node]])
    return tokens, parents
