"""Training of Hydra's heads: as Medusa's, but each reads the tokens up to the one that it predicts.

Head k reads [state; embeddings of the k + 1 tokens behind it] and learns what the target says of the next one; all
heads have the same weight, as in the authors' code. A head that was not trained predicts what the target does of its
first token: its first block passes the state on, further ones begin at zero. Hydra++ has four blocks a head, and in
front of them a decoder layer over the target's states, which begins by passing them on and has no norm behind it.

Source: Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig, HeadMethod
from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer, cross_entropy
from paceline.training.layer import DecoderLayer, RMSNorm

if TYPE_CHECKING:
    from paceline.models import ModelInfo

BLOCKS: Final = 4
"""Of a head of Hydra++."""


class _Head(nn.Module):
    def __init__(self, d: int, inputs: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(d if block else inputs, d) for block in range(blocks)])
        self.reduce = nn.Linear(inputs, d)
        for part in (*self.blocks, self.reduce):
            nn.init.zeros_(cast(Tensor, part.weight))
            nn.init.zeros_(cast(Tensor, part.bias))
        with torch.no_grad():
            self.reduce.weight[:, :d] += torch.eye(d)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reduce(x) + F.silu(self.blocks[0](x))
        for block in self.blocks[1:]:
            x = x + F.silu(block(x))
        return x


class _Prefix(DecoderLayer):
    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, hidden)
        self.input_layernorm = RMSNorm(hidden, layer.get("rms_norm_eps") or 1e-6)
        for part in (self.self_attn["o_proj"], self.mlp["down_proj"]):
            nn.init.zeros_(cast(Tensor, part.weight))

    def forward(self, batch: Batch) -> Tensor:
        """(b, t, hidden)."""
        q, keys = self.read(self.input_layernorm(batch.final), batch.positions)
        return self.finish(batch.final, self.attend(q, keys, [], batch.visible()))


class HydraTrainer(HeadTrainer):
    """Hydra's heads, which share the rows of the target's head."""

    method: HeadMethod = "hydra"
    blocks = 1

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows)
        self.depths, d = config.num_heads, config.hidden_size
        self.heads = nn.ModuleList([_Head(d, (k + 2) * d, config.num_layers) for k in range(config.num_heads)])

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method=cls.method,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_heads=depths,
            num_layers=cls.blocks,
            layer=layer if cls.method == "hydra++" else {},
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total = self.rows.new_zeros(())
        for depth, (at, columns, read) in enumerate(self._inputs(batch)):
            known = columns >= 0
            losses = cross_entropy(
                self.logits(self.heads[depth](read[known])), self.taught(batch, depth + 2, at[known])
            )
            total = total + losses.sum() / max(1, len(losses))
        return total

    def guesses(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for depth, (at, _, read) in enumerate(self._inputs(batch)):
            yield at, self.logits(self.heads[depth](read)).argmax(-1)

    def _states(self, batch: Batch) -> Tensor:
        """(b, t, d) where heads begin."""
        return batch.final

    def _inputs(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each head, what `Batch.learned` says, and (m, inputs) what it reads there."""
        parts = [self._states(batch).flatten(0, 1)]
        for depth in range(self.depths):
            parts.append(batch.ahead(batch.embedded, depth + 1).flatten(0, 1))
            at, columns = batch.learned(depth + 2)
            yield at, columns, torch.cat([part[at] for part in parts], 1)


class HydraPlusTrainer(HydraTrainer):
    """The same behind a decoder layer over the target's states."""

    method = "hydra++"
    blocks = BLOCKS

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 4) -> None:
        super().__init__(config, rows, depths)
        self.prefix = _Prefix(config.layer, config.hidden_size)

    def _states(self, batch: Batch) -> Tensor:
        found: Tensor = self.prefix(batch)
        return found
