"""Tiny random Llamas: the transformers model as oracle and our runner over the same weights, mapped by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.models import LayerSpec, ModelSpec, RopeSpec
from paceline.models.runners import NativeRunner
from paceline.tree import EMPTY_TREE, TokenTree

CPU = torch.device("cpu")


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | changes))).eval()


def spec_of(config: LlamaConfig) -> ModelSpec:
    return ModelSpec(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        layers=(LayerSpec(),) * config.num_hidden_layers,
        ropes={"default": RopeSpec(theta=config.rope_parameters["rope_theta"], dims=config.head_dim)},
        max_context=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
    )


def weights_of(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    weights = {"embed.weight": state["model.embed_tokens.weight"], "final_norm.weight": state["model.norm.weight"]}
    if not model.config.tie_word_embeddings:
        weights["head.weight"] = state["lm_head.weight"]
    for i in range(model.config.num_hidden_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        weights[f"{ours}attn_norm.weight"] = state[f"{theirs}input_layernorm.weight"]
        weights[f"{ours}mlp_norm.weight"] = state[f"{theirs}post_attention_layernorm.weight"]
        weights[f"{ours}qkv.weight"] = torch.cat([state[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv"])
        weights[f"{ours}o.weight"] = state[f"{theirs}self_attn.o_proj.weight"]
        weights[f"{ours}gate_up.weight"] = torch.cat([state[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        weights[f"{ours}down.weight"] = state[f"{theirs}mlp.down_proj.weight"]
    return weights


def runner_of(
    model: LlamaForCausalLM, *, windows: tuple[int | None, ...] = (), spec_changes: Any = None, **kwargs: Any
) -> NativeRunner:
    """Our runner over the weights of `model`; `windows` repeats over the layers, `spec_changes` replaces fields of the
    spec.
    """
    spec = spec_of(model.config)
    if spec_changes:
        spec = replace(spec, **spec_changes)
    if windows:
        layers = tuple(LayerSpec(window=windows[i % len(windows)]) for i in range(spec.num_layers))
        spec = replace(spec, layers=layers)
    weights = weights_of(model)
    dtype = weights["embed.weight"].dtype
    return NativeRunner(spec, weights, name="tiny", device=CPU, dtype=dtype, **kwargs)


def tokens(count: int, seed: int = 0, vocab: int = 64) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


@torch.inference_mode()
def oracle(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """(len(ids), v) logits of transformers, computed from scratch."""
    return model(torch.tensor([ids])).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> bool:
    return ours.shape == theirs.shape and bool((ours.float() - theirs.float()).abs().max() < tolerance)


def whole_pass(runner: NativeRunner, ids: list[int]) -> torch.Tensor:
    """(n, v) logits of tokens fed in one pass."""
    return runner.extend([runner.open()], [ids], all_logits=True).logits


def stepwise(runner: NativeRunner, ids: list[int], width: int = 1) -> torch.Tensor:
    """(n, v) logits of tokens scored in chains of `width`, as plain decoding does with a width of 1."""
    cache, rows = runner.open(), []
    for at in range(0, len(ids), width):
        part = ids[at : at + width]
        tree = TokenTree.chain(part[1:]) if len(part) > 1 else EMPTY_TREE
        rows.append(runner.score([cache], part[:1], [tree]).logits)
        runner.commit([cache], [range(len(part) - 1)])
    return torch.cat(rows)
