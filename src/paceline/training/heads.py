"""What is trained: a module with a loss, a view of the data, and tensors that a head is written from.

`HeadTrainer` is what the loop knows. Its methods are modules of their own, named in METHODS.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from paceline.models import ModelInfo
    from paceline.models.heads import HeadConfig
    from paceline.training.batches import Batch

METHODS: Final = {
    "eagle": "eagle:EagleTrainer",
    "eagle3": "eagle3:Eagle3Trainer",
    "medusa": "medusa:MedusaTrainer",
    "hydra": "hydra:HydraTrainer",
    "hydra++": "hydra:HydraPlusTrainer",
}


def trainer(method: str) -> type[HeadTrainer]:
    """The class of a method of METHODS."""
    module, name = METHODS[method].split(":")
    found: type[HeadTrainer] = getattr(import_module(f"paceline.training.{module}"), name)
    return found


class HeadTrainer(nn.Module):
    """A head in training.

    Args:
        config: of the head. rows: (v, hidden) of the target's head for the draft vocabulary; they stay as they are.
    Attributes:
        rate: usual peak of the learning rate.
        depths: how many tokens ahead it is judged by.
    """

    rate: ClassVar[float] = 1e-3
    depths: int
    rows: Tensor

    def __init__(self, config: HeadConfig, rows: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("rows", rows, persistent=False)

    @classmethod
    @abstractmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        """The config of a head for a target.

        Args:
            layer: `HeadConfig.layer` of a layer like the target's own. depths: as wanted, for methods with a head each.
        """

    @abstractmethod
    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """What is made less, per learned token. `generator` is for noise."""

    @abstractmethod
    def guesses(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """By depth, where the text goes on as drafted so far or not: (m,) flat positions of `Batch.learned`, and (m,)
        the columns that are likeliest there.
        """

    def tensors(self) -> dict[str, Tensor]:
        """What it has learned, by the names of a head."""
        return dict(self.named_parameters())

    def logits(self, states: Tensor) -> Tensor:
        """(m, v) of normed states (m, hidden)."""
        return states @ self.rows.T.to(states.dtype)

    def taught(self, batch: Batch, steps: int, at: Tensor) -> Tensor:
        """(m, v) the target's chances, within the draft vocabulary, of the token `steps` further on than `at`."""
        before = batch.final.flatten(0, 1)[at + steps - 1]
        return self.logits(before).softmax(-1, dtype=torch.float32)


def cross_entropy(logits: Tensor, chances: Tensor) -> Tensor:
    """(m,) of logits (m, v) against chances (m, v)."""
    return F.cross_entropy(logits.float(), chances, reduction="none")
