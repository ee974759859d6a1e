"""What config.json says, in the new and the old way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from models.checkpoints import CASES, OLD, SIZES, old_config

from paceline.checkpoints import declared_dtype, spec_from_config
from paceline.checkpoints.families import FAMILIES, MULTIMODAL
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import ModelSpec

LLAMA: dict[str, Any] = {"model_type": "llama", **OLD}


NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
"""Sizes that no file leaves out."""


def new_config(name: str) -> dict[str, Any]:
    """The config.json that transformers 5 would write, where it has the family."""
    from transformers import AutoConfig

    case = CASES[name]
    if case.oracle is not None:
        return old_config(name)
    sizes = {} if case.model_type in MULTIMODAL else SIZES
    config = AutoConfig.for_model(case.model_type, **{**sizes, **case.new}, dtype="float32")
    written: dict[str, Any] = config.to_dict()
    return written


@pytest.mark.parametrize("name", CASES)
def test_new_and_old_files_mean_the_same(name: str) -> None:
    new, old = spec_from_config(new_config(name)), spec_from_config(old_config(name))
    assert new == old
    assert replace(new, norm_eps=0.5) != old, "the comparison sees nothing"


def test_every_family_has_a_case() -> None:
    tried = {MULTIMODAL.get(case.model_type, case.model_type) for case in CASES.values()}
    assert tried == set(FAMILIES)


def test_every_default_is_that_of_transformers() -> None:
    """A file that leaves out all that may be left out means what transformers' own defaults say."""
    from transformers import AutoConfig

    lacking = {case.model_type for case in CASES.values() if case.oracle is not None}
    for family in FAMILIES.keys() - lacking:
        whole = AutoConfig.for_model(family).to_dict()
        own = {name: one for one, name in FAMILIES[family].keys.items()}
        sizes = {key: whole[key] for key in (own.get(size, size) for size in NEEDED) if key in whole}
        sparse = {"model_type": family, **sizes}
        if family == "deepseek_v2":  # which transformers leaves without a number of experts that each token uses
            sparse["num_experts_per_tok"] = whole["num_experts_per_tok"] = 6
        if family == "glm4_moe":  # whose heads would be divided by 96
            sparse["head_dim"] = whole["head_dim"] = 128
        assert spec_from_config(sparse) == spec_from_config(whole), family


OWN_KEYS = {"n_embd": "hidden_size", "norm_epsilon": "rms_norm_eps"}


def test_keys_of_a_familys_own_mean_llamas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "acme", replace(FAMILIES["llama"], keys=OWN_KEYS))  # type: ignore[arg-type]
    llama = {key: OLD[key] for key in OLD if key != "hidden_size"}
    acme = {**llama, "model_type": "acme", "n_embd": 64, "norm_epsilon": 1e-3}
    wanted = replace(spec_from_config(LLAMA), family="acme", norm_eps=1e-3)
    assert spec_from_config(acme) == wanted == spec_from_config(acme | {"hidden_size": 128, "rms_norm_eps": 0.5})
    assert spec_from_config(acme | {"n_embd": 128}) != wanted
    with pytest.raises(CheckpointError, match=r"lacks 'n_embd', which models of the family acme need"):
        spec_from_config(llama | {"model_type": "acme"})
    with pytest.raises(CheckpointError, match=r"'n_embd' must be an integer in 1\.\."):
        spec_from_config(acme | {"n_embd": "x"})
    with pytest.raises(CheckpointError, match="lacks 'hidden_size'"):
        spec_from_config({**acme, "model_type": "llama"})


