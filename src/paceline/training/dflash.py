"""DFlash: a network learns to draft a block in one pass from the target's states.

A block begins at an *anchor*, a token of a text behind which an answer's token comes, and has masks in its other rows:

    anchors: of each packed row at most `max_anchors`, drawn anew in each step                        (m,)
    rows of a block see the target's states of the tokens before its anchor, and each other           (m, block_size)
    draft k (from 0) predicts token anchor + 1 + k, from row k + 1, or k where the anchor drafts, too
    loss: sum_k w_k H(target's law of that token, draft k's) / sum_k w_k,  w_k = exp(-k / gamma)

over the drafts whose token is an answer's; H is the cross-entropy. Laws are over the draft vocabulary. Embedding and
head are the target's, and stay as they are; the network is trained alone.

Source: DFlash: block diffusion for flash speculative decoding (arXiv:2602.06036); what the paper leaves open as in the
`speculators` package.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor, nn

from paceline.config import documented, option
from paceline.models.heads import HeadConfig, HeadMethod, block_taps
from paceline.training.batches import Batch, TargetView
from paceline.training.block_network import BlockLayer, Blocks
from paceline.training.heads import HeadTrainer, SoftTargets, layer_of
from paceline.training.layer import RMSNorm
from paceline.training.train_config import TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.llm import LLM
    from paceline.models import ModelInfo

DEPTHS: Final = 7
"""Tokens of a block where nobody says how many."""

LAYERS: Final = 5
"""Most layers where nobody says how many, the paper's."""

AT_ONCE: Final = 64
"""Blocks of one pass where it is judged."""


@documented
@dataclass(frozen=True, kw_only=True)
class DFlashConfig(TrainConfig):
    """Says how large the network is, and how many blocks are learned in a step."""

    num_layers: int | None = option(None, "Of the network; a fourth of the model's, 5 at most, by default.", low=1,
                                    high=64)  # fmt: skip
    mask_token_id: int | None = option(
        None, "Of the model: stands for what is drafted; an id that is no token, or the end, by default.", low=0
    )
    max_anchors: int = option(64, "Blocks of a packed row that are learned in a step.", low=1)
    loss_decay_gamma: float = option(
        4.0, "Places behind which a draft counts a third of the first.", low=0.0, high=1e6, rule="be above 0",
        open_low=True,
    )  # fmt: skip


