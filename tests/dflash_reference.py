"""DFlash and DSpark networks in plain PyTorch, written from the papers alone: one text, no cache, one block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from eagle_reference import norm
from torch import Tensor
from torch.nn import functional as F

from paceline.models.heads import HeadConfig

Weights = Mapping[str, Tensor]


class Tables(NamedTuple):
    """Of the target: embeddings (vocabulary, hidden), and rows (n, hidden) of the head for what can be drafted."""

    embedding: Tensor
    head: Tensor


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """(heads, n, dim) turned by positions (n,), pairs being (i, i + dim / 2)."""
    dim = x.shape[-1]
    angle = positions[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin, (a, b) = angle.cos(), angle.sin(), x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def block_states(
    config: HeadConfig, weights: Weights, embedded: Tensor, states: Tensor, *, norm_context: bool = False
) -> Tensor:
    """(block, hidden) states behind the final norm.

    Args:
        embedded: (block, hidden) of the block. states: (t, taps * hidden) of the target's committed tokens.
        norm_context: wrong: what is made of the states goes through a layer's first norm, too.
    """
    eps, theta = config.layer.get("rms_norm_eps", 1e-6), config.layer.get("rope_theta", 10000.0)
    context = norm(states @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    t, size, dim = len(context), len(embedded), config.head_dim
    groups = config.layer["num_attention_heads"] // config.kv_heads
    positions, x = torch.arange(t + size), embedded
    seen = torch.ones(size, t + size, dtype=torch.bool)
    if config.causal:
        seen[:, t:] = seen[:, t:].tril()
    for layer in range(config.num_layers):
        at, first = f"layers.{layer}.self_attn", weights[f"layers.{layer}.input_layernorm.weight"]
        y = norm(x, first, eps)
        read = torch.cat((norm(context, first, eps) if norm_context else context, y))
        q, k, v = (
            (rows @ weights[f"{at}.{name}_proj.weight"].T).view(len(rows), -1, dim).transpose(0, 1)
            for name, rows in (("q", y), ("k", read), ("v", read))
        )
        q, k = (norm(heads, weights[f"{at}.{name}_norm.weight"], eps) for heads, name in ((q, "q"), (k, "k")))
        q, k = turned(q, positions[t:], theta), turned(k, positions, theta).repeat_interleave(groups, 0)
        shares = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = (shares @ v.repeat_interleave(groups, 0)).transpose(0, 1).reshape(size, -1)
        x = x + mixed @ weights[f"{at}.o_proj.weight"].T
        y = norm(x, weights[f"layers.{layer}.post_attention_layernorm.weight"], eps)
        gate, up, down = (weights[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x, weights["norm.weight"], eps)


def drafted_rows(config: HeadConfig, weights: Weights, tables: Tables, text: Sequence[int], states: Tensor) -> Tensor:
    """(k, hidden) states of the rows that draft behind a text, whose tokens but the last have states (t, ...)."""
    block = [text[-1], *[config.mask_token_id] * ((config.block_size or 0) - 1)]
    after = block_states(config, weights, tables.embedding[torch.tensor(block)], states)
    return after if config.sample_from_anchor else after[1:]


def logits_behind(
    config: HeadConfig, weights: Weights, tables: Tables, rows: Tensor, path: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(n,) logits and () confidence of the place behind a path, the text's last token and what was drafted.

    Args:
        rows: of `drafted_rows`.
    """
    base, rank = rows[len(path) - 1] @ tables.head.T, config.markov_rank
    confidence, h = torch.ones(()), rows[len(path) - 1]
    before = weights["markov_head.markov_w1.weight"][path[-1]] if rank else h[:0]
    if config.enable_confidence_head:
        read = torch.cat((h, before)) if config.confidence_head_with_markov else h
        proj = weights["confidence_head.proj.weight"][0] @ read
        confidence = torch.sigmoid(proj + weights.get("confidence_head.proj.bias", torch.zeros(1))[0])
    if not rank:
        return base, confidence
    out = weights["markov_head.markov_w2.weight"]
    if config.markov_head_type == "gated":
        gate = weights["markov_head.gate_proj.weight"] @ torch.cat((h, before))
        before = torch.sigmoid(gate + weights.get("markov_head.gate_proj.bias", torch.zeros(rank))) * before
    if config.markov_head_type == "rnn":
        state = torch.zeros(rank)
        for row, token in zip(rows, path, strict=False):
            z = torch.cat((state, weights["markov_head.markov_w1.weight"][token], row))
            made = weights["markov_head.joint_proj.weight"] @ z
            g, c, o = (made + weights.get("markov_head.joint_proj.bias", torch.zeros(3 * rank))).chunk(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            before = torch.tanh(o)
    return base + out @ before, confidence
