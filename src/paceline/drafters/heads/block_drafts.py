"""Drafting from the rows of a block: what is known of each sequence, and how chains and trees are made of one pass.

A row's logits depend on its place alone; where heads add something by the tokens drafted before (DSpark), also on the
path to it, and each path is read once. Drawn tokens carry the row that they were drawn from, given that path, so that
verification is exact. A place behind which a draft is not likely enough to be accepted ends its branch: that depends on
tokens before it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch

from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.common.draft_state import CHUNK, FEW
from paceline.drafters.growth.base import Growth, grow
from paceline.drafters.heads.cached_drafter import CachedState
from paceline.drafters.heads.head_drafter import DraftVocabulary
from paceline.models.runners import BlockHead, BlockRows
from paceline.tree import ROOT, TokenTree


class BlockState(CachedState):
    """Keeps one sequence, whose states are used up as they go into the cache."""

    __slots__ = ()

    @property
    def knows_its_text(self) -> bool:
        states = self.states
        return self.cache.length + states.count > 0 and states.first + states.count == len(self.context.tokens) - 1


class BlockDrafts:
    """Drafts for many sequences with one head that makes a block in a pass.

    Args:
        vocab_size: of the target. source: as of `TokenTree.sources`.
        threshold: least chance to be accepted, as the head says it, of a draft that is verified.
    """

    def __init__(self, head: BlockHead, vocab_size: int, source: int, threshold: float = 0.0) -> None:
        self.head, self._source, self._threshold = head, source, threshold
        self._vocabulary = DraftVocabulary(head.tokens, vocab_size)

    def catch_up(self, states: Sequence[BlockState], leave: int = FEW) -> None:
        """Put what the target's states are known of into the caches, where it is more than `leave` tokens."""
        while behind := [state for state in states if state.states.count > leave]:
            counts = [min(CHUNK, state.states.count) for state in behind]
            rows = torch.cat([state.states.all()[:count] for state, count in zip(behind, counts, strict=True)])
            self.head.inject([state.cache for state in behind], counts, rows)
            for state, count in zip(behind, counts, strict=True):
                state.states.drop(count)

    def chains(self, states: Sequence[BlockState], drafts: Sequence[ChainDraft]) -> list[TokenTree]:
        """One chain per state, from one pass."""
        reading = self._read(states, max(draft.steps for draft in drafts))
        active, depth = list(range(len(drafts))), 0
        memory = reading.begin(active)
        while active:
            tokens = [(drafts[i].tokens or drafts[i].context.tokens)[-1] for i in active]
            step = reading.step(active, [depth] * len(active), tokens, memory)
            going = [k for k in range(len(active)) if not step.ended[k]]
            if going:
                self._vocabulary.add_level([drafts[active[k]] for k in going], step.logits[going])
            on = [k for k in going if drafts[active[k]].wants_more]
            active, memory, depth = [active[k] for k in on], step.memory[on], depth + 1
        return [draft.tree(self._source) for draft in drafts]

    def trees(self, drafts: Sequence[Growth]) -> list[TokenTree]:
        """One tree per growing draft, from one pass."""
        growing = [draft for draft in drafts if draft.front]
        if not growing:
            return grow(lambda active: [], drafts, self._source)
        states = [cast(BlockState, draft.state) for draft in growing]
        reading = self._read(states, max(draft.depth for draft in growing))
        fronts = _Fronts(reading, growing)
        return grow(lambda active: [self._vocabulary.fitted(rows) for rows in fronts(active)], drafts, self._source)

    def _read(self, states: Sequence[BlockState], depth: int) -> _Reading:
        self.catch_up(states, leave=0)
        depth = min(depth, self.head.depths)
        rows = self.head.run([state.cache for state in states], [state.context.tokens[-1] for state in states], depth)
        return _Reading(self.head, rows, self._threshold)


class _Step:
    """Logits (r, n), the memory (r, w) behind these places, and which of them are not to be drafted."""

    __slots__ = ("ended", "logits", "memory")

    def __init__(self, logits: torch.Tensor, memory: torch.Tensor, ended: Sequence[bool]) -> None:
        self.logits, self.memory, self.ended = logits, memory, ended


class _Reading:
    """The rows of a pass, with what heads add to them."""

    def __init__(self, head: BlockHead, rows: BlockRows, threshold: float) -> None:
        self._heads, self._rows, self._threshold = head.heads, rows, threshold

    def begin(self, blocks: Sequence[int]) -> torch.Tensor:
        """(r, w) memory before the first place of these blocks."""
        return self._heads.begin(self._rows.states[list(blocks), 0])

    def step(self, blocks: Sequence[int], depths: Sequence[int], tokens: Sequence[int], memory: torch.Tensor) -> _Step:
        """The places at these depths (r,) of blocks (r,), behind tokens (r,)."""
        logits = self._rows.logits[list(blocks), list(depths)]
        if not self._heads.present:
            return _Step(logits, memory, [False] * len(blocks))
        states = self._rows.states[list(blocks), list(depths)]
        added = self._heads.step(torch.tensor(tokens, device=states.device), states, memory)
        if added.bias is not None:
            logits = logits + added.bias
        ended = [False] * len(blocks)
        if added.confidence is not None and self._threshold > 0.0:
            ended = (added.confidence < self._threshold).tolist()
        return _Step(logits, added.memory, ended)


class _Fronts:
    """Scores the fronts of growing trees, and notes which of their nodes have ended."""

    def __init__(self, reading: _Reading, drafts: Sequence[Growth]) -> None:
        self._reading = reading
        self._block = {id(draft): i for i, draft in enumerate(drafts)}
        before = reading.begin(range(len(drafts)))
        self._memory: dict[tuple[int, int | None], torch.Tensor] = {
            (id(draft), None): row for draft, row in zip(drafts, before.split(1), strict=True)
        }

    def __call__(self, active: Sequence[Growth]) -> list[torch.Tensor]:
        """The rows (front, n) of each draft's front."""
        nodes = [(draft, node) for draft in active for node in draft.front]
        step = self._reading.step(
            [self._block[id(draft)] for draft, _ in nodes],
            [len(draft.path_of(node)) for draft, node in nodes],
            [_token(draft, node) for draft, node in nodes],
            torch.cat([self._memory[id(draft), _parent(draft, node)] for draft, node in nodes]),
        )
        for (draft, node), row, ended in zip(nodes, step.memory.split(1), step.ended, strict=True):
            self._memory[id(draft), node] = row
            if ended:
                draft.ended.add(node)
        stops = list(accumulate(len(draft.front) for draft in active))
        return list(step.logits.tensor_split(stops[:-1]))


def _token(draft: Growth, node: int) -> int:
    """The token at a node, the text's last one at the root."""
    return draft.state.context.tokens[-1] if node == ROOT else draft.tokens[node]


def _parent(draft: Growth, node: int) -> int | None:
    """The node before a node; None before the root."""
    return None if node == ROOT else draft.parents[node]
