"""What requests teach a drafter: their tokens, the states of the target that it read, and the target's likeliest tokens
where a draft was rejected. All of it is in memory, by tenant, within a bound.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

LEAST: Final = 4
"""Tokens of a request from which something can be learned."""


class TrafficRecord:
    """Keeps one request while it runs, and afterwards.

    Args:
        text: so far, its root included; position `start` of it is the first token that is kept.
        prompt_length: tokens of it that the target did not write.
        states: (n, width) of the target, of the first n tokens that are kept; None where the drafter reads none.
        most: tokens that are kept; what comes later is not.
    Attributes:
        tokens: kept ones. first: index in them of the first one that the target wrote.
        at: indices in them of tokens that the target wrote in place of a draft.
        learned: some round has learned it.
    """

    __slots__ = ("_ids", "_logits", "_most", "_states", "at", "bytes", "first", "learned", "start", "tokens")

    def __init__(self, text: Sequence[int], start: int, prompt_length: int, states: Tensor | None, most: int) -> None:
        self._most, self.learned, self.bytes = most, False, 0
        self._begin(text, start, max(1, prompt_length - start), states)

    def _begin(self, text: Sequence[int], start: int, first: int, states: Tensor | None) -> None:
        self.start, self.first, self.tokens = start, first, list(text[start:])
        self._states = None if states is None else [states]
        self.at: list[int] = []
        self._ids: list[Tensor] = []
        self._logits: list[Tensor] = []

    @property
    def enough(self) -> bool:
        """Whether there is something to learn in it."""
        return len(self.tokens) - self.first >= LEAST

    def grow(self, text: Sequence[int], count: int, states: Tensor | None) -> bool:
        """Take in the last `count` tokens of a text; whether there was room for them.

        Args:
            states: (count, width) of the tokens before each; where those of earlier ones were missed, the record begins
                anew.
        """
        before = len(text) - count
        if len(self.tokens) >= self._most:
            return False
        if self._states is None:
            self.tokens += text[self.start + len(self.tokens) :]
        elif states is None:
            return False
        elif before != self.start + len(self.tokens):
            self._begin(text, before - 1, 1, states)
        else:
            self.tokens += text[before:]
            self._states.append(states)
        return True

    def reject(self, row_v: Tensor, count: int) -> None:
        """The last token was written in place of a draft.

        Args:
            row_v: (v,) raw logits that it was taken from. count: how many of the largest are kept.
        """
        logits, ids = row_v.topk(min(count, len(row_v)))
        self.at.append(len(self.tokens) - 1)
        self._ids.append(ids)
        self._logits.append(logits)

    def close(self) -> None:
        """The request has ended: nothing more comes."""
        parts = [*self._ids, *self._logits, *(self._states or ())]
        self.bytes = 8 * len(self.tokens) + sum(part.numel() * part.element_size() for part in parts)

    def tensors(self) -> dict[str, Tensor]:
        """On the CPU: tokens (t,), at (m,), ids (m, k), logits (m, k), and states (t - 1 or fewer, width)."""
        found = {"tokens": torch.tensor(self.tokens), "at": torch.tensor(self.at, dtype=torch.int64)}
        if self.at:
            found |= {"ids": torch.stack(self._ids), "logits": torch.stack(self._logits)}
        if self._states is not None:
            found["states"] = torch.cat(self._states)
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


class TrafficBuffer:
    """Keeps records of ended requests by tenant, the newest last.

    Args:
        most_bytes: of all records together; the oldest one of the tenant who has most goes first.
    Attributes:
        bytes: of all records.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self.bytes = most_bytes, 0
        self._of: dict[str, deque[TrafficRecord]] = {}
        self._held: dict[str, int] = {}

    def of(self, tenant: str) -> Sequence[TrafficRecord]:
        """The records of a tenant, the newest last."""
        return self._of.get(tenant, ())

    def add(self, tenant: str, record: TrafficRecord) -> None:
        """Keep a record, and drop others until there is room for it."""
        self._of.setdefault(tenant, deque()).append(record)
        self._add(tenant, record.bytes)
        while self.bytes > self._most:
            largest = max(self._held, key=lambda name: self._held[name])
            self._add(largest, -self._of[largest].popleft().bytes)

    def forget(self, tenant: str) -> None:
        """Drop all records of a tenant."""
        if self._of.pop(tenant, None) is not None:
            self.bytes -= self._held.pop(tenant)

    def parts(self, tenant: str, steps: int, held_out: int) -> tuple[list[TrafficRecord], list[TrafficRecord]]:
        """What a round learns of a tenant, one record for each step, and the newest ones, which it does not.

        Those that no round has learned come first, then others by chance, since what was learned is forgotten where it
        does not come again.
        """
        records = list(self.of(tenant))
        apart = min(held_out, len(records) // 2)
        held, rest = records[len(records) - apart :], records[: len(records) - apart]
        new, old = ([one for one in rest if one.learned is learned] for learned in (False, True))
        chance = random.Random(len(records))
        chosen = new[-steps:]
        chosen += chance.sample(old, min(len(old), steps - len(chosen)))
        while rest and len(chosen) < steps:
            chosen += chance.sample(rest, min(len(rest), steps - len(chosen)))
        return chosen, held

    def _add(self, tenant: str, count: int) -> None:
        self._held[tenant] = self._held.get(tenant, 0) + count
        self.bytes += count
