"""Training of Falcon heads by coupled sequential glancing distillation: the head is shown some of what it got wrong.

Row i of a pass reads [embedding of token i + 1; the target's state of token i], sees its text up to the end of its unit
of k tokens, and predicts the state k tokens further on, by it token i + k + 1:

    pass 1, without gradients: d = rows whose token is not the target's likeliest
    lambda * d rows are shown: they read the state and the token that they predict in place of their own, runs from the
        beginning of a unit that never reach its end                                                   (b, t) bool
    pass 2: smooth L1 of the states + 0.1 (0.9 KL + 0.1 cross-entropy of the text's token), of all rows but those shown
    lambda falls from 0.45 to 0.1

so that the rows behind what is shown learn how the tokens of a unit depend on each other. As in the authors' code: what
is shown, lambda (the paper's falls from 0.4 to 0), the temperature of 0.95 at which both parts of the second loss are
taken, the noise on states, which is EAGLE's, and that the LSTM reads each row by itself. Our own: rows that are shown
learn nothing, as in glancing training (GLAT, arXiv:2008.07905), and units begin anywhere, drawn anew in each step, as
they do when it drafts, where the last one ends with the text.

Source: Falcon: faster and parallel inference of large language models through enhanced semi-autoregressive drafting and
custom-designed decoding tree (arXiv:2412.12639).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.models.heads import HeadConfig
from paceline.models.layers import counting, gated
from paceline.training.batches import Batch, TargetView
from paceline.training.eagle import LENGTH, NOISE, TOKENS
from paceline.training.heads import HeadTrainer, SoftTargets, layer_of
from paceline.training.layer import Keys, TrainableDecoderLayer
from paceline.training.train_config import TrainConfig
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

UNIT: Final = 2
"""Tokens of a pass where nobody says how many, the paper's best."""

SHOWN: Final = (0.45, 0.1)
"""lambda, at the beginning and in the end."""

SOFT: Final = 0.9
"""Weight of the target's distribution over that of the text's token."""

TEMPERATURE: Final = 0.95


@documented
@dataclass(frozen=True, kw_only=True)
class FalconConfig(TrainConfig):
    """Says how many tokens a pass of a Falcon head drafts."""

    block_size: int = option(UNIT, "Tokens of a pass.", low=1, high=64)


class _Lstm(nn.Module):
    """Two layers on each row by itself, with PyTorch's names and rows; it begins with the state, which gates let
    through.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        for layer, inputs in enumerate((2 * d, d)):
            weight, bias = torch.zeros(4, d, inputs), torch.zeros(4, d)
            weight[[0, 2, 3]] = 0.1 * inputs**-0.5 * (2 * torch.rand(3, d, inputs) - 1)
            weight[2, :, -d:] += torch.eye(d)
            bias[[0, 3]] = 2.0
            self.register_parameter(f"weight_ih_l{layer}", nn.Parameter(weight.flatten(0, 1)))
            self.register_parameter(f"bias_ih_l{layer}", nn.Parameter(bias.flatten()))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) of (..., 2 d)."""
        for layer in range(2):
            weight, bias = (counting(self.get_parameter(f"{kind}_ih_l{layer}")) for kind in ("weight", "bias"))
            x = gated(F.linear(x, weight, bias))
        return x


