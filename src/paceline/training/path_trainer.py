"""What the trainers of heads on one state share (Medusa, Hydra, MLP speculator): head k learns token k + 2 behind the
state's own from the target's distribution over the draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer, SoftTargets

if TYPE_CHECKING:
    from paceline.models.heads import HeadConfig


class PathTrainer(HeadTrainer):
    """Trains as many heads as the config says, each for a token further ahead; a method computes their states.

    Attributes:
        decay: weight of a head's loss over that of the one before.
    """

    decay: ClassVar[float] = 1.0

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows)
        self.depths = config.num_heads

    @abstractmethod
    def head_states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Compute, for each head, what `Batch.learned` says, and (m, width) the states there, which `outputs` reads."""

    def outputs(self, depth: int) -> Tensor:
        """(v, width) rows behind a head: the target's, which stay as they are, or its own."""
        return self.rows

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total, targets = self.rows.new_zeros(()), self.soft_targets(batch)
        for depth, found in enumerate(self.head_states(batch)):
            total = total + self.head_loss(targets, depth, *found)
        return total

    def head_loss(self, targets: SoftTargets, depth: int, at: Tensor, columns: Tensor, states: Tensor) -> Tensor:
        """The weighted loss of a head, of what `head_states` gives for it."""
        known = columns >= 0
        losses = targets.loss(states[known], self.outputs(depth), at[known] + depth + 2)
        return self.decay**depth * losses / max(1, int(known.sum()))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, (at, _, states) in enumerate(self.head_states(batch)):
            yield at, (states @ self.outputs(depth).T.to(states.dtype)).argmax(-1)


def residual_blocks(width: int, count: int) -> nn.ModuleList:
    """Layers that add nothing at first: x + SiLU(block(x))."""
    blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])
    for parameter in blocks.parameters():
        nn.init.zeros_(parameter)
    return blocks


def through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    """Run (m, width) x through residual blocks."""
    for block in blocks:
        x = x + F.silu(block(x))
    return x
