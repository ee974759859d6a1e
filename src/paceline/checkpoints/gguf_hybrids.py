"""What GGUF files of models with mixers say and hold, in the words of `config.json` and of safetensors files.

Factors of Falcon-H1 are weighed into its weights. Value heads of Qwen3.5 lie in another order than in safetensors
files, head i with key head i mod key heads, and stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.checkpoints.config_keys import FULL
from paceline.checkpoints.gguf_file import GgufFile, Metadata
from paceline.checkpoints.model_family import LINEAR
from paceline.errors import CheckpointError, UnsupportedModelError

_MAMBA2 = {
    "ffn_norm": "post_attention_layernorm",
    "ssm_in": "mixer.in_proj",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
}
LFM2: Mapping[str, str] = {
    "ffn_norm": "post_attention_layernorm",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.out_proj": "mixer.out_proj",
    "shortconv.conv": "mixer.conv",
}
FALCON_H1: Mapping[str, str] = _MAMBA2
GRANITE_HYBRID: Mapping[str, str] = _MAMBA2 | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
QWEN3_NEXT: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "mixer.in_proj_qkv",
    "attn_gate": "mixer.in_proj_z",
    "ssm_in": "mixer.in_proj_qkvz",
    "ssm_ba": "mixer.in_proj_ba",
    "ssm_beta": "mixer.in_proj_b",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _channels(weight: torch.Tensor) -> torch.Tensor:
    return weight.unsqueeze(1)


def _rates(weight: torch.Tensor) -> torch.Tensor:
    """Logarithms of what decays are multiplied by, of which the file has the negative."""
    return weight.neg().log_().flatten()


FORMS: Mapping[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "ssm_conv1d.weight": ("mixer.conv1d.weight", _channels),
    "shortconv.conv.weight": ("mixer.conv.weight", _channels),
    "ssm_a": ("mixer.A_log", _rates),
    "ssm_d": ("mixer.D", torch.flatten),
    "ssm_dt.bias": ("mixer.dt_bias", torch.flatten),
    "ssm_norm.weight": ("mixer.norm.weight", torch.flatten),
    "ffn_norm": ("post_attention_layernorm.weight", torch.flatten),
    "exp_probs_b.bias": ("mlp.gate.expert_bias", torch.flatten),
}
"""Small tensors that are stored in another form: their names elsewhere, and what makes them."""


def layers_with_keys(file: GgufFile) -> list[bool]:
    """Which layers have attention: those with a number of key-value heads.

    Raises:
        CheckpointError: the numbers are not one for each layer, or differ where there are any.
    """
    counts = file.get("attention.head_count_kv")
    if not isinstance(counts, list) or len(counts) != file.number("block_count") or len({*counts} - {0}) > 1:
        raise CheckpointError(
            f"{file.path}: {file.architecture}.attention.head_count_kv must be a list with a number for each layer, "
            f"equal or 0; download it again"
        )
    return [count != 0 for count in counts]


def lfm2(file: GgufFile) -> Metadata:
    attention = layers_with_keys(file)
    return {
        "layer_types": [FULL if there else "conv" for there in attention],
        "num_key_value_heads": max(file.get("attention.head_count_kv")),
        "conv_L_cache": file.get("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(file: GgufFile) -> Metadata:
    gating = file.get("expert_gating_func", SIGMOID)
    if gating != SIGMOID:
        raise UnsupportedModelError(f"{file.path.name}: expert_gating_func={gating!r} is not supported")
    return lfm2(file) | {
        "num_dense_layers": file.get("leading_dense_block_count"),
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
    }


SIGMOID: int = 2
"""Number of the function that makes shares of experts of what the router says."""


def falcon_h1(file: GgufFile) -> Metadata:
    return _mamba2(file) | {
        "mamba_d_ssm": file.get("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": "blk.0.ssm_out.bias" in file.tensors,
    }


def granite_hybrid(file: GgufFile) -> Metadata:
    attention = layers_with_keys(file)
    experts, inner = file.get("expert_count") or 0, file.get("feed_forward_length")
    hidden = max(1, file.number("embedding_length"))
    return _mamba2(file) | {
        "layer_types": ["attention" if there else "mamba" for there in attention],
        "num_key_value_heads": max(file.get("attention.head_count_kv")),
        "mamba_expand": file.number("ssm.inner_size") // hidden,
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned", True) else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": file.get("expert_used_count"),
        "shared_intermediate_size": file.get("expert_shared_feed_forward_length") or inner,
    }


def _mamba2(file: GgufFile) -> dict[str, Any]:
    heads = max(1, file.number("ssm.time_step_rank"))
    tensors = {name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")}
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": file.number("ssm.inner_size") // heads,
        "mamba_d_state": file.get("ssm.state_size"),
        "mamba_n_groups": file.get("ssm.group_count"),
        "mamba_d_conv": file.get("ssm.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in tensors,
        "mamba_proj_bias": "ssm_in.bias" in tensors,
    }


def qwen3_next(file: GgufFile) -> Metadata:
    heads = max(1, file.number("ssm.time_step_rank"))
    recurrent = file.get("attention.recurrent_layers")
    interval = file.get("full_attention_interval", 4)
    file.get("rope.dimension_sections")  # positions of text are the same in all of them
    metadata: Metadata = {
        "full_attention_interval": interval,
        "linear_num_key_heads": file.get("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": file.get("ssm.state_size"),
        "linear_value_head_dim": file.number("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": file.get("ssm.conv_kernel"),
        "linear_value_heads_in_turn": file.architecture != "qwen3next",
        "intermediate_size": file.get("feed_forward_length") or file.get("expert_feed_forward_length"),
    }
    if recurrent is not None:
        metadata["layer_types"] = [LINEAR if one else FULL for one in recurrent]
    return metadata


def qwen3_next_moe(file: GgufFile) -> Metadata:
    return qwen3_next(file) | {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
    }