def test_llama_3_2() -> None:
    rope = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    spec = spec_from_config(
        LLAMA
        | {"rope_theta": 500000.0, "rope_scaling": {**rope, "rope_type": "llama3"}, "max_position_embeddings": 131072}
        | {"head_dim": 64, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    )
    assert spec.ropes["default"].kind == "llama3"
    assert spec.ropes["default"].scaling == rope
    assert (spec.head_dim, spec.tied, spec.dtype, spec.max_context) == (64, True, "bfloat16", 131072)


def test_gemma_3_4b_leaves_out_what_is_default() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = spec_from_config(
        {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "vision_config": {}}
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262208)
    assert spec.ropes["full_attention"].kind == "linear"
    assert (spec.ropes["full_attention"].theta, spec.ropes["sliding_attention"].theta) == (1e6, 1e4)
    assert [layer.window for layer in spec.layers[:7]] == [1024] * 5 + [None, 1024]
    assert (spec.tied, spec.dtype, spec.embedding_multiplier) == (True, "bfloat16", 2560**0.5)


KIMI_K2: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    | {"original_max_position_embeddings": 4096, "type": "yarn"},
}


def test_kimi_k2_is_a_deepseek_v3() -> None:
    spec = spec_from_config(KIMI_K2)
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.top_k, spec.moe.shared, spec.moe.groups) == (384, 8, 2048, None)
    assert (spec.max_context, spec.layers[0].moe, spec.layers[1].moe) == (131072, False, True)
    assert spec == spec_from_config(KIMI_K2 | {"model_type": "deepseek_v3"})
    assert spec != spec_from_config(KIMI_K2 | {"model_type": "deepseek_v3", "n_group": 8, "topk_group": 4})


def test_kimi_k2_is_the_text_part_of_a_kimi_k2_5() -> None:
    seeing = {"model_type": "kimi_k25", "vision_config": {}, "dtype": "bfloat16", "tie_word_embeddings": False}
    wanted = spec_from_config(KIMI_K2 | {"dtype": "bfloat16"})
    assert spec_from_config(seeing | {"text_config": KIMI_K2}) == wanted
    assert spec_from_config(seeing | {"text_config": KIMI_K2 | {"model_type": "deepseek_v3"}}) == wanted
    assert spec_from_config(seeing | {"text_config": KIMI_K2 | {"n_routed_experts": 256}}) != wanted


def test_ministral_3_is_the_text_part_of_a_mistral_3() -> None:
    rope = {"rope_type": "yarn", "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384}
    rope |= {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
    text = {"model_type": "ministral3", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34}
    text |= {"num_attention_heads": 32, "vocab_size": 131072, "rope_parameters": rope, "sliding_window": None}
    spec = spec_from_config({"model_type": "mistral3", "text_config": text, "dtype": "bfloat16", "vision_config": {}})
    assert (spec.family, spec.dtype, spec.max_context, spec.head_dim) == ("ministral3", "bfloat16", 262144, 128)
    assert spec.ropes["default"].growth == (0.1, 16384)
    small = {**text, "model_type": None, "rope_parameters": None, "rope_theta": 1e9}
    spec = spec_from_config({"model_type": "mistral3", "text_config": small})
    assert (spec.family, spec.ropes["default"].growth) == ("mistral", None)
    with pytest.raises(CheckpointError, match="lacks 'original_max_position_embeddings'"):
        spec_from_config(LLAMA | {"rope_scaling": {"type": "default", "llama_4_scaling_beta": 0.1}})


PHI4_MINI: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
    "tie_word_embeddings": True,
}


def test_phi_4_mini_is_a_phi_3() -> None:
    spec = spec_from_config(PHI4_MINI)
    assert (spec.head_dim, spec.ropes["default"].dims, spec.ropes["default"].kind) == (128, 96, "longrope")
    assert (spec.tied, spec.max_context, spec.layers[0].window) == (True, 131072, 262144)
    with pytest.raises(CheckpointError, match="'short_factor' must be a list of 64"):
        spec_from_config(PHI4_MINI | {"partial_rotary_factor": 1.0})


def test_windows() -> None:
    def windows(config: dict[str, Any]) -> list[int | None]:
        return [layer.window for layer in spec_from_config(OLD | config).layers]

    assert windows({"model_type": "mistral", "sliding_window": None}) == [None] * 3
    assert windows({"model_type": "mistral"}) == [4096] * 3
    assert windows({"model_type": "qwen2", "sliding_window": 8}) == [None] * 3
    slides = {"use_sliding_window": True, "sliding_window": 8}
    assert windows({"model_type": "qwen2", **slides, "max_window_layers": 2}) == [None, None, 8]
    assert windows({"model_type": "qwen3_moe", **slides}) == [8] * 3
    assert windows({"model_type": "gemma2"}) == [4096, None, 4096]
    assert windows({"model_type": "llama", "sliding_window": 8}) == [None] * 3
    assert windows({"model_type": "exaone4", "sliding_window": 8, "sliding_window_pattern": 2}) == [8, None, 8]
    letters = {"model_type": "exaone4", "sliding_window": 8, "num_hidden_layers": 5}
    assert windows(letters | {"sliding_window_pattern": "LG"}) == [8, None, 8, None, None]
    with pytest.raises(CheckpointError, match="'sliding_window_pattern' must be an integer or letters L and G"):
        windows(letters | {"sliding_window_pattern": "LX"})
    spec = spec_from_config(OLD | {"model_type": "exaone4", "sliding_window": None})
    assert [(layer.window, layer.rope) for layer in spec.layers] == [(None, "default")] * 3
    assert windows({"model_type": "smollm3", **slides, "no_rope_layers": [1, 0, 1]}) == [None, 8, None]


def test_yarn_and_dynamic_lengthen_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert spec_from_config(LLAMA | {"rope_scaling": yarn}).max_context == 256
    assert spec_from_config(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).max_context == 128
    assert spec_from_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).max_context == 64


