"""Random weights made on the device, and both engines around them without a second copy of most."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from paceline import LLM
from paceline.assembly import DraftModels
from paceline.bench import BUNDLED_TARGET, DEVIATION
from paceline.checkpoints import GenerationDefaults, Tokenizer, targets
from paceline.models import ModelSpec, Runner
from paceline.models.runners import NativeRunner

EMBEDDING = 16.0
"""Deviation of the embedding: the layers of the 8B shape add about as much."""

SLOTS = 8192

Weights = dict[str, torch.Tensor]


def random_weights(spec: ModelSpec, device: torch.device, seed: int = 0) -> Weights:
    """Canonical weights in bfloat16 under which a token decides the next one: t + 1, or t with its last bit turned if
    tied.
    """
    generator, weights = torch.Generator(device).manual_seed(seed), {}
    for target in targets(spec):
        out = torch.empty(target.shape, dtype=torch.bfloat16, device=device)
        deviation = EMBEDDING if target.name == "embed.weight" else DEVIATION
        weights[target.name] = out.fill_(1.0) if out.dim() == 1 else out.normal_(0.0, deviation, generator=generator)
    embedding = weights["embed.weight"]
    if spec.tied:
        signs = weights["final_norm.weight"]
        signs.bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)
        embedding[1::2] = embedding[0::2] * signs
    else:
        weights["head.weight"].copy_(embedding.roll(1, 0))
    return weights


def transformers_names(spec: ModelSpec, weights: Weights) -> Weights:
    """The same weights as views, under the names of transformers' Llama."""
    q, k = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    head = weights["embed.weight" if spec.tied else "head.weight"]
    found = {"model.embed_tokens.weight": weights["embed.weight"], "model.norm.weight": weights["final_norm.weight"]}
    found["lm_head.weight"] = head
    for index in range(spec.num_layers):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        parts = weights[f"{ours}qkv.weight"].split([q, k, k])
        found |= {f"{theirs}self_attn.{name}_proj.weight": part for name, part in zip("qkv", parts, strict=True)}
        gate, up = weights[f"{ours}gate_up.weight"].chunk(2)
        found |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
        found[f"{theirs}self_attn.o_proj.weight"] = weights[f"{ours}o.weight"]
        found[f"{theirs}mlp.down_proj.weight"] = weights[f"{ours}down.weight"]
        found[f"{theirs}input_layernorm.weight"] = weights[f"{ours}attn_norm.weight"]
        found[f"{theirs}post_attention_layernorm.weight"] = weights[f"{ours}mlp_norm.weight"]
    return found


def open_transformers(config: Any, weights: Weights, device: torch.device) -> Any:
    """transformers' Llama around the weights as they are, without a copy."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model.requires_grad_(False).eval()


class GivenLLM(LLM):
    """An LLM around weights at hand; its tokenizer is the bundled one, and its texts mean nothing."""

    def __init__(self, spec: ModelSpec, weights: Weights, *, name: str, device: str, most: int) -> None:
        self._spec, self._weights = spec, weights
        super().__init__(name, speculative_config=None, device=device, max_num_seqs=most, enable_prefix_caching=False)

    def _load(
        self, name: str, tokenizer: str | Path | None, revision: str | None, gguf_file: str | None, *, profile: bool
    ) -> None:
        self.folder, self.defaults = BUNDLED_TARGET, GenerationDefaults()
        self.tokenizer = Tokenizer.load(BUNDLED_TARGET)
        device, spec = torch.device(self.config.device), self._spec
        runner = NativeRunner(spec, self._weights, name=name, device=device, dtype=torch.bfloat16, cache_slots=SLOTS)
        self.runner = cast(Runner, runner)
        self.models = DraftModels(self.folder, self.tokenizer, self.runner.info, self.config)
        self._exact = []
        self._assemble()
