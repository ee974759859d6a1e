"""Training of the target itself so that it can stop early: LayerSkip's.

Layers are left out at random, deeper ones more often, and several exits have a loss in a step: the last one, the one
that is to draft, and another at random. All go through the final norm and the head that they share, and learn what the
target said before it was trained; so the last exit stays what it was, as far as that goes. Embedding and head stay as
they are. What is written is a checkpoint of its own: a model in place of the target, which says other things than it
here and there.

A draft counts as right where the trained model still says the same as the text.

Source: LayerSkip: enabling early exit inference and self-speculative decoding (arXiv:2404.16710), sections 4.1 and 4.2,
with the exits' losses against the target's distribution instead of the text's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import read_config
from paceline.errors import CapabilityError
from paceline.training.batches import Batch, TargetView
from paceline.training.draft_model import embedding_of, sliced, with_layers, write_checkpoint
from paceline.training.next_token import NextTokenTrainer, behind_layers
from paceline.training.train_config import ExitConfig, TrainConfig
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

DROPOUT: Final = 0.1
"""Chance of leaving out the last layer."""

EARLY: Final = 0.5
"""Weight of an early exit's loss over the last one's."""

NEVER: Final = -2
"""The column of a draft that is right nowhere."""


class LayerSkipTrainer(NextTokenTrainer):
    """Trains the target's layers, so that the first ones say what all of them say.

    Args:
        folder: of the target's checkpoint. layers: how many it has. exit_layer: of them, those that draft.
        rows, depths: as above.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "layer_skip"
    config_class: ClassVar[type[TrainConfig]] = ExitConfig
    rate: ClassVar[float] = 2e-4
    replaces_target: ClassVar[bool] = True

    def __init__(self, folder: Path, layers: int, exit_layer: int, rows: Tensor, depths: int | None = None) -> None:
        super().__init__(rows, depths)
        self.exit_layer = exit_layer
        self.model, self.embed = sliced(folder, range(layers))
        if not isinstance(getattr(self.model, "norm", None), nn.Module):
            raise CapabilityError(f"layer_skip cannot be trained for {type(self.model).__name__}; train a head instead")
        self.rates = dropout_rates(layers)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, ExitConfig)
        if config.exit_layer is not None:
            integer("exit_layer", config.exit_layer, 1, target.num_layers - 1)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[LayerSkipTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, ExitConfig)
        info = llm.runner.info
        exit_layer = max(1, info.num_layers // 4) if config.exit_layer is None else config.exit_layer
        view = TargetView(llm.runner, (), torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        return cls(llm.folder, info.num_layers, exit_layer, view.rows, config.depths), view

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        layers, targets = len(self.rates), self.soft_targets(batch)
        stay = torch.rand(layers, len(batch.tokens), generator=generator) >= self.rates[:, None]
        other = int(torch.randint(layers - 1, (1,), generator=generator))
        behind = self.behind_layers(batch, stay.to(batch.tokens.device))
        weights = {other: EARLY, self.exit_layer - 1: EARLY, layers - 1: 1.0}
        losses = [
            weight * targets.loss(self._normed(behind[layer])[tokens - 1], self.rows, tokens)
            for layer, weight in weights.items()
        ]
        return torch.stack(losses).sum() / sum(weights.values()) / max(1, len(tokens))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        behind = self.behind_layers(batch)
        drafted, said = (self.likeliest(self._normed(behind[layer])) for layer in (self.exit_layer - 1, -1))
        likeliest = torch.where(drafted == said, drafted, NEVER)
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            yield at, likeliest[at + depth + 1]

    def states(self, batch: Batch) -> Tensor:
        return self._normed(self.behind_layers(batch)[self.exit_layer - 1]).view_as(batch.final)

    def behind_layers(self, batch: Batch, stay: Tensor | None = None) -> list[Tensor]:
        """(b, t, d) states behind each layer; `stay` as of `next_token.behind_layers`."""
        return behind_layers(self.model, embedding_of(self.embed, batch), batch, stay)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint like the target's, with its tokenizer."""
        config = {**read_config(llm.folder), "paceline_layer_skip": {"exit_layer": self.exit_layer, **facts}}
        write_checkpoint(folder, llm, config, with_layers(llm.folder, self.model))

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "layer_skip", "exit_layer": self.exit_layer}

    def _normed(self, states: Tensor) -> Tensor:
        """(b * t, d) behind the final norm."""
        normed: Tensor = cast(nn.Module, self.model.norm)(states.flatten(0, 1))
        return normed


def dropout_rates(layers: int) -> Tensor:
    """(layers,) chance of leaving each out: from none of the first to `DROPOUT`, as 2^(l / (L - 1)) - 1 rises."""
    return torch.tensor([DROPOUT * (math.exp(layer * math.log(2) / max(layers - 1, 1)) - 1) for layer in range(layers)])
