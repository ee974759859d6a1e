"""Drafting chains with a draft model: one forward pass a level for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_rows import best_tokens, chances_of, draw_for, fit_rows, weights
from paceline.drafters.common.draft_state import DraftState, feed_ahead, feed_text
from paceline.tree import ACCEPTANCE

if TYPE_CHECKING:
    from paceline.drafters.base import Context
    from paceline.models import Runner
    from paceline.models.heads import AcceptanceHead
    from paceline.tree import GoOn, TokenTree


@dataclass(slots=True)
class ChainDraft:
    """Collects the tokens of one chain, level by level.

    Attributes:
        context: of the sequence. steps: most tokens. go_on: called before each token but the first. drawn: sample from
            q instead of taking its best token.
        tokens, confidence, rows: of the chain so far; the (v,) row that each token was drawn from, None where it is a
            point.
        behind: tokens between the text's last one and the chain, where it goes on from an earlier draft.
        features: what `go_on` is told beside the chain's chance.
    """

    context: Context
    steps: int
    go_on: GoOn
    drawn: bool
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    rows: list[torch.Tensor | None] = field(default_factory=list)
    reach: float = 1.0
    behind: Sequence[int] = ()
    features: Mapping[str, float] | None = None

    @property
    def wants_more(self) -> bool:
        depth = len(self.tokens) + 1
        return 1 < depth <= self.steps and self.reach > 0.0 and self.go_on(depth, self.reach, self.features)

    def add_best(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """The likeliest token comes next; where there is none, the chain is at its end."""
        if tokens:
            self.add(tokens[0], chances[0])
        else:
            self.reach = 0.0

    def add(self, token: int, chance: float, row: torch.Tensor | None = None) -> None:
        self.tokens.append(token)
        self.rows.append(row)
        self.confidence.append(chance)
        self.reach *= chance

    def tree(self, source: int) -> TokenTree:
        return chain_tree(self.tokens, self.confidence, source, self.rows)


def draft_chains(
    runner: Runner,
    states: Sequence[DraftState],
    drafts: Sequence[ChainDraft],
    vocab_size: int,
    source: int,
    *,
    head: AcceptanceHead | None = None,
) -> list[TokenTree]:
    """One chain per state; the caches then hold the whole text and all drafted tokens but the last of each.

    Args:
        head: foretells from the state of each drafted token that was fed whether it is accepted.
    """
    logits, last = feed_text(runner, states), runner.info.num_layers
    active = list(zip(states, drafts, strict=True))
    while True:
        add_level([draft for _, draft in active], fit_rows(logits, vocab_size))
        active = [(state, draft) for state, draft in active if draft.wants_more]
        if not active:
            return [draft.tree(source) for draft in drafts]
        fed, tokens = [state for state, _ in active], [draft.tokens[-1] for _, draft in active]
        scores = feed_ahead(runner, fed, tokens, () if head is None else (last,))
        logits = scores.logits
        if head is not None:
            for (_, draft), chance in zip(active, head.chances(scores.taps[last]), strict=True):
                draft.features = {ACCEPTANCE: chance}


AddLevel = Callable[[Sequence[ChainDraft], torch.Tensor], None]
"""Gives every draft its next token, from (r, n) logits."""


def chains_of_rows(
    drafts: Sequence[ChainDraft], rows: Sequence[torch.Tensor], source: int, add: AddLevel | None = None
) -> list[TokenTree]:
    """One chain per draft, where all of its rows are known: logits (k, n) of the next k tokens, `steps` of each draft.

    Args:
        add: `add_level` by default.
    """
    active = list(zip(drafts, rows, strict=True))
    while active:
        levels = torch.stack([logits[len(draft.tokens)] for draft, logits in active])
        (add or add_level)([draft for draft, _ in active], levels)
        active = [each for each in active if each[0].wants_more]
    return [draft.tree(source) for draft in drafts]


def plain(draft: ChainDraft) -> bool:
    """Whether the best tokens are those of the raw logits."""
    return not draft.drawn and draft.context.apply_rules is None


def add_level(drafts: Sequence[ChainDraft], logits: torch.Tensor) -> None:
    """The next token of every draft, from (r, v) logits; a chain ends where the rules allow no token of its model."""
    if all(plain(draft) for draft in drafts):
        for draft, tokens, chances in zip(drafts, *best_tokens(logits, 1), strict=True):
            draft.add_best(tokens, chances)
        return
    for i, draft in enumerate(drafts):
        rows = weights(draft.context, logits[i : i + 1], [[*draft.behind, *draft.tokens]])
        if not draft.drawn:
            (tokens,), (chances,) = best_tokens(rows, 1)
            draft.add_best(tokens, chances)
        elif drawn := draw_for(draft.context, row_v := chances_of(rows)[0], (), len(draft.behind) + len(draft.tokens)):
            draft.add(*drawn, row_v)
        else:
            draft.reach = 0.0
