"""A second model with the same tokenizer, which reads along with a text of a search and says what comes next.

Its cache follows the text: what the text has gained is fed in one piece when the next row is wanted, what was taken
back is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Final

import torch

from paceline.checkpoints import same_tokenizer
from paceline.errors import ConfigError
from paceline.search.forest import shaped
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.models import Runner, SequenceCache
    from paceline.search.base import Search
    from paceline.search.branch import Branch

CHUNK: Final = 512
"""Tokens of a pass that fills a cache."""


def open_second(search: Search, option: str, model: object) -> Runner:
    """Open a model that writes in the tokens of the search's own.

    Args:
        option: that named it, for messages. model: folder or hub id.
    Raises:
        ConfigError: no name, or another tokenizer.
        CheckpointError: nothing to load there.
    """
    need(isinstance(model, str) and model != "", option, "be a folder or hub id", model)
    why = same_tokenizer(search.tokenizer, search.models.tokenizer_of(str(model)))
    if why is not None:
        raise ConfigError(f"{option} must have the model's tokenizer, {model!r} has not: {why}")
    return search.models.open(str(model))


class SecondModel:
    """The second model's cache of one text.

    Args:
        search: whose rows and passes its own are counted with.
        runner: of the model.
    """

    def __init__(self, search: Search, runner: Runner) -> None:
        self._search, self.runner, self._text = search, runner, list[int]()
        self._cache: SequenceCache | None = None

    def rows(self, branch: Branch) -> tuple[torch.Tensor, torch.Tensor]:
        """(v,) float32 logits of what follows a branch, over the tokens of the search's own model, and their
        log-probabilities as the request's parameters shape them.

        Raises:
            NumericsError: they are no distribution.
        """
        self.read(branch)
        logits = fitted(self._logits, self._search.runner.info.vocab_size)
        logprobs, errors = shaped([branch], logits)
        if branch in errors:
            raise errors[branch]
        return logits[0], logprobs[0]

    def read(self, branch: Branch, taps: Sequence[int] = ()) -> dict[int, torch.Tensor]:
        """Bring the cache to the whole text of a branch.

        Args:
            taps: layers, as `Scores.taps` counts them.
        Returns:
            Layer -> (1, hidden) states of the text's last token.
        """
        text = branch.text()
        kept = next((i for i, pair in enumerate(zip(self._text, text, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(self._text), len(text)) if kept is None else kept
        if kept == len(text) == len(self._text) and not taps:
            return {}
        cache = self.cache(min(kept, len(text) - 1))
        for start in range(cache.length, len(text), CHUNK):
            piece = text[start : start + CHUNK]
            scores = self.runner.extend([cache], [piece], taps=taps if start + CHUNK >= len(text) else ())
            self._search.own_rows += len(piece)
            self._search.own_passes += 1
        self._text, self._logits = text, scores.logits[-1:]
        return {layer: states[-1:] for layer, states in scores.taps.items()}

    def cache(self, length: int) -> SequenceCache:
        """Its cache, cut to so many tokens; where the runner cannot take tokens back, a new one."""
        if self._cache is not None and self._cache.length > length:
            if self.runner.capabilities.truncate:
                self.runner.truncate(self._cache, length)
            else:
                self.release()
        if self._cache is None:
            self._cache = self.runner.open()
        return self._cache

    def release(self) -> None:
        """Give the cache back."""
        if self._cache is not None:
            self.runner.release(self._cache)
        self._cache, self._text = None, []


def fitted(logits: torch.Tensor, width: int) -> torch.Tensor:
    """(b, width) float32 from (b, w): tokens that the second model lacks are forbidden."""
    found = torch.full((len(logits), width), -inf, device=logits.device)
    most = min(width, logits.shape[1])
    found[:, :most] = logits[:, :most]
    return found
