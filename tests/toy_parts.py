"""Runners whose sequences keep more than keys and values, around a tiny Llama of random weights.

`HybridRunner` has a recurrent part beside attention: a hash of all tokens so far, on which the logits depend, and which
goes back to checkpoints only. `EncoderRunner` has what an encoder has read: it is added to every embedding, so that
keys, values and logits depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from tiny_llama import runner_of, tiny_llama
from toy_numbers import normal

from paceline.errors import ConfigError, PromptError
from paceline.models import NO_INPUTS, Capabilities, Inputs, PartAbilities, Rollback, context_of
from paceline.models.checks import check_chains
from paceline.models.runners import NativeRunner
from paceline.models.state import NativeCache
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.parts import CompositeState, StateOperations
from paceline.tree import Scores, TokenTree

MODEL: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 512}


def mixed(value: int, token: int) -> int:
    """The next value of the recurrence."""
    return (value * 6364136223846793005 + token + 1442695040888963407) % 2**63


def raised(value: int, size: int) -> torch.Tensor:
    """(size,) what the recurrent part adds to the logits."""
    return torch.from_numpy(normal(size, (value,))) * 3


class RunningHash:
    """A recurrent part.

    Attributes:
        value: after the committed tokens. checkpoints: values by length; one at the end of every chunk of known tokens.
        inputs: tokens that were scored and wait for `commit`. noted: values after each.
    """

    abilities: ClassVar[PartAbilities] = PartAbilities(rollback=Rollback.CHECKPOINTS, branches=False, shared=False)

    def __init__(self) -> None:
        self.length, self.value = 0, 0
        self.checkpoints = {0: 0}
        self.inputs, self.noted = list[int](), list[int]()

    def feed(self, tokens: Sequence[int]) -> list[int]:
        """Commit known tokens; the value after each."""
        *found, self.value = accumulate(tokens, mixed, initial=self.value)
        found = [*found[1:], self.value]
        self.length += len(tokens)
        self.checkpoints[self.length] = self.value
        self.inputs, self.noted = [], []
        return found

    def score(self, tokens: Sequence[int], done: int) -> list[int]:
        """The values after tokens of a chain, the first `done` of which were scored before."""
        assert self.inputs[:done] == list(tokens[:done])
        self.inputs, self.noted = list(tokens), self.noted[:done]
        for token in tokens[done:]:
            self.noted.append(mixed(self.noted[-1] if self.noted else self.value, token))
        return self.noted[done:]

    def commit(self, path: Sequence[int]) -> None:
        """Take the value that was noted after the last accepted token."""
        self.value = self.noted[len(path)]
        self._kept(1 + len(path))

    def _kept(self, count: int) -> None:
        self.length += count
        self.inputs, self.noted = [], []

    def check_truncate(self, length: int) -> None:
        """The present length and checkpoints are possible."""
        if length != self.length and length not in self.checkpoints:
            known = ", ".join(map(str, sorted({*self.checkpoints, self.length})))
            raise ConfigError(f"truncate: the recurrent state can go back to {known} tokens only, got {length}")

    def truncate(self, length: int) -> None:
        if length != self.length:
            self.length, self.value = length, self.checkpoints[length]
        self.checkpoints = {at: value for at, value in self.checkpoints.items() if at <= length}
        self.inputs, self.noted = [], []

    def fork(self) -> Self:
        other = type(self)()
        other.length, other.value, other.checkpoints = self.length, self.value, dict(self.checkpoints)
        return other

    def release(self) -> None:
        self.checkpoints = {}


class ReplayedHash(RunningHash):
    """Notes nothing: it reads the accepted tokens again from where it stood before they were scored."""

    def commit(self, path: Sequence[int]) -> None:
        for token in self.inputs[: 1 + len(path)]:
            self.value = mixed(self.value, token)
        self._kept(1 + len(path))


class ForgetfulHash(RunningHash):
    """Wrong: it stays where the last scored token left it, accepted or not."""

    def commit(self, path: Sequence[int]) -> None:
        self.value = self.noted[-1]
        self._kept(1 + len(path))


class SharingHash(RunningHash):
    """Wrong: it says that a new one stands beside the keys and values of a beginning that others left."""

    abilities: ClassVar[PartAbilities] = PartAbilities(rollback=Rollback.CHECKPOINTS, branches=False, shared=True)


class HybridRunner(StateOperations[CompositeState]):
    """Attention and a recurrence; see `paceline.models.Runner`.

    Args:
        recurrent: makes that part.
    """

    def __init__(self, recurrent: type[RunningHash] = RunningHash, **options: Any) -> None:
        self.native, self.recurrent = runner_of(tiny_llama(**MODEL), **options), recurrent
        self.info = self.native.info
        abilities = PartAbilities.common([NativeCache.abilities, recurrent.abilities])
        self.capabilities = Capabilities(trees=True, fork=True).within(abilities)
        self.memory = ArenaMemory(self.native.arena, abilities)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> CompositeState:
        context_of(self, inputs)
        return CompositeState(self.native.open(prompt_length), [self.recurrent()])

    def extend(
        self,
        caches: Sequence[CompositeState],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        scores = self.native.extend([state.cache for state in caches], tokens, taps=taps, all_logits=all_logits)
        values = [recurrent_of(state).feed(own) for state, own in zip(caches, tokens, strict=True)]
        return self._with([own if all_logits else own[-1:] for own in values], scores)

    def score(
        self,
        caches: Sequence[CompositeState],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        check_chains(f"{self.info.name} has a recurrent state, which", trees)
        scores = self.native.score([state.cache for state in caches], roots, trees, taps=taps, computed=computed)
        done = [0] * len(caches) if computed is None else computed
        fed = [[root, *tree.tokens.tolist()] for root, tree in zip(roots, trees, strict=True)]
        values = [recurrent_of(state).score(*each) for state, *each in zip(caches, fed, done, strict=True)]
        return self._with(values, scores)

    def _with(self, values: Sequence[Sequence[int]], scores: Scores) -> Scores:
        rows = [raised(value, self.info.vocab_size) for own in values for value in own]
        return Scores(scores.logits + torch.stack(rows), scores.rows, scores.taps)


def recurrent_of(state: CompositeState) -> RunningHash:
    (part,) = state.others
    assert isinstance(part, RunningHash)
    return part


class HybridReference:
    """The same model computed from scratch for every text, without parts."""

    def __init__(self) -> None:
        self.native = runner_of(tiny_llama(**MODEL))
        self.info = self.native.info

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """(v,) logits after a text."""
        cache = self.native.open()
        row = self.native.extend([cache], [list(text)]).logits[0]
        self.native.release(cache)
        *_, value = accumulate(text, mixed, initial=0)
        return row + raised(value, self.info.vocab_size)

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        return greedy(self.logits, prompt, steps)


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
