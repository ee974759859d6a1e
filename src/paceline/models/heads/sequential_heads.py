"""What DSpark adds to the rows of a block, one place after the other: a correction of the logits by the tokens drafted
before, and the chance that a draft is accepted.

    e = W1[token before]                                                      (rank,)
    vanilla   logits + W2 e
    gated     logits + W2 (sigmoid(W_g [h; e] + b) * e)
    rnn       g, c, o = W [s; e; h] + b;  s' = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);  logits + W2 tanh(o)
    confidence = sigmoid(w [h; e] + b), or of h alone: estimates the sum over all tokens of min(p, q)

h is the place's state behind the backbone's final norm; s, zeros at the block's first place, is what an rnn has kept of
the tokens before. W1 has a row for each token of the target, W2 for each that can be drafted.

Source: DSpark (arXiv:2607.05147).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.models.heads.head_config import HeadConfig
from paceline.models.layers.linear import Map, make_linear
from paceline.models.layers.own_weights import Weights


@dataclass(frozen=True, slots=True)
class SequentialStep:
    """What is added at r places.

    Attributes:
        bias: (r, n) to be added to the logits; None where nothing is.
        memory: (r, w) of the tokens so far, for the place behind.
        confidence: (r,) from 0 to 1; None where there is no such head.
    """

    bias: torch.Tensor | None
    memory: torch.Tensor
    confidence: torch.Tensor | None


class SequentialHeads:
    """The heads of one block head.

    Args:
        weights: by the names of `tensors_of`; those of the heads are taken out.
    """

    def __init__(self, config: HeadConfig, weights: Weights) -> None:
        rank = config.markov_rank
        self._kind = config.markov_head_type if rank else None
        self._width = rank if self._kind == "rnn" else 0
        self._table = weights.pop("markov_head.markov_w1.weight") if rank else None
        self._out = _taken(weights, "markov_head.markov_w2")
        self._inner = _taken(weights, f"markov_head.{'gate' if self._kind == 'gated' else 'joint'}_proj")
        self._confidence = _taken(weights, "confidence_head.proj")
        self._reads_token = config.confidence_head_with_markov

    @property
    def present(self) -> bool:
        """Whether there are any."""
        return self._out is not None or self._confidence is not None

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """(r, w) memory before the first place of r blocks, of the dtype of their states."""
        return states.new_zeros(len(states), self._width)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, states: torch.Tensor, memory: torch.Tensor) -> SequentialStep:
        """What is added at places with these tokens (r,) before them.

        Args:
            states: (r, hidden) of the places, behind the final norm. memory: (r, w) of the places before.
        """
        before = None if self._table is None else self._table[tokens]
        confidence = None
        if self._confidence is not None:
            read = states if before is None or not self._reads_token else torch.cat((states, before), 1)
            confidence = torch.sigmoid(self._confidence(read).float().squeeze(1))
        if before is None or self._out is None:
            return SequentialStep(None, memory, confidence)
        if self._kind == "gated" and self._inner is not None:
            before = torch.sigmoid(self._inner(torch.cat((states, before), 1))) * before
        elif self._inner is not None:
            gate, new, before = self._inner(torch.cat((memory, before, states), 1)).chunk(3, 1)
            gate, before = torch.sigmoid(gate), torch.tanh(before)
            memory = gate * memory + (1 - gate) * torch.tanh(new)
        return SequentialStep(self._out(before), memory, confidence)


def _taken(weights: Weights, name: str) -> Map | None:
    """The linear layer of that name; None where there is none."""
    weight = weights.pop(f"{name}.weight", None)
    if weight is None:
        return None
    return make_linear(weight, weights.pop(f"{name}.bias", None), row_invariant=False)
