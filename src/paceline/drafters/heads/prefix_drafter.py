"""Drafters whose heads begin with what a decoder layer makes of the target's states of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Unpack, cast

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.common.draft_state import CHUNK, FEW
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.cached_drafter import CachedHeadDrafter, CachedState
from paceline.drafters.heads.path_drafts import PathDrafts
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models.runners import PrefixHeads
from paceline.models.state import NativeCache
from paceline.tree import TokenTree
from paceline.utils import integer


class PrefixState(CachedState):
    """One sequence; what the target's states are known of goes into the cache of the prefix layer before a draft.

    Attributes:
        start: (0 or 1, hidden) what that layer made of the last state in its cache.
    """

    __slots__ = ("start",)

    def __init__(self, context: Context, cache: NativeCache, states: TappedStates, start: torch.Tensor) -> None:
        super().__init__(context, cache, states)
        self.start = start

    @property
    def knows_its_text(self) -> bool:
        states = self.states
        return states.count + len(self.start) > 0 and states.first + states.count == len(self.context.tokens) - 1

    def begin_anew(self, states: TappedStates) -> None:
        super().begin_anew(states)
        self.start = self.start[:0]


@with_growth_options
class PrefixDrafter(CachedHeadDrafter[PrefixState]):
    """Base of drafters whose heads were trained for the target.

    Args:
        model: as for `medusa`.
        draft_context: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    heads: ClassVar[type[PrefixHeads]]
    head: PrefixHeads
    follows_shapes = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_context: int | None = 1024,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        integer("draft_context", 1 if draft_context is None else draft_context, 1)
        name, target = self._configure(args, model, growth)
        self.head = self.heads(name, target, tokenizer=args.fingerprint)
        self.limit = min(self.limit, self.head.depths)
        self._drafts = PathDrafts(self.head, args.vocab_size, args.index)
        self._read(target, self.head.taps, draft_context)

    @property
    def learned_tokens(self) -> torch.Tensor | None:
        return self.head.tokens

    def catch_up(self, states: Sequence[PrefixState]) -> None:
        if behind := [state for state in states if state.knows_its_text and state.states.count > FEW]:
            self._starts(behind)

    def _new(self, context: Context, cache: NativeCache, states: TappedStates) -> PrefixState:
        return PrefixState(context, cache, states, self.none)

    def fork(self, state: PrefixState, context: Context) -> PrefixState:
        return PrefixState(context, self.head.fork(state.cache), state.states.copy(), state.start)

    def _chains(self, states: Sequence[PrefixState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(self._starts(states), chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(self._starts([cast(PrefixState, draft.state) for draft in growing]), growing)

    def _starts(self, states: Sequence[PrefixState]) -> torch.Tensor:
        """(b, hidden) what the heads begin with, once all known states are in the caches."""
        while behind := [state for state in states if state.states.count]:
            counts = [min(CHUNK, state.states.count) for state in behind]
            rows = torch.cat([state.states.all()[:count] for state, count in zip(behind, counts, strict=True)])
            starts = self.head.read([state.cache for state in behind], counts, rows)
            for state, count, row in zip(behind, counts, starts.split(1), strict=True):
                state.states.drop(count)
                state.start = row
        return torch.cat([state.start for state in states])
