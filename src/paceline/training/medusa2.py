"""Training of Medusa-2: heads together with the target, which changes.

The target's layers learn to hold what the heads need, at a quarter of the heads' rate, while its own next token is
held to what it said before (self-distillation). For the first steps the heads learn alone, so that they do not spoil
the layers while they know nothing. Embedding and head stay as they are. What is written is a checkpoint of its own, a
model in place of the target which says other things than it here and there, and in its folder `head` the heads, which
belong to that model and to no other.

A draft counts as right where the trained model still says the same as the text.

Source: Medusa: simple LLM inference acceleration framework with multiple decoding heads (arXiv:2401.10774), sections
2.2.2 and 2.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.checkpoints import read_config
from paceline.models.heads import HeadConfig, write_head
from paceline.training.batches import Batch, TargetView
from paceline.training.draft_model import embedding_of, sliced, with_layers, write_checkpoint
from paceline.training.medusa import MedusaTrainer
from paceline.training.next_token import NextTokenTrainer, decoded
from paceline.training.path_trainer import residual_blocks

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.training.train_config import TrainConfig

HEAD: Final = "head"
"""Folder of the heads, in that of the model."""

SHARE: Final = 0.2
"""Weight of the heads' losses over that of the model's own next token."""

FASTER: Final = 4.0
"""The heads' rate over the layers': Adam moves all weights alike, so theirs count so many times."""

NEVER: Final = -2
"""The column of a draft that is right nowhere."""


class Medusa2Trainer(NextTokenTrainer):
    """Trains the target's layers and Medusa heads together.

    Args:
        folder: of the target's checkpoint. layers: how many it has.
        vocabulary: (n,) int64 tokens that the heads draft. rows: (v, hidden) of the target's head, for all tokens.
        heads: how many. alone: steps in which the heads learn and the layers do not learn from them.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "medusa2"
    rate: ClassVar[float] = 1e-4
    replaces_target: ClassVar[bool] = True
    vocabulary: Tensor

    def __init__(self, folder: Path, layers: int, vocabulary: Tensor, rows: Tensor, *, heads: int, alone: int) -> None:
        super().__init__(rows, heads)
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.alone = alone
        self.model, self.embed = sliced(folder, range(layers))
        self.heads = nn.ModuleList([residual_blocks(rows.shape[1], 1) for _ in range(heads)])
        self.steps = nn.Parameter(torch.zeros(()), requires_grad=False)  # kept with the weights of a stopped run

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[Medusa2Trainer, TargetView]:
        """The layers learn the whole vocabulary, the heads draft a part of it."""
        info = llm.runner.info
        view = TargetView(llm.runner, (), torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        heads, alone = config.depths or 4, config.fitting.warmup_steps
        return cls(llm.folder, info.num_layers, vocabulary, view.rows, heads=heads, alone=alone), view

    def states(self, batch: Batch) -> Tensor:
        return decoded(self.model, embedding_of(self.embed, batch), batch)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        states, targets = self.states(batch).flatten(0, 1), self.soft_targets(batch)
        tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        total = targets.loss(states[tokens - 1], self.rows, tokens) / max(1, len(tokens))
        read = states if self.steps >= self.alone else states.detach()
        with torch.no_grad():
            self.steps.add_(1)
        for depth in range(self.depths):
            at, columns = batch.learned(depth + 2)
            known = at[columns >= 0]
            losses = targets.loss(self.ahead(depth, read[known]), self.rows, known + depth + 2)
            total = total + SHARE * MedusaTrainer.decay**depth * losses / max(1, len(known))
        return total

    def ahead(self, depth: int, states: Tensor) -> Tensor:
        """(m, d) what a head makes of states (m, d)."""
        (block,) = cast(nn.ModuleList, self.heads[depth])
        return states + F.silu(FASTER * block(states))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        states = self.states(batch).flatten(0, 1)
        said, rows = self.likeliest(states), self.rows[self.vocabulary].T
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            drafted = self.vocabulary[(self.ahead(depth, states[at]) @ rows.to(states.dtype)).argmax(-1)]
            yield at, torch.where(drafted == said[at + depth + 1], drafted, NEVER)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint like the target's, with its tokenizer, and the heads in a folder in it."""
        info = llm.runner.info
        config = HeadConfig(
            method="medusa",
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            draft_vocab_size=len(self.vocabulary),
            num_heads=self.depths,
            target={**facts["target"], "name": folder.name},
            provenance=facts,
        )
        tensors = {
            f"heads.{depth}.blocks.{name}": (FASTER * parameter).to(info.dtype)
            for depth, head in enumerate(self.heads)
            for name, parameter in head.named_parameters()
        }
        if config.draft_vocab_size < config.vocab_size:
            tensors["draft_to_target"] = self.vocabulary
        write_head(folder / HEAD, config, tensors)
        write_checkpoint(
            folder,
            llm,
            {**read_config(llm.folder), "paceline_medusa2": dict(facts)},
            with_layers(llm.folder, self.model),
        )

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "medusa", "model": str(folder / HEAD)}
