"""Drafting with a head that predicts k tokens in each pass, by units of k inputs that see each other (Falcon).

    first unit: the text's last k inputs, of which the last one has the text's last token
    rows of a unit: states k places behind its inputs, and logits of the k tokens behind it         (k, d), (k, n)
    unit behind a drafted path: its last k tokens, with the states that the unit before has made

Row j of a unit knows nothing of the j tokens drafted behind it, so that all nodes that are as deep below one node share
a row, and a tree has a unit for each node of every k-th level that is expanded: the paper's tree. A chain or a tree of
m levels takes m / k passes. Drawn tokens carry the row that they were drawn from, so that verification is exact.

Keys and values of an input depend on itself alone; what it makes of its unit does not stay. So the text's inputs are
kept but for the last k, which are fed in front of each draft: where the text goes on by fewer, some are fed again.

Source: Falcon: faster and parallel inference of large language models through enhanced semi-autoregressive drafting and
custom-designed decoding tree (arXiv:2412.12639).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch

from paceline.drafters.base import Context
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.common.draft_state import CHUNK
from paceline.drafters.growth.base import Growth, as_tree, grow
from paceline.drafters.heads.feature_drafts import FEW, FeatureDrafts, FeatureState, chain
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models import PassResult
from paceline.models.state import NativeCache
from paceline.tree import ROOT, TokenTree


class UnitState(FeatureState):
    """Keeps one sequence, for a head whose inputs come `unit` at a time."""

    __slots__ = ("unit",)

    def __init__(self, context: Context, cache: NativeCache, states: TappedStates, unit: int) -> None:
        super().__init__(context, cache, states)
        self.unit = unit

    @property
    def knows_its_text(self) -> bool:
        """Whether the first unit is known."""
        return self.states.count >= self.unit and self.is_current


@dataclass(frozen=True, slots=True)
class Units:
    """What a pass makes of b units: states (b, k, d), logits (b, k, n)."""

    states: torch.Tensor
    logits: torch.Tensor

    def picked(self, units: Sequence[int]) -> Units:
        """These alone."""
        if len(units) == len(self.states):
            return self
        return Units(self.states[list(units)], self.logits[list(units)])


class SemiAutoregressiveDrafts(FeatureDrafts):
    """Drafts for many sequences, `FeatureHead.unit` tokens in each pass of the head."""

    def chains(self, states: Sequence[FeatureState], drafts: Sequence[ChainDraft]) -> list[TokenTree]:
        self.catch_up(states)
        active, size, units, passes = list(range(len(states))), self.head.unit, self.first_units(states), 0
        while True:
            for row in range(size):
                self._vocabulary.add_level([drafts[i] for i in active], units.logits[:, row])
                on = [k for k, i in enumerate(active) if drafts[i].wants_more]
                active, units = [active[k] for k in on], units.picked(on)
                if not active:
                    return [draft.tree(self._source) for draft in drafts]
            passes += 1
            lengths = [states[i].states.count + size * passes for i in active]
            result = self.head.step(
                [states[i].cache for i in active], [chain(length) for length in lengths],
                [length - size for length in lengths],
                tokens=[token for i in active for token in drafts[i].tokens[-size:]],
                states=units.states.flatten(0, 1), picked=range(size * len(active)),
            )  # fmt: skip
            units = self._units(result)

    def trees(self, drafts: Sequence[Growth]) -> list[TokenTree]:
        growing = [draft for draft in drafts if draft.front]
        if growing:
            self.catch_up([cast(FeatureState, draft.state) for draft in growing])
        reading = _Reading(self)
        return grow(reading.score, drafts, self._source)

    def catch_up(self, states: Sequence[FeatureState]) -> None:
        """Keep in the caches what the target's states are known of, but for the last unit and a few."""
        for state in states:
            self.confirm(state)
        while behind := [state for state in states if state.states.count > self.head.unit + FEW]:
            counts = [min(CHUNK, state.states.count - self.head.unit) for state in behind]
            self._feed(behind, counts, ())
            for state, count in zip(behind, counts, strict=True):
                state.kept = count
                self._keep(state)

    def confirm(self, state: FeatureState) -> None:
        """Keep the inputs in scratch that came from the target and are no longer of the last unit."""
        state.kept = min(state.kept, state.states.count - self.head.unit)
        if state.kept > 0:
            self._keep(state)
        state.kept, state.fed_tokens, state.fed_parents = 0, [], []

    def first_units(self, states: Sequence[FeatureState]) -> Units:
        """The last unit of each text, with all before it that its cache lacks."""
        counts = [state.states.count for state in states]
        last = [row for stop in accumulate(counts) for row in range(stop - self.head.unit, stop)]
        result = self._feed(states, counts, last)
        for state, count in zip(states, counts, strict=True):
            state.kept = count
            state.fed_tokens, state.fed_parents = [0] * count, list(range(-1, count - 1))
        return self._units(PassResult(result.logits, result.states[last]))

    def feed(self, nodes: Sequence[tuple[Growth, int]], before: Sequence[torch.Tensor]) -> Units:
        """The units behind some nodes, those of a draft one behind the other.

        Args:
            before: (k, d) states of each one's unit, which the unit before has made.
        """
        size, tokens, computed = self.head.unit, list[int](), dict[int, int]()
        drafts = {id(draft): draft for draft, _ in nodes}
        states = {key: cast(FeatureState, draft.state) for key, draft in drafts.items()}
        computed = {key: len(state.fed_tokens) for key, state in states.items()}
        for draft, node in nodes:
            state, path = states[id(draft)], draft.path_of(node)
            first = len(state.fed_tokens)
            state.fed_tokens.extend(path[-size:])
            state.fed_parents.extend([draft.fed[ancestor(draft, node, size)], *range(first, first + size - 1)])
            draft.fed[node] = first + size - 1
            tokens += path[-size:]
        result = self.head.step(
            [state.cache for state in states.values()],
            [as_tree(state.fed_tokens[1:], [parent - 1 for parent in state.fed_parents[1:]])
             for state in states.values()],
            list(computed.values()), tokens=tokens, states=torch.cat(list(before)), picked=range(len(tokens)),
        )  # fmt: skip
        return self._units(result)

    def _units(self, result: PassResult) -> Units:
        return Units(*(rows.unflatten(0, (-1, self.head.unit)) for rows in (result.states, result.logits)))

    def fitted(self, logits: torch.Tensor) -> torch.Tensor:
        """(r, v) logits over the target's tokens."""
        return self._vocabulary.fitted(logits)


