"""Training of Chimera heads: encoders and heads learn together, as they will draft.

Place i has the target's state h_i. In unroll k the input is the trigram's feature of token i + 1 + k, which sees the
states up to h_i and the inputs of earlier unrolls at its place; head k reads what the encoder makes of it, and h_i.

    loss = sum over heads k of the cross-entropy of token i + 2 + k, and smooth L1(o_k, h_{i + 1 + k})

The second part aligns the encoder with the target's last layer. Its weight, 1, and that it is taken of every unroll are
our reading; the authors' code aligns the first. As there, a head begins as the target's own on both of what it reads.

Source: Chimera: a lossless decoding method for accelerating large language models inference by fusing all tokens
(arXiv:2402.15758).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.layer import Keys, PrefixLayer
from paceline.training.path_trainer import PathTrainer, residual_blocks, through

if TYPE_CHECKING:
    from paceline.models import ModelInfo

Unroll = tuple[Tensor, Tensor, Tensor, Tensor]
"""What `Batch.learned` says, and (m, d) of the encoder and of the head there."""


class _TrigramEncoder(nn.Module):
    """Makes a feature of three embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block, self.reduce = nn.Linear(3 * width, 3 * width), nn.Linear(3 * width, width, bias=False)
        for parameter in self.block.parameters():
            nn.init.zeros_(parameter)

    def forward(self, batch: Batch) -> Tensor:
        """(b, t, d) of each token and the two before it; a document's first one stands for those that lack."""
        here = batch.embedded
        one = torch.where(batch.positions[..., None] >= 1, here.roll(1, 1), here)
        two = torch.where(batch.positions[..., None] >= 2, here.roll(2, 1), one)
        read = torch.cat((two, one, here), -1)
        feature: Tensor = self.reduce(read + F.silu(self.block(read)))
        return feature


class ChimeraTrainer(PathTrainer):
    """Trains Chimera's encoders and heads, which share the rows of the target's head."""

    name: ClassVar[str] = "chimera"

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        d = config.hidden_size
        self.trigram, self.encoder = _TrigramEncoder(d), PrefixLayer(config.layer, d)
        self.heads = nn.ModuleList([
            nn.ModuleDict({"reduce": nn.Linear(2 * d, d, bias=False), "blocks": residual_blocks(d, config.num_layers)})
            for _ in range(config.num_heads)
        ])  # fmt: skip
        with torch.no_grad():
            for head in self.heads:
                cast(nn.Linear, cast(nn.ModuleDict, head)["reduce"]).weight.copy_(torch.eye(d).repeat(1, 2))

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="chimera",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
            layer=layer,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total, targets, true = self.rows.new_zeros(()), self.soft_targets(batch), batch.final.flatten(0, 1)
        for depth, (at, columns, encoded, states) in enumerate(self.unrolled(batch)):
            apart = F.smooth_l1_loss(encoded.float(), true[at + depth + 1], reduction="none").mean(-1).sum()
            total = total + self.head_loss(targets, depth, at, columns, states) + apart / max(1, len(at))
        return total

    def head_states(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for at, columns, _, states in self.unrolled(batch):
            yield at, columns, states

    def unrolled(self, batch: Batch) -> Iterator[Unroll]:
        """Compute what each head reads and makes, at the places from which it learns."""
        layer, visible = self.encoder, batch.visible()
        features, final = self.trigram(batch), batch.final.flatten(0, 1)
        _, known = layer.read(layer.input_layernorm(batch.final), batch.positions)
        drafted: list[Keys] = []
        for depth, head in enumerate(self.heads):
            x = batch.ahead(features, depth + 1)
            q, keys = layer.read(layer.input_layernorm(x), batch.positions + depth + 1)
            drafted.append(keys)
            encoded = layer.finish(x, layer.attend(q, known, drafted, visible)).flatten(0, 1)
            at, columns = batch.learned(depth + 2)
            own = cast(nn.ModuleDict, head)
            state = own["reduce"](torch.cat((final[at], encoded[at]), -1))
            yield at, columns, encoded[at], through(cast(nn.ModuleList, own["blocks"]), state)
