"""IBM's MLP speculator: a state goes from head to head, and takes up the token that the head before it has drafted.

Head k projects the state, adds the embedding of the last token (its own, of the state's width), norms and bends the
sum: that is the new state, from which its matrix predicts. State and embedding are weighed so that the target's state
still has half of the variance behind the last head: 2^(-1/2n) and sqrt((1 - 2^(-1/n)) m / 2), for n heads of width m.
The norm divides by the root of the mean square; it has a weight and, as published, a bias. The bend is GELU's exact
form. Heads may share all weights but the first projection; the target's state may be normed first and divided by
sqrt(2).

Source: Accelerating production LLMs with combined token/embedding speculators (arXiv:2404.19124).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch
from torch.nn import functional as F

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.path_heads import HeadStep, PathHeads, linear
from paceline.models.layers.linear import Map
from paceline.models.layers.own_weights import Weights

EPS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class _SpeculatorStage:
    """One head: tables (vocabulary, m) and vectors (m,) of the state's width, and maps."""

    embed: torch.Tensor
    proj: Map
    norm: torch.Tensor
    bias: torch.Tensor | float
    head: Map


class MLPSpeculatorHead(PathHeads):
    """The heads in a folder, for one target; see `PathHeads`."""

    method = "mlp_speculator"

    def _build(self, config: HeadConfig, weights: Weights) -> None:
        width, kept = config.inner_size or config.hidden_size, 0.5 ** (0.5 / config.num_heads)
        make_map = cache(partial(linear, weights))  # tied heads share their maps
        self._kept, self._added = kept, ((1.0 - kept**2) * width / 2) ** 0.5
        self._scale_input, self._stages = config.scale_input, []
        for k in range(config.num_heads):
            name, proj = ("heads.0", min(k, 1)) if config.tie_weights else (f"heads.{k}", k)
            self._stages.append(
                _SpeculatorStage(
                    embed=weights[f"{name}.embed.weight"],
                    proj=make_map(f"heads.{proj}.proj"),
                    norm=weights[f"{name}.norm.weight"],
                    bias=weights.get(f"{name}.norm.bias", 0.0),
                    head=make_map(f"{name}.head"),
                )
            )

    @torch.inference_mode()
    def begin(self, states: torch.Tensor) -> torch.Tensor:
        return normed(states) / 2**0.5 if self._scale_input else states

    @torch.inference_mode()
    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        stage = self._stages[depth]
        embedded = stage.embed[torch.tensor(tokens, device=memory.device)]
        state = normed(self._kept * stage.proj(memory) + self._added * embedded)
        state = F.gelu(state * stage.norm + stage.bias)
        return HeadStep(stage.head(state), state)


def normed(x: torch.Tensor) -> torch.Tensor:
    """(r, m) x over the root of its mean square, in x's dtype."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)
