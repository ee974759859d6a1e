"""DFlash and DSpark: a small network drafts a whole block in one pass, from the target's own states.

    text's last token and block_size - 1 masks  ->  logits of block_size - 1 tokens (DFlash), or of block_size (DSpark)

In each layer the block sees keys and values that are made of the target's states of the committed text
(models.runners.block_head); those of newly committed tokens go into the draft's cache before each pass, so that it
always holds as many positions as there are states. DFlash's rows depend on the text alone. DSpark's get a correction of
low rank by the token before, and say how likely they are accepted: the draft ends before the first that falls below
`confidence_threshold`.

Sources: DFlash: block diffusion for flash speculative decoding (arXiv:2602.06036), DSpark (arXiv:2607.05147).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.block_drafts import BlockDrafts, BlockState
from paceline.drafters.heads.cached_drafter import CachedHeadDrafter
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.models.runners import BlockHead
from paceline.models.state import NativeCache
from paceline.tree import TokenTree
from paceline.utils import integer, number


@with_growth_options
class DFlashDrafter(CachedHeadDrafter[BlockState]):
    """Drafts a block in one pass with a network that was trained for the target.

    Args:
        model: folder or hub id of the network.
        draft_context: as for `eagle`.
    Raises:
        ConfigError: a value outside its range, no network.
        CheckpointError: a head of another method or for another model.
        CapabilityError: a target that does not give what it needs, or that scores no trees where some are grown.
    """

    name = "dflash"
    head: BlockHead

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_context: int | None = 1024,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        self._open(args, model, draft_context, growth)

    def _open(
        self,
        args: DrafterArgs,
        model: str | None,
        draft_context: int | None,
        growth: GrowthOptions,
        threshold: float = 0.0,
    ) -> None:
        integer("draft_context", 1 if draft_context is None else draft_context, 1)
        name, target = self._configure(args, model, growth)
        mask_row = None if args.models is None else args.models.embedding_of
        self.head = BlockHead.load(name, target, self.name, tokenizer=args.fingerprint, mask_row=mask_row)
        self.limit = min(self.limit, self.head.depths)
        self.vocab_size = args.vocab_size
        self._drafts = BlockDrafts(self.head, args.vocab_size, args.index, threshold)
        self._read(target, self.head.taps, draft_context)

    def catch_up(self, states: Sequence[BlockState]) -> None:
        self._drafts.catch_up([state for state in states if state.knows_its_text])

    def _new(self, context: Context, cache: NativeCache, states: TappedStates) -> BlockState:
        return BlockState(context, cache, states)

    def fork(self, state: BlockState, context: Context) -> BlockState:
        return BlockState(context, self.head.fork(state.cache), state.states.copy())

    @property
    def row_bytes(self) -> int:
        """All logits come from one pass."""
        return self.none.itemsize * (self.vocab_size if self.head.tokens is None else len(self.head.tokens))

    def _chains(self, states: Sequence[BlockState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        return self._drafts.chains(states, chains)

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        return self._drafts.trees(growing)


@with_growth_options
class DSparkDrafter(DFlashDrafter):
    """Drafts a block as `dflash` does, each token corrected by the one before, as far as its confidence goes.

    Args:
        model, draft_context: as for `dflash`.
        confidence_threshold: least chance to be accepted, as the network's confidence head says it, of a token that is
            drafted; the draft ends before the first that has less. 0 drafts the whole block.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "dspark"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_context: int | None = 1024,
        confidence_threshold: float = 0.0,
        **growth: Unpack[GrowthOptions],
    ) -> None:
        number("confidence_threshold", confidence_threshold, 0.0, 1.0, "be in 0..1")
        self._open(args, model, draft_context, growth, confidence_threshold)