def test_mixtures() -> None:
    spec = spec_from_config({"model_type": "qwen3_moe", **OLD, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert [layer.moe for layer in spec.layers] == [False, False, False]
    spec = spec_from_config({"model_type": "qwen3_moe", **OLD, "num_experts": 8, "norm_topk_prob": True})
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.intermediate, spec.moe.norm_top_k) == (8, 768, True)
    assert all(layer.moe for layer in spec.layers)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({}, None),
        ({"dtype": "auto"}, None),
    ],
)
def test_declared_dtype(given: dict[str, Any], wanted: str | None) -> None:
    assert declared_dtype({"model_type": "llama", **given}) == wanted


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "rwkv"}, "'rwkv'"),
    ({"model_type": "mamba", "hidden_act": "gelu"}, "'gelu'"),
    ({"model_type": "lfm2_moe", "use_expert_bias": False}, "use_expert_bias=False"),
    ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "scoring_func='softmax'"),
    ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave=False"),
    ({"model_type": "kimi_linear", "mla_use_nope": False}, "mla_use_nope=False"),
    ({"model_type": "lightnet", "use_short_conv": True}, "use_short_conv=True"),
    ({"model_type": "lightnet", "attn": {"layers": [1]}}, "attn="),
    ({"model_type": "nemotron_h", "mlp_hidden_act": "silu"}, "mlp_hidden_act='silu'"),
    ({"model_type": "nemotron_h", "moe_latent_size": 32}, "moe_latent_size=32"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-X"}, "'X'"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "-*-"}, "without Mamba"),
    ({"model_type": "mamba2", "hidden_act": "gelu"}, "'gelu'"),
    ({"model_type": None}, "None"),
    ({"hidden_act": "relu2"}, "'relu2'"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "secret": 1}}, "'secret'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer type"),
    ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
    ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"] * 3}, "layer_types"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"clip_qkv": 8.0}, "clip_qkv"),
    ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse", "else"]}, "'else'"),
    ({"model_type": "mistral4", "n_group": 2}, "n_group=2"),
    ({"model_type": "minimax_m2", "use_qk_norm": False}, "use_qk_norm=False"),
    ({"model_type": "hunyuan_v1_moe", "num_experts": [2, 3, 2]}, "num_experts that differs"),
    ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias=True"),
    ({"model_type": "ernie4_5_moe", "moe_layer_end_index": 0}, "moe_layer_end_index=0"),
]


@pytest.mark.parametrize(("change", "text"), UNSUPPORTED)
def test_what_is_not_implemented_is_rejected_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        spec_from_config(LLAMA | change)


