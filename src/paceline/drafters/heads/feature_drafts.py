"""Drafting with an EAGLE head: what it knows of each sequence, and how chains and trees are scored by its layer.

The head's cache holds inputs made of the target's own states alone. Those of new tokens are fed in front of each draft,
in scratch with the draft; once the text has gone on they are kept and what was drafted is dropped, so that no state
that the head has guessed ever stays. The cache begins where the first state is known, which is no loss for rotary
embeddings: they are relative.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Final, Protocol, cast

import torch

from paceline.drafters.base import Context
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.common.draft_state import CHUNK
from paceline.drafters.growth.base import Growth, as_tree, grow, inputs_of
from paceline.drafters.heads.cached_drafter import CachedState
from paceline.drafters.heads.head_drafter import DraftVocabulary
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models import PassResult
from paceline.models.runners import FeatureHead
from paceline.models.state import NativeCache
from paceline.tree import EMPTY_TREE, ROOT, TokenTree

FEW: Final = 16
"""Inputs that are fed together with a draft."""


class FeatureState(CachedState):
    """Keeps one sequence, and how much of it is in the head's cache.

    Attributes:
        kept: how many of `states` the cache has in scratch, before what was drafted.
        fed_tokens, fed_parents: all inputs in scratch, see `FedState`.
    """

    __slots__ = ("fed_parents", "fed_tokens", "kept")

    def __init__(self, context: Context, cache: NativeCache, states: TappedStates) -> None:
        super().__init__(context, cache, states)
        self.kept = 0
        self.fed_tokens: list[int] = []
        self.fed_parents: list[int] = []

    @property
    def pending(self) -> list[int]:
        """Tokens of the inputs that the cache lacks: each goes with the state of the token before it."""
        first = self.states.first + 1
        return self.context.tokens[first : first + self.states.count]

    def begin_anew(self, states: TappedStates) -> None:
        super().begin_anew(states)
        self.kept = 0


@lru_cache(maxsize=256)
def chain(inputs: int) -> TokenTree:
    """Inputs one after the other, as a tree for the head's layer, which does not look at tokens."""
    return TokenTree.chain([0] * (inputs - 1)) if inputs > 1 else EMPTY_TREE


class Commits(Protocol):
    """A head whose layer keeps inputs of each sequence."""

    def commit(self, caches: Sequence[NativeCache], paths: Sequence[Sequence[int]]) -> None: ...


class KnownInputs(ABC):
    """Keeps the inputs in a head's caches that came from the target, and drops those that were drafted."""

    head: Commits

    @abstractmethod
    def _feed_known(self, states: Sequence[FeatureState], counts: Sequence[int]) -> object:
        """Feed the first of what each cache lacks, as a chain in scratch."""

    def catch_up(self, states: Sequence[FeatureState]) -> None:
        """Keep in the caches what the target's states are known of, but for a few."""
        for state in states:
            self.confirm(state)
        while behind := [state for state in states if state.states.count > FEW]:
            counts = [min(CHUNK, state.states.count - 1) for state in behind]
            self._feed_known(behind, counts)
            for state, count in zip(behind, counts, strict=True):
                state.kept = count
                self._keep(state)

    def confirm(self, state: FeatureState) -> None:
        """Keep the inputs in scratch that came from the target, if the text has gone on since."""
        if 0 < state.kept < state.states.count:
            self._keep(state)
        state.kept, state.fed_tokens, state.fed_parents = 0, [], []

    def _keep(self, state: FeatureState) -> None:
        self.head.commit([state.cache], [range(state.kept - 1)])
        state.states.drop(state.kept)
        state.kept = 0


