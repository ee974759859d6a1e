"""Training of Hydra heads: each learns the token so many places ahead from a state of the target and the embeddings of
the tokens up to there, the text's own; and of Hydra++'s, which begin with what a decoder layer makes of all states.

Head k reads [state; embeddings of k + 1 tokens], which its first block reduces to a state: R x + SiLU(W x). R begins as
the state alone, all else at zero, so that heads that were not trained predict what the target does of the next token.
Both learn from the target's distribution, as Hydra++ does in the paper; Hydra's own loss, on the text's tokens, is that
in expectation where the text was drawn from the target. All heads have the same weight, as in the authors' code.

Source: Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig, HeadMethod
from paceline.training.batches import Batch
from paceline.training.layer import PrefixLayer
from paceline.training.path_trainer import PathTrainer, residual_blocks, through

if TYPE_CHECKING:
    from paceline.models import ModelInfo


class _Head(nn.Module):
    def __init__(self, d: int, inputs: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(inputs, d), *residual_blocks(d, blocks - 1)])
        self.reduce = nn.Linear(inputs, d)
        with torch.no_grad():
            for parameter in (*self.blocks[0].parameters(), *self.reduce.parameters()):
                parameter.zero_()
            self.reduce.weight[:, :d] = torch.eye(d)

    def forward(self, x: Tensor) -> Tensor:
        return through(self.blocks[1:], self.reduce(x) + F.silu(self.blocks[0](x)))


class HydraTrainer(PathTrainer):
    """Trains Hydra heads, which share the rows of the target's head."""

    name: ClassVar[HeadMethod] = "hydra"
    blocks: ClassVar[int] = 1

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        d = config.hidden_size
        self.heads = nn.ModuleList([_Head(d, (k + 2) * d, config.num_layers) for k in range(config.num_heads)])

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method=cls.name,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
            num_layers=cls.blocks,
            layer=layer if cls.name == "hydra++" else {},
        )

    def head_states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        states, embedded = self.starts(batch).flatten(0, 1), batch.embedded.flatten(0, 1)
        for depth, head in enumerate(self.heads):
            at, columns = batch.learned(depth + 2)
            path = [embedded[at + ahead] for ahead in range(1, depth + 2)]
            yield at, columns, head(torch.cat((states[at], *path), 1))

    def starts(self, batch: Batch) -> Tensor:
        """(b, t, d) states that heads begin with."""
        return batch.final


class HydraPlusTrainer(HydraTrainer):
    """Trains Hydra++ heads: of four blocks each, behind a decoder layer that adds nothing at first."""

    name, blocks = "hydra++", 4

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        self.prefix = PrefixLayer(config.layer, config.hidden_size)

    def starts(self, batch: Batch) -> Tensor:
        return cast(Tensor, self.prefix(batch))