class FalconTrainer(HeadTrainer):
    """Trains a head that predicts `block_size` tokens in each pass.

    Args:
        config: of the head. rows: of the target's head, for the draft vocabulary.
        depths: by how many tokens it is judged: those of two passes by default.
    """

    name: ClassVar[str] = "falcon"
    config_class: ClassVar[type[TrainConfig]] = FalconConfig
    rate: ClassVar[float] = 2e-3

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int | None = None) -> None:
        super().__init__(config, rows)
        self.unit, d = config.block_size or 1, config.hidden_size
        self.depths = depths or 2 * self.unit
        self.lstm = _Lstm(d)
        self.layers = nn.ModuleList([TrainableDecoderLayer(config.layer, d, d)])

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        need(config.taps is None, "taps", "be left out for falcon, which reads the model's last states", config.taps)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[FalconTrainer, TargetView]:
        assert isinstance(config, FalconConfig)
        head_config = cls.config_of(llm.runner.info, layer_of(llm.runner), len(vocabulary), 1)
        head_config = replace(head_config, block_size=config.block_size)
        view = TargetView(llm.runner, head_config.taps, vocabulary, keep_bytes=config.feature_cache_bytes)
        return cls(head_config, view.rows, config.depths), view

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="falcon",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            block_size=UNIT,
            layer=layer,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        device, k = batch.final.device, self.unit
        noise = torch.rand(batch.final.shape, generator=generator).to(device) - 0.5
        read = batch.final + noise * NOISE * LENGTH / batch.final.shape[1]
        first = int(torch.randint(k, (1,), generator=generator))
        at, columns = batch.learned(k + 1)
        targets = self.soft_targets(batch)
        shown = self.shown(batch, self.wrong(batch, read, first, targets), first, generator)
        states = self.states(batch, read, first, shown).flatten(0, 1)
        hidden = ~shown.flatten()[at]
        at, columns = at[hidden], columns[hidden]
        true = batch.final.flatten(0, 1)[at + k]
        near = F.smooth_l1_loss(states[at].float(), true, reduction="none").mean(-1).sum() / max(1, len(at))
        known = columns >= 0
        at, columns = at[known], columns[known]
        return near + TOKENS * self.of_tokens(targets, states[at], at + k + 1, columns) / max(1, len(at))

    def of_tokens(self, targets: SoftTargets, states: Tensor, places: Tensor, columns: Tensor) -> Tensor:
        """The sum of the losses in nats of states (m, d) that predict the tokens at flat places (m,), of these columns;
        but for the target's entropy.
        """
        chances = targets.chances[targets.row[places]] ** (1 / TEMPERATURE)
        chances = SOFT * chances / chances.sum(-1, keepdim=True)
        chances[torch.arange(len(columns)), columns] += 1 - SOFT
        every = SoftTargets(torch.arange(len(columns), device=places.device), chances)
        return every.loss(states / TEMPERATURE, self.rows, every.row)

    @torch.no_grad()
    def wrong(self, batch: Batch, read: Tensor, first: int, targets: SoftTargets) -> int:
        """How many rows of a pass over states (b, t, d) say another token than the target's likeliest."""
        at, columns = batch.learned(self.unit + 1)
        at = at[columns >= 0]
        said = self.logits(self.states(batch, read, first).flatten(0, 1)[at]).argmax(-1)
        likeliest = targets.chances[targets.row[at + self.unit + 1]].argmax(-1)
        return int((said != likeliest).sum())

    def shown(self, batch: Batch, wrong: int, first: int, generator: torch.Generator) -> Tensor:
        """(b, t) bool: about lambda times `wrong` rows that are shown what they predict."""
        begin, end = SHOWN
        most = round(wrong * (end + (begin - end) * (1 - self.done)))
        learned = torch.zeros(batch.tokens.shape, dtype=torch.bool)
        learned.view(-1)[batch.learned(self.unit + 1)[0].cpu()] = True
        places = batch.positions.cpu() + first
        begins = (learned & (places % self.unit == 0)).flatten().nonzero().squeeze(1)
        order = begins[torch.randperm(len(begins), generator=generator)]
        runs = torch.randint(1, max(2, self.unit), (len(order),), generator=generator)
        if self.unit == 1:  # a unit has no rows behind what is shown
            runs.zero_()
        kept = runs.cumsum(0) <= most
        chosen = torch.zeros(learned.numel() + self.unit, dtype=torch.bool)
        for row in range(self.unit - 1):
            chosen[order[kept & (runs > row)] + row] = True
        return (chosen[: learned.numel()].view_as(learned) & learned).to(batch.tokens.device)

    def states(self, batch: Batch, read: Tensor, first: int, shown: Tensor | None = None) -> Tensor:
        """(b, t, d) states k tokens ahead of each, made of states (b, t, d).

        Args:
            first: by how much the first unit of a text is shorter. shown: (b, t) bool rows that read what they predict.
        """
        k, layer = self.unit, cast(TrainableDecoderLayer, self.layers[0])
        embedded = batch.ahead(batch.embedded, 1)
        if shown is not None:
            embedded = torch.where(shown[..., None], batch.ahead(batch.embedded, k + 1), embedded)
            read = torch.where(shown[..., None], batch.ahead(batch.final, k), read)
        x = self.fused(embedded, read)
        q, keys = layer.read(x, batch.positions)
        return layer.finish(x, layer.attend(q, keys, (), in_units(batch, k, first)))

    def fused(self, embedded: Tensor, states: Tensor) -> Tensor:
        """(..., d) what the LSTM makes of both (..., d)."""
        return cast(Tensor, self.lstm(torch.cat((embedded, states.to(embedded.dtype)), -1)))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Drafts behind every token: each is the last of a unit in one of k passes."""
        every = [batch.learned(depth + 2)[0] for depth in range(self.depths)]
        found = [torch.zeros(batch.tokens.numel(), dtype=torch.int64, device=batch.tokens.device) for _ in every]
        for first in range(self.unit):
            last = ((batch.positions + first + 1) % self.unit == 0).flatten()
            for at, said, states in zip(every, found, self._drafted(batch, first), strict=False):
                ends = at[last[at]]
                said[ends] = self.logits(states[ends]).argmax(-1)
        for at, said in zip(every, found, strict=True):
            yield at, said[at]

    def _drafted(self, batch: Batch, first: int) -> Iterator[Tensor]:
        """By depth, without end, (b * t, d) states of the token so far ahead of each place that ends a unit: of the
        text's own tokens, and behind the first unit of the states that the head has made.
        """
        k, layer, visible = self.unit, cast(TrainableDecoderLayer, self.layers[0]), in_units(batch, self.unit, first)
        x = self.fused(batch.ahead(batch.embedded, 1), batch.final)
        q, keys = layer.read(x, batch.positions)
        made, more = layer.finish(x, layer.attend(q, keys, (), visible)), list[Keys]()
        rows = [shifted(made, row - k + 1) for row in range(k)]  # of the unit that ends at a place, by place
        for start in count(0, k):
            for states in rows:
                yield states.flatten(0, 1)
            inputs = [self.fused(batch.ahead(batch.embedded, start + row + 2), state) for row, state in enumerate(rows)]
            read = [layer.read(x, batch.positions + start + row + 1) for row, x in enumerate(inputs)]
            more += [keys_values for _, keys_values in read]
            rows = [
                layer.finish(x, layer.attend(queries, keys, more, visible))
                for x, (queries, _) in zip(inputs, read, strict=True)
            ]


def in_units(batch: Batch, unit: int, first: int) -> Tensor:
    """(b, t, t) bool: what each position may see: its document up to the end of its unit, of which the first one is
    shorter by `first`.
    """
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    number = (batch.positions + first) // unit
    return same & (number[:, None, :] <= number[:, :, None])


def shifted(values: Tensor, steps: int) -> Tensor:
    """(b, t, ...) `values` of the token `steps` further on, of one before for steps below 0; zeros beyond the row."""
    moved, t = torch.zeros_like(values), values.shape[1]
    moved[:, max(0, -steps) : t - max(0, steps)] = values[:, max(0, steps) : t - max(0, -steps)]
    return moved
