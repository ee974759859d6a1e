"""What one pass predicts for masked slots: a token for each, and how sure the model is, by several measures.

Measures come from the clean distribution, before temperature: a probability after it says how cold the sampler is, not
how sure the model is. Noise is drawn in float64 from the (seed, round, slot) of a draw, so that a token does not depend
on what else is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from paceline.diffusion.canvas import Floats
from paceline.models import Flags, Ints


@dataclass(frozen=True, slots=True)
class Predictions:
    """The model's word on some slots of one canvas; row i of everything belongs to `slots[i]`.

    Attributes:
        slots: (k,) ascending.
        tokens: (k,) int64, the most probable token, or the one sampled at a temperature.
        confidence: (k,) clean probability of `tokens`.
        entropy: (k,) of the clean distribution, nats.
        margin: (k,) clean probability of the first token less that of the second.
        gap: (k,) logit of the first token less that of the second.
        logits: (k, vocab_size), the mask token's at -inf.
    """

    slots: Ints
    tokens: Ints
    confidence: Floats
    entropy: Floats
    margin: Floats
    gap: Floats
    logits: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, slots: Ints, *, temperature: float = 0.0, seed: int = 0, round_: int = 0) -> Self:
        """Sum up logits.

        Args:
            logits: (k, v), the mask token's column at -inf.
            slots: (k,) int64 ascending.
            temperature: of the sampled token; 0 takes the most probable one, the lowest id among equals.
            seed: of the request.
            round_: of the canvas; draws of different rounds differ.
        """
        log_p = torch.log_softmax(logits, dim=-1)
        p = log_p.exp()
        entropy = -(p * log_p.nan_to_num(neginf=0.0)).sum(-1)
        values, order = logits.topk(min(2, logits.shape[1]), dim=-1)
        best = logits.argmax(-1)
        chosen = best if temperature == 0 else _gumbel_argmax(logits, slots, temperature, seed, round_)
        pair = p.gather(1, order)
        confidence = p.gather(1, chosen[:, None])[:, 0]
        return cls(
            slots,
            _ints(chosen),
            _floats(confidence),
            _floats(entropy),
            _floats(pair[:, 0] - pair[:, -1]),
            _floats(values[:, 0] - values[:, -1]),
            logits,
        )

    def rows(self, slots: Ints) -> Ints:
        """Row of each of `slots`, which all have been computed."""
        rows = np.searchsorted(self.slots, slots)
        assert slots.size == 0 or (rows.max() < self.slots.size and (self.slots[rows] == slots).all()), (
            "a slot without a row"
        )
        return rows

    def at(self, slots: Ints) -> Predictions:
        """Restricted to `slots` (ascending)."""
        rows = self.rows(slots)
        return Predictions(
            slots,
            self.tokens[rows],
            self.confidence[rows],
            self.entropy[rows],
            self.margin[rows],
            self.gap[rows],
            self.logits[torch.from_numpy(rows).to(self.logits.device)],
        )

    def tokens_at(self, slots: Ints) -> Ints:
        """The tokens predicted at `slots`."""
        return self.tokens[self.rows(slots)]

    def confidence_at(self, slots: Ints) -> Floats:
        """The clean probabilities of the tokens predicted at `slots`."""
        return self.confidence[self.rows(slots)]

    def entropy_at(self, slots: Ints) -> Floats:
        """The entropies at `slots`, nats."""
        return self.entropy[self.rows(slots)]

    def probability(self, slots: Ints, tokens: Ints) -> Floats:
        """Of `tokens` at `slots`, under the clean distribution; where one is the prediction, as noted there."""
        rows = self.rows(slots)
        values = self.confidence[rows]
        for i in np.flatnonzero(self.tokens[rows] != tokens):
            values[i] = float(self.logits[int(rows[i])].double().softmax(-1)[int(tokens[i])])
        return values

    def known(self, slots: Ints) -> Flags:
        """Which of `slots` have a row."""
        return np.isin(slots, self.slots)


def uniform(seed: int, round_: int, length: int, purpose: int) -> Floats:
    """(length,) numbers in [0, 1) keyed by seed, round and purpose (2 to 7): a slot's number does not depend on what
    else is decoded.
    """
    return _stream(seed, (purpose << 61) + round_).random(length)


def _stream(seed: int, key: int) -> np.random.Generator:
    pair = np.array([seed & 0xFFFFFFFFFFFFFFFF, key], np.uint64)  # a list would become floats
    return np.random.Generator(np.random.Philox(key=pair))


def _gumbel_argmax(logits: torch.Tensor, slots: Ints, temperature: float, seed: int, round_: int) -> torch.Tensor:
    noise = np.empty(tuple(logits.shape))
    for row, slot in enumerate(slots):
        noise[row] = _stream(seed, (round_ << 32) | int(slot)).gumbel(size=logits.shape[1])
    return (logits.double() / temperature + torch.from_numpy(noise).to(logits.device)).argmax(-1)


def _ints(tensor: torch.Tensor) -> Ints:
    return tensor.cpu().numpy()


def _floats(tensor: torch.Tensor) -> Floats:
    return tensor.double().cpu().numpy()
