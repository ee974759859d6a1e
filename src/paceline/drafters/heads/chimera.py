"""Chimera: drafts from the last three tokens and the target's states of all before, with a head for each level.

Source: Chimera: a lossless decoding method for accelerating large language models inference by fusing all tokens
(arXiv:2402.15758).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.cached_drafter import CachedHeadDrafter
from paceline.drafters.heads.chimera_drafts import ChimeraDrafts, ChimeraState
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models.runners import ChimeraHead
from paceline.models.state import NativeCache
from paceline.tree import TokenTree
from paceline.utils import integer


@with_growth_options
class ChimeraDrafter(CachedHeadDrafter[ChimeraState]):
    """Drafts with Chimera's encoders and heads that were trained for the target.

    Args:
        model: as for `medusa`.
        draft_context: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "chimera"
    follows_shapes = True
    head: ChimeraHead

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
        self.head = ChimeraHead(name, target, tokenizer=args.fingerprint)
        self.limit = min(self.limit, self.head.depths)
        self._drafts = ChimeraDrafts(self.head, args.vocab_size, args.index)
        self._read(target, self.head.taps, draft_context)

    def catch_up(self, states: Sequence[ChimeraState]) -> None:
        self._drafts.catch_up([state for state in states if state.knows_its_text])

    def fork(self, state: ChimeraState, context: Context) -> ChimeraState:
        self._drafts.confirm(state)
        return ChimeraState(context, self.head.fork(state.cache), state.states.copy())

    def _new(self, context: Context, cache: NativeCache, states: TappedStates) -> ChimeraState:
        return ChimeraState(context, cache, states)

    def _chains(self, states: Sequence[ChimeraState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(states, chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(growing)
