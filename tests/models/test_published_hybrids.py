"""Shapes of published models with mixers: their files are taken, and make as many weights as their cards say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.checkpoints import spec_from_config
from paceline.checkpoints.weights import targets
from paceline.models.passes.eligibility import unsupported

_LFM2 = {"vocab_size": 65536, "num_hidden_layers": 16, "num_key_value_heads": 8, "conv_L_cache": 3, "norm_eps": 1e-5}
_LFM2 |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "block_auto_adjust_ff_dim": True, "block_multiple_of": 256}
_LFM2 |= {"block_ffn_dim_multiplier": 1.0, "rope_theta": 1e6, "tie_embedding": True, "model_type": "lfm2"}
_DELTA = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
_DELTA |= {"num_key_value_heads": 2, "linear_num_key_heads": 16, "full_attention_interval": 4, "rope_theta": 1e7}
_GRANITE = {"model_type": "granitemoehybrid", "vocab_size": 100352, "num_attention_heads": 12, "mamba_n_heads": 48}
_GRANITE |= {"num_key_value_heads": 4, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4}
_GRANITE |= {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
_GRANITE |= {"logits_scaling": 6, "tie_word_embeddings": True, "position_embedding_type": "nope"}
_FORTY = {"num_hidden_layers": 40, "hidden_size": 1536, "mamba_d_head": 64}


def _with_attention(layers: int, *attention: int) -> list[str]:
    return ["attention" if layer in attention else "mamba" for layer in range(layers)]


CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "LFM2-350M": (_LFM2 | {"hidden_size": 1024, "num_attention_heads": 16, "block_ff_dim": 6656}, 0.354484e9),
    "LFM2-1.2B": (_LFM2 | {"hidden_size": 2048, "num_attention_heads": 32, "block_ff_dim": 12288}, 1.170341e9),
    "LFM2-8B-A1B": (
        {"model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168}
        | {"num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "num_dense_layers": 2}
        | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792, "use_expert_bias": True}
        | {"layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]},
        8.34e9,
    ),
    "Qwen3.5-0.8B": (
        {
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "text_config": _DELTA
            | {"model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584}
            | {"num_hidden_layers": 24, "num_attention_heads": 8, "linear_num_value_heads": 16},
        },
        0.752e9,
    ),
    "Qwen3-Next-80B-A3B": (
        _DELTA
        | {"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120}
        | {"num_hidden_layers": 48, "num_attention_heads": 16, "linear_num_value_heads": 32, "num_experts": 512}
        | {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
        79.7e9,
    ),
    "Granite-4.0-H-350M": (
        _GRANITE
        | {"num_hidden_layers": 32, "hidden_size": 768, "mamba_d_head": 32, "shared_intermediate_size": 2048}
        | {"num_local_experts": 0, "layer_types": _with_attention(32, 10, 13, 17, 27)},
        0.340e9,
    ),
    "Granite-4.0-H-1B": (
        _GRANITE
        | _FORTY
        | {"shared_intermediate_size": 4096, "num_local_experts": 0, "layer_types": _with_attention(40, 5, 15, 25, 35)},
        1.46e9,
    ),
    "Granite-4.0-H-Tiny": (
        _GRANITE
        | _FORTY
        | {"shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6}
        | {"intermediate_size": 512, "layer_types": _with_attention(40, 5, 15, 25, 35)},
        6.94e9,
    ),
    "Falcon-H1-0.5B": (
        {"model_type": "falcon_h1", "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048}
        | {"num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
        | {"rope_theta": 1e11, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.35], "mlp_multipliers": [0.88, 0.59]},
        0.521e9,
    ),
    "Bamba-9B": (
        {"model_type": "bamba", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_state": 128}
        | {"attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "mamba_n_heads": 128, "mamba_d_head": 64},
        9.78e9,
    ),
    "Nemotron-Nano-9B-v2": (
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4480, "intermediate_size": 15680}
        | {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}
        | {"num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
        | {"mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
        | {"time_step_limit": [0.0, math.inf], "mamba_proj_bias": False, "rms_norm_eps": 1e-5},
        8.89e9,
    ),
    "Nemotron-3-Nano-30B-A3B": (
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856}
        | {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52}
        | {"num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64}
        | {"mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 128}
        | {"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        31.6e9,
    ),
    "Jamba-Mini": (
        {"model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16}
        | {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_dt_rank": 256, "mamba_d_state": 16, "mamba_expand": 2, "mamba_d_conv": 4},
        51.6e9,
    ),
    "Kimi-Linear-48B-A3B": (
        {"model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216}
        | {"num_hidden_layers": 27, "num_attention_heads": 32, "head_dim": 72, "kv_lora_rank": 512, "num_experts": 256}
        | {"num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1, "mla_use_nope": True}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "model_max_length": 2**20, "moe_layer_freq": 1}
        | {"linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32}},
        49.1e9,
    ),
    "Mamba-2.8B": (
        {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64, "state_size": 16}
        | {"intermediate_size": 5120, "time_step_rank": 160, "d_inner": 5120, "ssm_cfg": {}},
        2.768e9,
    ),
    "Falcon-Mamba-7B": (
        {"model_type": "falcon_mamba", "vocab_size": 65024, "hidden_size": 4096, "num_hidden_layers": 64}
        | {"intermediate_size": 8192, "time_step_rank": 256, "tie_word_embeddings": False, "mixer_rms_eps": 1e-6},
        7.27e9,
    ),
    "Mamba-Codestral-7B": (
        {"model_type": "mamba2", "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128}
        | {"head_dim": 64, "state_size": 128, "n_groups": 8, "time_step_limit": [0.0, math.inf]},
        7.29e9,
    ),
    "Phi-4-mini-flash-reasoning": (
        {"model_type": "phi4flash", "vocab_size": 200064, "hidden_size": 2560, "intermediate_size": 10240}
        | {"num_hidden_layers": 32, "num_attention_heads": 40, "num_key_value_heads": 20, "mb_per_layer": 2}
        | {"sliding_window": 512, "layer_norm_eps": 1e-5, "max_position_embeddings": 262144, "hidden_act": "silu"}
        | {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "mlp_bias": False, "lm_head_bias": False}
        | {"tie_word_embeddings": True, "_attn_implementation": "flash_attention_2"},
        3.852563e9,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_has_as_many_weights_as_its_card_says(name: str) -> None:
    config, wanted = CONFIGS[name]
    spec = spec_from_config(config | {"torch_dtype": "bfloat16"})
    assert spec.states
    assert sum(target.size for target in targets(spec)) == pytest.approx(wanted, rel=4e-3)


def test_the_files_of_phi_4_mini_flash_have_as_many_bytes_as_their_index_says() -> None:
    """All in bfloat16, but for the rates of the recurrences and what is subtracted of differential attention."""
    spec = spec_from_config(CONFIGS["Phi-4-mini-flash-reasoning"][0])
    wide = ("mixer.decay", "lambdas")
    assert sum(target.size * (4 if target.name.endswith(wide) else 2) for target in targets(spec)) == 7_706_608_640
    window = [layer.window for layer in spec.layers[:4]]
    assert window == [None, 512, None, 512]
    assert {layer.kv_of for layer in spec.layers} == {None, 17}


def test_compiled_passes_do_not_cover_phi_4_mini_flash() -> None:
    spec, cpu = spec_from_config(CONFIGS["Phi-4-mini-flash-reasoning"][0]), torch.device("cpu")
    assert unsupported(spec, torch.bfloat16, cpu) == "layers that read keys or states of other layers"
    first = replace(spec, layers=spec.layers[:16])
    assert unsupported(first, torch.bfloat16, cpu) == "differential attention"
    plain = replace(first, differential=False)
    assert unsupported(plain, torch.bfloat16, cpu) == "states between layers in another dtype"
    assert unsupported(replace(plain, wide_sums=False), torch.bfloat16, cpu) is None


def test_all_other_shapes_run_in_compiled_passes() -> None:
    """Steps of another rank would not."""

    def lacks(config: dict[str, Any]) -> str | None:
        return unsupported(spec_from_config(config), torch.float32, torch.device("cpu"))

    lacking = {name: why for name, (config, _) in CONFIGS.items() if (why := lacks(config)) is not None}
    assert list(lacking) == ["Phi-4-mini-flash-reasoning"]
    assert lacks(CONFIGS["Mamba-2.8B"][0] | {"time_step_rank": 150}) == "mixers of such kinds and sizes"


def test_a_layer_less_is_noticed() -> None:
    config, wanted = CONFIGS["LFM2-350M"]
    spec = spec_from_config(config | {"num_hidden_layers": 15})
    assert sum(target.size for target in targets(spec)) != pytest.approx(wanted, rel=4e-3)
