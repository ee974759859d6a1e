"""Toys whose word depends on how many slots are filled, or on one neighbour: for rules that look at more than one
round.
"""

from collections.abc import Callable

import numpy as np

from tests.diffusion.toys import Independent, Toy


class Scripted(Toy):
    """`script(filled, slot)` gives the token that a slot predicts, and how surely, once `filled` slots hold a token."""

    def __init__(self, script: Callable[[int, int], tuple[int, float]], vocab_size: int = 8) -> None:
        super().__init__(vocab_size)
        self.script = script

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        filled = int((ids != self.mask_token_id).sum())
        rows = np.empty((slots.size, self.vocab_size))
        for row, slot in enumerate(slots):
            token, confidence = self.script(filled, int(slot))
            rows[row] = (1 - confidence) / (self.vocab_size - 2)
            rows[row, token] = confidence
        return np.log(rows)


class Copier(Independent):
    """Predicts what it sees at filled slots, and T1 elsewhere."""

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        rows = super().rows(ids, slots)
        filled = ids != self.mask_token_id
        rows[filled] = np.log(1e-6)
        rows[filled, ids[filled]] = np.log(0.99)
        return rows


class Oscillator(Toy):
    """Two slots; each predicts the other's token, inverted."""

    def __init__(self) -> None:
        super().__init__(3)

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        rows = np.full((2, 3), np.log(0.2))
        for slot in (0, 1):
            other = int(ids[1 - slot])
            rows[slot, 0 if other == self.mask_token_id else 1 - other] = np.log(0.8)
        return rows[slots]


def with_ends(confidence: list[float], tokens: list[int], end: int) -> Independent:
    """T1 with an end of text."""
    toy = Independent(confidence, tokens=tokens)
    toy.eos_token_ids = (end,)
    return toy


def modes(copies: int, length: int) -> np.ndarray:
    """Weights of independent copies of a text that is all 0 or all 1."""
    one = np.zeros((2,) * length)
    one[(0,) * length] = one[(1,) * length] = 0.5
    weights = one
    for _ in range(copies - 1):
        weights = np.multiply.outer(weights, one)
    return weights
