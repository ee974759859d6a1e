"""LayerSkip's training loss: layers dropped at random, and a loss at every exit in turn.

Source: LayerSkip, enabling early exit inference and self-speculative decoding (arXiv:2404.16710), sections 4.1 and 4.2.
Layers are counted from 0 to L - 1; exit l leaves behind layer l, through the final norm and the head that all exits
share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

# Axes in this file: b = batch, t = window, h = width, v = vocabulary.


def dropout_rates(layers: int, most: float) -> list[float]:
    """Chance of leaving each layer out for a sequence: it doubles from layer to layer in the sense of 2^(l / (L - 1)) -
    1, so that the first is never left out and the last with chance `most`. The schedule over time is the one of
    fine-tuning: constant.
    """
    return [most * (math.exp(layer * math.log(2) / max(layers - 1, 1)) - 1) for layer in range(layers)]


def exits_of_step(step: int, layers: int, rotation: int) -> list[int]:
    """The exits that have a loss in this step: every `rotation`-th one, another set each step, and always the last."""
    early = [layer for layer in range(layers - 1) if layer % rotation == step % rotation]
    return [*early, layers - 1]


def exit_weights(exits: list[int], layers: int, scale: float, *, equal: bool) -> list[float]:
    """Weights of the exits' losses, summing to 1.

    Args:
        scale: of the early exits against the last.
        equal: the same for all early exits; else as in the paper, rising as 0 + 1 + ... + l.
    """
    rising = [0.0 if equal else sum(range(layer + 1)) for layer in range(layers)]
    early = [scale * (1.0 if equal else rising[layer]) for layer in range(layers - 1)]
    last = 1.0 if equal else layers - 1 + scale * sum(range(layers - 1))
    every = [*early, last]
    total = sum(every[layer] for layer in exits)
    return [every[layer] / total for layer in exits]


def states_by_layer(model: LlamaForCausalLM, x_bt: Tensor, rates: list[float] | None = None) -> Iterator[Tensor]:
    """(b, t, h) states behind each layer; with `rates`, each sequence skips each layer with that chance."""
    state_bth = model.model.embed_tokens(x_bt)
    positions = torch.arange(x_bt.shape[1], device=x_bt.device)[None]
    rotations = model.model.rotary_emb(state_bth, positions)
    for index, layer in enumerate(model.model.layers):
        stay = torch.rand(len(x_bt)) >= (rates[index] if rates else 0.0)
        if bool(stay.all()):
            state_bth = layer(state_bth, position_embeddings=rotations, position_ids=positions)
        elif bool(stay.any()):
            rows = stay.nonzero().squeeze(1).to(x_bt.device)
            deeper = layer(state_bth[rows], position_embeddings=rotations, position_ids=positions)
            state_bth = state_bth.index_copy(0, rows, deeper.to(state_bth.dtype))
        yield state_bth


def exit_loss(model: LlamaForCausalLM, state_bth: Tensor, x_bt: Tensor) -> Tensor:
    """Mean next-token loss of one exit; logits in float32."""
    logits_btv = model.lm_head(model.model.norm(state_bth[:, :-1]))
    return F.cross_entropy(logits_btv.float().flatten(0, 1), x_bt[:, 1:].flatten())


def training_loss(model: LlamaForCausalLM, x_bt: Tensor, rates: list[float], weights: dict[int, float]) -> Tensor:
    """The weighted sum of the losses of the exits in `weights`."""
    parts = [
        weights[layer] * exit_loss(model, state_bth, x_bt)
        for layer, state_bth in enumerate(states_by_layer(model, x_bt, rates))
        if layer in weights
    ]
    return torch.stack(parts).sum()


@torch.no_grad()
def losses_by_exit(model: LlamaForCausalLM, rows_bt: Tensor, batch: int) -> list[float]:
    """Mean loss of every exit over (rows, t) held-out tokens."""
    totals = [0.0] * len(model.model.layers)
    for part in rows_bt.split(batch):
        x_bt = part.to(model.device)
        for layer, state_bth in enumerate(states_by_layer(model, x_bt)):
            totals[layer] += exit_loss(model, state_bth, x_bt).item() * len(part)
    return [total / len(rows_bt) for total in totals]
