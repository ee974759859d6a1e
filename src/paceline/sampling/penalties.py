"""Repetition, frequency and presence penalties, from the counts along each row's own path.

Only tokens that occur are read and written: there is no (rows, vocabulary) matrix of counts.

Semantics and order are vLLM's: repetition over prompt and output (positive logits are divided, others multiplied), then
frequency times the count and presence once, both over the output only. Source: CTRL (arXiv:1909.05858) for the
repetition penalty.

Axes in this file: r = rows, m = tokens touched by the committed text, t = (row, token) pairs touched by paths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.sampling.logit_rules import LogitRule, Paths

_FIRST_CAPACITY = 64


class Penalties(LogitRule):
    """The penalties of one sequence and the counts that they need.

    Args:
        presence, frequency, repetition: as in SamplingParams; 0, 0 and 1 change nothing.
        prompt: the prompt's token ids, all below the vocabulary's size.
    """

    name = "penalties"
    needs_paths = True

    def __init__(self, presence: float, frequency: float, repetition: float, prompt: Sequence[int]) -> None:
        self.presence, self.frequency, self.repetition = presence, frequency, repetition
        touched = list(dict.fromkeys(prompt)) if repetition != 1.0 else []
        self._fixed = len(touched)
        self._slots = {token: slot for slot, token in enumerate(touched)}
        capacity = max(_FIRST_CAPACITY, 2 * len(touched))
        self._ids = np.zeros(capacity, np.int64)
        self._counts = np.zeros(capacity, np.float32)
        self._ids[: len(touched)] = touched

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            slot = self._slots.get(token)
            if slot is None:
                slot = self._append(token)
            self._counts[slot] += 1.0

    def rewind(self, tokens: Sequence[int]) -> None:
        """Slots vanish in the reverse order of their making."""
        for token in reversed(tokens):
            slot = self._slots[token]
            self._counts[slot] -= 1.0
            if slot >= self._fixed and self._counts[slot] == 0.0:
                del self._slots[token]

    def fork(self) -> Penalties:
        twin = Penalties(self.presence, self.frequency, self.repetition, ())
        twin._fixed, twin._slots = self._fixed, dict(self._slots)
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        return twin

    def _append(self, token: int) -> int:
        slot = len(self._slots)
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._slots[token] = slot
        self._ids[slot], self._counts[slot] = token, 0.0
        return slot

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        pairs = self._touched_by(paths)
        if pairs:
            rows, columns, counts = zip(*pairs, strict=True)
            at = torch.tensor([rows, columns], device=rows_rv.device)
            own_t = self._penalised(
                rows_rv[at[0], at[1]], torch.tensor(counts, dtype=torch.float32, device=rows_rv.device)
            )
        if size := len(self._slots):
            ids_m = torch.from_numpy(self._ids[:size]).to(rows_rv.device)
            counts_m = torch.from_numpy(self._counts[:size]).to(rows_rv.device)
            rows_rv.index_copy_(1, ids_m, self._penalised(rows_rv.index_select(1, ids_m), counts_m))
        if pairs:
            rows_rv[at[0], at[1]] = own_t

    def _touched_by(self, paths: Paths) -> list[tuple[int, int, float]]:
        """(row, token, count in output and path) for every token of every row's path."""
        pairs = []
        for row, path in enumerate(paths):
            for token in set(path):
                slot = self._slots.get(token)
                committed = 0.0 if slot is None else float(self._counts[slot])
                pairs.append((row, token, committed + path.count(token)))
        return pairs

    def _penalised(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Logits of tokens that occur in prompt or output, `counts` times in the output; one rounding per operation."""
        if self.repetition != 1.0:
            logits = torch.where(logits > 0, logits / self.repetition, logits * self.repetition)
        if self.frequency != 0.0:
            logits = logits - counts * self.frequency
        if self.presence != 0.0:
            logits = logits - (counts > 0) * self.presence
        return logits
