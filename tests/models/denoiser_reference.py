"""A plain float64 transformer of slots, written without the package's own, that reads stored tensors by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Past = list[tuple[torch.Tensor, torch.Tensor]]

VOCAB, WIDTH, HEADS, KV, INNER, LAYERS = 40, 16, 4, 2, 24, 3
HEAD_DIM = 6  # not WIDTH / HEADS, where a family has the key


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def turned(x: torch.Tensor, slots: np.ndarray, theta: float, dims: int) -> torch.Tensor:
    """Rotary embedding as a product of complex numbers, (r, heads, d), the pairs being (i, i + dims / 2)."""
    frequencies = (1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)).double()
    angles = torch.from_numpy(slots).double()[:, None] * frequencies[None]
    pairs = (
        torch.complex(x[..., : dims // 2], x[..., dims // 2 : dims])
        * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.cat((pairs.real, pairs.imag, x[..., dims:]), -1)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


@dataclass
class Reference:
    """One layer's tensors are asked for by `at(layer, part)`; an MLP is a function of (layer, row)."""

    tensors: Tensors
    at: Callable[[int, str], torch.Tensor]
    mlp: Callable[[int, torch.Tensor], torch.Tensor]
    embed: str
    final: str
    head: str
    eps: float
    theta: float
    heads: int = HEADS
    kv: int = KV
    head_dim: int = HEAD_DIM
    rotated: int = HEAD_DIM
    qk_norm: bool = False
    bias: bool = False
    shifted: bool = False
    mask_token: int = VOCAB - 1
    stored: Past = field(default_factory=list)

    def __call__(self, ids: np.ndarray, slots: np.ndarray, seen: np.ndarray, past: Past | None = None) -> torch.Tensor:
        """Logits (q, v), `seen` (q, r + q); `stored` then holds the keys and values of the rows, layer by layer."""
        x = self.tensors[self.embed][torch.from_numpy(ids)]
        self.stored = []
        for layer in range(LAYERS):
            x = x + self._attention(layer, x, slots, torch.from_numpy(seen), past[layer] if past else None)
            normed = rms(x, self.at(layer, "mlp_norm"), self.eps)
            x = x + torch.stack([self.mlp(layer, row) for row in normed])
        logits = rms(x, self.tensors[self.final], self.eps) @ self.tensors[self.head].T
        logits[:, self.mask_token] = -torch.inf
        return self._shift(logits, slots) if self.shifted else logits

    def _attention(
        self,
        layer: int,
        x: torch.Tensor,
        slots: np.ndarray,
        seen: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        h = rms(x, self.at(layer, "attn_norm"), self.eps)
        parts = []
        for name, count in (("q", self.heads), ("k", self.kv), ("v", self.kv)):
            part = h @ self.at(layer, name).T
            if self.bias:
                part = part + self.at(layer, f"{name}_bias")
            part = part.view(len(x), count, self.head_dim)
            if self.qk_norm and name != "v":
                part = rms(part, self.at(layer, f"{name}_norm"), self.eps)
            parts.append(part if name == "v" else turned(part, slots, self.theta, self.rotated))
        q, k, v = parts
        self.stored.append((k, v))
        if past is not None:
            k, v = torch.cat((past[0], k)), torch.cat((past[1], v))
        out = []
        for head in range(self.heads):
            mine = head // (self.heads // self.kv)
            scores = q[:, head] @ k[:, mine].T / self.head_dim**0.5
            shares = torch.exp(scores - scores.max()) * seen
            out.append(shares / shares.sum(1, keepdim=True) @ v[:, mine])
        return torch.cat(out, 1) @ self.at(layer, "o").T

    @staticmethod
    def _shift(logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """For texts whose rows stand in the order of their slots, from 0 on."""
        assert (slots == np.arange(len(slots))).all()
        return torch.cat((logits[:1], logits[:-1]))


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return down @ (silu(gate @ x) * (up @ x))
