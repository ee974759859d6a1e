"""DoLa: what the last layer has learned beyond an earlier one.

Source: DoLa: Decoding by Contrasting Layers Improves Factuality in Large Language Models (arXiv:2309.03883).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import torch

from paceline.sampling.steering.base import Steering, exact_sums, need_alpha, only_plausible
from paceline.utils import items, need

LATE, REACH, STEP, FIRST = 40, 20, 2, 2
"""Models deeper than `LATE` have candidates among `REACH` layers only; every second layer is one, from `FIRST` on."""

MOST: Final = 64
"""Candidate layers: each costs a head."""


class DoLa(Steering):
    """log p - log q, where q is what an early layer would predict through the model's head: of the candidate layers the
    one whose q differs most from p in Jensen-Shannon divergence, chosen anew for every token. Tokens less than `alpha`
    times as likely as the likeliest are excluded. At alpha 1 that is greedy decoding.

    As in the authors' code, early states go to the head without the final norm. (Their code, and that of transformers,
    takes the two divergences from the mean rather than to it, and one layer for a whole batch.)

    Args:
        layers: candidates, counted as in the paper: 0 are the embeddings, i the output of layer i. "low" is every
            second one of the lower half from 2 on, "high" of the upper half (of the first or last 20 in models of more
            than 40 layers). The paper takes low layers for reasoning and long answers, high ones for short facts.
        alpha: in 0..1.
        norm: apply the final norm to early states.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "dola"

    def __init__(
        self, layers: Literal["low", "high"] | Sequence[int] = "low", alpha: float = 0.1, norm: bool = False
    ) -> None:
        rule = 'be "low", "high" or a list of layers'
        if layers not in ("low", "high"):
            need(not isinstance(layers, str), "layers", rule, layers)
            layers = items("layers", layers, rule)
            whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in layers)
            need(whole and 0 < len(layers) <= MOST, "layers", f"hold 1 to {MOST} integers of 0 or more", layers)
        need(isinstance(norm, bool), "norm", "be True or False", norm)
        need_alpha(alpha)
        self.layers, self.alpha, self.norm = layers, alpha, norm

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """See `Steering.taps`."""
        if self.layers == "low":
            end = min(num_layers // 2, REACH) if num_layers > LATE else num_layers // 2
            chosen: Iterable[int] = range(FIRST, end, STEP)
        elif self.layers == "high":
            chosen = range(num_layers - REACH if num_layers > LATE else num_layers // 2, num_layers, STEP)
        else:
            chosen = sorted({int(one) for one in self.layers})
            fine = chosen[-1] < num_layers
            need(fine, "layers", f"be below {num_layers}, the last layer of this model", list(self.layers))
        return tuple(layer - 1 for layer in chosen) or (max(0, num_layers // 2 - 1),)

    def shape(self, rows_rv: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor:
        """See `Steering.shape`; of equal divergences the first layer's counts."""
        final_rv = rows_rv.log_softmax(-1)
        early_rv, most_r = final_rv, torch.full_like(rows_rv[:, 0], -math.inf, dtype=torch.float64)
        for other_rv in others:
            layer_rv = other_rv.log_softmax(-1)
            found_r = divergence(final_rv, layer_rv)
            better_r = ~(found_r <= most_r)
            early_rv = torch.where(better_r[:, None], layer_rv, early_rv)
            most_r = torch.where(better_r, found_r, most_r)
        return only_plausible(final_rv - early_rv, rows_rv, self.alpha)


def divergence(one_rv: torch.Tensor, other_rv: torch.Tensor) -> torch.Tensor:
    """(r,) float64 Jensen-Shannon divergence in nats of distributions given as log-probabilities (r, v)."""
    mean_rv = torch.logaddexp(one_rv, other_rv) - math.log(2.0)
    terms_rv = one_rv.exp() * (one_rv - mean_rv) + other_rv.exp() * (other_rv - mean_rv)
    return exact_sums(terms_rv) / 2.0
