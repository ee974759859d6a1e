"""Denoisers that predict what a test wants, from rows of probabilities or a function of the text, and drafters over
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from toy_models import letters
from toys import ToyRunner

from paceline.drafters import DrafterArgs
from paceline.models import Call

Says = Callable[[list[int], int], Sequence[float]]
"""The text before the masks, the place among them from 0 on -> (v,) probabilities."""


class Scripted:
    """Full attention; the mask token comes after the target's `vocab_size` tokens. Keeps what it was asked."""

    attention, block_length, needs_left = "full", None, False

    def __init__(self, says: Says, vocab_size: int, *, ends: tuple[int, ...] = (), max_length: int = 4096) -> None:
        self.says, self.mask_token_id, self.vocab_size = says, vocab_size, vocab_size + 1
        self.eos_token_ids, self.max_length = ends, max_length
        self.canvases: list[list[int]] = []

    def new_cache(self, length: int) -> None:
        raise AssertionError("a pass under full attention stores nothing")

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        return [self._rows(call)[slice(None) if call.wanted is None else call.wanted] for call in calls]

    def _rows(self, call: Call) -> torch.Tensor:
        ids = call.ids.tolist()
        assert call.slots.tolist() == list(range(len(ids)))
        self.canvases.append(ids)
        first = ids.index(self.mask_token_id)
        rows = torch.full((len(ids), self.vocab_size), float("nan"), dtype=torch.float64)
        for position in range(len(ids) - first):
            rows[first + position, :-1] = torch.tensor(self.says(ids[:first], position), dtype=torch.float64).log()
            rows[first + position, -1] = float("-inf")
        return rows


def rows_of_a_runner(runner: ToyRunner, temperature: float = 1.0) -> Says:
    """The runner's own distributions along its likeliest continuation: of the first mask the target's very
    distribution.
    """

    def says(text: list[int], position: int) -> list[float]:
        ahead = text + runner.greedy(text, position)
        return (runner.logits(ahead).double() / temperature).softmax(-1).tolist()

    return says


def random_rows(vocab_size: int, seed: int = 0) -> Says:
    """Distributions that have nothing to do with any target."""

    def says(text: list[int], position: int) -> list[float]:
        drawn = np.random.default_rng((seed, position, *text)).random(vocab_size) + 1e-3
        return (drawn / drawn.sum()).tolist()

    return says


def args(denoiser: Any, vocab_size: int, **more: Any) -> DrafterArgs:
    """Of a drafter that opens this denoiser."""
    models = SimpleNamespace(denoiser=lambda model, device=None: denoiser, tokenizer=letters())
    return DrafterArgs(**{"vocab_size": vocab_size, "index": 1, "max_context": 4096, "models": models, **more})
