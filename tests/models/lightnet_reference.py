"""LightNet as its formula says it, without a state: what transformers lacks.

For every dimension m of a head's keys, a token reads the values so far, averaged by softmax over e^(logit_m).
Source: arXiv:2405.21022; names of tensors are those of the package flash-linear-attention.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel


class LightNetConfig(PretrainedConfig):
    model_type = "lightnet"


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        d, self.heads = config.hidden_size, config.hidden_size // config.expand_ratio
        keys = self.heads * config.expand_ratio
        self.q_proj, self.k_proj = nn.Linear(d, keys, bias=False), nn.Linear(d, keys, bias=False)
        self.v_proj, self.o_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        rank = config.gate_low_rank_dim
        self.g_proj = nn.Sequential(nn.Linear(d, rank, bias=False), nn.Linear(rank, d, bias=False))
        self.g_norm = nn.RMSNorm(d, config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (proj(x).unflatten(-1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        rows = x.shape[1]
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()[None, :, :, None, None]
        shares = k[:, None].expand(-1, rows, -1, -1, -1).masked_fill(~seen, -torch.inf).softmax(2)
        read = torch.einsum("bthm,btjhm,bjhv->bthv", F.silu(q), shares, v) * q.shape[-1] ** -0.5
        return self.o_proj(self.g_norm(read.flatten(2)) * F.silu(self.g_proj(x)))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attn, self.mlp = Attention(config), MLP(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LightNetForCausalLM(PreTrainedModel):
    config_class = LightNetConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, tokens: torch.Tensor) -> Any:
        """In float64 whatever the weights are in."""
        kept = next(self.parameters()).dtype
        self.double()
        x = self.model.embeddings(tokens)
        for layer in self.model.layers:
            x = layer(x)
        logits = self.lm_head(self.model.norm(x)).to(kept)
        self.to(kept)
        return SimpleNamespace(logits=logits)
