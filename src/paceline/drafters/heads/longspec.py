"""LongSpec: a layer with a sliding window that also reads what the target has cached of the text, so that a draft's own
memory does not grow with it.

    propose:  keys and values of the text's last tokens, a window of them, those that are lacking made of the tokens
              the target's last layer's keys and values of the text but its last token, where they lie in its cache
              chains and trees level by level: a pass of the layer over the new nodes of all sequences

The window's keys depend on tokens and positions alone: nothing is told of steps without drafts, and a sequence that was
preempted, forked or begun from the prefix cache drafts as any other.

Source: LongSpec: long-context lossless speculative decoding with efficient drafting and verification
(arXiv:2502.17421).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Unpack

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.draft_chain import ChainDraft
from paceline.drafters.growth.base import Growth, grow
from paceline.drafters.growth.options import GrowthOptions, with_growth_options
from paceline.drafters.heads.head_drafter import DraftVocabulary, HeadDrafter
from paceline.models.runners import DraftInputs, LongSpecHead
from paceline.tree import ROOT, TokenTree


class LongSpecState:
    """Keeps one sequence.

    Attributes:
        window: (k, 2 g, e) the head's keys and values of the last k tokens before position `stop`; never written to.
    """

    __slots__ = ("context", "stop", "window")

    def __init__(self, context: Context, window: torch.Tensor, stop: int = 0) -> None:
        self.context, self.window, self.stop = context, window, stop

    @property
    def knows_its_text(self) -> bool:
        """It reads it from the context; of a text of one token the target has cached nothing."""
        return len(self.context.tokens) > 1


@with_growth_options
class LongSpecDrafter(HeadDrafter[LongSpecState]):
    """Drafts with a layer of constant memory that attends to the keys and values of the target's last layer.

    Args:
        model: folder or hub id of the head.
    Raises:
        ConfigError: a value outside its range, no head.
        CheckpointError: a head of another method or for another model.
        CapabilityError: a target that does not show these keys and values, or that scores no trees where some are
            grown.
    """

    name = "longspec"
    catches_up = True
    reads_target = True

    def __init__(self, args: DrafterArgs, *, model: str | None = None, **growth: Unpack[GrowthOptions]) -> None:
        name, target = self._configure(args, model, growth)
        self.head = LongSpecHead.load(name, target, tokenizer=args.fingerprint)
        self._vocabulary = DraftVocabulary(self.head.tokens, args.vocab_size)

    def begin(self, contexts: Sequence[Context]) -> list[LongSpecState]:
        return [LongSpecState(context, self.head.none) for context in contexts]

    def fork(self, state: LongSpecState, context: Context) -> LongSpecState:
        return LongSpecState(context, state.window, state.stop)

    def catch_up(self, states: Sequence[LongSpecState]) -> None:
        """Make the keys and values that a window lacks of its text, but for the last token."""
        most = self.head.window
        behind = [state for state in states if state.stop < len(state.context.tokens) - 1]
        if not behind:
            return
        firsts = [max(state.stop, len(state.context.tokens) - 1 - most) for state in behind]
        texts = [state.context.tokens[first:-1] for state, first in zip(behind, firsts, strict=True)]
        for state, new in zip(behind, self.head.known(texts, firsts), strict=True):
            kept = state.window[max(0, len(state.window) + len(new) - most) :]
            state.window = torch.cat((kept, new)) if len(new) < most else new.clone()
            state.stop = len(state.context.tokens) - 1

    def held_bytes(self, tokens: int) -> int:
        """Of the window."""
        return min(tokens, self.head.window) * self.head.token_bytes

    def _chains(self, states: Sequence[LongSpecState], chains: Sequence[ChainDraft]) -> list[TokenTree]:
        active = list(zip(self.opened(states), chains, strict=True))
        while active:
            self._vocabulary.add_level([chain for _, chain in active], self.head.step([inputs for inputs, _ in active]))
            active = [(inputs, chain) for inputs, chain in active if chain.wants_more]
            for inputs, chain in active:
                inputs.feed(chain.tokens[-1], len(chain.tokens) - 1)
        return [chain.tree(self.index) for chain in chains]

    def _trees(self, growing: Sequence[Growth]) -> list[TokenTree]:
        drafts = [draft for draft in growing if draft.front]
        inputs = {
            id(draft): own
            for draft, own in zip(drafts, self.opened([_state_of(draft) for draft in drafts]), strict=True)
        }

        def score(active: Sequence[Growth]) -> list[torch.Tensor]:
            own = [inputs[id(draft)] for draft in active]
            for draft, fed in zip(active, own, strict=True):
                _feed(draft, fed)
            stops = list(accumulate(len(draft.front) for draft in active))
            return list(self._vocabulary.fitted(self.head.step(own)).tensor_split(stops[:-1]))

        return grow(score, growing, self.index)

    def opened(self, states: Sequence[LongSpecState]) -> list[DraftInputs]:
        """What drafts begin with: windows, the target's keys and values, and the roots."""
        self.catch_up(states)
        opened = []
        for state in states:
            text = state.context.tokens
            inputs = self.head.opened(len(text) - 1, state.window, state.context.target_cache())
            inputs.feed(text[-1])
            opened.append(inputs)
        return opened


def _state_of(draft: Growth) -> LongSpecState:
    assert isinstance(draft.state, LongSpecState)
    return draft.state


def _feed(draft: Growth, inputs: DraftInputs) -> None:
    """Feed the nodes of a front; the root is there."""
    if draft.front == [ROOT]:
        draft.fed[ROOT] = 0
        return
    for node in draft.front:
        draft.fed[node] = inputs.feed(draft.tokens[node], draft.fed[draft.parents[node]])
