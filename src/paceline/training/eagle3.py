"""Training of EAGLE-3 heads: tokens alone are learned, and the head goes on from its own states as it will when it
drafts.

In unroll j the input of each place is the token j further on and the state that unroll j - 1 made there. It sees the
inputs of unroll 0 up to its place, which are the target's own, and of each later unroll the one at its place alone. So
places do not see each other behind unroll 0, and only those are gone through from which something is learned. What a
token's embedding adds to queries, keys and values is the same in all unrolls.

The paper gives unroll j's loss the weight 0.8^j. Here it is taken of a share 0.8^j of the places, drawn anew in each
step, each of which was part of the unroll before: the same in expectation, for 4.0 unrolls' work instead of 7. Losses
are against the target's distribution over the draft vocabulary, where the text's token is in it.

Source: EAGLE-3: scaling up inference acceleration of large language models via training-time test (arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch
from paceline.training.heads import HeadTrainer
from paceline.training.layer import Keys, RMSNorm, TrainableDecoderLayer

if TYPE_CHECKING:
    from paceline.models import ModelInfo

DECAY: Final = 0.8
"""Share of an unroll's places that the next one goes on from."""


class Eagle3Layer(TrainableDecoderLayer):
    """A decoder layer whose attention reads [norm(embedding); norm(state)]."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, 2 * hidden)
        eps = layer.get("rms_norm_eps") or 1e-6
        self.input_layernorm, self.hidden_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)

    def of_embedding(self, name: str, embedded: Tensor) -> Tensor:
        """(b, t, width) what normed embeddings add to the projection of that name."""
        return F.linear(embedded, self._halves(name)[0])

    def of_state(self, name: str, state: Tensor) -> Tensor:
        """(b, m, width) what normed states add to it."""
        return F.linear(state, self._halves(name)[1])

    def _halves(self, name: str) -> tuple[Tensor, ...]:
        return cast(nn.Linear, self.self_attn[name]).weight.chunk(2, 1)


class Eagle3Trainer(HeadTrainer):
    """Trains an EAGLE-3 head in `depths` unrolls (the paper has 7, which take longer and serve drafts of 7)."""

    name: ClassVar[str] = "eagle3"

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
        return HeadConfig(
            method="eagle3",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            taps=taps_of(target.num_layers),
            layer=layer,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        drawn = torch.rand(batch.tokens.numel(), generator=generator).to(batch.tokens.device)
        total, targets, count = self.rows.new_zeros(()), self.soft_targets(batch), 0
        for depth, (at, columns, states) in enumerate(self._unrolled(batch, drawn)):
            known = columns >= 0
            count = count or int(known.sum())
            total = total + targets.loss(self.norm(states[known]), self.rows, at[known] + depth + 2)
        return total / max(1, count)

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for at, _, states in self._unrolled(batch, torch.zeros(1, device=batch.tokens.device)):
            yield at, self.logits(self.norm(states)).argmax(-1)

    def _unrolled(self, batch: Batch, drawn: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each unroll, what `Batch.learned` says, and (m, d) the states there, before the norm.

        Args:
            drawn: (b * t,) or (1,) from 0 to 1: unroll j goes through places where it is below 0.8^j.
        """
        layer, names = cast(Eagle3Layer, self.layers[0]), ("q_proj", "k_proj", "v_proj")
        (rows, length), drawn = batch.tokens.shape, drawn.expand(batch.tokens.numel())
        embedded, visible = layer.input_layernorm(batch.embedded), batch.visible()
        added = {name: layer.of_embedding(name, embedded) for name in names}
        state = self.fc(batch.taps)
        places = torch.arange(length, device=state.device).expand(rows, length)
        kept: list[Keys] = []
        for depth in range(self.depths):
            at, columns = batch.learned(depth + 2)
            going = drawn[at] < DECAY**depth
            at, columns = at[going], columns[going]
            part = needed(at, places, length)
            if not depth:
                kept.append(self._keys(added, state, (batch, places, 0)))
            places, state = places.gather(1, part), picked(state, part)
            kept[1:] = [(among(keys, part), among(values, part)) for keys, values in kept[1:]]
            if depth:
                kept.append(self._keys(added, state, (batch, places, depth)))
            query = picked(batch.ahead(added["q_proj"], depth + 1), places)
            query = query + layer.of_state("q_proj", layer.hidden_norm(state))
            q = layer.queries(query, picked(batch.positions, places) + depth)
            state = layer.finish(state, layer.attend(q, kept[0], kept[1:], picked(visible, places)))
            yield at, columns, state.flatten(0, 1)[found_at(at, places, length)]

    def _keys(self, added: Mapping[str, Tensor], state: Tensor, where: tuple[Batch, Tensor, int]) -> Keys:
        """Of places (b, m) with states (b, m, d), in an unroll."""
        (batch, places, depth), layer = where, cast(Eagle3Layer, self.layers[0])
        normed = layer.hidden_norm(state)
        keys, values = (
            picked(batch.ahead(added[name], depth + 1), places) + layer.of_state(name, normed)
            for name in ("k_proj", "v_proj")
        )
        return layer.keys(keys, values, picked(batch.positions, places) + depth)


def taps_of(count: int) -> tuple[int, ...]:
    """Layers of a target of so many whose states are read: an early one, the middle, a late one; fewer of few."""
    low = min(1, max(count - 3, 0))
    middle = max(count // 2 - 1, low + 1)
    return tuple(sorted({min(layer, count - 1) for layer in (low, middle, max(count - 4, middle + 1))}))


def needed(at: Tensor, places: Tensor, length: int) -> Tensor:
    """(b, n) indices into places (b, m), ascending, with which flat positions `at` are among them, and others so that
    all rows have as many.
    """
    wanted = torch.zeros(len(places) * length, dtype=torch.bool, device=places.device)
    wanted[at] = True
    flags = wanted.view(-1, length).gather(1, places)
    most = max(1, int(flags.sum(1).max()))
    return flags.int().sort(dim=1, descending=True, stable=True).indices[:, :most].sort(1).values


def found_at(at: Tensor, places: Tensor, length: int) -> Tensor:
    """(n,) where flat positions `at` are among places (b, m), flattened."""
    index = torch.empty(len(places) * length, dtype=torch.int64, device=places.device)
    starts = torch.arange(len(places), device=places.device)[:, None] * length
    index[(starts + places).flatten()] = torch.arange(places.numel(), device=places.device)
    return index[at]


def picked(values: Tensor, places: Tensor) -> Tensor:
    """(b, m, ...) values (b, t, ...) at places (b, m)."""
    return values[torch.arange(len(values), device=places.device)[:, None], places]


def among(values: Tensor, part: Tensor) -> Tensor:
    """(b, g, n, e) of values (b, g, m, e) at indices (b, n)."""
    return values.take_along_dim(part[:, None, :, None], 2)
