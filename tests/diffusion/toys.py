"""Toy denoisers: T1 (independent of the canvas), T2 (exact conditionals of an enumerated joint), T3 (permutations)."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import torch

from paceline.models.denoiser import Call


class Toy:
    attention = "full"
    block_length = None
    needs_left = False
    eos_token_ids: tuple[int, ...] = ()
    max_length = 4096

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.mask_token_id = vocab_size - 1
        self.calls = 0

    def new_cache(self, length: int) -> None:
        del length

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        self.calls += 1
        outputs = []
        for call in calls:
            logits = torch.from_numpy(np.array(self.rows(call.ids, call.slots), np.float64))
            logits[:, self.mask_token_id] = -torch.inf
            outputs.append(logits if call.wanted is None else logits[call.wanted])
        return outputs


class Independent(Toy):
    """T1: slot i predicts token `tokens[i]` with probability `confidence[i]`, whatever the canvas holds."""

    def __init__(
        self, confidence: Sequence[float], vocab_size: int = 8, tokens: Sequence[int] | None = None, prompt: int = 0
    ) -> None:
        super().__init__(vocab_size)
        c = np.asarray(confidence, float)
        n = c.size
        p = np.repeat(((1 - c) / (vocab_size - 2))[:, None], vocab_size, 1)
        p[np.arange(n), list(tokens or np.arange(n) % 3)] = c
        self.table = np.log(p)
        self.prompt = prompt

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        table = np.concatenate([np.zeros((self.prompt, self.vocab_size)), self.table])
        return table[slots]


class Joint(Toy):
    """T2: the exact conditional of every slot given those that are filled, from weights over all strings of V^G."""

    def __init__(self, weights: np.ndarray, prompt: int = 0) -> None:
        super().__init__(weights.shape[0] + 1)
        self.weights = weights / weights.sum()
        self.prompt = prompt

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        text = ids[np.argsort(slots)][self.prompt :]
        rows = np.zeros((slots.size, self.vocab_size))
        with np.errstate(divide="ignore"):
            for row, slot in enumerate(slots):
                if slot < self.prompt:
                    continue
                i = slot - self.prompt
                given = tuple(slice(None) if t == self.mask_token_id or j == i else int(t) for j, t in enumerate(text))
                kept = [j for j, g in enumerate(given) if isinstance(g, slice)]
                p = self.weights[given].sum(axis=tuple(k for k, j in enumerate(kept) if j != i))
                rows[row, :-1] = np.log(p / max(p.sum(), 1e-300))
        return rows


def permutation(n: int) -> Joint:
    """T3: uniform over the orderings of n symbols."""
    weights = np.zeros((n,) * n)
    for order in permutations(range(n)):
        weights[order] = 1
    return Joint(weights)
