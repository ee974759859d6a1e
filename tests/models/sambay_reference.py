"""SambaY as its formulas say it, token by token: what transformers lacks.

With L layers, layer i < L / 2 is a Mamba mixer (i even) or attention to a window (i odd). Layer L / 2 is a Mamba mixer
whose reading m, before its gate, is the memory of this token; layer L / 2 + 1 attends to the whole text. Behind these,
even layers are out(silu(in(x)) * m), odd ones attend to the keys and values of layer L / 2 + 1. An MLP follows each.
Attention is differential. Sources: arXiv:2507.06607, arXiv:2410.05258; names of tensors are those of
Phi-4-mini-flash-reasoning's files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput


@dataclass
class Output(ModelOutput):
    logits: Any = None
    cache: Any = None


class Phi4FlashConfig(PretrainedConfig):
    model_type = "phi4flash"


class Mamba(nn.Module):
    def __init__(self, config: Any, *, publishes: bool) -> None:
        super().__init__()
        d, self.inner, self.publishes = config.hidden_size, config.mamba_expand * config.hidden_size, publishes
        self.state, self.rank, taps = config.mamba_d_state, math.ceil(d / 16), config.mamba_d_conv
        self.in_proj, self.out_proj = nn.Linear(d, 2 * self.inner, bias=False), nn.Linear(self.inner, d, bias=False)
        self.conv1d = nn.Conv1d(self.inner, self.inner, taps, groups=self.inner)
        self.x_proj = nn.Linear(self.inner, self.rank + 2 * self.state, bias=False)
        self.dt_proj = nn.Linear(self.rank, self.inner)
        self.A_log, self.D = nn.Parameter(torch.zeros(self.inner, self.state)), nn.Parameter(torch.ones(self.inner))

    def step(self, x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
        into, gate = self.in_proj(x).chunk(2)
        taps = self.conv1d.weight.shape[-1]
        columns = [*kept.get("columns", [torch.zeros_like(into)] * (taps - 1)), into]
        kept["columns"] = columns[1:]
        into = F.silu((torch.stack(columns, -1) * self.conv1d.weight[:, 0]).sum(-1) + self.conv1d.bias)
        low, b, c = self.x_proj(into).split([self.rank, self.state, self.state])
        step = F.softplus(self.dt_proj(low))[:, None]
        before = kept.get("state", torch.zeros(self.inner, self.state, dtype=x.dtype))
        kept["state"] = (step * -self.A_log.exp()).exp() * before + step * b * into[:, None]
        read = kept["state"] @ c + self.D * into
        if self.publishes:
            kept["memory"] = read
        return self.out_proj(read * F.silu(gate))


class GatedMemory(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.mamba_expand * config.hidden_size
        self.in_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def step(self, x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
        return self.out_proj(F.silu(self.in_proj(x)) * kept["memory"])


class Lambdas(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("q1", "k1", "q2", "k2"):
            self.register_parameter(f"lambda_{name}", nn.Parameter(torch.zeros(size)))
        self.subln = nn.RMSNorm(2 * size, 1e-5)


class Attention(nn.Module):
    def __init__(self, config: Any, layer: int, window: int | None, *, own_keys: bool) -> None:
        super().__init__()
        d, self.heads, self.kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.size, self.window, self.own_keys = d // self.heads, window, own_keys
        self.Wqkv = nn.Linear(d, d + (2 * self.kv_heads * self.size if own_keys else 0))
        self.out_proj, self.inner_cross_attn = nn.Linear(d, d), Lambdas(self.size)
        self.start = 0.8 - 0.6 * math.exp(-0.3 * layer)

    def step(self, x: torch.Tensor, kept: dict[str, Any]) -> torch.Tensor:
        """`kept["keys"]` and `kept["values"]` are lists of tokens' (kv heads, size)."""
        projected = self.Wqkv(x).unflatten(0, (-1, self.size))
        if self.own_keys:
            kept.setdefault("keys", []).append(projected[self.heads : self.heads + self.kv_heads])
            kept.setdefault("values", []).append(projected[self.heads + self.kv_heads :])
        first = 0 if self.window is None else max(0, len(kept["keys"]) - self.window)
        keys, values = (torch.stack(kept[name][first:], 1) for name in ("keys", "values"))
        both = [self.difference(projected, keys, values, pair) for pair in range(self.heads // 2)]
        return self.out_proj(torch.cat(both))

    def difference(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pair: int) -> torch.Tensor:
        """What a pair of heads gives, of keys and values (kv heads, tokens, size)."""
        inner, at = self.inner_cross_attn, 2 * (pair // (self.heads // self.kv_heads))
        whole = torch.cat([values[at], values[at + 1]], -1)
        one, two = (
            (keys[at + half] @ queries[2 * pair + half] * self.size**-0.5).softmax(0) @ whole for half in (0, 1)
        )
        grown, shrunk = (inner.lambda_q1 @ inner.lambda_k1).exp(), (inner.lambda_q2 @ inner.lambda_k2).exp()
        return inner.subln(one - (grown - shrunk + self.start) * two) * (1 - self.start)


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fc1(x).chunk(2)
        return self.fc2(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        half = config.num_hidden_layers // 2
        if layer % 2:
            window = config.sliding_window if layer < half else None
            self.attn: Any = Attention(config, layer, window, own_keys=layer < half + 2)
        else:
            self.attn = GatedMemory(config) if layer > half else Mamba(config, publishes=layer == half)
        self.reads = half if layer > half and not layer % 2 else half + 1 if layer > half + 1 else layer
        self.mlp = MLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def step(self, x: torch.Tensor, kept: list[dict[str, Any]]) -> torch.Tensor:
        """x behind the layer, of what layers keep."""
        x = x + self.attn.step(self.input_layernorm(x), kept[self.reads])
        return x + self.mlp(self.post_attention_layernorm(x))


class Phi4FlashForCausalLM(PreTrainedModel):
    config_class = Phi4FlashConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.model.final_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def forward(self, tokens: torch.Tensor, *, cache: Any = None, use_cache: bool = False) -> Output:
        """Of one text (1, tokens), in float64 whatever the weights are in; its cache is what each layer keeps."""
        dtype, kept = next(self.parameters()).dtype, cache
        self.double()
        if kept is None:
            kept = [{} for _ in self.model.layers]
        logits = torch.stack([self.token(int(token), kept) for token in tokens[0]])
        self.to(dtype)
        return Output(logits=logits[None].to(dtype), cache=kept if use_cache else None)

    def token(self, token: int, kept: list[dict[str, Any]]) -> torch.Tensor:
        """Logits behind one more token."""
        x = self.model.embed_tokens.weight[token]
        for layer in self.model.layers:
            x = layer.step(x, kept)
        return self.model.final_layernorm(x) @ self.model.embed_tokens.weight.t()
