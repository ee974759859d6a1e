"""A runner whose sequences keep what an encoder has read beside keys and values, around a tiny Llama of random weights:
it is added to every embedding, so that keys, values and logits depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from tiny_llama import runner_of, tiny_llama
from toy_numbers import normal

from paceline.errors import PromptError
from paceline.models import NO_INPUTS, Capabilities, Inputs, PartAbilities, context_of
from paceline.models.runners import NativeRunner
from paceline.models.state import NativeCache
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.parts import CompositeState, StateOperations
from paceline.tree import Scores, TokenTree

MODEL: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 512}


def greedy(logits: Any, prompt: Sequence[int], steps: int) -> list[int]:
    """The likeliest tokens after a prompt."""
    text = list(prompt)
    for _ in range(steps):
        text.append(int(logits(text).argmax()))
    return text[len(prompt) :]


class EncoderMemory:
    """What an encoder has read: the same for all tokens, and for all sequences with these inputs."""

    abilities: ClassVar[PartAbilities] = PartAbilities()

    def __init__(self, inputs: Inputs, hidden_size: int) -> None:
        self.inputs = inputs
        key = int(inputs.digest[:15] or "0", 16)
        self.added = torch.from_numpy(normal(hidden_size, (key,)).copy()) if inputs.digest else torch.zeros(hidden_size)

    def embedded(self, native: NativeRunner, tokens: Sequence[int], start: int) -> torch.Tensor:
        """(n, hidden) what is fed for tokens from position `start` on."""
        found = native.embed(tokens).clone()
        for span in self.inputs.embeddings:
            for position in range(max(span.start, start), min(span.stop, start + len(tokens))):
                found[position - start] = torch.from_numpy(span.embeddings[position - span.start].copy())
        return found + self.added

    def commit(self, path: Sequence[int]) -> None: ...

    def check_truncate(self, length: int) -> None: ...

    def truncate(self, length: int) -> None: ...

    def fork(self) -> Self:
        return self

    def release(self) -> None: ...


class EncoderRunner(StateOperations[CompositeState]):
    """A decoder that follows what an encoder has read.

    Args:
        native: the decoder; None makes a tiny one.
    """

    input_kinds = ("encoder_tokens", "features", "embeddings")

    def __init__(self, native: NativeRunner | None = None) -> None:
        self.native = runner_of(tiny_llama(**MODEL)) if native is None else native
        self.info = self.native.info
        abilities = PartAbilities.common([NativeCache.abilities, EncoderMemory.abilities])
        self.capabilities = Capabilities(trees=True, fork=True).within(abilities)
        self.memory = ArenaMemory(self.native.arena, abilities)

    def most_tokens(self, inputs: Inputs) -> int:
        """Each token of the encoder takes the place of one."""
        if inputs.encoder_tokens and max(inputs.encoder_tokens) >= self.info.vocab_size:
            raise PromptError(f"encoder tokens must lie in 0..{self.info.vocab_size - 1}")
        return self.info.max_context - len(inputs.encoder_tokens)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> CompositeState:
        context_of(self, inputs)
        return CompositeState(self.native.open(prompt_length), [EncoderMemory(inputs, self.info.hidden_size)])

    def extend(
        self,
        caches: Sequence[CompositeState],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        embeddings = [self._embedded(*each) for each in zip(caches, tokens, strict=True)]
        keys = [state.cache for state in caches]
        return self.native.extend_embeddings(keys, embeddings, taps=taps, all_logits=all_logits)

    def score(
        self,
        caches: Sequence[CompositeState],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        done = [0] * len(caches) if computed is None else computed
        fed = [[r, *t.tokens.tolist()][done[i] :] for i, (r, t) in enumerate(zip(roots, trees, strict=True))]
        hidden = torch.cat([self._embedded(*each) for each in zip(caches, fed, strict=True)])
        keys = [state.cache for state in caches]
        result = self.native.run_layers(keys, roots, trees, hidden=hidden, taps=taps, computed=computed)
        rows = tuple(accumulate(map(len, fed), initial=0))
        return Scores(self.native.head(result.states), rows, result.taps)

    def _embedded(self, state: CompositeState, tokens: Sequence[int]) -> torch.Tensor:
        (part,) = state.others
        assert isinstance(part, EncoderMemory)
        return part.embedded(self.native, tokens, state.length)

    def greedy(self, prompt: Sequence[int], steps: int, inputs: Inputs = NO_INPUTS) -> list[int]:
        """What follows, computed from scratch for every token."""

        def logits(text: Sequence[int]) -> torch.Tensor:
            state = self.open(len(prompt), inputs)
            row = self.extend([state], [list(text)]).logits[0]
            self.release(state)
            return row

        return greedy(logits, prompt, steps)
