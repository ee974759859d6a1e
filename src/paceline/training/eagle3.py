"""Training of EAGLE-3 heads: tokens alone are learned, and the head goes on from its own states as it will when it
drafts.

In unroll j the input of each place is the token j further on and the state that unroll j - 1 made there. It sees the
inputs of unroll 0 up to its place, which are the target's own, and of each later unroll the one at its place alone. So
places do not see each other behind unroll 0, and from there on only those are gone through from which something is
learned. The loss of unroll j has weight 0.8^j, against the target's distribution over the draft vocabulary, where the
text's token is in it.

Source: EAGLE-3: scaling up inference acceleration of large language models via training-time test (arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer, cross_entropy
from paceline.training.layer import DecoderLayer, Keys, RMSNorm

if TYPE_CHECKING:
    from paceline.models import ModelInfo

DECAY: Final = 0.8
"""Weight of an unroll's loss over that of the one before."""


class Eagle3Layer(DecoderLayer):
    """Its attention reads [norm(embedding); norm(state)]."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, 2 * hidden)
        eps = layer.get("rms_norm_eps") or 1e-6
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)


class Eagle3Trainer(HeadTrainer):
    """An EAGLE-3 head; `depths` unrolls are trained (the paper has 7, which take longer and serve drafts of 7)."""

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int = 5) -> None:
        super().__init__(config, rows)
        self.depths, d = depths, config.hidden_size
        self.fc = nn.Linear(len(config.taps) * d, d, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config.layer, d)])
        self.norm = RMSNorm(d, config.layer.get("rms_norm_eps") or 1e-6)
        with torch.no_grad():  # it begins with the last of the states, of which it reads the others little by little
            self.fc.weight.mul_(0.1)[:, -d:] += torch.eye(d)

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        count = target.num_layers
        taps = tuple(sorted({min(1, count - 1), max(count // 2 - 1, 0), max(count - 4, 0)}))
        return HeadConfig(
            method="eagle3",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=taps,
            layer=layer,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        total = self.rows.new_zeros(())
        for depth, (at, columns, states) in enumerate(self._unrolled(batch)):
            known = columns >= 0
            losses = cross_entropy(self.logits(self.norm(states[known])), self.taught(batch, depth + 2, at[known]))
            total = total + DECAY**depth * losses.sum() / max(1, len(losses))
        return total

    def guesses(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for at, _, states in self._unrolled(batch):
            yield at, self.logits(self.norm(states)).argmax(-1)

    def _unrolled(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each unroll, what `Batch.learned` says, and (m, d) the states there, before the norm."""
        layer = cast(Eagle3Layer, self.layers[0])
        state, visible = self.fc(batch.taps), batch.visible()
        rows, length = batch.tokens.shape
        places = torch.arange(length).expand(rows, length)
        kept: list[Keys] = []
        for depth in range(self.depths):
            embedded = picked(batch.ahead(batch.embedded, depth + 1), places)
            x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(state)), -1)
            q, keys = layer.read(x, picked(batch.positions, places) + depth)
            kept.append(keys)
            state = layer.finish(state, layer.attend(q, kept[0], kept[1:], visible))
            at, columns = batch.learned(depth + 2)
            found = torch.empty(rows * length, dtype=torch.int64)
            found[(torch.arange(rows)[:, None] * length + places).flatten()] = torch.arange(places.numel())
            yield at, columns, state.flatten(0, 1)[found[at]]
            if depth == 0:
                places = needed(batch.learned(3)[0], rows, length)
                state, visible = picked(state, places), picked(visible, places)


def needed(at: Tensor, rows: int, length: int) -> Tensor:
    """(b, m) places of each row in which are flat positions `at`, and others so that all rows have as many."""
    wanted = torch.zeros(rows * length, dtype=torch.bool)
    wanted[at] = True
    most = int(wanted.view(rows, length).sum(1).max())
    return wanted.view(rows, length).int().sort(dim=1, descending=True, stable=True).indices[:, :most].sort(1).values


def picked(values: Tensor, places: Tensor) -> Tensor:
    """(b, m, ...) values (b, t, ...) at places (b, m)."""
    return values[torch.arange(len(values))[:, None], places]