ODD: list[Any] = [-4, 0, "x", [4], True, 1.5]
LLAMA_3 = {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": None}, "hidden_size"),
    ({"num_hidden_layers": "three"}, "num_hidden_layers"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "3 key-value heads"),
    ({"rope_scaling": {"type": "linear"}}, "'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": "two"}}, "'factor'"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_theta": 0.0}, "rope_theta"),
    ({"rope_theta": "big"}, "rope_theta"),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        "rope_theta must be a number above 1.*got 'x'; repair",
    ),
    ({"rope_parameters": {"rope_theta": True}}, "rope_theta"),
    ({"rope_parameters": {"rope_theta": [1e4]}}, "rope_theta"),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ({"rope_parameters": {"partial_rotary_factor": True}}, "partial_rotary_factor"),
    ({"rms_norm_eps": -1}, "'rms_norm_eps' must be in 0..1, got -1; repair"),
    ({"rms_norm_eps": 2}, "'rms_norm_eps' must be in 0..1, got 2"),
    ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' must be a finite number"),
    ({"model_type": "gemma2", "final_logit_softcapping": 0}, "final_logit_softcapping"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 1, "sliding_attention": {}}},
        "'full_attention' must be an object",
    ),
    ({"head_dim": 15}, "head_dim"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (
        {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor",
    ),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
    ({"model_type": "qwen2", "layer_types": "full_attention"}, "layer_types"),
    (
        {"model_type": "qwen2", "layer_types": ["full_attention"] * 4},
        "'layer_types' must be a list of 3 entries, one per layer",
    ),
    ({"model_type": "smollm3", "no_rope_layers": [1, "x", 1]}, "'no_rope_layers' must be a list of integers"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": ["x"]}, "'mlp_only_layers' must be a list of integers"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -4},
        "'max_window_layers' must be an integer in 0",
    ),
    ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
    ({"model_type": "granite", "residual_multiplier": -4}, "'residual_multiplier' must be above 0, got -4"),
    *(({"sliding_window": value}, "'sliding_window' must be an integer in 1") for value in ODD),
    *(({"head_dim": value}, "'head_dim' must be an integer in 1") for value in ODD),
    *(({"vocab_size": value}, "'vocab_size' must be an integer in 1") for value in ODD),
    *(({"num_key_value_heads": value}, "'num_key_value_heads' must be an integer in 1") for value in ODD),
    *(({"rope_theta": value}, "rope_theta") for value in ODD[:4]),
    *(
        ({key: value}, f"'{key}' must be one of float32, .* got")
        for key in ("dtype", "torch_dtype")
        for value in ("zzz", 5, "torch.zzz")
    ),
    *(
        ({"model_type": "mistral", key: "x"}, f"'{key}' must be true or false")
        for key in ("attention_bias", "use_sliding_window")
    ),
    ({"rope_scaling": {"type": "yarn"}}, "rope type 'yarn' needs 'factor'"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": "x"}}, "'truncate' must be true or false, got 'x'"),
    (
        {"rope_scaling": LLAMA_3 | {"high_freq_factor": 1.0}},
        "'high_freq_factor' must be above low_freq_factor=1.0, got 1.0",
    ),
    ({"rope_scaling": LLAMA_3, "rope_parameters": "x"}, "'rope_parameters' must be an object"),
]


@pytest.mark.parametrize(("change", "text"), WRONG)
def test_contradictions_are_one_clear_line(change: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as caught:
        spec_from_config(LLAMA | change)
    assert not isinstance(caught.value, UnsupportedModelError)
    assert "\n" not in str(caught.value)


def test_a_yarn_without_a_factor_takes_the_ratio_of_both_lengths() -> None:
    yarn = {"type": "yarn", "original_max_position_embeddings": 64}
    assert spec_from_config(LLAMA | {"rope_scaling": yarn}).ropes["default"].kind == "yarn"


def test_the_result_is_a_spec() -> None:
    assert isinstance(spec_from_config(LLAMA), ModelSpec)
