"""EAGLE: a decoder layer that goes on from the target's own states drafts, and is told the true ones after each round.

Source: EAGLE: speculative sampling requires rethinking feature uncertainty (arXiv:2401.15077); EAGLE-2: faster
inference of language models with dynamic draft trees (arXiv:2406.16858); EAGLE-3: scaling up inference acceleration of
large language models via training-time test (arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.cached_drafter import CachedHeadDrafter
from paceline.drafters.heads.feature_drafts import FeatureDrafts, FeatureState
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.errors import ConfigError
from paceline.models import Runner
from paceline.models.runners import FeatureHead
from paceline.models.state import NativeCache
from paceline.tree import TokenTree
from paceline.utils import integer


@with_growth_options
class EagleDrafter(CachedHeadDrafter[FeatureState]):
    """Drafts with a head of one decoder layer that was trained for the target.

    Args:
        model: folder or hub id of the head.
        draft_context: most tokens at the end of a prompt that the head sees, beside all that is generated. Of those
            that the prefix cache holds it sees the last 64 at most. None is the whole prompt, which is then read anew.
        draft_device: where the head runs: "cpu", "cuda" or "cuda:N", or "auto" for the device of this machine on which
            a drafted token takes the least time, the way of the target's states there included; None is the target's.
    Raises:
        ConfigError: a value outside its range, no head, no device of this machine.
        CheckpointError: a head of another method or for another model.
        CapabilityError: a target that does not give what the head needs, or that scores no trees where some are grown.
    """

    name = "eagle"
    learns = "eagle"
    heads: ClassVar[tuple[str, ...]] = ("eagle",)
    drafting: ClassVar[type[FeatureDrafts]] = FeatureDrafts
    """How chains and trees are scored."""
    head: FeatureHead

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_context: int | None = 1024,
        draft_device: str | None = None,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        integer("draft_context", 1 if draft_context is None else draft_context, 1)
        name, target = self._configure(args, model, growth)
        self._device = draft_device
        self.head, self.vocab_size = self._load(name, target, args), args.vocab_size
        self._drafts = self.drafting(self.head, args.vocab_size, args.index)
        self._read(target, self.head.taps, draft_context)

    def _load(self, name: str, target: Runner, args: DrafterArgs) -> FeatureHead:
        """The head of a folder or hub id, on its device."""

        def on(device: torch.device | None) -> FeatureHead:
            return FeatureHead.load(name, target, self.heads, tokenizer=args.fingerprint, device=device)

        if self._device is None:
            return on(None)
        if args.models is None:
            raise ConfigError(
                f"draft_device must be left out where models are not loaded from files, got {self._device!r}"
            )
        return args.models.placed(name, self._device, on, lambda head: head.level_seconds(target))

    def catch_up(self, states: Sequence[FeatureState]) -> None:
        self._drafts.catch_up([state for state in states if state.knows_its_text])

    def _new(self, context: Context, cache: NativeCache, states: TappedStates) -> FeatureState:
        return FeatureState(context, cache, states)

    def _chains(self, states: Sequence[FeatureState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(states, chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(growing)

    @property
    def learned_tokens(self) -> torch.Tensor | None:
        return self.head.tokens

    def fork(self, state: FeatureState, context: Context) -> FeatureState:
        self._drafts.confirm(state)
        return self._new(context, self.head.fork(state.cache), state.states.copy())


@with_growth_options
class Eagle2Drafter(EagleDrafter):
    """The same head as `eagle`, with the trees of EAGLE-2 where no other policy is named.

    Args:
        model, draft_context, draft_device: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "eagle2"
    usual_policy = "eagle2"


@with_growth_options
class Eagle3Drafter(EagleDrafter):
    """Drafts with a head that reads several of the target's layers and predicts tokens alone.

    `tree_policy` "eagle2" makes the paper's trees.

    Args:
        model, draft_context, draft_device: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "eagle3"
    learns = "eagle3"
    heads = ("eagle3",)