class _Reading:
    """Scores the fronts of growing trees: a unit is fed once, its rows serve the next k levels below its node."""

    def __init__(self, drafts: SemiAutoregressiveDrafts) -> None:
        self._drafts, self._size = drafts, drafts.head.unit
        self._rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def score(self, active: Sequence[Growth]) -> list[torch.Tensor]:
        """The rows (front, v) of each draft's front."""
        if active[0].front == [ROOT]:
            units = self._drafts.first_units([cast(FeatureState, draft.state) for draft in active])
            for draft in active:
                draft.fed[ROOT] = cast(FeatureState, draft.state).kept - 1
            self._note([(draft, ROOT) for draft in active], units)
        elif missing := [(draft, node) for draft in active for node in draft.front if self._begins(draft, node)]:
            before = [self._rows[id(draft), ancestor(draft, node, self._size)][0] for draft, node in missing]
            self._note(missing, self._drafts.feed(missing, before))
        return [self._drafts.fitted(torch.stack([self._row(draft, node) for node in draft.front])) for draft in active]

    def _begins(self, draft: Growth, node: int) -> bool:
        """Whether a node is the last of a unit."""
        return len(draft.path_of(node)) % self._size == 0

    def _note(self, nodes: Sequence[tuple[Growth, int]], units: Units) -> None:
        for (draft, node), states, logits in zip(nodes, units.states, units.logits, strict=True):
            self._rows[id(draft), node] = states, logits

    def _row(self, draft: Growth, node: int) -> torch.Tensor:
        """(n,) logits of the token behind a node."""
        below = len(draft.path_of(node)) % self._size
        return self._rows[id(draft), ancestor(draft, node, below)][1][below]


def ancestor(draft: Growth, node: int, steps: int) -> int:
    """The node so many levels above a node, ROOT where that is the root."""
    for _ in range(steps):
        node = draft.parents[node]
    return node
