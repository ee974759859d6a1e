"""What goes along with one sequence that is steered (`sampling.steering`): layers, and second sequences."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.drafters import Context
from paceline.errors import PromptError
from paceline.models import Runner, SequenceCache, memory_of
from paceline.sampling.steering import Steering
from paceline.utils import described

logger = logging.getLogger("paceline.engine")


@dataclass(slots=True)
class Second:
    """Holds a second sequence, which has a prompt of its own and the same output.

    Attributes:
        name: of the method that looks at it.
        runner: runs its model.
        prompt: token ids of its own prompt.
        taps: layers whose states the method wants, where the model is another one than the target.
        held: the cache, filled as far as rows were wanted; None before it is made, and after it was given up.
    """

    name: str
    runner: Runner
    prompt: Sequence[int]
    taps: tuple[int, ...] = ()
    held: SequenceCache | None = None

    def length(self, context: Context) -> int:
        """Tokens of the second sequence, beside a sequence with this text."""
        return len(self.prompt) + len(context.tokens) - context.prompt_length

    def root(self, context: Context) -> int:
        """Its last token."""
        return context.tokens[-1] if len(context.tokens) > context.prompt_length else self.prompt[-1]

    def missing(self, context: Context) -> list[int]:
        """What its cache lacks, all but the last token."""
        if not (count := self.length(context) - 1 - self.cache.length):
            return []
        return [*self.prompt, *context.tokens[context.prompt_length :]][-1 - count : -1]

    @property
    def cache(self) -> SequenceCache:
        """The cache, made if need be."""
        return self.hold(self.runner.open(len(self.prompt))) if self.held is None else self.held

    def hold(self, cache: SequenceCache) -> SequenceCache:
        """Take a cache, whose committed tokens are never taken back."""
        self.held = cache
        if (memory := memory_of(self.runner)) is not None:
            memory.forget_behind_windows(cache)
        return cache

    def release(self) -> None:
        """Give up the cache."""
        if self.held is not None:
            self.runner.release(self.held)
        self.held = None

    def check(self, max_tokens: int) -> None:
        """Reject a second sequence that its model cannot hold.

        Raises:
            PromptError: an empty prompt, tokens outside the vocabulary, or more than the context.
        """
        info, size, name = self.runner.info, len(self.prompt), self.name
        if not size:
            raise PromptError(f"the other prompt of steering method {name!r} has no tokens; give at least one")
        if (most := max(self.prompt)) >= info.vocab_size:
            raise PromptError(
                f"steering method {name!r} needs a prompt of token ids in 0..{info.vocab_size - 1}, which {info.name} "
                f"knows, got {most}"
            )
        if size + max_tokens > info.max_context:
            raise PromptError(
                f"steering method {name!r} needs room for {size} tokens of a prompt and {max_tokens} new ones, but "
                f"the context of {info.name} holds {info.max_context}; lower max_tokens"
            )


@dataclass(slots=True)
class Companion:
    """Holds what steers one sequence.

    Attributes:
        method: shapes the target's rows.
        taps: layers of the target whose states it wants.
        seconds: second sequences, as `Steering.companions` lists them.
    """

    method: Steering
    taps: tuple[int, ...] = ()
    seconds: tuple[Second, ...] = ()

    def said(self, error: Exception) -> str:
        """What a request that steering ends is told."""
        logger.debug("the error of steering method %s", self.method.name, exc_info=error)
        return f"steering method {self.method.name!r} failed ({described(error)})"

    def fresh(self) -> Companion:
        """The same without caches."""
        return replace(self, seconds=tuple(replace(second, held=None) for second in self.seconds))

    def release(self) -> None:
        """Give up all caches."""
        for second in self.seconds:
            second.release()
