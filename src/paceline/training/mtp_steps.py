"""What both trainers of modules for multi-token prediction share: the steps in which one module is used for each token.

Step k reads the true token k + 1 further on and the state that step k - 1 made, in step 0 the target's, and learns the
token after that. A place sees the inputs of step 0 up to itself, and of each later step its own alone, which is what is
in the cache when it drafts. Step k's loss has the weight 0.6^k, divided by the sum of all; it is taken against the
target's distribution, where the paper has the text's token. The module alone learns.

Source: FastMTP: accelerating LLM inference with enhanced multi-token prediction (arXiv:2509.18362).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer

if TYPE_CHECKING:
    from paceline.models import ModelInfo

DECAY: Final = 0.6
"""A step's weight, as a share of that of the step before."""

DEPTHS: Final = 3
"""Steps where nobody says how many."""


class StepsTrainer(HeadTrainer):
    """Trains a module in `depths` steps; a subclass has its layers.

    Attributes:
        embed_norm, state_norm: of embeddings and states. fc: what makes one state of both.
    """

    name: ClassVar[str] = "mtp"
    embed_norm: nn.Module
    state_norm: nn.Module
    fc: nn.Linear
    state_first = False
    """The state is the first half of what `fc` reads."""

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = DEPTHS) -> None:
        super().__init__(config, rows)
        self.depths = depths

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="mtp",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            layer=layer,
        )

    @abstractmethod
    def behind(self, x: Tensor, batch: Batch, kept: list[Any]) -> Tensor:
        """(b, t, d) normed states behind the layers, of a step's inputs (b, t, d).

        Args:
            kept: what earlier steps left there, an entry each; empty in step 0.
        """

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        targets, total = self.soft_targets(batch), self.rows.new_zeros(())
        whole = sum(DECAY**depth for depth in range(self.depths))
        for depth, states in enumerate(self._steps(batch)):
            at, columns = batch.learned(depth + 2)
            at = at[columns >= 0]
            loss = targets.loss(states.flatten(0, 1)[at], self.rows, at + depth + 2) / max(1, len(at))
            total = total + DECAY**depth / whole * loss
        return total

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, states in enumerate(self._steps(batch)):
            at, _ = batch.learned(depth + 2)
            yield at, self.logits(states.flatten(0, 1)[at]).argmax(-1)

    def _steps(self, batch: Batch) -> Iterator[Tensor]:
        """(b, t, d) states of each step, behind the norm."""
        state, embedded = batch.final, self.embed_norm(batch.embedded)
        kept: list[Any] = []
        for depth in range(self.depths):
            halves = (batch.ahead(embedded, depth + 1), self.state_norm(state))
            x = self.fc(torch.cat(halves[::-1] if self.state_first else halves, -1))
            state = self.behind(x, batch, kept)
            yield state
