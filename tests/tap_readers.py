"""Drafters that draft nothing and note which hidden states of a prompt they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.drafters import Context, Drafter, DrafterArgs
from paceline.tree import EMPTY_TREE, Budget, TokenTree

SEEN: list[torch.Tensor] = []
CONTEXTS: list[Context] = []


class Reader(Drafter):
    """Wants the states of `window` tokens, None of all, behind one layer; of kept prompts of `again`."""

    name = "reader"

    def __init__(self, args: DrafterArgs, *, window: int | None = None, again: int | None = None) -> None:
        self.taps, self.tap_window, self.tap_reread = (1,), window, again

    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        SEEN.extend(context.taps.get(1, torch.empty(0, 32)) for context in contexts)
        CONTEXTS.extend(contexts)
        return list(contexts)

    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        return [EMPTY_TREE] * len(states)

    def fork(self, state: Any, context: Context) -> Any:
        return context
