"""What the trainers share whose states each say the token that follows, with the text as drafted so far as their input:
draft models, adapters of early exits, early exits themselves. They learn the target's distribution of that token.

Source: Hinton et al. 2015 (arXiv:1503.02531).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.training.batches import Batch
from paceline.training.heads import Trainer


class NextTokenTrainer(Trainer):
    """Learns the target's next token from states; a method says which states, and what it writes.

    Args:
        rows: (v, hidden) of the target's head. depths: how many tokens ahead it is judged by.
    """

    def __init__(self, rows: Tensor, depths: int | None) -> None:
        super().__init__(rows)
        self.depths = depths or 5

    @abstractmethod
    def states(self, batch: Batch) -> Tensor:
        """Compute (b, t, d) states, whose products with `head_rows` are logits of the token behind each."""

    def head_rows(self) -> Tensor:
        """(v, d) rows of the head: the target's, which stay as they are, or its own."""
        return self.rows

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        states = self.states(batch).flatten(0, 1)[tokens - 1]
        return self.soft_targets(batch).loss(states, self.head_rows(), tokens) / max(1, len(tokens))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        likeliest = self.likeliest(self.states(batch).flatten(0, 1))
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            yield at, likeliest[at + depth + 1]

    def likeliest(self, states: Tensor) -> Tensor:
        """(m,) columns of the likeliest tokens behind states (m, d)."""
        rows = self.head_rows().T.to(states.dtype)
        return torch.cat([(part @ rows).argmax(-1) for part in states.split(1024)])


def behind_layers(model: nn.Module, embedded: Tensor, batch: Batch, stay: Tensor | None = None) -> list[Tensor]:
    """(b, t, d) states of a decoder of transformers behind each layer, whose documents do not see each other.

    Args:
        embedded: (b, t, d). stay: (layers, b) bool, whether the layer runs for the row; None runs all.
    """
    behind: list[Tensor] = []

    def passed(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        chosen = output if stay is None else torch.where(stay[len(behind), :, None, None], output, inputs[0])
        behind.append(chosen)
        return chosen

    handles = [layer.register_forward_hook(passed) for layer in cast(nn.ModuleList, model.layers)]
    try:
        decoded(model, embedded, batch)
    finally:
        for handle in handles:
            handle.remove()
    return behind


def text_loss(states: Tensor, rows: Tensor, batch: Batch) -> Tensor:
    """The cross-entropy in nats, per learned token, of the text's own tokens.

    Args:
        states: (b, t, d), whose products with rows (v, d) are logits of the token behind each; of the whole vocabulary.
    """
    wanted = batch.columns.flatten()
    tokens = (wanted >= 0).nonzero().squeeze(1)
    return losses_of(states.flatten(0, 1)[tokens - 1], rows, wanted[tokens]) / max(1, len(tokens))


def losses_of(states: Tensor, rows: Tensor, wanted: Tensor) -> Tensor:
    """The sum of the cross-entropies in nats of tokens (m,), by states (m, d) and rows (v, d) of a head."""
    losses = [
        F.cross_entropy((part @ rows.T.to(part.dtype)).float(), tokens, reduction="sum")
        for part, tokens in zip(states.split(512), wanted.split(512), strict=True)
    ]
    return torch.stack(losses).sum() if losses else states.sum() * 0.0


def decoded(model: nn.Module, embedded: Tensor, batch: Batch) -> Tensor:
    """(b, t, d) states behind the final norm of a decoder of transformers, whose documents do not see each other."""
    return seeing(model, embedded, batch.visible(), batch.positions)


def seeing(model: nn.Module, embedded: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
    """(b, r, d) the same of rows (b, r, d) at positions (b, r), each of which sees as many as visible (b, r, r)."""
    mask = torch.zeros(visible.shape, device=visible.device).masked_fill(~visible, torch.finfo(torch.float32).min)
    states = model(
        inputs_embeds=embedded, attention_mask=mask[:, None], position_ids=positions, use_cache=False
    ).last_hidden_state
    return cast(Tensor, states)
