"""Parallel prompt decoding: trained prompt tokens behind the inputs of a scoring pass guess what comes further on.

Prompt token i stands i places behind an input, where the target reads an embedding that was trained in place of a
token's, and says a guess of the token i + 1 places on. Each may have several embeddings, *virtual tokens*, which do not
see each other: virtual token j sees virtual token j of the prompt tokens before it, and the guesses are averaged. They
are rows of the pass that scores a tree (models.added_rows), so that there is no other pass; those behind the last
accepted input are the guesses for the next tree, a level each. As many levels can be drafted as prompt tokens stood
there, and which inputs have how many follows from the tree (tree.prompt_tokens).

Guesses of a level know nothing of the tokens drafted before it. The first step of a sequence, and one behind steps in
which nothing was to be drafted, has none.

Source: Hardware-Aware Parallel Prompt Decoding for memory-efficient acceleration of LLM inference (arXiv:2405.18628).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final, Unpack, cast

import numpy as np
import torch
from torch.nn import functional as F

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.head_drafter import HeadDrafter
from paceline.drafters.heads.path_drafts import PathDrafts
from paceline.errors import CheckpointError
from paceline.models import AddedRows
from paceline.models.heads import HeadStep, read_head
from paceline.tree import Budget, Scores, TokenTree, Verdict, last_accepted, prompt_counts
from paceline.utils import integer

DECAY: Final = 0.99
"""Of what was seen of levels, at each new sight."""


class Guesses:
    """What prompt tokens said, as heads of one state (b, levels, v)."""

    tokens: torch.Tensor | None = None
    reads_tokens = False

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        return HeadStep(memory[:, depth], memory)


class PromptState:
    """Keeps one sequence, with the guesses behind its text.

    Attributes:
        guesses: (s, v) logits of the levels behind the root. known: length of the text that they belong to.
        counts: prompt tokens behind the inputs of the tree that is scored. made: (rows, v) what they said.
    """

    __slots__ = ("context", "counts", "guesses", "known", "made")

    def __init__(self, context: Context, guesses: torch.Tensor) -> None:
        self.context, self.guesses, self.known = context, guesses, len(context.tokens)
        self.counts: list[int] = []
        self.made: torch.Tensor | None = None

    @property
    def knows_its_text(self) -> bool:
        """Whether there are guesses behind the text as it is now."""
        return len(self.guesses) > 0 and self.known == len(self.context.tokens)


@with_growth_options
class PPDDrafter(HeadDrafter[PromptState]):
    """Drafts with prompt tokens that were trained for the target.

    Args:
        model: folder or hub id of the prompt tokens.
        prompt_rows: rows of prompt tokens beside the tree of a sequence in a scoring pass, at most; 0 drafts nothing.
    Raises:
        ConfigError: a value outside its range, no prompt tokens.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that scores no rows beside a tree, or no trees where some are grown.
    """

    name = "ppd"
    follows_shapes = True
    keeps_trajectory = True
    adds_rows = True

    def __init__(
        self, args: DrafterArgs, *, model: str | None = None, prompt_rows: int = 16, **growth: Unpack[GrowthOptions]
    ) -> None:
        integer("prompt_rows", prompt_rows, 0, 1024)
        name, target = self._configure(args, model, growth)
        config, weights = read_head(name, target.info, tokenizer=args.fingerprint)
        if config.method != self.name:
            raise CheckpointError(f"the head {name} is of method {config.method!r}, not {self.name!r}; name that one")
        self.prompts, self.prompt_rows = weights["prompts"], prompt_rows
        self.levels, self.virtual_tokens = config.num_heads, config.virtual_tokens
        self.limit = min(self.limit, self.levels)
        info = target.info
        self.none = torch.empty(0, info.vocab_size, device=info.device, dtype=info.dtype)
        self._drafts = PathDrafts(Guesses(), args.vocab_size, args.index)
        self._taken, self._tried = np.full(self.levels, 4.0), np.full(self.levels, 8.0)

    def begin(self, contexts: Sequence[Context]) -> list[PromptState]:
        return [PromptState(context, self.none) for context in contexts]

    def fork(self, state: PromptState, context: Context) -> PromptState:
        twin = PromptState(context, state.guesses)
        twin.known = state.known
        return twin

    def propose(
        self, states: Sequence[PromptState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        pairs = zip(states, budgets, strict=True)
        within = [replace(budget, depth=min(budget.depth, len(state.guesses))) for state, budget in pairs]
        return super().propose(states, within, so_far)

    def _chains(self, states: Sequence[PromptState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(self._stacked(states), chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(self._stacked([cast(PromptState, draft.state) for draft in growing]), growing)

    def _stacked(self, states: Sequence[PromptState]) -> torch.Tensor:
        """(b, levels, v); levels without a guess, which nobody looks at, are zero."""
        return torch.stack([F.pad(state.guesses, (0, 0, 0, self.levels - len(state.guesses))) for state in states])

    @property
    def gains(self) -> list[float]:
        """Tokens that each level adds: the chance that one of it is accepted, and of all levels before."""
        return [float(gain) for gain in np.cumprod(self._taken / self._tried)]

    def rows_beside(self, inputs: int) -> int:
        return min(self.prompt_rows // self.virtual_tokens, self.levels * inputs) * self.virtual_tokens

    def added_rows(
        self, states: Sequence[PromptState], trees: Sequence[TokenTree], rooms: Sequence[int]
    ) -> Sequence[AddedRows]:
        gains, nodes, after, kinds = self.gains, list[list[int]](), list[list[int]](), list[tuple[int, int]]()
        for state, tree, room in zip(states, trees, rooms, strict=True):
            most = min(room, self.prompt_rows) // self.virtual_tokens
            state.counts, state.made = prompt_counts(last_accepted(tree), gains, most), None
            places = list(self._places(state.counts))
            nodes.append([node for node, _, _ in places])
            after.append([row - 1 if level else -1 for row, (_, level, _) in enumerate(places)])
            kinds += [(level, copy) for _, level, copy in places]
        if not kinds:
            return ()
        levels, copies = torch.tensor(kinds, device=self.prompts.device).T
        made = self.prompts[levels, copies]
        return (AddedRows(0, nodes, after, lambda states: made),)

    def _places(self, counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Node, prompt token and virtual token of each row: of each input chains, one for each virtual token."""
        for place, count in enumerate(counts):
            for copy in range(self.virtual_tokens):
                yield from ((place - 1, level, copy) for level in range(count))

    def read_rows(self, states: Sequence[PromptState], logits: Sequence[torch.Tensor]) -> None:
        for state, rows in zip(states, logits, strict=True):
            state.made = rows

    def observe(
        self,
        states: Sequence[PromptState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Keep what the prompt tokens behind the last accepted input said."""
        for state, tree, verdict in zip(states, trees, verdicts, strict=True):
            state.guesses = self._guesses(state, verdict.path[-1] + 1 if verdict.path else 0)
            state.known, state.made, state.counts = len(state.context.tokens), None, []
            self._learn(tree, verdict)

    def _guesses(self, state: PromptState, last: int) -> torch.Tensor:
        """(s, v) means over the virtual tokens behind an input; those that are not there are none."""
        if state.made is None:
            return self.none
        starts = list(accumulate(state.counts, initial=0))
        first, stop = (self.virtual_tokens * start for start in starts[last : last + 2])
        count = state.counts[last]
        return state.made[first:stop].unflatten(0, (self.virtual_tokens, count)).mean(0) if count else self.none

    def _learn(self, tree: TokenTree, verdict: Verdict) -> None:
        """One of a level is accepted, or none, where all levels before were and some were drafted."""
        for level, parent in enumerate((-1, *verdict.path)[: self.levels]):
            if len(tree) and tree.children(parent):
                self._tried[level] = DECAY * self._tried[level] + 1.0
                self._taken[level] = DECAY * self._taken[level] + (level < len(verdict.path))

    def held_bytes(self, tokens: int) -> int:
        return (self.levels + self.prompt_rows) * self.none.shape[1] * self.none.itemsize
