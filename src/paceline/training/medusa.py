"""Training of Medusa-1 heads: each learns the token so many places ahead from one state of the target, which stays as
it is. Head k has weight 0.8^k.

A head that was not trained predicts what the target does of the next token: its residual block begins at zero.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import Tensor, nn

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.path_trainer import PathTrainer, residual_blocks, through

if TYPE_CHECKING:
    from paceline.models import ModelInfo


class MedusaTrainer(PathTrainer):
    """Trains Medusa heads, which share the rows of the target's head."""

    name: ClassVar[str] = "medusa"
    decay: ClassVar[float] = 0.8

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        all_blocks = [residual_blocks(config.hidden_size, config.num_layers) for _ in range(config.num_heads)]
        self.heads = nn.ModuleList([nn.ModuleDict({"blocks": blocks}) for blocks in all_blocks])

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="medusa",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
        )

    def head_states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        states = batch.final.flatten(0, 1)
        for depth, head in enumerate(self.heads):
            at, columns = batch.learned(depth + 2)
            blocks = cast(nn.ModuleList, cast(nn.ModuleDict, head)["blocks"])
            yield at, columns, through(blocks, states[at])
