"""What is trained: a module with a loss, a view of the data, and tensors that a head is written from.

`HeadTrainer` is what the loop knows. Its methods are modules of their own, named in METHODS.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from paceline.models import ModelInfo
    from paceline.models.heads import HeadConfig
    from paceline.training.batches import Batch, TargetView

METHODS: Final = {
    "eagle": "eagle:EagleTrainer",
    "eagle3": "eagle3:Eagle3Trainer",
    "medusa": "medusa:MedusaTrainer",
    "hydra": "hydra:HydraTrainer",
    "hydra++": "hydra:HydraPlusTrainer",
    "mlp_speculator": "mlp_speculator:MLPSpeculatorTrainer",
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

    def begin_with(self, view: TargetView) -> None:
        """Begin with what the target has."""

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

    def taught(self, batch: Batch) -> Taught:
        """What the target says of the tokens that are learned."""
        at = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        row = torch.full_like(batch.tokens.flatten(), -1)
        row[at] = torch.arange(len(at), device=at.device)
        return Taught(row, self.logits(batch.final.flatten(0, 1)[at - 1]).softmax(-1, dtype=torch.float32))


@dataclass(frozen=True, slots=True)
class Taught:
    """The target's distributions of the tokens that are learned, within the draft vocabulary.

    Attributes:
        row: (b * t,) int64 place in `chances` of the token at each flat position; -1 where it is not learned.
        chances: (n, v) float32.
    """

    row: Tensor
    chances: Tensor

    def loss(self, states: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """The sum of the cross-entropies of the logits that states (m, d) and rows (v, d) of a head make for the tokens
        at flat positions (m,).
        """
        made: Tensor = _CrossEntropy.apply(states, rows, self.chances[self.row[tokens]])  # type: ignore[no-untyped-call]
        return made


class _CrossEntropy(torch.autograd.Function):
    """Its gradient is made with it, so that logits (m, v) are not kept."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, chances: Tensor) -> Tensor:
        logits = (states @ rows.T.to(states.dtype)).float()
        top = logits.logsumexp(-1, keepdim=True)
        total = top.sum() - torch.dot(chances.flatten(), logits.flatten())
        slope = logits.sub_(top).exp_().sub_(chances).to(states.dtype)
        down = slope.T @ states if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(slope @ rows.to(states.dtype), down)
        return total

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor | None, None]:
        states, rows = ctx.saved_tensors
        return above * states, None if rows is None else above * rows, None
