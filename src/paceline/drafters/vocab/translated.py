"""What a draft model with another tokenizer knows of one sequence: the text in its own tokens, and a cache of it.

In: the target's tokens, as they come. Out: a `DraftState` over the draft's tokens. Not here: translation
(`retokenize`), drafting (`tli`, `slem`).

The draft's tokens of a text that grows are not those of the shorter text with some more behind: its last few may become
others. The cache keeps what stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.drafters.common.draft_rows import uniform
from paceline.drafters.common.draft_state import DraftState, agreed

if TYPE_CHECKING:
    from paceline.drafters.base import Context
    from paceline.drafters.vocab.retokenize import Reading
    from paceline.models import Runner, SequenceCache

_STEP = 1 << 40
"""Number of a draw that makes seeds; drafts have smaller ones."""


class TranslatedState:
    """See the module.

    Attributes:
        context: the sequence, in the target's tokens. inner: the same for the draft model, in its own.
        reading: how far the text was translated.
    """

    __slots__ = ("_closed", "context", "inner", "reading")

    def __init__(
        self, context: Context, reading: Reading, cache: SequenceCache, inner: DraftState | None = None
    ) -> None:
        self.context, self.reading = context, reading
        tokens = [] if inner is None else list(inner.context.tokens)
        own = replace(context, tokens=tokens, prompt_length=0, shape=None, taps={}, prediction=())
        self.inner = DraftState(own, cache, 0 if inner is None else inner.base)
        self._closed = 0

    @property
    def ready(self) -> bool:
        """Whether the draft model sees the whole text: no byte waits for the end of its character."""
        return bool(self.inner.context.tokens) and not self.reading.pending

    def follow(self, runner: Runner, number: Callable[[Sequence[int]], list[int]]) -> None:
        """Bring the draft's text up to the target's.

        The seed of a step is a function of the request's and of the target's position: draft texts of different steps
        may be equally long, and two steps must not share their noise.

        Args:
            number: the draft's tokens as `runner` knows them.
        """
        context, own, reading = self.context, self.inner.context, self.reading
        own.seed = int(uniform(context.seed, len(context.tokens), _STEP) * 2**53)
        if reading.read == len(context.tokens):
            return
        reading.follow(context.tokens)
        new = number([*reading.done[self._closed :], *reading.open])
        old = own.tokens[self._closed :]
        same = agreed(old, new)
        own.tokens[self._closed + same :] = new[same:]
        self.inner.forget(runner, self._closed + same)
        self._closed = len(reading.done)

    def fork(self, context: Context, runner: Runner) -> TranslatedState:
        """A state for a copy of the sequence."""
        if self.inner.context.tokens:
            self.inner.settle(runner)
        if not runner.capabilities.fork:
            return TranslatedState(context, self.reading.copy(), runner.open())
        return TranslatedState(context, self.reading.copy(), runner.fork(self.inner.cache), self.inner)
