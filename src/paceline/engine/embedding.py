"""Embeddings of texts by a decoder: the states behind its final norm, pooled over each text.

Texts are read as prompts are, many in a pass and long ones in pieces, in sequences of their own that share nothing with
those of requests. Only a text that is longer than a pass keeps its sequence from one pass to the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from paceline.config import ALL_DRAFTS, EmbeddingParams
from paceline.engine.driver import Turns
from paceline.engine.prompts import ReadPrompt
from paceline.errors import CapabilityError, NumericsError, PromptError
from paceline.models import Runner, SequenceCache, memory_of
from paceline.registry import ABILITIES
from paceline.utils import shortened


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one text, by vLLM's name."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """What became of one text, by vLLM's names.

    Attributes:
        prompt: the text; None where token ids were given.
        prompt_token_ids: as they were read, after truncation.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


def readable(prompt: ReadPrompt, params: EmbeddingParams, most: int, vocab_size: int) -> ReadPrompt:
    """The same prompt with the tokens that are read of it.

    Args:
        most: as many tokens as the model takes.
    Raises:
        PromptError: no tokens, too many, or ids outside the vocabulary; or it holds what has no meaning here.
    """
    extras = {"prediction": bool(prompt.prediction), "speculative_config": prompt.drafts != ALL_DRAFTS}
    for name in [name for name, given in {**extras, "inputs": bool(prompt.inputs.digest)}.items() if given]:
        raise PromptError(f"{name} must be left out of a text that is embedded; nothing is decoded")
    kept = params.most_tokens(most)
    tokens = prompt.tokens if kept is None else prompt.tokens[-kept:]
    if not tokens:
        raise PromptError("the text is empty; give at least one token (or a tokenizer that adds a start token)")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise PromptError(f"token ids must be integers in 0..{vocab_size - 1}, got {shortened(token)}")
    check_length(len(tokens), most)
    return replace(prompt, tokens=tokens)


def check_length(tokens: int, most: int) -> None:
    """Reject a text of more tokens than the model takes.

    Raises:
        PromptError: it has.
    """
    if tokens > most:
        raise PromptError(
            f"the text has {tokens} tokens, and the model takes {most}; shorten it, or give truncate_prompt_tokens (-1 "
            "keeps as many as the model takes)"
        )


def shaped_embeddings(pooled: torch.Tensor, dimensions: int | None, *, normalize: bool) -> torch.Tensor:
    """(n, dimensions) float32 embeddings of pooled states (n, hidden): cut, and then made as long as 1."""
    pooled = pooled.float()[:, :dimensions]
    return torch.nn.functional.normalize(pooled, dim=-1) if normalize else pooled


@dataclass(slots=True)
class _Text:
    """A text on its way.

    Attributes:
        read: tokens so far. total: (hidden,) float32 sum of their states; with pooling "last" the state of the last.
        cache: its sequence, where it has one.
    """

    tokens: list[int]
    read: int = 0
    total: torch.Tensor | None = None
    cache: SequenceCache | None = field(default=None, repr=False)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.read


