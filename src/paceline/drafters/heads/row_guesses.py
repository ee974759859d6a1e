"""What drafters share whose guesses are rows of the pass that scores a tree (models.added_rows).

Behind an input stand rows that guess what comes further on, a level of the next tree each; those behind the last
accepted input are the guesses for it. So as many levels can be drafted as rows stood there, and which inputs have how
many follows from the tree (tree.prompt_tokens). Rows of one level may be several, which do not see each other and whose
guesses are averaged. Guesses of a level know nothing of the tokens drafted before it. The first step of a sequence, and
one behind steps in which nothing was to be drafted, has none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import torch
from torch.nn import functional as F

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions
from paceline.drafters.heads.head_drafter import HeadDrafter
from paceline.drafters.heads.path_drafts import PathDrafts
from paceline.errors import CheckpointError
from paceline.models import AddedRows
from paceline.models.heads import HeadConfig, HeadStep, read_head
from paceline.tree import Budget, Scores, TokenTree, Verdict, last_accepted, prompt_counts
from paceline.utils import integer

DECAY: Final = 0.99
"""Of what was seen of levels, at each new sight."""


class Guesses:
    """What rows said, as heads of one state (b, levels, v)."""

    tokens: torch.Tensor | None = None
    reads_tokens = False

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        return HeadStep(memory[:, depth], memory)


@dataclass(frozen=True, slots=True)
class LevelRows:
    """The rows of one sequence, level by level.

    Attributes:
        nodes, after: per level, as of `AddedRows`.
        numbers: of each input, by level, its rows among all of the sequence.
    """

    nodes: list[list[int]]
    after: list[list[int]]
    numbers: list[list[list[int]]]

    @classmethod
    def of(cls, counts: Sequence[int], levels: int, copies: int) -> LevelRows:
        """Chains of so many rows behind each input, `copies` of each."""
        rows = cls([[] for _ in range(levels)], [[] for _ in range(levels)], [[] for _ in counts])
        number = 0
        for level in range(levels):
            for place, own in enumerate(rows.numbers):
                if counts[place] > level:
                    rows.nodes[level] += [place - 1] * copies
                    rows.after[level] += own[level - 1] if level else [-1] * copies
                    own.append(list(range(number, number + copies)))
                    number += copies
        return rows


class GuessState:
    """Keeps one sequence, with the guesses behind its text.

    Attributes:
        guesses: (s, v) logits of the levels behind the root. known: length of the text that they belong to.
        rows: behind the inputs of the tree that is scored. made: (rows, v) what they said.
    """

    __slots__ = ("context", "guesses", "known", "made", "rows")

    def __init__(self, context: Context, guesses: torch.Tensor) -> None:
        self.context, self.guesses, self.known = context, guesses, len(context.tokens)
        self.rows = LevelRows.of((), 0, 1)
        self.made: torch.Tensor | None = None

    @property
    def knows_its_text(self) -> bool:
        """Whether there are guesses behind the text as it is now."""
        return len(self.guesses) > 0 and self.known == len(self.context.tokens)


class RowGuessDrafter(HeadDrafter[GuessState]):
    """Base of these drafters, which load what was trained (`_load`) and make their rows of it (`_rows`).

    Attributes:
        levels: rows behind an input, at most. copies: rows of a level. most: rows of a sequence, at most.
    """

    follows_shapes = True
    keeps_trajectory = True
    adds_rows = True

    def _load(
        self, args: DrafterArgs, model: str | None, most: int, growth: GrowthOptions
    ) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
        """Check the options, and read what was trained.

        Raises:
            CheckpointError: heads of another method.
        """
        name, target = self._configure(args, model, growth)
        config, weights = read_head(name, target.info, tokenizer=args.fingerprint)
        if config.method != self.name:
            raise CheckpointError(f"the head {name} is of method {config.method!r}, not {self.name!r}; name that one")
        self.levels, self.copies, self.most = config.num_heads, config.virtual_tokens, most
        self.limit, info = min(self.limit, self.levels), target.info
        self.none = torch.empty(0, info.vocab_size, device=info.device, dtype=info.dtype)
        self._drafts = PathDrafts(Guesses(), args.vocab_size, args.index)
        self._taken, self._tried = np.full(self.levels, 4.0), np.full(self.levels, 8.0)
        return config, weights

    @abstractmethod
    def _rows(self, rows: Sequence[LevelRows]) -> Sequence[AddedRows]:
        """The rows of some sequences, some of them at least, by ascending layer; each sequence's level by level."""

    def begin(self, contexts: Sequence[Context]) -> list[GuessState]:
        return [GuessState(context, self.none) for context in contexts]

    def fork(self, state: GuessState, context: Context) -> GuessState:
        twin = GuessState(context, state.guesses)
        twin.known = state.known
        return twin

    def propose(
        self, states: Sequence[GuessState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        pairs = zip(states, budgets, strict=True)
        within = [replace(budget, depth=min(budget.depth, len(state.guesses))) for state, budget in pairs]
        return super().propose(states, within, so_far)

    def _chains(self, states: Sequence[GuessState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(self._stacked(states), chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(self._stacked([cast(GuessState, draft.state) for draft in growing]), growing)

    def _stacked(self, states: Sequence[GuessState]) -> torch.Tensor:
        """(b, levels, v); levels without a guess, which nobody looks at, are zero."""
        return torch.stack([F.pad(state.guesses, (0, 0, 0, self.levels - len(state.guesses))) for state in states])

    @property
    def gains(self) -> list[float]:
        """Tokens that each level adds: the chance that one of it is accepted, and of all levels before."""
        return [float(gain) for gain in np.cumprod(self._taken / self._tried)]

    def rows_beside(self, inputs: int) -> int:
        return min(self.most // self.copies, self.levels * inputs) * self.copies

    def added_rows(
        self, states: Sequence[GuessState], trees: Sequence[TokenTree], rooms: Sequence[int]
    ) -> Sequence[AddedRows]:
        gains, some = self.gains, False
        for state, tree, room in zip(states, trees, rooms, strict=True):
            counts = prompt_counts(last_accepted(tree), gains, min(room, self.most) // self.copies)
            state.rows, state.made = LevelRows.of(counts, self.levels, self.copies), None
            some = some or any(counts)
        return self._rows([state.rows for state in states]) if some else ()

    def read_rows(self, states: Sequence[GuessState], logits: Sequence[torch.Tensor]) -> None:
        for state, rows in zip(states, logits, strict=True):
            state.made = rows

    def observe(
        self,
        states: Sequence[GuessState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Keep what the rows behind the last accepted input said."""
        for state, tree, verdict in zip(states, trees, verdicts, strict=True):
            state.guesses = self._guesses(state, verdict.path[-1] + 1 if verdict.path else 0)
            state.known, state.made = len(state.context.tokens), None
            self._learn(tree, verdict)

    def _guesses(self, state: GuessState, last: int) -> torch.Tensor:
        """(s, v) means over the rows of each level behind an input; those that are not there are none."""
        if state.made is None or not (numbers := state.rows.numbers[last]):
            return self.none
        return state.made[torch.tensor(numbers, device=state.made.device)].mean(1)

    def _learn(self, tree: TokenTree, verdict: Verdict) -> None:
        """One of its own drafts of a level is accepted, or none, where all levels before were and it drafted some."""
        path = verdict.path
        for level, parent in enumerate((-1, *path)[: self.levels]):
            if own := [node for node in tree.children(parent) if tree.sources[node] == self.index]:
                self._tried[level] = DECAY * self._tried[level] + 1.0
                self._taken[level] = DECAY * self._taken[level] + (level < len(path) and path[level] in own)

    def held_bytes(self, tokens: int) -> int:
        return (self.levels + self.most) * self.none.shape[1] * self.none.itemsize


def check_rows(name: str, rows: int) -> None:
    """Reject what is no number of rows of a sequence; ConfigError."""
    integer(name, rows, 0, 1024)