class DFlashTrainer(HeadTrainer):
    """Trains a network that drafts blocks.

    Args:
        config: of the network. rows: as above. how: how many blocks, and how their places count.
    """

    name: ClassVar[HeadMethod] = "dflash"
    config_class: ClassVar[type[TrainConfig]] = DFlashConfig
    rate: ClassVar[float] = 6e-4
    from_anchor: ClassVar[bool] = False
    mask: Tensor

    def __init__(self, config: HeadConfig, rows: Tensor, how: DFlashConfig) -> None:
        super().__init__(config, rows)
        self.depths, self.most, self.gamma = config.drafts_of_block, how.max_anchors, how.loss_decay_gamma
        d, eps = config.hidden_size, config.layer.get("rms_norm_eps") or 1e-6
        self.fc = nn.Linear(len(config.taps) * d, d, bias=False)
        self.hidden_norm, self.norm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.layers = nn.ModuleList([BlockLayer(config.layer, d) for _ in range(config.num_layers)])
        self.register_buffer("mask", torch.zeros(config.hidden_size), persistent=False)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, DFlashConfig)
        mask, most = config.mask_token_id, target.vocab_size
        need(mask is None or mask < most, "mask_token_id", f"be below {most}, the model's tokens", mask)

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        layers = max(1, min(LAYERS, target.num_layers // 4))
        return HeadConfig(
            method=cls.name,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_layers=layers,
            taps=block_taps(target.num_layers, layers),
            layer=layer,
            block_size=depths + (not cls.from_anchor),
            mask_token_id=0,
            sample_from_anchor=cls.from_anchor,
        )

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[DFlashTrainer, TargetView]:
        assert isinstance(config, DFlashConfig)
        info = llm.runner.info
        own = cls.config_of(info, layer_of(llm.runner), len(vocabulary), config.depths or DEPTHS)
        layers, mask = config.num_layers or own.num_layers, config.mask_token_id
        taps = config.taps or tuple(dict.fromkeys(block_taps(info.num_layers, layers)))
        mask = mask_of(llm.tokenizer, info.vocab_size) if mask is None else mask
        own = replace(own, num_layers=layers, taps=taps, mask_token_id=mask, **cls.more_of(config))
        view = TargetView(llm.runner, own.taps, vocabulary, keep_bytes=config.feature_cache_bytes)
        trainer = cls(own, view.rows, config)
        trainer.init_from(view)
        return trainer, view

    @classmethod
    def more_of(cls, config: DFlashConfig) -> Mapping[str, Any]:
        """Fields of `HeadConfig` that a method has beside these."""
        return {}

    def init_from(self, view: TargetView) -> None:
        """The embedding of the mask token is the target's."""
        embedded = view.runner.embed([self.config.mask_token_id])  # type: ignore[attr-defined]
        self.mask.copy_(embedded[0].float())

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        targets, learned = self.soft_targets(batch), learned_drafts(batch, self.depths)
        total, weight = self.rows.new_zeros(()), 0.0
        for at in chosen(learned[:, 0], batch, self.most, generator):
            drafts, counts = self.loss_of(batch, at, learned[at], targets)
            total, weight = total + drafts, weight + counts
        return total / max(1e-9, weight)

    def loss_of(self, batch: Batch, at: Tensor, learned: Tensor, targets: SoftTargets) -> tuple[Tensor, float]:
        """The loss of blocks at flat positions (m,) of one row, and the sum of their weights.

        Args:
            learned: (m, depths) bool.
        """
        states, total, weight = self.states(batch, at), self.rows.new_zeros(()), 0.0
        for k, factor in enumerate(self.weights()):
            known = learned[:, k]
            total = total + factor * targets.loss(states[known, k], self.rows, at[known] + 1 + k)
            weight += factor * int(known.sum())
        return total, weight

    def weights(self) -> list[float]:
        """Of each draft in the loss."""
        return [math.exp(-k / self.gamma) for k in range(self.depths)]

    def states(self, batch: Batch, at: Tensor) -> Tensor:
        """(m, depths, d) states that draft, of blocks at flat positions (m,) of one row."""
        row, anchors = int(at[0]) // batch.tokens.shape[1], at % batch.tokens.shape[1]
        blocks = Blocks(anchors, self.config.block_size or 0, batch.documents[row], batch.positions[row])
        context, first = self.hidden_norm(self.fc(batch.taps[row])), batch.embedded[row, anchors]
        states = blocks.run(self.layers, context, first, self.mask.to(first.dtype))
        drafting: Tensor = self.norm(states if self.config.sample_from_anchor else states[:, 1:])
        return drafting

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        every = batch.tokens.numel()
        likeliest = torch.zeros(every, self.depths, dtype=torch.int64, device=batch.tokens.device)
        for all_of_row in chosen(learned_drafts(batch, 1)[:, 0], batch, every, None):
            for at in all_of_row.split(AT_ONCE):
                likeliest[at] = self.logits_of(batch, at).argmax(-1)
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            yield at, likeliest[at + 1, depth]

    def logits_of(self, batch: Batch, at: Tensor) -> Tensor:
        """(m, depths, v) logits of blocks at flat positions (m,) of one row, with the text's own tokens before each."""
        return self.logits(self.states(batch, at))


def learned_drafts(batch: Batch, depths: int) -> Tensor:
    """(b * t, depths) bool: whether draft k of a block at a flat position is learned."""
    found = torch.zeros(batch.tokens.numel(), depths, dtype=torch.bool, device=batch.tokens.device)
    for k in range(depths):
        at, columns = batch.learned(k + 2)
        found[at[columns >= 0] + 1, k] = True
    return found


def chosen(possible: Tensor, batch: Batch, most: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Flat positions (m,), ascending, of at most so many anchors of each row that has some; all without a generator."""
    rows = possible.view(batch.tokens.shape)
    for i, row in enumerate(rows):
        at = row.nonzero().squeeze(1)
        if len(at) > most and generator is not None:
            at = at[torch.randperm(len(at), generator=generator)[:most].to(at.device)].sort().values
        if len(at):
            yield at + i * rows.shape[1]


def mask_of(tokenizer: Tokenizer, rows: int) -> int:
    """The first id below `rows` that is no token; where all are, that of the end."""
    known = set(tokenizer.tokens())
    spare = next((token for token in range(rows) if token not in known), None)
    return (tokenizer.eos_id or 0) if spare is None else spare
