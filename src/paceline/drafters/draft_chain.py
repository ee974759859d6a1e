"""Drafting chains with a draft model: one forward pass a level for the whole batch.

In: settled states, how far to draft. Out: one chain each. Not here: trees with branches (`draft_tree`), upkeep of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.drafters.draft_rows import best, draws, fit, weights
from paceline.drafters.draft_state import DraftState, feed_ahead, feed_text
from paceline.tree.token_tree import EMPTY_TREE, TokenTree, Trial

if TYPE_CHECKING:
    from paceline.drafters.base import Context
    from paceline.models.base import Runner

GoOn = Callable[[int, float, object], bool]


@dataclass(slots=True)
class ChainDraft:
    """One chain under construction.

    Attributes:
        context: of the sequence. steps: most tokens. go_on: asked before each token but the first. drawn: sample from q instead of
            taking its best token.
        behind: tokens between the text's last one and the chain, where it goes on from an earlier draft.
    """

    context: Context
    steps: int
    go_on: GoOn
    drawn: bool
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    trials: dict[int, tuple[Trial, ...]] = field(default_factory=dict)
    reach: float = 1.0
    behind: Sequence[int] = ()

    @property
    def wants_more(self) -> bool:
        depth = len(self.tokens) + 1
        return 1 < depth <= self.steps and self.reach > 0.0 and self.go_on(depth, self.reach, None)

    def add(self, token: int, chance: float) -> None:
        self.tokens.append(token)
        self.confidence.append(chance)
        self.reach *= chance

    def tree(self, source: int) -> TokenTree:
        if not self.tokens:
            return EMPTY_TREE
        tree = TokenTree.chain(self.tokens, confidence=self.confidence, source=source)
        return tree.replace(trials=self.trials) if self.trials else tree


def draft_chains(
    runner: Runner, states: Sequence[DraftState], drafts: Sequence[ChainDraft], vocab_size: int, source: int
) -> list[TokenTree]:
    """One chain per state; the caches then hold the whole text and all drafted tokens but the last of each."""
    logits = feed_text(runner, states)
    active = list(zip(states, drafts, strict=True))
    while True:
        add_level([draft for _, draft in active], fit(logits, vocab_size))
        active = [(state, draft) for state, draft in active if draft.wants_more]
        if not active:
            return [draft.tree(source) for draft in drafts]
        logits = feed_ahead(runner, [state for state, _ in active], [draft.tokens[-1] for _, draft in active])


def _plain(draft: ChainDraft) -> bool:
    return not draft.drawn and draft.context.shape is None


def add_level(drafts: Sequence[ChainDraft], logits: torch.Tensor) -> None:
    """The next token of every draft, from (r, v) logits."""
    if all(_plain(draft) for draft in drafts):
        for draft, (token,), (chance,) in zip(drafts, *best(logits, 1), strict=True):
            draft.add(token, chance)
        return
    for i, draft in enumerate(drafts):
        rows = weights(draft.context, logits[i : i + 1], [[*draft.behind, *draft.tokens]])
        if draft.drawn:
            _draw_level(draft, rows)
        else:
            ((token,),), ((chance,),) = best(rows, 1)
            draft.add(token, chance)


def _draw_level(draft: ChainDraft, rows: torch.Tensor) -> None:
    node = len(draft.tokens)
    trials, tokens, chances = draws(draft.context, rows.softmax(-1)[0], [node], len(draft.behind) + node)
    if not trials:
        draft.reach = 0.0
        return
    draft.add(tokens[0], chances[0])
    draft.trials[node - 1] = tuple(trials)
