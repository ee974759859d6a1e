"""Medusa's heads: each predicts a token so many places ahead from one state of the target.

Head k makes of a state, which predicts the token behind it, logits of the token k + 1 places behind that one: by
residual blocks x + SiLU(W x + b), and rows of its own or the target's. It reads no tokens.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.path_heads import HeadStep, PathHeads, linear, residual
from paceline.models.layers.own_weights import Weights


class MedusaHead(PathHeads):
    """The heads in a folder, for one target; see `PathHeads`."""

    method = "medusa"
    reads_tokens = False

    def _build(self, config: HeadConfig, weights: Weights) -> None:
        heads, blocks = range(config.num_heads), range(config.num_layers)
        self._blocks = [[linear(weights, f"heads.{k}.blocks.{j}") for j in blocks] for k in heads]
        self._heads = [self._rows(weights, k) for k in heads]

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """(b, n) logits of head `depth`, from 0 on, of states (b, hidden) after the target's final norm."""
        return self._heads[depth](residual(self._blocks[depth], states))

    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        return HeadStep(self.logits(memory, depth), memory)
