"""DSpark: DFlash whose drafts are corrected by the token before each, and that learns how likely they are accepted.

Blocks are DFlash's (training.dflash), whose first row drafts, too; the correction and the confidence are those of
models.heads.sequential_heads, with the text's own tokens before each place (m, depths):

    q_k = softmax(head(h_k) + correction)       p_k = the target's law of the same token, over the draft vocabulary
    apart_k = |p_k - q_k|_1
    loss = sum_k w_k (0.1 CE(text's token, q_k) + 0.9 apart_k + BCE(confidence_k, 1 - apart_k / 2)) / sum_k w_k

The last target is detached: it is the chance that a draft which was drawn from q_k is accepted. The correction adds
nothing at first.

Source: DSpark (arXiv:2607.05147).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.models.heads import MARKOV_HEADS, HeadConfig, HeadMethod
from paceline.training.batches import Batch
from paceline.training.dflash import DFlashConfig, DFlashTrainer
from paceline.training.heads import SoftTargets
from paceline.training.train_config import TrainConfig
from paceline.utils import choice

TOKENS, LAWS = 0.1, 0.9
"""Weights of the cross-entropy and of the distance of the laws."""

INIT: Final = 0.02
"""Standard deviation of embeddings of the token before, at first."""


@documented
@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """Says how drafts are corrected by the token before, beside what DFlash has."""

    markov_rank: int = option(256, "Of the correction.", low=1, high=4096)
    markov_head_type: str = option(
        "vanilla", "Of the correction: vanilla, gated or rnn.",
        check=lambda name, value: choice(name, value, MARKOV_HEADS),
    )  # fmt: skip


class MarkovHead(nn.Module):
    """The correction, with weights named as in DSpark's files."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank, d = config.markov_rank, config.hidden_size
        self.kind = config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=INIT)
        nn.init.zeros_(self.markov_w2.weight)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(d + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + d, 3 * rank)

    def forward(self, before: Tensor, states: Tensor) -> Tensor:
        """(m, k, v) what is added to the logits.

        Args:
            before: (m, k, rank) embeddings of the tokens before each place. states: (m, k, d) of the places.
        """
        if self.kind == "gated":
            before = torch.sigmoid(self.gate_proj(torch.cat((states, before), -1))) * before
        elif self.kind == "rnn":
            before = self._recurrent(before, states)
        bias: Tensor = self.markov_w2(before)
        return bias

    def _recurrent(self, before: Tensor, states: Tensor) -> Tensor:
        memory, found = torch.zeros_like(before[:, 0]), []
        for e, h in zip(before.unbind(1), states.unbind(1), strict=True):
            gate, new, out = self.joint_proj(torch.cat((memory, e, h), -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(new)
            found.append(torch.tanh(out))
        return torch.stack(found, 1)


class DSparkTrainer(DFlashTrainer):
    """Trains a network that drafts blocks, with the correction and the confidence.

    Args: as of `DFlashTrainer`.
    """

    name: ClassVar[HeadMethod] = "dspark"
    config_class: ClassVar[type[TrainConfig]] = DSparkConfig
    from_anchor: ClassVar[bool] = True

    def __init__(self, config: HeadConfig, rows: Tensor, how: DFlashConfig) -> None:
        super().__init__(config, rows, how)
        self.markov_head = MarkovHead(config)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.hidden_size + config.markov_rank, 1)})
        for parameter in self.confidence_head.parameters():
            nn.init.zeros_(parameter)

    @classmethod
    def more_of(cls, config: DFlashConfig) -> Mapping[str, Any]:
        assert isinstance(config, DSparkConfig)
        return {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }

    def loss_of(self, batch: Batch, at: Tensor, learned: Tensor, targets: SoftTargets) -> tuple[Tensor, float]:
        logits, confidence = self.drafted(batch, at)
        block, k = learned.nonzero().unbind(1)
        tokens = at[block] + 1 + k
        weight = torch.tensor(self.weights(), device=at.device)[k]
        logits, p = logits[block, k].float(), targets.chances[targets.row[tokens]]
        apart = (p - logits.softmax(-1)).abs().sum(-1)
        losses = TOKENS * F.cross_entropy(logits, batch.columns.flatten()[tokens], reduction="none") + LAWS * apart
        accepted = (1 - apart.detach() / 2).clamp(0, 1)
        losses = losses + F.binary_cross_entropy_with_logits(confidence[block, k].float(), accepted, reduction="none")
        return (weight * losses).sum(), float(weight.sum())

    def logits_of(self, batch: Batch, at: Tensor) -> Tensor:
        return self.drafted(batch, at)[0]

    def drafted(self, batch: Batch, at: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (m, depths, v), and those of the confidence (m, depths), of blocks at flat positions (m,) of one row,
        with the text's own tokens before each place.
        """
        states = self.states(batch, at)
        places = (at[:, None] + torch.arange(self.depths, device=at.device)).clamp(max=batch.tokens.numel() - 1)
        before = self.markov_head.markov_w1(batch.tokens.flatten()[places])
        confidence = cast(Tensor, self.confidence_head["proj"](torch.cat((states, before), -1))).squeeze(-1)
        return self.logits(states) + self.markov_head(before, states), confidence
