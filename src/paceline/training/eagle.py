"""Training of EAGLE-1 heads: the target's next state is learned, and through its head the next token.

The loss is smooth L1 between the made and the true state, and a tenth of the cross-entropy of the tokens that follow
from them. The states that are read get noise, uniform within 0.1 on each side and less for long texts.

Source: EAGLE: speculative sampling requires rethinking feature uncertainty (arXiv:2401.15077).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer
from paceline.training.layer import Keys, TrainableDecoderLayer

if TYPE_CHECKING:
    from paceline.models import ModelInfo

TOKENS: Final = 0.1
"""Weight of the cross-entropy."""

NOISE, LENGTH = 0.2, 512
"""Width of the noise on states, for texts of so many tokens."""


class EagleTrainer(HeadTrainer):
    """Trains an EAGLE-1 head, whose states are those after the target's final norm."""

    name: ClassVar[str] = "eagle"

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 5) -> None:
        super().__init__(config, rows)
        self.depths = depths
        self.make(config)

    def make(self, config: HeadConfig) -> None:
        """Make the head's parts."""
        d = config.hidden_size
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.layers = nn.ModuleList([TrainableDecoderLayer(config.layer, d, d)])
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, d:] += torch.eye(d)

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="eagle",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            layer=layer,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        noise = torch.rand(batch.final.shape, generator=generator).to(batch.final.device) - 0.5
        read = batch.final + noise * NOISE * LENGTH / batch.final.shape[1]
        predicted = next(self._unrolled(batch, read)).flatten(0, 1)
        at, columns = batch.learned(2)
        true = batch.final.flatten(0, 1)[at + 1]
        made = self.features(predicted[at]).float()
        states = F.smooth_l1_loss(made, true, reduction="none").mean(-1).sum() / max(1, len(at))
        at = at[columns >= 0]
        return states + TOKENS * self.soft_targets(batch).loss(predicted[at], self.rows, at + 2) / max(1, len(at))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, state in enumerate(self._unrolled(batch, batch.final)):
            at, _ = batch.learned(depth + 2)
            yield at, self.logits(state.flatten(0, 1)[at]).argmax(-1)

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """(b, t, d) what the first layer reads of embeddings and states (b, t, d)."""
        made: Tensor = self.fc(torch.cat((embedded, states), -1))
        return made

    def attended(self, layer: TrainableDecoderLayer, x: Tensor) -> Tensor:
        """(b, t, d) what a layer's attention reads of its inputs (b, t, d)."""
        return x

    def features(self, states: Tensor) -> Tensor:
        """(..., d) what is aligned with the target's next states, and goes with the next tokens, of states (..., d)
        behind the layers.
        """
        return states

    def _unrolled(self, batch: Batch, state: Tensor) -> Iterator[Tensor]:
        """(b, t, d) states behind the layers, made of the target's, then of these, and so on; as EAGLE-3's training
        goes on.
        """
        visible, layers = batch.visible(), cast("list[TrainableDecoderLayer]", list(self.layers))
        kept: list[list[Keys]] = [[] for _ in layers]
        for depth in range(self.depths):
            x = self.fused(batch.ahead(batch.embedded, depth + 1), state)
            for layer, known in zip(layers, kept, strict=True):
                q, keys = layer.read(self.attended(layer, x), batch.positions + depth)
                known.append(keys)
                x = layer.finish(x, layer.attend(q, known[0], known[1:], visible))
            yield x
            state = self.features(x)
