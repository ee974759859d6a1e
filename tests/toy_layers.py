"""Drafting with part of a toy target's layers: `models.layer_drafts.LayerDrafts` without weights.

In: caches of a ToyRunner, a LayerPlan. Out: its logits with noise, the less the more layers run. It checks its callers as the toy
does, and leaves drafted positions in the cache's scratch, as a native runner does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.models.decoder import LayerPlan
from paceline.models.layer_drafts import Found, Stop, begun, chains_by_steps

NOISE = 0.8
"""Standard deviation of the noise of a model without layers, as a share of the logits'."""


class ToyLayers:
    """Drafts by the layers of a ToyRunner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def logits(self, text: Sequence[int], layers: int) -> torch.Tensor:
        """(v,) logits after `text` where so many layers ran."""
        runner = self._runner
        key, missing = runner._key(text), 1.0 - layers / runner.info.num_layers
        row = runner.logits(text).float()
        if missing > 0:
            noise = np.random.default_rng((runner.seed, 77, layers, *key)).standard_normal(len(row)).astype(np.float32)
            row = row + torch.from_numpy(noise) * (NOISE * missing * runner.sharpness)
        return row.to(runner.info.dtype)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        rng = np.random.default_rng((self._runner.seed, 99))
        return hidden.float() @ torch.from_numpy(
            rng.standard_normal((hidden.shape[1], self._runner.info.vocab_size)).astype(np.float32)
        )

    def step(
        self, caches: Sequence[Any], inputs: Sequence[Sequence[int]], plan: LayerPlan, *, states: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        runner = self._runner
        runner._check(caches, inputs)
        assert plan.first == 0
        rows = []
        for cache, own in zip(caches, inputs, strict=True):
            runner._check_tokens(own)
            chain = [(int(token), i - 2) for i, token in enumerate(own)]
            assert chain[:-1] == cache.inputs[: len(own) - 1], "the inputs before the last were not fed"
            assert cache.length + len(own) <= runner.info.max_context, "a draft outgrew the context"
            cache.inputs = chain
            rows.append(self.logits([*cache.tokens, *own], self.layers_of(plan)))
        hidden = torch.zeros(len(rows) if states else 0, runner.info.hidden_size, dtype=runner.info.dtype)
        return torch.stack(rows), hidden

    def layers_of(self, plan: LayerPlan) -> int:
        stop = self._runner.info.num_layers if plan.stop is None else plan.stop
        return stop - len([i for i in range(stop) if i in plan.skip_attention and i in plan.skip_mlp])

    def chains(
        self,
        caches: Sequence[Any],
        roots: Sequence[int],
        steps: Sequence[int],
        stops: Sequence[Stop | None],
        *,
        plan: LayerPlan,
        least: Sequence[float],
    ) -> list[Found]:
        return chains_by_steps(self, begun(caches, roots, steps, stops, least), plan)
