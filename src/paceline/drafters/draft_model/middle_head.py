"""A trained head that drafts for a model between draft and target, as SpecMQuant's EAGLE head does for its small model.

The head goes on from the middle model's states of all committed tokens. It is told those of the target's text alone;
for each chain it works on a copy, which is dropped with the chain, so that it never has to go back. The states of what
the target keeps of a chain are those of the middle model's own passes over it.

Source: SpecMQuant, Speculative decoding meets quantization (arXiv:2505.22179).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.drafters.base import Context
from paceline.drafters.common.draft_state import CHUNK
from paceline.drafters.heads.cached_drafter import CachedHeadDrafter
from paceline.drafters.heads.tapped_states import joined, of_pass
from paceline.models import Runner
from paceline.tree import Budget, Scores, TokenTree, Verdict


class HeadState:
    """Keeps what a head knows of one sequence.

    Attributes:
        extended: the sequence with the chain behind it.
        text, base: the target's text as far as the head was told of it, and the head's state of it; none at first.
        chain: the head's state of `extended`; none before the chain is begun.
        rows: (n, taps * hidden) the middle model's states of tokens that `base` was not told of.
    """

    __slots__ = ("base", "chain", "extended", "rows", "text")

    def __init__(self, extended: Context, none: torch.Tensor) -> None:
        self.extended, self.rows = extended, none
        self.text: Context | None = None
        self.base: Any = None
        self.chain: Any = None

    @property
    def first(self) -> int:
        """Position of the token of the first of `rows`."""
        return 0 if self.text is None else len(self.text.tokens) - 1


class MiddleHead:
    """A head's drafter, told of the middle model's passes instead of the target's.

    Args:
        drafter: made for the middle model.
    """

    def __init__(self, drafter: CachedHeadDrafter[Any]) -> None:
        self.drafter, self.taps = drafter, tuple(drafter.taps)

    def begin(self, extended: Context) -> HeadState:
        """The state of a new sequence, whose chain will be kept in this context."""
        return HeadState(extended, self.drafter.none)

    def read(self, runner: Runner, states: Sequence[HeadState], caches: Sequence[Any]) -> None:
        """Let the middle model read all of the texts but their last tokens, and the head what it said; the text is that
        of `extended`, behind which chains begin anew. What the caches hold of it has been read before.
        """
        for state, cache in zip(states, caches, strict=True):
            self._drop_chain(state)
            state.rows = state.rows[: cache.length - state.first]
        each = list(zip(states, caches, strict=True))
        while behind := [(state, cache) for state, cache in each if cache.length < len(state.extended.tokens) - 1]:
            parts = [state.extended.tokens[cache.length : -1][:CHUNK] for state, cache in behind]
            scores = runner.extend([cache for _, cache in behind], parts, taps=self.taps)
            rows = joined([scores.taps[layer] for layer in self.taps]).split([len(part) for part in parts])
            for (state, _), new in zip(behind, rows, strict=True):
                state.rows = torch.cat((state.rows, new))
        for state in states:
            self._tell(state)

    def propose(
        self, states: Sequence[HeadState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        """Trees behind the chains."""
        return self.drafter.propose([state.chain for state in states], budgets, so_far)

    def observe(
        self, states: Sequence[HeadState], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores
    ) -> None:
        """What the middle model made of the trees, in a pass over them and the last tokens before; `extended` holds the
        new tokens.
        """
        for i, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
            rows = of_pass(scores, i, verdict, self.taps)
            assert rows is not None
            state.rows = torch.cat((state.rows, rows))
        self.drafter.observe([state.chain for state in states], trees, verdicts, scores)

    def end(self, states: Sequence[HeadState]) -> None:
        """Free what they hold."""
        for state in states:
            self._drop_chain(state)
            if state.base is not None:
                self.drafter.end([state.base])
                state.base = None

    def _tell(self, state: HeadState) -> None:
        """Let the head know of the target's new text, and begin a chain behind it."""
        tokens = list(state.extended.tokens)
        if state.text is None:
            known = dict(zip(self.taps, state.rows.chunk(len(self.taps), 1), strict=True))
            state.text = replace(state.extended, tokens=tokens, taps=known)
            (state.base,) = self.drafter.begin([state.text])
            state.text.taps = {}
        else:
            state.text.tokens[:] = tokens
            self.drafter.learn(state.base, state.rows)
        state.rows = self.drafter.none
        self.drafter.catch_up([state.base])
        state.chain = self.drafter.fork(state.base, state.extended)

    def _drop_chain(self, state: HeadState) -> None:
        if state.chain is not None:
            self.drafter.end([state.chain])
            state.chain = None
