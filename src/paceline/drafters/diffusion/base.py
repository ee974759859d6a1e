"""What drafters share that look ahead with a diffusion language model: one pass over the text and masks behind it.

A pass sees the text, then masks. A model with full attention takes the last mask for the end of what will be written,
so there are at least `draft_masks` of them, however few tokens are drafted; under block-causal attention they go on to
the end of the last drafted token's block, since later ones are seen by nobody.

Keys and values of drafted slots are never kept. Under block-causal attention those of the text's whole blocks depend on
nothing behind them and are stored; under full attention every slot's depend on the masks, and the text is computed anew
with each draft, its last `draft_context` tokens where that is too much.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import numpy as np

from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.bases import limit_of
from paceline.drafters.common.draft_rows import fit_rows
from paceline.errors import DrafterError
from paceline.models import Call, Ints, SlotCache
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from paceline.utils import integer, need

if TYPE_CHECKING:
    import torch

LEAST_ROOM: Final = 256
"""Slots of a cache, which double when they are full."""


class DenoisedState:
    """Keeps one sequence with its cache, where the model has one.

    Attributes:
        cache: of the text's whole blocks, `slots` long; None where nothing is stored.
    """

    __slots__ = ("cache", "context", "slots")

    def __init__(self, context: Context) -> None:
        self.context = context
        self.cache: SlotCache | None = None
        self.slots = 0


S = TypeVar("S", bound=DenoisedState)


class DenoisingDrafter(Drafter, Generic[S]):
    """Drafts what a diffusion language model fills into masks behind the text; a drafter chooses among its logits.

    Args:
        args: of the drafter.
        model: folder or hub id of the denoiser.
        num_speculative_tokens: most tokens to draft; None leaves it to the budget and `draft_max_length`.
        draft_max_length: most tokens of a draft.
        draft_masks: fewest masks behind the text, under full attention.
        draft_context: most tokens of the text that a pass sees; None is what the denoiser has room for.
        draft_device: where the denoiser runs: "cpu", "cuda" or "cuda:N"; None is the target's.
        between: tokens between the text and the masks.
    Raises:
        ConfigError: a value outside its range, no denoiser.
        DrafterError: another tokenizer.
    """

    catches_up = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None,
        num_speculative_tokens: int | None,
        draft_max_length: int,
        draft_masks: int,
        draft_context: int | None,
        draft_device: str | None,
        between: Sequence[int] = (),
    ) -> None:
        limit = limit_of(num_speculative_tokens)
        integer("draft_max_length", draft_max_length, 1)
        integer("draft_masks", draft_masks, 0)
        integer("draft_context", 1 if draft_context is None else draft_context, 1)
        rule = f"be the folder or hub id of a diffusion language model for method {self.name!r}"
        need(isinstance(model, str) and args.models is not None, "speculative_config model", rule, model)
        assert args.models is not None
        self.denoiser = args.models.denoiser(str(model), device=draft_device)
        self.index, self.vocab_size, self.limit = args.index, args.vocab_size, min(limit, draft_max_length)
        self.draft_masks, self.draft_context, self.between = draft_masks, draft_context, list(between)
        self.ends = [token for token in self.denoiser.eos_token_ids if token < args.vocab_size]
        self._stores = self.denoiser.attention == "block" and not self.denoiser.needs_left

    @abstractmethod
    def _state(self, context: Context) -> S:
        """Of a new sequence."""

    @abstractmethod
    def _tree(self, state: S, logits: torch.Tensor) -> TokenTree:
        """A chain of at most k tokens from (k, v) logits of the slots behind the text, over the target's tokens."""

    def begin(self, contexts: Sequence[Context]) -> list[S]:
        return [self._state(context) for context in contexts]

    def propose(self, states: Sequence[S], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(states)
        active = [
            (i, state, self._steps(budget)) for i, (state, budget) in enumerate(zip(states, budgets, strict=True))
        ]
        active = [(i, state, steps) for i, state, steps in active if steps > 0 and state.context.tokens]
        if not active:
            return trees
        for (i, state, _), logits in zip(
            active, self._look([(state, steps) for _, state, steps in active]), strict=True
        ):
            trees[i] = self._tree(state, fit_rows(logits, self.vocab_size))
        return trees

    def fork(self, state: S, context: Context) -> S:
        return self._state(context)

    def end(self, states: Sequence[S]) -> None:
        for state in states:
            state.cache, state.slots = None, 0

    def held_bytes(self, tokens: int) -> int:
        """Keys and values of the denoiser's cache."""
        if not self._stores:
            return 0
        assert self.denoiser.block_length is not None
        slots = tokens + len(self.between) + self.denoiser.block_length
        return self._room(slots) * self.denoiser.slot_bytes

    @property
    def row_bytes(self) -> int:
        """All logits come from one pass."""
        return 4 * self.denoiser.vocab_size

    def _room(self, slots: int) -> int:
        """Slots of a cache that is made where so many are needed."""
        return min(max(1 << (slots - 1).bit_length(), LEAST_ROOM), self.denoiser.max_length)

    def _steps(self, budget: Budget) -> int:
        """Tokens to draft: within the budget, the options and the canvas, which must hold one token of the text at
        least.
        """
        return min(budget.nodes, budget.depth, self.limit, self.denoiser.max_length - 1 - len(self.between))

    def _look(self, active: Sequence[tuple[S, int]]) -> list[torch.Tensor]:
        """(k, v) logits of the first k masks of each."""
        logits = self.denoiser.forward([self._call(state, steps) for state, steps in active])
        for state, _ in active:
            if state.cache is not None:
                state.cache.truncate(self.whole_blocks(len(state.context.tokens)))
        return logits

    def _call(self, state: S, steps: int) -> Call:
        """The pass, of whose rows the first masks' are wanted."""
        text, longest = state.context.tokens, self.denoiser.max_length - len(self.between)
        seen = len(text) if self.draft_context is None else min(len(text), self.draft_context)
        masks = self._masks(seen + len(self.between), steps)
        seen = min(seen, longest - masks)
        behind = self.between + [self.denoiser.mask_token_id] * masks
        whole = seen == len(text)
        if not (self._stores and whole):
            state.cache, state.slots = None, 0
            ids = self._known(np.array(text[-seen:] + behind, np.int64))
            return Call(ids, np.arange(ids.size), wanted=np.arange(steps) + seen + len(self.between))
        held = self._held(state, seen + len(behind))
        ids = self._known(np.array(text[held:] + behind, np.int64))
        wanted = np.arange(steps) + seen - held + len(self.between)
        return Call(ids, np.arange(held, held + ids.size), state.cache, np.arange(held), True, wanted=wanted)

    def _masks(self, first: int, steps: int) -> int:
        """How many masks there are from slot `first` on, where they fit."""
        block, most = self.denoiser.block_length, self.denoiser.max_length
        if block is None:
            return min(max(steps, self.draft_masks), most - 1 - len(self.between))
        wanted = -(-(first + steps) // block) * block - first
        return wanted if first + wanted <= most else steps

    def _held(self, state: S, slots: int) -> int:
        """Slots whose keys and values are stored; makes room for so many slots in all."""
        if state.cache is None or state.slots < slots:
            state.slots = self._room(slots)
            state.cache = self.denoiser.new_cache(state.slots)
        return int(state.cache.stored.size)

    def whole_blocks(self, count: int) -> int:
        """Slots of the whole blocks among the first `count`."""
        assert self.denoiser.block_length is not None
        return count // self.denoiser.block_length * self.denoiser.block_length

    def _known(self, ids: Ints) -> Ints:
        """The same ids, all of which the denoiser knows.

        Raises:
            DrafterError: one that it does not.
        """
        if int(ids.max()) >= self.denoiser.vocab_size:
            raise DrafterError(
                f"the text holds token {int(ids.max())}, and the diffusion model of {self.name!r} has only "
                f"{self.denoiser.vocab_size}; choose one with the target's vocabulary"
            )
        return ids
