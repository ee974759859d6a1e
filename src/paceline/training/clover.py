"""Training of Clover heads: each learns the token so many places ahead from what an augmenting block makes of the
target's states, to which an attention decoder adds the tokens up to there, the text's own.

Heads that were not trained predict what the target does of the next token, as Medusa's: block, decoder and the heads'
own layers add nothing at first. Queries and keys begin as the state and the token themselves, with a little noise.
(The paper's block begins as a copy of the target's last layer, which only layers of a Llama's form would allow.)

Source: Clover: regressive lightweight speculative decoding with sequential knowledge (arXiv:2405.00263).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.models.heads import HeadConfig, regressive, target_rows, unit_rows
from paceline.training.batches import Batch, TargetView
from paceline.training.layer import PrefixLayer, RMSNorm
from paceline.training.path_trainer import PathTrainer, residual_blocks, through

if TYPE_CHECKING:
    from paceline.models import ModelInfo

NOISE: Final = 0.01
"""Largest entry that is added to the maps of queries and keys."""


class _AttentionDecoder(nn.Module):
    """Adds a token to a state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d, self.heads = config.hidden_size, config.regressive_heads
        self.norm = RMSNorm(d, config.layer.get("rms_norm_eps") or 1e-6)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, d) for _ in range(3))
        with torch.no_grad():
            for near in (self.q_proj, self.k_proj):
                near.weight.uniform_(-NOISE, NOISE).add_(torch.eye(d))
                near.bias.zero_()
            self.v_proj.weight.zero_()
            self.v_proj.bias.zero_()

    def forward(self, states: Tensor, read: Tensor) -> Tensor:
        """(..., d) states behind tokens whose rows (..., d) are read."""
        return states + regressive(self.q_proj(self.norm(states)), self.k_proj(read), self.v_proj(read), self.heads)


class CloverTrainer(PathTrainer):
    """Trains Clover heads, which share the rows of the target's head."""

    name: ClassVar[str] = "clover"
    table: Tensor

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        self.prefix, self.decoder = PrefixLayer(config.layer, config.hidden_size), _AttentionDecoder(config)
        all_blocks = [residual_blocks(config.hidden_size, config.num_layers) for _ in range(config.num_heads)]
        self.heads = nn.ModuleList([nn.ModuleDict({"blocks": blocks}) for blocks in all_blocks])

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="clover",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
            layer=layer,
        )

    def init_from(self, view: TargetView) -> None:
        """Keep the rows by which tokens are read."""
        info = view.runner.info
        rows = target_rows(cast(Any, view.runner), info, torch.arange(info.vocab_size))
        self.register_buffer("table", unit_rows(rows), persistent=False)

    def head_states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        states, rows = self.prefix(batch), self.table[batch.tokens].float()
        for depth, head in enumerate(self.heads):
            states = self.decoder(states, batch.ahead(rows, depth + 1))
            at, columns = batch.learned(depth + 2)
            blocks = cast(nn.ModuleList, cast(nn.ModuleDict, head)["blocks"])
            yield at, columns, through(blocks, states.flatten(0, 1)[at])