class FeatureDrafts(KnownInputs):
    """Drafts for many sequences with one head that goes on from its own states.

    Args:
        vocab_size: of the target. source: as of `TokenTree.sources`.
    """

    head: FeatureHead

    def __init__(self, head: FeatureHead, vocab_size: int, source: int) -> None:
        self.head, self._source = head, source
        self._vocabulary = DraftVocabulary(head.tokens, vocab_size)

    def chains(self, states: Sequence[FeatureState], drafts: Sequence[ChainDraft]) -> list[TokenTree]:
        """One chain per state: a pass a level for all of them."""
        self.catch_up(states)
        counts = [state.states.count for state in states]
        result = self._first(states)
        active = list(range(len(states)))
        while True:
            self._vocabulary.add_level([drafts[i] for i in active], result.logits)
            on = [k for k, i in enumerate(active) if drafts[i].wants_more]
            if not on:
                return [draft.tree(self._source) for draft in drafts]
            behind = result.states if len(on) == len(active) else result.states[on]
            active = [active[k] for k in on]
            fed = [counts[i] + len(drafts[i].tokens) for i in active]
            result = self.head.step(
                [states[i].cache for i in active], [chain(count) for count in fed], [count - 1 for count in fed],
                tokens=[drafts[i].tokens[-1] for i in active], states=behind, picked=range(len(active)),
            )  # fmt: skip

    def trees(self, drafts: Sequence[Growth]) -> list[TokenTree]:
        """One tree per growing draft: a pass a round for all of them."""
        growing = [draft for draft in drafts if draft.front]
        if growing:
            self.catch_up([cast(FeatureState, draft.state) for draft in growing])
        behind: dict[int, torch.Tensor] = {}
        return grow(lambda active: self._fronts(active, behind), drafts, self._source)

    def _feed_known(self, states: Sequence[FeatureState], counts: Sequence[int]) -> object:
        return self._feed(states, counts, ())

    def _first(self, states: Sequence[FeatureState]) -> PassResult:
        """Logits (b, n) and states (b, hidden) behind each text."""
        counts = [state.states.count for state in states]
        last = [stop - 1 for stop in accumulate(counts)]
        result = self._feed(states, counts, last)
        for state, count in zip(states, counts, strict=True):
            state.kept = count
        return result if len(result.states) == len(states) else replace(result, states=result.states[last])

    def _feed(self, states: Sequence[FeatureState], counts: Sequence[int], picked: Sequence[int]) -> PassResult:
        """Feed the first of what each cache lacks, as a chain in scratch."""
        rows = [state.states.all()[:count] for state, count in zip(states, counts, strict=True)]
        return self.head.step(
            [state.cache for state in states], [chain(count) for count in counts], [0] * len(states),
            tokens=[token for state, count in zip(states, counts, strict=True) for token in state.pending[:count]],
            states=self.head.joined(rows[0] if len(rows) == 1 else torch.cat(rows)), picked=picked,
        )  # fmt: skip

    def _fronts(self, drafts: Sequence[Growth], behind: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """Score the fronts; `behind`: by draft, the states (inputs, hidden) behind what is in scratch."""
        states = [cast(FeatureState, draft.state) for draft in drafts]
        inputs = [inputs_of(draft, state) for draft, state in zip(drafts, states, strict=True)]
        if drafts[0].front == [ROOT]:
            result = self._first(states)
            for draft, row in zip(drafts, result.states.split(1), strict=True):
                behind[id(draft)] = row.expand(draft.fed[ROOT] + 1, -1)  # of these, the last one alone has children
            parts = result.logits.split(1)
        else:
            fed = [len(state.fed_tokens) for state in states]
            before = [
                behind[id(draft)][fed_nodes[1][-len(draft.front) :]]
                for draft, fed_nodes in zip(drafts, inputs, strict=True)
            ]
            trees = [as_tree(tokens[1:], [parent - 1 for parent in parents[1:]]) for tokens, parents in inputs]
            counts = [len(draft.front) for draft in drafts]
            result = self.head.step(
                [state.cache for state in states], trees, fed,
                tokens=[token for tokens, count in zip(inputs, counts, strict=True) for token in tokens[0][-count:]],
                states=torch.cat(before), picked=range(sum(counts)),
            )  # fmt: skip
            for draft, rows in zip(drafts, result.states.split(counts), strict=True):
                behind[id(draft)] = torch.cat((behind[id(draft)], rows))
            parts = result.logits.split(counts)
        for state, (tokens, parents) in zip(states, inputs, strict=True):
            state.fed_tokens, state.fed_parents = tokens, parents
        return [self._vocabulary.fitted(rows) for rows in parts]
