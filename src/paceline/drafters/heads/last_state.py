"""Drafters that need one state of the target alone, that of the token before the root, and heads that go on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Unpack, cast

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.head_drafter import HeadDrafter
from paceline.drafters.heads.path_drafts import PathDrafts
from paceline.drafters.heads.tapped_states import of_pass, of_prompt
from paceline.models.heads import PathHeads
from paceline.tree import Scores, TokenTree, Verdict


class LastState:
    """Keeps one sequence, with the target's state before its root.

    Attributes:
        state: (0 or 1, hidden) of the target, of the token before the root. known: length of the text that it belongs
            to.
    """

    __slots__ = ("context", "known", "state")

    def __init__(self, context: Context, state: torch.Tensor) -> None:
        self.context, self.state, self.known = context, state, len(context.tokens)

    @property
    def knows_its_text(self) -> bool:
        """Whether the state is that of the text as it is now."""
        return len(self.state) > 0 and self.known == len(self.context.tokens)


@with_growth_options
class LastStateDrafter(HeadDrafter[LastState]):
    """Base of drafters whose heads were trained for the target.

    Args:
        model: folder or hub id of the heads.
    Raises:
        ConfigError: a value outside its range, no heads.
        CheckpointError: heads of another method or for another model.
        CapabilityError: a target that does not give what the heads need, or that scores no trees where some are grown.
    """

    heads: ClassVar[type[PathHeads]]

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        name, target = self._configure(args, model, growth)
        self.head = self.heads(name, target, tokenizer=args.fingerprint)
        self.limit = min(self.limit, self.head.depths)
        self._drafts = PathDrafts(self.head, args.vocab_size, args.index)
        self._read(target, self.head.taps, 1)

    @property
    def learned_tokens(self) -> torch.Tensor | None:
        return self.head.tokens

    def begin(self, contexts: Sequence[Context]) -> list[LastState]:
        return [LastState(context, of_prompt(context, self.taps, 1, self.none)) for context in contexts]

    def observe(
        self,
        states: Sequence[LastState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        """Take the target's state of the last token before the new root."""
        for i, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
            passed = of_pass(scores, i, verdict, self.taps)
            state.state = self.none if passed is None else passed[-1:]
            state.known = len(state.context.tokens)

    def fork(self, state: LastState, context: Context) -> LastState:
        return LastState(context, state.state)

    def held_bytes(self, tokens: int) -> int:
        return self.none.shape[1] * self.none.itemsize

    def _chains(self, states: Sequence[LastState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(torch.cat([state.state for state in states]), chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(torch.cat([cast(LastState, draft.state).state for draft in growing]), growing)
