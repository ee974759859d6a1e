"""What the trainers share whose guesses are rows of the target's own passes (PPD, hidden transfer, LUD).

The target stays as it is. The g-th row behind token a, its anchor, learns the target's own distribution of token
a + g + 1, with weight 0.8^(g - 1), at anchors that are drawn anew in each step; all of a packed row share one pass,
whose rows and what they see are those of `masked_rows`, once for each copy of a row. The logits of copies are averaged,
which is the head of their mean state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.config import documented, option
from paceline.models.heads import HeadConfig, write_head
from paceline.training.batches import PAD, Batch, TargetView
from paceline.training.draft_model import sliced
from paceline.training.heads import Trainer
from paceline.training.masked_rows import MaskedRows
from paceline.training.train_config import TrainConfig

if TYPE_CHECKING:
    from paceline.llm import LLM

DEPTHS: Final = 3
"""Rows behind a token where nobody says how many, PPD's in the paper."""

WEIGHT: Final = 0.8
"""Of a row over that of the one before."""


@documented
@dataclass(frozen=True, kw_only=True)
class RowGuessConfig(TrainConfig):
    """Says how many tokens have rows behind them in a step."""

    anchors: int = option(64, "Of ppd, hidden_transfer and lud: tokens of a row with guesses behind them.", low=1)


@dataclass(frozen=True, slots=True)
class RowsOfPass:
    """Says what the rows of a pass are, tokens first.

    Attributes:
        anchors: (r,) int64 place of the token behind which a row stands; its own place where it is a token.
        depths: (r,) int64, 0 of tokens. copies: (r,) int64 number of the copy, -1 of tokens.
        seen: (r, r) bool, which rows each row sees. tokens: how many are tokens.
    """

    anchors: Tensor
    depths: Tensor
    copies: Tensor
    seen: Tensor
    tokens: int

    @classmethod
    def of(cls, rows: MaskedRows, documents: Tensor, copies: int) -> RowsOfPass:
        """Rows with so many copies of each that is no token; documents: (t,) of the tokens."""
        tokens = int((rows.depths == 0).sum())
        more = range(tokens, len(rows.depths))
        order = torch.tensor([*range(tokens), *(list(more) * copies)])
        copy = torch.tensor([-1] * tokens + [number for number in range(copies) for _ in more])
        seen = rows.visible(documents.cpu())[order][:, order]
        seen &= (copy[None] < 0) | (copy[:, None] == copy[None])
        device = documents.device
        anchors, depths = rows.anchors[order].to(device), rows.depths[order].to(device)
        return cls(anchors, depths, copy.to(device), seen.to(device), tokens)


class RowGuessTrainer(Trainer):
    """Trains rows of the target's passes; a method says what they are.

    Args:
        folder: of the target's checkpoint. layers: how many it has. rows: (v, hidden) of its head, for all tokens.
        depths: rows behind a token. anchors: as of `RowGuessConfig`.
    Attributes:
        copies: of each row.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    config_class: ClassVar[type[TrainConfig]] = RowGuessConfig
    copies: int = 1

    def __init__(self, folder: Path, layers: int, rows: Tensor, *, depths: int, anchors: int) -> None:
        super().__init__(rows)
        model, self.embed = sliced(folder, range(layers))
        self.model = (model.requires_grad_(False).eval(),)  # in a tuple: no part of what is trained and kept
        self.depths, self.anchors = depths, anchors

    @staticmethod
    def view_of(llm: LLM, config: TrainConfig) -> TargetView:
        """The target, with its whole vocabulary."""
        every = torch.arange(llm.runner.info.vocab_size)
        return TargetView(llm.runner, (), every, keep_bytes=config.feature_cache_bytes)

    @abstractmethod
    def run(self, model: nn.Module, embedded: Tensor, rows: RowsOfPass, **given: Any) -> Tensor:
        """(r, hidden) states behind the final norm.

        Args:
            model: the target's layers. embedded: (tokens, hidden). given: mask and positions, for `model`.
        """

    @abstractmethod
    def stored(self, llm: LLM) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Keys of the `HeadConfig` that it writes, beside the target's, and the tensors."""

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        targets, total = self.soft_targets(batch), self.rows.new_zeros(())
        first = learned(batch, 1)
        rank = torch.rand(batch.tokens.shape, generator=generator).to(first.device)
        order = torch.where(first, rank, 2.0).argsort(1).argsort(1)
        kept = [learned(batch, depth) & (order < self.anchors) for depth in range(1, self.depths + 1)]
        for depth, (at, states) in enumerate(self.states(batch, kept), start=1):
            losses = targets.loss(states, self.rows, at + depth + 1)
            total = total + WEIGHT ** (depth - 1) * losses / max(1, len(at))
        return total

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for at, states in self.states(batch, [learned(batch, depth) for depth in range(1, self.depths + 1)]):
            yield at, self.logits(states).argmax(-1)

    def states(self, batch: Batch, kept: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Flat places (m,) of the anchors (b, t) bool of each row, and (m, hidden) what the target makes of it there,
        the mean of its copies.
        """
        found: list[list[Tensor]] = [[] for _ in kept]
        for i in range(len(batch.tokens)):
            masked = MaskedRows.of((batch.documents[i] != PAD).nonzero().squeeze(1), [one[i] for one in kept])
            own = self._pass(batch, i, RowsOfPass.of(masked, batch.documents[i], self.copies))
            for part, states in zip(found, own.split([int(one[i].sum()) for one in kept]), strict=True):
                part.append(states)
        places = [one.flatten().nonzero().squeeze(1) for one in kept]
        return [(at, torch.cat(parts)) for at, parts in zip(places, found, strict=True)]

    def _pass(self, batch: Batch, i: int, rows: RowsOfPass) -> Tensor:
        """(m, hidden) mean states of the rows behind tokens, of packed row i, those of each depth together."""
        states = self.ran(batch, i, rows)[rows.tokens :]
        return cast(Tensor, states.unflatten(0, (self.copies, -1)).mean(0)) if len(states) else states

    def ran(self, batch: Batch, i: int, rows: RowsOfPass) -> Tensor:
        """(r, hidden) states of all rows of a pass over packed row i."""
        device = batch.tokens.device
        model, embed = (part.to(device) for part in (self.model[0], self.embed[0]))
        mask = torch.zeros(rows.seen.shape, device=device).masked_fill(~rows.seen, torch.finfo(torch.float32).min)
        places = batch.positions[i][rows.anchors] + rows.depths
        embedded = embed(batch.tokens[i][rows.anchors[: rows.tokens]])
        return self.run(
            model, embedded, rows, attention_mask=mask[None, None], position_ids=places[None], use_cache=False
        )

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """What was learned, in the format of `paceline.models.heads`."""
        info, (more, tensors) = llm.runner.info, self.stored(llm)
        config = HeadConfig(
            method=cast(Any, self.name),
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            draft_vocab_size=info.vocab_size,
            num_heads=self.depths,
            target=facts["target"],
            provenance=facts,
            **more,
        )
        write_head(folder, config, {name: tensor.to(info.dtype) for name, tensor in tensors.items()})

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": self.name, "model": str(folder)}


def learned(batch: Batch, depth: int) -> Tensor:
    """(b, t) bool: where the row so far behind a token learns a token of an answer."""
    places = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=batch.tokens.device)
    places[batch.learned(depth + 1)[0]] = True
    return places.view(batch.tokens.shape)
