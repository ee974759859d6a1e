"""Drafting with heads that guess several tokens ahead of one state of the target (`PathHeads`): chains, and trees of
every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth, grow
from paceline.drafters.heads.head_drafter import DraftVocabulary
from paceline.models.heads import HeadStep
from paceline.tree import TokenTree


class LevelHeads(Protocol):
    """Scores one level of paths after the other; see `PathHeads`."""

    tokens: torch.Tensor | None

    @property
    def reads_tokens(self) -> bool: ...

    def begin(self, states: torch.Tensor) -> torch.Tensor: ...

    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep: ...


class PathDrafts:
    """Drafts for many sequences with heads that each score one level.

    Args:
        vocab_size: of the target. source: as of `TokenTree.sources`.
    """

    def __init__(self, head: LevelHeads, vocab_size: int, source: int) -> None:
        self.head, self._source = head, source
        self._vocabulary = DraftVocabulary(head.tokens, vocab_size)

    def chains(self, states: torch.Tensor, drafts: Sequence[ChainDraft]) -> list[TokenTree]:
        """One chain per state (b, hidden): a pass a level for all of them."""
        memory, active, depth = self.head.begin(states), list(drafts), 0
        while active:
            last = [draft.tokens[-1] if draft.tokens else draft.context.tokens[-1] for draft in active]
            step = self.head.step(memory, last, depth)
            self._vocabulary.add_level(active, step.logits)
            on = [i for i, draft in enumerate(active) if draft.wants_more]
            memory, depth = step.memory if len(on) == len(active) else step.memory[on], depth + 1
            active = [active[i] for i in on]
        return [draft.tree(self._source) for draft in drafts]

    def trees(self, states: torch.Tensor, drafts: Sequence[Growth]) -> list[TokenTree]:
        """One tree per state (b, hidden): a pass a round for all of them, one more for each further depth in it."""
        reading = _Reading(self.head, self._vocabulary)
        for draft, row in zip(drafts, self.head.begin(states).split(1), strict=True):
            reading.begin(draft, row)
        return grow(reading.score, drafts, self._source)


Path = tuple[int, ...]
"""Tokens from the root on."""


class _Reading:
    """What heads make of paths: each is read once, or where heads read no tokens, once for its length."""

    def __init__(self, head: LevelHeads, vocabulary: DraftVocabulary) -> None:
        self._head, self._vocabulary = head, vocabulary
        self._memory: dict[tuple[int, Path], torch.Tensor] = {}
        self._rows: dict[tuple[int, Path], torch.Tensor] = {}

    def begin(self, draft: Growth, row: torch.Tensor) -> None:
        """A draft's (1, w) memory before its root."""
        self._memory[id(draft), ()] = row

    def score(self, active: Sequence[Growth]) -> list[torch.Tensor]:
        """The rows (front, v) of each draft's front."""
        fronts = [[(id(draft), self._path(draft, node)) for node in draft.front] for draft in active]
        missing: dict[int, dict[tuple[int, Path], None]] = {}
        for key in (key for front in fronts for key in front if key not in self._rows):
            missing.setdefault(len(key[1]) - 1, {})[key] = None
        for depth, keys in missing.items():
            self._read(list(keys), depth)
        logits = [torch.cat([self._rows[key] for key in front]) for front in fronts]
        if self._head.reads_tokens:  # no path is asked for twice
            self._rows.clear()
        return logits

    def _path(self, draft: Growth, node: int) -> Path:
        path = (draft.state.context.tokens[-1], *draft.path_of(node))
        return path if self._head.reads_tokens else (0,) * len(path)

    def _read(self, keys: Sequence[tuple[int, Path]], depth: int) -> None:
        memory = torch.cat([self._memory[draft, path[:-1]] for draft, path in keys])
        step = self._head.step(memory, [path[-1] for _, path in keys], depth)
        self._rows.update(zip(keys, self._vocabulary.fitted(step.logits).split(1), strict=True))
        self._memory.update(zip(keys, step.memory.split(1), strict=True))
