"""Configurations of published models without mixers, in the keys of their files: they are taken, all in compiled
passes, and make as many weights as their cards say.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.checkpoints import spec_from_config
from paceline.checkpoints.weights import targets
from paceline.models.passes.eligibility import unsupported

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48}
_YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
_DEEPSEEK: dict[str, Any] = {
    "moe_layer_freq": 1, "n_shared_experts": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_act": "silu", "ep_size": 1,
    "pretraining_tp": 1, "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
_MINISTRAL: dict[str, Any] = {
    "model_type": "ministral3", "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 131072, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "sliding_window": None,
    "rope_parameters": _YARN | {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384,
                                "rope_theta": 1e9, "llama_4_scaling_beta": 0.1},
}  # fmt: skip
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "DeepSeek-V3": (
        _DEEPSEEK
        | {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432}
        | {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256}
        | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536}
        | {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
        | {"max_position_embeddings": 163840, "rope_theta": 10000, "num_nextn_predict_layers": 1}
        | {"rope_scaling": _YARN | {"factor": 40, "original_max_position_embeddings": 4096}}
        | {"auto_map": {"AutoModelForCausalLM": "x.Y"}, "quantization_config": _FP8, "tie_word_embeddings": False},
        671e9,
    ),
    "GLM-4.7-Flash": (
        _DEEPSEEK
        | {"model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240}
        | {"num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 64}
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "q_lora_rank": 768}
        | {"qk_nope_head_dim": 192, "v_head_dim": 256, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
        | {"max_position_embeddings": 202752, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
        30e9,
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944}
        | {"num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "add_qk_norm": False}
        | {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_scaling": None}
        | {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "decoder_sparse_step": 1, "rope_theta": 1000000}
        | {"moe_router_dtype": "float32", "num_nextn_predict_layers": 1, "eos_token_id": [151329, 151336, 151338]},
        106e9,
    ),
    "Ministral-3-14B": (
        {
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "text_config": _MINISTRAL | {"hidden_size": 5120, "intermediate_size": 16384, "num_hidden_layers": 40},
            "vision_config": {"model_type": "pixtral"},
        },
        13.5e9,
    ),
    "Ministral-3-3B": (
        {
            "model_type": "mistral3",
            "text_config": _MINISTRAL
            | {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "tie_word_embeddings": True},
        },
        3.4e9,
    ),
    "Mistral-Small-4": (
        {
            "model_type": "mistral3",
            "text_config": {"model_type": "mistral4", "vocab_size": 131072, "hidden_size": 4096}
            | {"intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128}
            | {"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
            | {"v_head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1}
            | {"moe_intermediate_size": 2048, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        },
        119e9,
    ),
    "OLMo-3-7B": (
        {"model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 4096}
        | {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "rope_theta": 500000}
        | {"max_position_embeddings": 65536, "attention_bias": False, "rms_norm_eps": 1e-6}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
           | {"original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836}},
        7.3e9,
    ),
    "EXAONE-4.0-32B": (
        {"model_type": "exaone4", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 27392}
        | {"num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
        | {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "max_position_embeddings": 131072}
        | {"rope_scaling": _LLAMA3 | {"factor": 16.0}, "rope_theta": 1000000, "rms_norm_eps": 1e-5},
        30.95e9 + 2 * 102400 * 5120,
    ),
    "ERNIE-4.5-0.3B": (
        {"model_type": "ernie4_5", "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072}
        | {"num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128}
        | {"use_bias": False, "tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        0.36e9,
    ),
    "ERNIE-4.5-21B-A3B": (
        {"model_type": "ernie4_5_moe", "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288}
        | {"num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_intermediate_size": 1536}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "head_dim": None}
        | {"use_bias": False, "moe_use_aux_free": True, "moe_capacity": [64, 64, 64], "moe_gate": "topk"},
        21.8e9,
    ),
    "Hunyuan-A13B": (
        {"model_type": "hunyuan_v1_moe", "vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 3072}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128}
        | {"num_experts": 64, "moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True}
        | {"moe_intermediate_size": [3072] * 32, "use_cla": False, "use_qk_norm": True, "tie_word_embeddings": True}
        | {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}, "moe_layer_num_skipped": 0},
        80e9,
    ),
    "Seed-OSS-36B": (
        {"model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648}
        | {"num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128}
        | {"attention_bias": True, "attention_out_bias": False, "rope_scaling": {"rope_type": "default"}}
        | {"max_position_embeddings": 524288, "rope_theta": 10000000.0, "tie_word_embeddings": False},
        36e9,
    ),
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536}
        | {"num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128}
        | {"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True}
        | {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_qk_norm": True}
        | {"qk_norm_type": "per_layer", "rotary_dim": 64, "rope_theta": 5000000, "attn_type_list": [1] * 62},
        230e9,
    ),
    "Apertus-8B": (
        {"model_type": "apertus", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "xielu"}
        | {"qk_norm": True, "post_norm": False, "attention_bias": False, "mlp_bias": False, "rope_theta": 12000000}
        | {"rope_scaling": _LLAMA3 | {"factor": 8.0, "type": "llama3"}, "max_position_embeddings": 65536},
        8e9,
    ),
    "Phi-4-mini": (
        {"model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192}
        | {"num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "sliding_window": 262144}
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "lm_head_bias": False, "full_attn_mod": 1}
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "interpolate_factor": 1}
        | {"rope_scaling": _LONGROPE, "auto_map": {"AutoTokenizer": "Xenova/gpt-4o"}, "mlp_bias": False},
        3.8e9,
    ),
}  # fmt: skip
"""Keys of `config.json`, and what the card says of the size; of EXAONE without embeddings, which are added."""


def weights(config: dict[str, Any]) -> int:
    return sum(target.size for target in targets(spec_from_config(config | {"torch_dtype": "bfloat16"})))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_has_as_many_weights_as_its_card_says(name: str) -> None:
    config, wanted = CONFIGS[name]
    assert weights(config) == pytest.approx(wanted, rel=1e-2)
    inner = config.get("text_config", config)
    layers = inner["num_hidden_layers"] - 1
    less = inner | {"num_hidden_layers": layers, "moe_layer_end_index": None}
    less |= {
        key: value[:layers] for key, value in inner.items() if isinstance(value, list) and len(value) == layers + 1
    }
    assert weights(less) != pytest.approx(wanted, rel=1e-2), "a layer less is not noticed"


@pytest.mark.parametrize("name", CONFIGS)
def test_published_shapes_run_in_compiled_passes(name: str) -> None:
    assert unsupported(spec_from_config(CONFIGS[name][0]), torch.bfloat16, torch.device("cpu")) is None


def test_rotary_tables_of_published_files() -> None:
    """Hunyuan stretches wavelengths once; OLMo 3 scales where attention is full; EXAONE 4 turns in windows alone."""
    ropes = {name: spec_from_config(config).ropes for name, (config, _) in CONFIGS.items()}
    hunyuan = ropes["Hunyuan-A13B"]["default"]
    assert (hunyuan.kind, hunyuan.theta) == ("default", pytest.approx(10000 * 1000 ** (128 / 126)))
    assert {kind: rope.kind for kind, rope in ropes["OLMo-3-7B"].items()} == {
        "full_attention": "yarn",
        "sliding_attention": "default",
    }
    exaone = spec_from_config(CONFIGS["EXAONE-4.0-32B"][0]).layers
    assert [(layer.window, layer.rope) for layer in exaone[2:4]] == [(4096, "default"), (None, None)]
    dims = {name: rope["default"].dims for name, rope in ropes.items() if "default" in rope}
    assert (dims["Phi-4-mini"], dims["GLM-4.5-Air"], dims["MiniMax-M2"], dims["GLM-4.7-Flash"]) == (96, 64, 64, 64)
