"""Tiny random diffusion checkpoints as their families write them, each with its plain float64 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models.denoiser_reference import HEAD_DIM, HEADS, INNER, KV, LAYERS, VOCAB, WIDTH, Reference, Tensors, gated


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_norm = len(shape) == 1 and ("norm" in name or "ln_f" in name)
        tensors[name] = 1 + 0.3 * x if is_norm else x * (0.5 if len(shape) == 1 else (3.0 / shape[-1]) ** 0.5)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def llada(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """GSAI-ML/LLaDA-8B's keys and names; one key-value head less than it has query heads, to be tested too."""
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "activation_type": "silu", "alibi": False,
        "alibi_bias_max": 8.0, "attention_layer_norm": False, "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False, "block_group_size": 1, "block_type": "llama", "d_model": WIDTH,
        "embedding_size": VOCAB,
        "eos_token_id": 3, "flash_attention": False, "include_bias": False, "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms", "layer_norm_with_affine": True, "mask_token_id": VOCAB - 1,
        "max_sequence_length": 256,
        "mlp_hidden_size": INNER, "mlp_ratio": 4, "multi_query_attention": None, "n_heads": HEADS, "n_kv_heads": KV,
        "n_layers": LAYERS, "pad_token_id": 3, "precision": "amp_bf16", "rms_norm_eps": 1e-5, "rope": True,
        "rope_full_precision": True, "rope_theta": 500000.0, "scale_logits": False, "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "weight_tying": False,
    }  # fmt: skip
    size = WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.transformer.wte.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        at = f"model.transformer.blocks.{i}."
        shapes |= {f"{at}{x}_proj.weight": (size * (HEADS if x == "q" else KV), WIDTH) for x in "qkv"}
        shapes |= {f"{at}attn_out.weight": (WIDTH, WIDTH), f"{at}ff_out.weight": (WIDTH, INNER)}
        shapes |= {f"{at}{x}.weight": (INNER, WIDTH) for x in ("ff_proj", "up_proj")}
        shapes |= {f"{at}{x}.weight": (WIDTH,) for x in ("attn_norm", "ff_norm")}
    shapes |= {"model.transformer.ln_f.weight": (WIDTH,), "model.transformer.ff_out.weight": (VOCAB, WIDTH)}
    tensors = drawn(shapes, seed)
    write(folder, config | changes, tensors)
    names = {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "attn_out",
        "attn_norm": "attn_norm",
        "mlp_norm": "ff_norm",
    }

    def at(layer: int, part: str) -> torch.Tensor:
        return tensors[f"model.transformer.blocks.{layer}.{names.get(part, part)}.weight"]

    return Reference(
        tensors, at, lambda n, x: gated(x, at(n, "ff_proj"), at(n, "up_proj"), at(n, "ff_out")),
        "model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ff_out.weight",
        eps=1e-5, theta=500000.0, head_dim=size, rotated=size,
    )  # fmt: skip


