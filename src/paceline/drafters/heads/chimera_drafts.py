"""Drafting with Chimera's heads: chains and trees, a pass of the full-context encoder a level.

inputs of a text: the target's states that the encoder's cache lacks, then the root's trigram, one chain in scratch
inputs of drafts: the trigrams of their paths, behind that
states of the target stay in the cache once the text has gone on; trigrams never do
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch

from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth, as_tree, grow, inputs_of
from paceline.drafters.heads.feature_drafts import FeatureState, KnownInputs, chain
from paceline.drafters.heads.head_drafter import DraftVocabulary
from paceline.models.runners import ChimeraHead, trigram
from paceline.tree import ROOT, TokenTree


class ChimeraState(FeatureState):
    """See there; the inputs that the cache lacks are states, and the root's trigram."""

    __slots__ = ()

    @property
    def pending(self) -> list[int]:
        """A token for each input, of which the last one counts."""
        return [0] * self.states.count + self.context.tokens[-1:]

    @property
    def before(self) -> torch.Tensor:
        """(1, hidden) the target's state of the token before the root."""
        return self.states.all()[-1:]


class ChimeraDrafts(KnownInputs):
    """Drafts for many sequences.

    Args:
        vocab_size: of the target. source: as of `TokenTree.sources`.
    """

    head: ChimeraHead

    def __init__(self, head: ChimeraHead, vocab_size: int, source: int) -> None:
        self.head, self._source = head, source
        self._vocabulary = DraftVocabulary(head.tokens, vocab_size)

    def chains(self, states: Sequence[ChimeraState], drafts: Sequence[ChainDraft]) -> list[TokenTree]:
        """One chain per state: a pass a level for all of them."""
        self.catch_up(states)
        before = torch.cat([state.before for state in states])
        encoded, active, depth = self._begun(states), list(range(len(states))), 0
        while True:
            logits = self.head.logits(before, encoded, [depth] * len(active))
            self._vocabulary.add_level([drafts[i] for i in active], logits)
            on = [k for k, i in enumerate(active) if drafts[i].wants_more]
            if not on:
                return [draft.tree(self._source) for draft in drafts]
            before, active, depth = before[on], [active[k] for k in on], depth + 1
            fed = [states[i].states.count + 1 + depth for i in active]
            grams = [trigram(states[i].context.tokens, drafts[i].tokens) for i in active]
            encoded = self.head.encode(
                [states[i].cache for i in active], [chain(count) for count in fed], [count - 1 for count in fed],
                self.head.features(grams),
            )  # fmt: skip

    def trees(self, drafts: Sequence[Growth]) -> list[TokenTree]:
        """One tree per growing draft: a pass a round for all of them."""
        if growing := [draft for draft in drafts if draft.front]:
            self.catch_up([cast(ChimeraState, draft.state) for draft in growing])
        return grow(self._fronts, drafts, self._source)

    def _feed_known(self, states: Sequence[FeatureState], counts: Sequence[int]) -> object:
        rows = [state.states.all()[:count] for state, count in zip(states, counts, strict=True)]
        trees = [chain(count) for count in counts]
        return self.head.encode([state.cache for state in states], trees, [0] * len(states), torch.cat(rows))

    def _begun(self, states: Sequence[ChimeraState]) -> torch.Tensor:
        """(b, hidden) what the encoder makes of each root."""
        counts = [state.states.count + 1 for state in states]
        roots = self.head.features([trigram(state.context.tokens) for state in states]).split(1)
        rows = [part for state, root in zip(states, roots, strict=True) for part in (state.states.all(), root)]
        trees = [chain(count) for count in counts]
        encoded = self.head.encode([state.cache for state in states], trees, [0] * len(states), torch.cat(rows))
        for state in states:
            state.kept = state.states.count
        return encoded[[stop - 1 for stop in accumulate(counts)]]

    def _fronts(self, drafts: Sequence[Growth]) -> list[torch.Tensor]:
        """Score the fronts."""
        states = [cast(ChimeraState, draft.state) for draft in drafts]
        inputs = [inputs_of(draft, state) for draft, state in zip(drafts, states, strict=True)]
        paths = [[draft.path_of(node) for node in draft.front] for draft in drafts]
        if drafts[0].front == [ROOT]:
            encoded = self._begun(states)
        else:
            trees = [as_tree(tokens[1:], [parent - 1 for parent in parents[1:]]) for tokens, parents in inputs]
            grams = [trigram(s.context.tokens, path) for s, own in zip(states, paths, strict=True) for path in own]
            encoded = self.head.encode(
                [state.cache for state in states], trees, [len(state.fed_tokens) for state in states],
                self.head.features(grams),
            )  # fmt: skip
        for state, (tokens, parents) in zip(states, inputs, strict=True):
            state.fed_tokens, state.fed_parents = tokens, parents
        counts = [len(own) for own in paths]
        before = torch.cat([state.before.expand(count, -1) for state, count in zip(states, counts, strict=True)])
        logits = self.head.logits(before, encoded, [len(path) for own in paths for path in own])
        return [self._vocabulary.fitted(rows) for rows in logits.split(counts)]
