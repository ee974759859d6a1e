"""Toy denoisers: T1 (independent of the canvas), T2 (exact conditionals of an enumerated joint), T3 (permutations),
scripted ones whose word depends on how many slots are filled or on a neighbour, and T4, a tiny random transformer
in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Literal

import numpy as np
import torch

from paceline.checkpoints import targets
from paceline.models import Call, DenoiserSpec, LayerSpec, ModelSpec, RopeSpec
from paceline.models.runners import NativeDenoiser


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


WIDTH, HEADS, HEAD_DIM, INNER, LAYERS = 32, 4, 8, 48, 2


def t4(
    kind: Literal["full", "shifted", "block", "shifted block"] = "full",
    block_length: int = 4,
    vocab_size: int = 24,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float64,
    eos_token_ids: tuple[int, ...] = (),
) -> NativeDenoiser:
    """Two layers, 32 wide; the mask token is the last of the vocabulary. Logits spread by about 2, so that arguments of
    the maximum are clear and depend on the canvas.
    """
    spec = DenoiserSpec(
        model=ModelSpec(
            family="t4",
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            intermediate_size=INNER,
            layers=(LayerSpec(),) * LAYERS,
            ropes={"default": RopeSpec(theta=10000.0, dims=HEAD_DIM)},
            max_context=512,
            qk_norm="head" if kind == "block" else None,
            qkv_bias="shifted" in kind,
        ),
        mask_token_id=vocab_size - 1,
        eos_token_ids=eos_token_ids,
        block_length=block_length if "block" in kind else None,
        shifted="shifted" in kind,
    )
    return NativeDenoiser(spec, random_weights(spec, seed, dtype))


def random_weights(spec: DenoiserSpec, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Canonical weights of a dense model, the same values in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for target in targets(spec.model):
        drawn = torch.randn(target.shape, generator=generator, dtype=torch.float64)
        if target.name.endswith("norm.weight"):
            weights[target.name] = (1 + 0.2 * drawn).to(dtype)
        elif target.name == "embed.weight":
            weights[target.name] = (0.2 * drawn).to(dtype)
        elif target.name.endswith("bias"):
            weights[target.name] = (0.3 * drawn).to(dtype)
        else:
            weights[target.name] = (drawn * (4.0 / target.shape[-1]) ** 0.5).to(dtype)
    return weights