def _qwen(
    folder: Path,
    seed: int,
    config: dict[str, Any],
    *,
    bias: bool = False,
    experts: int = 0,
    top_k: int = 0,
    inner: int = INNER,
    **more: Any,
) -> Reference:
    """Qwen2 and Qwen3 names, dense or with experts stored one by one."""
    base = {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV,
        "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 256, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False,
        "mask_token_id": VOCAB - 1, "eos_token_id": 3, "use_sliding_window": False, "sliding_window": None,
    }  # fmt: skip
    head_dim = config.get("head_dim", WIDTH // HEADS)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        widths = {"q": HEADS * head_dim, "k": KV * head_dim, "v": KV * head_dim}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (n, WIDTH) for x, n in widths.items()}
        shapes |= {f"{at}self_attn.{x}_proj.bias": (n,) for x, n in widths.items() if bias}
        shapes |= {f"{at}self_attn.{x}_norm.weight": (head_dim,) for x in "qk" if more.get("qk_norm")}
        shapes |= {f"{at}self_attn.o_proj.weight": (WIDTH, HEADS * head_dim)}
        shapes |= {f"{at}{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
        for mlp in [f"{at}mlp.experts.{e}." for e in range(experts)] or [f"{at}mlp."]:
            shapes |= {f"{mlp}{x}_proj.weight": (inner, WIDTH) for x in ("gate", "up")} | {
                f"{mlp}down_proj.weight": (WIDTH, inner)
            }
        if experts:
            shapes[f"{at}mlp.gate.weight"] = (experts, WIDTH)
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH)}
    tensors = drawn(shapes, seed)
    write(folder, base | config, tensors)
    names = {
        "attn_norm": "input_layernorm.weight",
        "mlp_norm": "post_attention_layernorm.weight",
        "o": "self_attn.o_proj.weight",
    }
    names |= {x: f"self_attn.{x}_proj.weight" for x in "qkv"} | {f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
    names |= {f"{x}_norm": f"self_attn.{x}_norm.weight" for x in "qk"}

    def at(layer: int, part: str) -> torch.Tensor:
        return tensors[f"model.layers.{layer}.{names.get(part, part)}"]

    def mlp(n: int, x: torch.Tensor) -> torch.Tensor:
        if not experts:
            return gated(x, *(at(n, f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")))
        share = torch.softmax(at(n, "mlp.gate.weight") @ x, 0)
        best = share.argsort(descending=True)[:top_k].tolist()
        total = share[best].sum() if config.get("norm_topk_prob") else 1.0
        outs = {
            e: gated(x, *(at(n, f"mlp.experts.{e}.{name}_proj.weight") for name in ("gate", "up", "down")))
            for e in best
        }
        return sum(share[e] / total * outs[e] for e in best)  # type: ignore[return-value]

    fixed = {"eps": base["rms_norm_eps"], "theta": 10000.0, "head_dim": head_dim, "rotated": head_dim, "bias": bias}
    return Reference(
        tensors, at, mlp, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", **(fixed | more)
    )


def dream(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """Dream-org/Dream-v0's keys: Qwen2 with biases, shifted logits."""
    config = {"architectures": ["DreamModel"], "model_type": "Dream", "use_mrope": False, "max_window_layers": 28}
    return _qwen(folder, seed, config | changes, bias=True, shifted=True)


def sdar(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """JetLM/SDAR's keys: Qwen3."""
    config = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "head_dim": HEAD_DIM, "attention_bias": False}
    config |= {"block_size": 4, "fuse_cross_entropy": True}
    return _qwen(folder, seed, config | changes, qk_norm=True)


def sdar_moe(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """JetLM/SDAR-30B-A3B's keys: Qwen3-MoE."""
    config = {
        "architectures": ["SDARMoeForCausalLM"],
        "model_type": "sdar_moe",
        "head_dim": HEAD_DIM,
        "attention_bias": False,
    }
    config |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "norm_topk_prob": True}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "block_size": 4}
    return _qwen(folder, seed, config | changes, qk_norm=True, experts=6, top_k=2, inner=10)


def llada_moe(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """inclusionAI/LLaDA-MoE-7B-A1B's keys: softmax routing, probabilities as they are."""
    config = {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "attention_bias": False, "clip_qkv": None}
    config |= {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "expert_intermediate_size": 10,
        "dense_intermediate_size": 32,
    }
    config |= {"moe_layer_freq": [1] * LAYERS, "qk_layernorm": True, "moe_router_score_function": "softmax"}
    config |= {"moe_router_enable_expert_bias": False, "norm_topk_prob": None, "shared_expert_intermediate_size": None}
    return _qwen(folder, seed, config | changes, qk_norm=True, experts=6, top_k=2, inner=10)


def llada2(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """inclusionAI/LLaDA2.0-mini's keys and names: a dense layer first, then grouped sigmoid routing with a shared
    expert.
    """
    experts, inner, groups, open_, top_k, scale = 8, 10, 4, 2, 3, 2.5
    config = {
        "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "first_k_dense_replace": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": INNER, "max_position_embeddings": 256,
        "moe_intermediate_size": inner, "moe_router_enable_expert_bias": True, "n_group": groups,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS, "num_experts": experts, "num_experts_per_tok": top_k, "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV, "num_shared_experts": 1, "pad_token_id": 3, "eos_token_id": 3,
        "partial_rotary_factor": 0.67,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 600000, "routed_scaling_factor": scale,
        "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": open_, "use_bias": False,
        "use_qk_norm": True, "use_qkv_bias": False, "vocab_size": VOCAB, "mask_token_id": VOCAB - 1, "block_length": 4,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.word_embeddings.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}attention.query_key_value.weight": ((HEADS + 2 * KV) * HEAD_DIM, WIDTH)}
        shapes |= {f"{at}attention.dense.weight": (WIDTH, HEADS * HEAD_DIM)}
        shapes |= {f"{at}attention.{x}_layernorm.weight": (HEAD_DIM,) for x in ("query", "key")}
        shapes |= {f"{at}{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
        sparse = [f"{at}mlp.experts.{e}." for e in range(experts)] + [f"{at}mlp.shared_experts."]
        for mlp, n in [(name, inner) for name in sparse] if i else [(f"{at}mlp.", INNER)]:
            shapes |= {f"{mlp}{x}_proj.weight": (n, WIDTH) for x in ("gate", "up")} | {
                f"{mlp}down_proj.weight": (WIDTH, n)
            }
        if i:
            shapes |= {f"{at}mlp.gate.weight": (experts, WIDTH), f"{at}mlp.gate.expert_bias": (experts,)}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH)}
    tensors = drawn(shapes, seed)
    write(folder, config | changes, tensors)
    cuts = {"q": (0, HEADS), "k": (HEADS, HEADS + KV), "v": (HEADS + KV, HEADS + 2 * KV)}
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "o": "attention.dense"}
    names |= {"q_norm": "attention.query_layernorm", "k_norm": "attention.key_layernorm"}

    def at(layer: int, part: str) -> torch.Tensor:
        if part in cuts:
            low, high = cuts[part]
            return tensors[f"model.layers.{layer}.attention.query_key_value.weight"][low * HEAD_DIM : high * HEAD_DIM]
        return tensors[f"model.layers.{layer}.{names.get(part, part)}.weight"]

    def through(n: int, name: str, x: torch.Tensor) -> torch.Tensor:
        return gated(x, *(at(n, f"mlp.{name}{part}_proj") for part in ("gate", "up", "down")))

    def mlp(n: int, x: torch.Tensor) -> torch.Tensor:
        if n == 0:
            return through(n, "", x)
        scores = 1 / (1 + torch.exp(-(at(n, "mlp.gate") @ x)))
        ranked = scores + tensors[f"model.layers.{n}.mlp.gate.expert_bias"]
        size = experts // groups
        best_two = [sorted(ranked[g * size : (g + 1) * size].tolist())[-2:] for g in range(groups)]
        allowed = sorted(range(groups), key=lambda g: -sum(best_two[g]))[:open_]
        free = [e for e in range(experts) if e // size in allowed]
        best = sorted(free, key=lambda e: -float(ranked[e]))[:top_k]
        routed = sum(scores[e] / scores[best].sum() * scale * through(n, f"experts.{e}.", x) for e in best)
        return routed + through(n, "shared_experts.", x)  # type: ignore[no-any-return]

    return Reference(
        tensors, at, mlp, "model.word_embeddings.weight", "model.norm.weight", "lm_head.weight",
        eps=1e-6, theta=600000.0, rotated=4, qk_norm=True,
    )  # fmt: skip


FAMILIES = {
    "llada": llada,
    "dream": dream,
    "sdar": sdar,
    "sdar_moe": sdar_moe,
    "llada_moe": llada_moe,
    "llada2": llada2,
}
