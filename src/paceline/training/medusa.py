"""Training of Medusa-1 heads: each learns the token so many places ahead from one state of the target, which stays as
it is.

Head k predicts token k + 2 behind the state's own and has weight 0.8^k. A head that was not trained predicts what the
target does of the next token: its residual block begins at zero.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer

if TYPE_CHECKING:
    from paceline.models import ModelInfo

DECAY: Final = 0.8
"""Weight of a head over that of the one before."""


class _Head(nn.Module):
    def __init__(self, d: int, blocks: int) -> None:
        super().__init__()
        made = [nn.Linear(d, d) for _ in range(blocks)]
        for block in made:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        self.blocks = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class MedusaTrainer(HeadTrainer):
    """Medusa heads that share the rows of the target's head."""

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows)
        self.depths = config.num_heads
        self.heads = nn.ModuleList([_Head(config.hidden_size, config.num_layers) for _ in range(config.num_heads)])

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="medusa",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total, states, taught = self.rows.new_zeros(()), batch.final.flatten(0, 1), self.taught(batch)
        for depth, head in enumerate(self.heads):
            at, columns = batch.learned(depth + 2)
            at = at[columns >= 0]
            total = total + DECAY**depth * taught.loss(head(states[at]), self.rows, at + depth + 2) / max(1, len(at))
        return total

    def guesses(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        states = batch.final.flatten(0, 1)
        for depth, head in enumerate(self.heads):
            at, _ = batch.learned(depth + 2)
            yield at, self.logits(head(states[at])).argmax(-1)
