"""What a rule on logits is, along every path of a tree, and the simple ones: processors of the user's own,
allowed_token_ids, bad words, min_tokens, logit_bias.

A rule changes rows of logits in place. Row i continues the committed text by a path of its own, and must come out as
it would at the root once the path was committed; so a rule with a state looks at the state and at the path, never at
other rows. The prompt is no part of the committed text. Penalties are such a rule too, in a module of their own, and
so are grammars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch

from paceline.config import LogitsProcessor, processor_form
from paceline.errors import ConfigError, PromptError

Paths = Sequence[Sequence[int]]


class LogitRule:
    """One rule of one sequence; the defaults are those of a rule without a state.

    Whatever a rule raises ends its own request (`sampling.rules`).

    Attributes:
        name: what messages call it.
        needs_paths: rows at different paths may come out differently.
    """

    name: str = "a rule of its own"
    needs_paths = False

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        """Change (r, v) float32 rows in place.

        Args:
            paths: r of them, tokens after the committed text; a single empty one for all rows where no rule needs
                paths.
            generated: the committed tokens after the prompt.
        """
        raise NotImplementedError

    def parts(self) -> Sequence[LogitRule]:
        """The rules that it consists of, to be applied one after the other to the root's row."""
        return [self]

    def advance(self, tokens: Sequence[int]) -> None:
        """Tokens were committed."""

    def rewind(self, tokens: Sequence[int]) -> None:
        """The last committed tokens, given oldest first, were taken back."""

    def fork(self) -> Self:
        """An independent state at the same point."""
        return self

    def allowed(self, path: Sequence[int]) -> int:
        """How many tokens of a path, from its start, the rule does not forbid for certain."""
        return len(path)

    def forced(self, most: int) -> list[tuple[int, float]]:
        """Up to `most` tokens that the rule makes certain, or likely, to come next, with their chances."""
        return []


class _Constant:
    """Values that are put on each device once."""

    def __init__(self, values: Iterable[float], dtype: torch.dtype) -> None:
        self._host = torch.tensor(list(values), dtype=dtype)
        self._copies = {self._host.device: self._host}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._copies:
            self._copies[device] = self._host.to(device)
        return self._copies[device]


class Processors(LogitRule):
    """Functions of the user's own, one after the other, each row with the text along its own path.

    Attributes:
        name: of the one that was asked last.

    Args:
        processors: see `SamplingParams`.
        prompt: the prompt's token ids.
    """

    needs_paths = True

    def __init__(self, processors: Sequence[LogitsProcessor], prompt: Sequence[int]) -> None:
        self._processors = [(one, processor_form(one), _name(one)) for one in processors]
        self._prompt = list(prompt)

    def parts(self) -> Sequence[LogitRule]:
        return [Processors([one], self._prompt) for one, _, _ in self._processors]

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        for row, path in enumerate(paths):
            self.process(rows_rv[row], [*generated, *path])

    def process(self, row_v: torch.Tensor, output: list[int]) -> None:
        """Change one row."""
        for processor, form, name in self._processors:
            self.name = name
            found = self._call(processor, form, list(output), row_v.clone())
            row_v.copy_(given_rows(found, row_v, "it must return logits"))

    def _call(self, processor: LogitsProcessor, form: str, output: list[int], row_v: torch.Tensor) -> Any:
        if form == "output":
            return processor(output, row_v)
        if form == "prompt and output":
            return processor(list(self._prompt), output, row_v)
        whole = torch.tensor([[*self._prompt, *output]], device=row_v.device)
        return processor(whole, row_v[None])[0]


def _name(processor: LogitsProcessor) -> str:
    return f"logits processor {getattr(processor, '__qualname__', type(processor).__qualname__)}"


def given_rows(found: Any, rows: torch.Tensor, rule: str) -> torch.Tensor:
    """What code of a user's own made of rows, without its gradients.

    Args:
        rule: what a message begins with.
    Raises:
        TypeError: no floating-point tensor of their shape.
    """
    if not isinstance(found, torch.Tensor) or found.shape != rows.shape:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise TypeError(f"{rule} of shape {tuple(rows.shape)}, got {got}")
    if not found.is_floating_point():
        raise TypeError(f"{rule} of a floating-point dtype, got {found.dtype}")
    return found.detach()


