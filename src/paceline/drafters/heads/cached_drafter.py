"""What drafters share whose head keeps a cache of each text: it is told the target's states of all committed tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar, cast

import torch

from paceline.drafters.base import Context
from paceline.drafters.common.draft_state import CHUNK
from paceline.drafters.heads.head_drafter import HeadDrafter
from paceline.drafters.heads.tapped_states import TappedStates, of_pass, of_prompt
from paceline.models import Runner
from paceline.models.state import NativeCache
from paceline.tree import Scores, TokenTree, Verdict


class CachedState:
    """Keeps one sequence, with the cache of its head's layer and states that are not in it yet.

    Attributes:
        cache: of the head's layer; its inputs are those of the tokens before `states.first`.
        states: of the target, of the tokens behind these.
    """

    __slots__ = ("cache", "context", "states")

    def __init__(self, context: Context, cache: NativeCache, states: TappedStates) -> None:
        self.context, self.cache, self.states = context, cache, states

    @property
    def is_current(self) -> bool:
        """Whether states are known up to the last token but one."""
        return self.states.first + self.states.count == len(self.context.tokens) - 1

    @property
    def knows_its_text(self) -> bool:
        """Whether the target's states of all tokens but the last are known, and of one at least."""
        return self.states.count > 0 and self.is_current

    def begin_anew(self, states: TappedStates) -> None:
        """The cache was emptied, and goes on with these."""
        self.states = states


class HasCaches(Protocol):
    """Says what a head with a decoder layer can do."""

    @property
    def runner(self) -> object:
        """The layer."""

    def open(self) -> NativeCache: ...

    def fork(self, cache: NativeCache) -> NativeCache: ...

    def truncate(self, cache: NativeCache, length: int) -> None: ...

    def release(self, cache: NativeCache) -> None: ...


C = TypeVar("C", bound=CachedState)


class CachedHeadDrafter(HeadDrafter[C]):
    """Drafts with heads that have a decoder layer, whose cache follows the text.

    Attributes:
        head: whose caches are kept.
    """

    head: HasCaches

    @abstractmethod
    def _new(self, context: Context, cache: NativeCache, states: TappedStates) -> C:
        """The state of a sequence."""

    def begin(self, contexts: Sequence[Context]) -> list[C]:
        return [self._state(context) for context in contexts]

    def _state(self, context: Context) -> C:
        known = of_prompt(context, self.taps, self.tap_window, self.none)
        return self._new(context, self.head.open(), TappedStates(len(context.tokens) - 1 - len(known), known))

    def observe(
        self, states: Sequence[C], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """Take the target's states of the committed tokens."""
        for i, (state, verdict) in enumerate(zip(states, verdicts, strict=True)):
            passed = of_pass(scores, i, verdict, self.taps)
            self.learn(state, self.none if passed is None else passed)

    def learn(self, state: C, known: torch.Tensor) -> None:
        """Take the target's states (n, taps * hidden) of the last n tokens of the text but the very last; where more
        have come since, the text is seen anew from these on.
        """
        state.states.add(known)
        if not state.is_current:
            self._begin_anew(state, known)
        if self.tap_window is not None and state.states.count > self.tap_window + CHUNK:
            self._begin_anew(state, state.states.all()[-self.tap_window :].clone())

    def _begin_anew(self, state: C, known: torch.Tensor) -> None:
        """See the text from where its last states are known on."""
        self.head.truncate(state.cache, 0)
        state.begin_anew(TappedStates(len(state.context.tokens) - 1 - len(known), known))

    def end(self, states: Sequence[C]) -> None:
        for state in states:
            self.head.release(state.cache)

    def runners(self) -> Sequence[Runner]:
        return (cast(Runner, self.head.runner),)

    def held_bytes(self, tokens: int) -> int:
        """Of states that were not used up: of the window and what may wait behind it, and of what is drafted."""
        most = tokens if self.tap_window is None else min(tokens, self.tap_window + CHUNK)
        return most * self.none.shape[1] * self.none.itemsize
