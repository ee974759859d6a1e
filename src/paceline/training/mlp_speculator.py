"""Training of IBM's MLP speculator: a state goes from head to head and takes up the text's token before each.

The heads share their weights but for the first projection, and begin with the target's embedding and the rows of its
head; both are learned. The target's state is normed and divided by sqrt(2).

Source: Accelerating production LLMs with combined token/embedding speculators (arXiv:2404.19124).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch, TargetView
from paceline.training.path_trainer import PathTrainer

if TYPE_CHECKING:
    from paceline.models import ModelInfo

EPS: Final = 1e-6


class _TrainableStage(nn.Module):
    """Head 0 has everything, head 1 a projection; those behind it use these."""

    def __init__(self, config: HeadConfig, rows: Tensor, *, whole: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.proj = nn.Linear(width, width, bias=False)
        nn.init.eye_(self.proj.weight)
        if whole:
            self.embed, self.norm = nn.Embedding(config.vocab_size, width), _Norm(width)
            self.head = nn.Linear(width, len(rows), bias=False)
            with torch.no_grad():
                self.head.weight.copy_(rows)


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return normed(x) * self.weight + self.bias


class MLPSpeculatorTrainer(PathTrainer):
    """Trains an MLP speculator: heads that share their weights, of the target's width."""

    name: ClassVar[str] = "mlp_speculator"
    rate: ClassVar[float] = 3e-3

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        count = min(2, config.num_heads)
        self.heads = nn.ModuleList([_TrainableStage(config, rows, whole=not number) for number in range(count)])
        self.kept = 0.5 ** (0.5 / config.num_heads)
        self.added = ((1.0 - self.kept**2) * config.hidden_size / 2) ** 0.5

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="mlp_speculator",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
            inner_size=target.hidden_size,
            tie_weights=True,
            scale_input=True,
        )

    def init_from(self, view: TargetView) -> None:
        table = view.embedding()
        with torch.no_grad():
            self.first.embed.weight.copy_(normed(table) / self.config.hidden_size**0.5)

    @property
    def first(self) -> _TrainableStage:
        """Head 0, whose embedding, norm and head the others use."""
        return cast(_TrainableStage, self.heads[0])

    def outputs(self, depth: int) -> Tensor:
        return self.first.head.weight

    def head_states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        state, tokens = normed(batch.final.flatten(0, 1)) / 2**0.5, batch.tokens.flatten()
        before = torch.arange(len(tokens), device=tokens.device)
        for depth in range(self.depths):
            at, columns = batch.learned(depth + 2)
            state = state[torch.searchsorted(before, at)]  # places are among those of the head before
            project = cast(_TrainableStage, self.heads[min(depth, len(self.heads) - 1)]).proj
            mixed = self.kept * project(state) + self.added * self.first.embed(tokens[at + depth + 1])
            state, before = F.gelu(self.first.norm(mixed)), at
            yield at, columns, state


def normed(x: Tensor) -> Tensor:
    """(n, width) x over the root of its mean square."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=EPS)
