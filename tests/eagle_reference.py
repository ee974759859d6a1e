"""EAGLE heads in plain PyTorch, written from the papers alone: one text, no cache, no tree."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from paceline.models.heads import HeadConfig

Weights = Mapping[str, torch.Tensor]
ON_STATE = ("eagle", "fspad", "dovetail")
"""Methods that make the state behind the target's final norm."""


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """(heads, n, dim) turned by position, pairs being (i, i + dim / 2)."""
    n, dim = x.shape[-2:]
    angle = torch.arange(n)[:, None] * theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(
    config: HeadConfig, weights: Weights, x: torch.Tensor, layer: int = 0, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """(n, hidden) of inputs (n, hidden or 2 hidden), which see those before them, or what is `seen` (n, n)."""
    n, dim, groups = len(x), config.head_dim, config.layer["num_attention_heads"] // config.kv_heads
    at, theta = f"layers.{layer}.self_attn", config.layer.get("rope_theta", 10000.0)
    q, k, v = ((x @ weights[f"{at}.{name}_proj.weight"].T).view(n, -1, dim).transpose(0, 1) for name in "qkv")
    if f"{at}.q_norm.weight" in weights:
        eps = config.layer.get("rms_norm_eps", 1e-6)
        q, k = (norm(x, weights[f"{at}.{name}_norm.weight"], eps) for x, name in ((q, "q"), (k, "k")))
    q, k, v = rotated(q, theta), rotated(k, theta).repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    seen = torch.ones(n, n, dtype=torch.bool).tril() if seen is None else seen
    shares = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    return (shares @ v).transpose(0, 1).reshape(n, -1) @ weights[f"{at}.o_proj.weight"].T


def mlp(config: HeadConfig, weights: Weights, x: torch.Tensor, layer: int = 0) -> torch.Tensor:
    """(n, hidden) what the second half of the layer adds to x (n, hidden)."""
    h = norm(x, weights[f"layers.{layer}.post_attention_layernorm.weight"], config.layer.get("rms_norm_eps", 1e-6))
    gate, up, down = (weights[f"layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(h @ gate.T) * (h @ up.T)) @ down.T


def sampled(weights: Weights, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """(n, hidden) states as FSPAD's sampler makes them of the tokens."""
    gate, up, down = (weights[f"sampler.{name}.weight"] for name in ("gate", "up", "down"))
    return states + (F.silu(embedded @ gate.T) * (states @ up.T)) @ down.T


def forward(
    config: HeadConfig, weights: Weights, head: torch.Tensor, embedded: torch.Tensor, states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, v) and states (n, hidden) behind each input.

    Args:
        head: (v, hidden). embedded: (n, hidden) of the tokens. states: (n, hidden) of the tokens before, joined.
    """
    eps = config.layer.get("rms_norm_eps", 1e-6)
    if config.method in ("eagle", "fspad"):
        if config.method == "fspad":
            states = sampled(weights, embedded, states)
        x = F.linear(torch.cat((embedded, states), 1), weights["fc.weight"])
        x = x + attention(config, weights, x)
    elif config.method == "dovetail":
        x = fused(weights, embedded, states, eps)
        x = x + attention(config, weights, norm(x, weights["layers.0.input_layernorm.weight"], eps))
    else:
        both = (
            norm(embedded, weights["layers.0.input_layernorm.weight"], eps),
            norm(states, weights["layers.0.hidden_norm.weight"], eps),
        )
        x = (both[1] if config.norm_before_residual else states) + attention(config, weights, torch.cat(both, 1))
    x = x + mlp(config, weights, x)
    for layer in range(1, config.num_layers):
        h = norm(x, weights[f"layers.{layer}.input_layernorm.weight"], eps)
        x = x + attention(config, weights, h, layer)
        x = x + mlp(config, weights, x, layer)
    made = x + x @ weights["feature_proj.weight"].T if config.method == "fspad" else x
    return (x if config.method in ON_STATE else norm(x, weights["norm.weight"], eps)) @ head.T, made


def fused(weights: Weights, embedded: torch.Tensor, states: torch.Tensor, eps: float) -> torch.Tensor:
    """(n, hidden) what Dovetail's gate makes of embeddings and states (n, hidden)."""
    h1 = states @ weights["fusion.state.weight"].T
    h2 = F.silu(norm(embedded, weights["fusion.norm.weight"], eps) @ weights["fusion.token.weight"].T)
    z = torch.sigmoid(torch.cat((h1, h2), 1) @ weights["fusion.gate.weight"].T)
    return z * h1 + (1 - z) * h2


def joined(config: HeadConfig, weights: Weights, states: torch.Tensor) -> torch.Tensor:
    """(n, hidden) what the layer takes for the target's states (n, taps * hidden)."""
    if config.method in ON_STATE:
        return states
    eps = config.layer.get("rms_norm_eps", 1e-6)
    if "input_norm.weight" in weights:
        states = norm(states, weights["input_norm.weight"], eps)
    if "fc_norm.0.weight" in weights:
        parts = enumerate(states.chunk(len(config.taps), 1))
        states = torch.cat([norm(part, weights[f"fc_norm.{tap}.weight"], eps) for tap, part in parts], 1)
    return states @ weights["fc.weight"].T


def ahead(
    config: HeadConfig,
    weights: Weights,
    tables: tuple[torch.Tensor, torch.Tensor],
    known: tuple[list[int], torch.Tensor],
    count: int,
) -> torch.Tensor:
    """(count, v) logits of a P-EAGLE head for the next tokens, from count - 1 masks behind the text; as of `after`."""
    embedding, head = tables
    tokens, states = known
    assert config.mask_token_id is not None
    unknown = joined(config, weights, weights["mask_hidden"].view(1, -1)).expand(count - 1, -1)
    tokens = [*tokens, *[config.mask_token_id] * (count - 1)]
    return forward(config, weights, head, embedding[tokens], torch.cat((states, unknown)))[0][-count:]


def after(
    config: HeadConfig,
    weights: Weights,
    tables: tuple[torch.Tensor, torch.Tensor],
    known: tuple[list[int], torch.Tensor],
    drafted: tuple[int, ...],
) -> torch.Tensor:
    """(v,) logits behind drafted tokens: each goes with the state that the head made of the one before it.

    Args:
        tables: the embedding (v, hidden) and the head. known: tokens 1 .. n of a text and the joined states of tokens
            0 .. n - 1.
    """
    embedding, head = tables
    tokens, states = known
    logits, made = forward(config, weights, head, embedding[tokens], states)
    for token in drafted:
        tokens, states = [*tokens, token], torch.cat((states, made[-1:]))
        logits, made = forward(config, weights, head, embedding[tokens], states)
    return logits[-1]