class EmbeddingRun:
    """Texts that are read pass by pass, in turns with whoever else uses the model.

    Args:
        runner: of the model, whose turns these are.
        prompts: texts, whose tokens were checked (`readable`).
        most_tokens, most_texts: of a pass.
        name: the outputs' ids begin with it.
    Raises:
        CapabilityError: the runner does not give states of its layers.
        ConfigError: more dimensions than the model has.
        PromptError: a text that does not fit into the memory for keys and values.
    """

    def __init__(
        self, runner: Runner, turns: Turns, prompts: Sequence[ReadPrompt], params: EmbeddingParams, *,
        most_tokens: int, most_texts: int, name: str,
    ) -> None:  # fmt: skip
        if not runner.capabilities.taps:
            raise CapabilityError(
                f"embed needs a model that {ABILITIES['taps']}; {runner.info.name} is not one as it runs here"
            )
        params.check_size(runner.info.hidden_size)
        _check_room(runner, max((len(prompt.tokens) for prompt in prompts), default=0))
        self._runner, self._turns, self._params, self._name = runner, turns, params, name
        self._prompts, self._texts = prompts, [_Text(prompt.tokens) for prompt in prompts]
        self._unread, self._closed = deque(self._texts), False
        self._most_tokens, self._most_texts = most_tokens, most_texts

    @property
    def ended(self) -> bool:
        """Whether all texts have been read."""
        return not self._unread

    @property
    def count(self) -> int:
        """Of texts."""
        return len(self._texts)

    @property
    def done(self) -> int:
        """Texts that have been read."""
        return self.count - len(self._unread)

    @property
    def tokens_read(self) -> int:
        """Of all texts."""
        return sum(text.read for text in self._texts)

    def step(self) -> None:
        """One pass, in a turn of its own; nothing once the run is closed.

        Raises:
            NumericsError: the model gave states that are not finite.
        """
        with self._turns.turn():
            if self._closed or self.ended:
                return
            batch = self._next()
            try:
                self._read(batch)
            except BaseException:
                self._release()
                raise
            while self._unread and not self._unread[0].left:
                self._let_go(self._unread.popleft())

    def read_on(self) -> None:
        """Passes, each in a turn of its own, until no text is half read: one at least, unless all have been read. A run
        that is closed meanwhile ends before its next pass.

        Where many runs share a model, whoever lets one at a time do this has the sequence of one text in memory.

        Raises:
            NumericsError: as `step`.
        """
        self.step()
        while self._unread and self._unread[0].cache is not None:
            self.step()

    def close(self) -> None:
        """Give up what has not been read, as soon as nobody has a turn; never waits."""
        self._turns.soon(self._release)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return [len(text.tokens) for text in self._texts]

    def vectors(self) -> torch.Tensor:
        """(n, dimensions) float32 embeddings, in the order of the texts, once all have been read."""
        totals = torch.stack([_pooled(text) for text in self._texts])
        counts = torch.tensor([[len(text.tokens)] for text in self._texts])
        params, pooled = self._params, totals / counts if self._params.pooling == "mean" else totals
        return shaped_embeddings(pooled, params.dimensions, normalize=params.normalize)

    def results(self) -> list[EmbeddingRequestOutput]:
        """The same as vLLM gives it."""
        vectors = self.vectors().tolist()
        return [
            EmbeddingRequestOutput(f"{self._name}-{i}", prompt.text, prompt.tokens, EmbeddingOutput(vector))
            for i, (prompt, vector) in enumerate(zip(self._prompts, vectors, strict=True))
        ]

    def _next(self) -> list[tuple[_Text, list[int]]]:
        """The texts of the next pass, with the tokens of each; one that fits into a pass is not divided."""
        batch, room = list[tuple[_Text, list[int]]](), self._most_tokens
        for text in islice(self._unread, self._most_texts):
            if batch and text.left > room:
                break
            tokens = text.tokens[text.read : text.read + room]
            batch.append((text, tokens))
            room -= len(tokens)
        return batch

    def _read(self, batch: Sequence[tuple[_Text, list[int]]]) -> None:
        runner, last = self._runner, self._runner.info.num_layers
        caches = [self._opened(text) for text, _ in batch]
        states = runner.extend(caches, [tokens for _, tokens in batch], taps=(last,)).taps[last]
        for (text, tokens), rows in zip(batch, states.split([len(tokens) for _, tokens in batch]), strict=True):
            text.read += len(tokens)
            if self._params.pooling == "mean":
                total = rows.sum(0, dtype=torch.float32).cpu()
                text.total = total if text.total is None else text.total + total
            else:
                text.total = rows[-1].to("cpu", torch.float32, copy=True)  # the next pass may use that memory
            if not bool(text.total.isfinite().all()):
                raise NumericsError("the model's states of a text are not finite numbers")

    def _opened(self, text: _Text) -> SequenceCache:
        """The sequence of a text, which never goes back."""
        if text.cache is None:
            text.cache = self._runner.open(len(text.tokens))
            if (memory := memory_of(self._runner)) is not None:
                memory.forget_behind_windows(text.cache)
        return text.cache

    def _let_go(self, text: _Text) -> None:
        cache, text.cache = text.cache, None
        if cache is not None:
            self._runner.release(cache)

    def _release(self) -> None:
        """Free all sequences; twice does no harm."""
        self._closed = True
        for text in self._texts:
            self._let_go(text)


def _check_room(runner: Runner, longest: int) -> None:
    """Reject a text that could not be in memory, whatever else is.

    Raises:
        PromptError: the memory for keys and values is smaller.
    """
    memory = memory_of(runner)
    if memory is not None and memory.blocks_for(longest) > memory.capacity:
        raise PromptError(
            f"the text has {longest} tokens, but the memory for keys and values holds "
            f"{memory.capacity * memory.block_size}; shorten it, or raise kv_cache_memory_bytes"
        )


def _pooled(text: _Text) -> torch.Tensor:
    if text.total is None or text.left:
        raise RuntimeError("an embedding was asked for before its text was read")
    return text.total