class AllowedTokens(LogitRule):
    """Forbids all tokens but some.

    Args:
        tokens: those that stay possible.
    """

    name = "allowed_token_ids"

    def __init__(self, tokens: Iterable[int]) -> None:
        self._ids = _Constant(sorted(set(tokens)), torch.int64)

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        ids = self._ids.on(rows_rv.device)
        kept = rows_rv.index_select(1, ids)
        rows_rv.fill_(-math.inf).index_copy_(1, ids, kept)


class ForbiddenTokens(LogitRule):
    """Forbids some ids: those of the model that are no tokens of its tokenizer.

    Args:
        tokens: the ids.
    """

    name = "the tokenizer's vocabulary"

    def __init__(self, tokens: Iterable[int]) -> None:
        self._ids = _Constant(tokens, torch.int64)

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        rows_rv.index_fill_(1, self._ids.on(rows_rv.device), -math.inf)


class LogitBias(LogitRule):
    """Adds a number to the logits of some tokens.

    Args:
        bias: token id -> what is added.
    """

    name = "logit_bias"

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids, self._bias = _Constant(bias, torch.int64), _Constant(bias.values(), torch.float32)

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        rows_rv[:, self._ids.on(rows_rv.device)] += self._bias.on(rows_rv.device)


class MinTokens(LogitRule):
    """Forbids the tokens that end a text before `min_tokens` are generated.

    Args:
        min_tokens: 1 or more.
        stop_ids: end and stop tokens.
    """

    name = "min_tokens"
    needs_paths = True

    def __init__(self, min_tokens: int, stop_ids: Iterable[int]) -> None:
        self._min_tokens, self._stop_ids = min_tokens, _Constant(stop_ids, torch.int64)

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        left = self._min_tokens - len(generated)
        if left <= 0:
            return
        short = [row for row, path in enumerate(paths) if len(path) < left]
        stops = self._stop_ids.on(rows_rv.device)
        if len(short) == len(paths):
            rows_rv.index_fill_(1, stops, -math.inf)
        elif short:
            rows_rv[torch.tensor(short, device=rows_rv.device)[:, None], stops] = -math.inf


class BadWords(LogitRule):
    """Forbids the tokens that would complete one of some sequences, looked up by the token before the last.

    As in vLLM, a word counts only inside the output: a word that begins in the prompt can be completed.

    Args:
        words: token sequences (see `bad_word_token_ids`).
    """

    name = "bad_words"

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = _Constant(sorted({word[0] for word in words if len(word) == 1}), torch.int64)
        self._reach = max((len(word) - 1 for word in words), default=0)
        self.needs_paths = self._reach > 0
        self._ending: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._ending.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        rows_rv.index_fill_(1, self._always.on(rows_rv.device), -math.inf)
        if self.needs_paths:
            tail = generated[-self._reach :]
            pairs = [(row, token) for row, path in enumerate(paths) for token in self._after(tail, path)]
            if pairs:
                at = torch.tensor(pairs, device=rows_rv.device)
                rows_rv[at[:, 0], at[:, 1]] = -math.inf

    def _after(self, generated: Sequence[int], path: Sequence[int]) -> list[int]:
        """Tokens that would complete a word of several tokens after `generated` and then `path`."""
        tail = (*generated, *path)
        words = self._ending.get(tail[-1], ()) if tail else ()
        return [final for prefix, final in words if tail[-len(prefix) :] == prefix]


def bad_word_token_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]] | None) -> list[tuple[int, ...]]:
    """The token sequences to forbid: each word as it stands at the start of a text and after a space.

    vLLM drops the spelling after a space unless it has as many tokens as the other and another first token. We keep it
    whenever it differs, so that a word whose spellings differ in length cannot slip through in the middle of a
    sentence.

    Args:
        words: as the user wrote them; leading spaces do not matter.
        encode: text -> token ids without special tokens; None where there is no tokenizer.
    Raises:
        ConfigError: there is no tokenizer, or a word that has no tokens.
    """
    if encode is None:
        raise ConfigError(
            f"bad_words needs a tokenizer to find the words' tokens, got {list(words)!r} without one; use logit_bias"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = (word.lstrip(), " " + word.lstrip()) if word.strip() else (word,)
        try:
            ids = [tuple(int(token) for token in encode(text)) for text in spellings]
        except PromptError:  # it speaks of a prompt
            raise ConfigError(f"bad_words must be valid Unicode, got {word!r}") from None
        if not any(ids):
            raise ConfigError(f"bad_words must have tokens in this model's vocabulary, got {word!r}, which has none")
        found.update(dict.fromkeys(one for one in ids if one))
    return list(found)
