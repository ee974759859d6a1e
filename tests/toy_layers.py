"""The layers of a toy target, which can be run in part, and its head: `models.RunsLayers` and `models.HasHead`.

The logits are those of the ToyRunner with noise, the less the more layers run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from toy_numbers import normal

from paceline.models import LayerPlan

NOISE = 0.8
"""Standard deviation of the noise of a model without layers, as a share of the logits'."""


def direction(state: torch.Tensor) -> tuple[int, ...]:
    """Names a state (hidden,), and what an RMS norm makes of it, alike."""
    return _direction(state.double().numpy().tobytes())


@lru_cache(maxsize=2**16)
def _direction(state: bytes) -> tuple[int, ...]:
    row = np.frombuffer(state)
    return tuple((100 * row / np.sqrt(np.mean(row * row))).round().astype(np.int64).tolist())


@lru_cache
def _matrix(seed: int, hidden_size: int, vocab_size: int) -> torch.Tensor:
    """(hidden, v) float32."""
    rng = np.random.default_rng((seed, 99))
    return torch.from_numpy(rng.standard_normal((hidden_size, vocab_size)).astype(np.float32))


class ToyLayers:
    """What the layers of a ToyRunner make of texts.

    Attributes:
        given: all states that it has made.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.given: set[bytes] = set()
        self._remembered: dict[tuple[int, ...], torch.Tensor] = {}
        self._made: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]] = {}

    def logits(self, text: Sequence[int], layers: int) -> torch.Tensor:
        """(v,) logits after `text` where so many layers ran."""
        runner = self._runner
        key, missing = runner._key(text), 1.0 - layers / runner.info.num_layers
        row = runner.logits(text).float()
        if missing > 0:
            noise = normal(len(row), (runner.seed, 77, layers, *key))
            row = row + torch.from_numpy(noise.copy()) * (NOISE * missing * runner.sharpness)
        return row.to(runner.info.dtype)

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """The logits of texts whose states these are; of other states, numbers that depend on nothing else."""
        matrix = _matrix(self._runner.seed, hidden.shape[1], self._runner.info.vocab_size)
        remembered = [self._remembered.get(direction(row)) for row in hidden]
        rows = [row.float() @ matrix if known is None else known for row, known in zip(hidden, remembered, strict=True)]
        return torch.stack(rows) if rows else torch.zeros(0, self._runner.info.vocab_size)

    def run(self, texts: Sequence[Sequence[int]], plan: LayerPlan) -> list[torch.Tensor]:
        """The states (hidden,) behind the plan's last layer after each text."""
        return [self._step(text, self.layers_of(plan))[1] for text in texts]

    def check_states(self, hidden: torch.Tensor, texts: Sequence[Sequence[int]], first: int) -> None:
        """Whether these are the states of the texts before layer `first`, none of the earlier ones left out; states
        that no layer has made, such as those of an adapter, may stand for them.
        """
        assert len(hidden) == len(texts)
        for row, text in zip(hidden, texts, strict=True):
            known = row.float().numpy().tobytes() in self.given
            assert not known or torch.equal(row, self._runner.hidden(first - 1, text)), "states of something else"

    def _step(self, text: Sequence[int], layers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (v,) and state (hidden,) after `text`; the head remembers what it said of that state."""
        runner = self._runner
        key = (layers, len(text) if runner.nan_from is not None else 0, *runner._key(text))
        if key not in self._made:
            row, state = self.logits(text, layers), runner.hidden(layers - 1, text)
            self._made[key] = row, state, direction(state)
        row, state, name = self._made[key]
        self._remembered[name] = row.float()
        return row, state

    def layers_of(self, plan: LayerPlan) -> int:
        stop = self._runner.info.num_layers if plan.stop is None else plan.stop
        return stop - len([i for i in range(stop) if i in plan.skip_attention and i in plan.skip_mlp])


class ToyKeys:
    """The keys and values of a ToyRunner's last layer, which depend on the text up to each token
    (`models.LastKeys`): two heads, half as wide as the states.
    """

    kv_heads = 2

    def __init__(self, runner: Any) -> None:
        self._runner, self.head_dim = runner, runner.info.hidden_size // 2

    def read(self, cache: Any) -> torch.Tensor:
        runner, text, width = self._runner, cache.tokens, 2 * self.kv_heads * self.head_dim
        rows = [normal(width, (runner.seed, 55, *runner._key(text[: end + 1]))) for end in range(cache.length)]
        found = np.stack(rows) if rows else np.zeros((0, width), np.float32)
        return torch.from_numpy(found.copy()).view(-1, 2 * self.kv_heads, self.head_dim).to(runner.info.dtype)

    def turned(self, heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        return heads * torch.tensor(positions).cos().view(-1, 1, 1).to(heads.dtype)
