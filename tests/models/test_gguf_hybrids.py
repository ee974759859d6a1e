"""GGUF files of models with mixers, written as llama.cpp's converter writes them, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from models.checkpoints import CASES, oracle
from models.test_gguf import TEXT, byte_level, finish, logits_of, neighbours, values_of

from paceline.errors import CheckpointError
from paceline.models import load_runner

MODELS = {
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2moe", {"routed_scaling_factor": 1.0}),
    "falcon_h1": ("falcon-h1", {}),
    "falcon_h1-normed": ("falcon-h1", {"projectors_bias": False}),
    "granitemoehybrid": ("granitehybrid", {}),
    "granitemoehybrid-moe": ("granitehybrid", {"position_embedding_type": "nope"}),
    "bamba": ("granitehybrid", {}),
    "qwen3_next": ("qwen3next", {"mlp_only_layers": []}),
    "qwen3_5_text": ("qwen35", {}),
    "qwen3_5_text-wide": ("qwen35", {}),
    "qwen3_5_moe_text": ("qwen35moe", {}),
}
"""Case -> architecture in GGUF, and other keys of its configuration."""

PARTS = {
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.gate_proj": "ffn_gate", "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down", "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "block_sparse_moe.router": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp", "mixer.in_proj": "ssm_in",
    "mixer.out_proj": "ssm_out", "mixer.conv1d": "ssm_conv1d", "mixer.norm": "ssm_norm",
    "mixer.in_proj_qkv": "attn_qkv", "mixer.in_proj_z": "attn_gate", "mixer.in_proj_ba": "ssm_ba",
    "mixer.in_proj_b": "ssm_beta", "mixer.in_proj_a": "ssm_alpha",
}  # fmt: skip
EXPERTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": ("ffn_down_exps",),
    "feed_forward.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "feed_forward.experts.down_proj": ("ffn_down_exps",),
    "block_sparse_moe.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "block_sparse_moe.experts.down_proj": ("ffn_down_exps",),
}

RENAMED = {"pre_ff_layernorm.weight": "ffn_norm", "feed_forward.expert_bias": "exp_probs_b.bias"}
SMALL = {"mixer.A_log": "ssm_a", "mixer.D": "ssm_d", "mixer.dt_bias": "ssm_dt.bias"}


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a case with those other keys."""
    name = f"{request.param}-gguf"
    _, other = MODELS[request.param]
    monkeypatch.setitem(CASES, name, replace(CASES[request.param], new={**CASES[request.param].new, **other}))
    return name


def tensors_of(architecture: str, model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model under GGUF's names, changed as the converter changes them."""
    config, found = model.config, dict[str, torch.Tensor]()
    for key, tensor in model.state_dict().items():
        short = key.removeprefix("model.")
        value = folded(short, tensor, config) if architecture == "falcon-h1" else tensor
        if architecture.startswith("qwen") and "norm" in short and "linear_attn" not in short:
            value = value + 1.0
        if short.startswith("layers."):
            _, layer, part = short.split(".", 2)
            for name, own in layer_tensors(architecture, part, value, config).items():
                found[f"blk.{layer}.{name}"] = own
        elif short != "lm_head.weight" or not config.tie_word_embeddings:
            norm = "token_embd_norm" if architecture.startswith("lfm2") else "output_norm"
            ends = {"lm_head.weight": "output.weight", "embed_tokens.weight": "token_embd.weight"}
            found[ends.get(short, f"{norm}.weight")] = value
    return found


def folded(name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """A weight of Falcon-H1 with the factors of its map."""
    into = config.attention_in_multiplier
    factors = {"embed_tokens": config.embedding_multiplier, "lm_head": config.lm_head_multiplier, "q_proj": into}
    factors |= {"k_proj": config.key_multiplier * into, "v_proj": into, "o_proj": config.attention_out_multiplier}
    factors |= {"gate_proj": config.mlp_multipliers[0], "down_proj": config.mlp_multipliers[1]}
    factors |= {"mamba.out_proj": config.ssm_out_multiplier, "mamba.in_proj": config.ssm_in_multiplier}
    for part, factor in factors.items():
        value = value * factor if f"{part}.weight" in name else value
    if "mamba.in_proj.weight" not in name:
        return value
    inner, shared = 128, config.mamba_n_groups * config.mamba_d_state
    rows = value.split([inner, inner, shared, shared, config.mamba_n_heads])
    return torch.cat([part * factor for part, factor in zip(rows, config.ssm_multipliers, strict=True)])


def layer_tensors(architecture: str, part: str, value: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    part = part.replace("linear_attn.", "mixer.").replace("mamba.", "mixer.")
    if part in RENAMED:
        return {RENAMED[part] + (".weight" if config.model_type == "bamba" else ""): value}
    if part in EXPERTS:
        names = EXPERTS[part]
        return {f"{name}.weight": own for name, own in zip(names, value.chunk(len(names), 1), strict=True)}
    if part == "mixer.in_proj_qkvz.weight":
        return by_part(value, config)
    if "shared_mlp." in part:
        return shared_mlp(part, value, mixture=bool(config.num_local_experts))
    if architecture.startswith("qwen35") and part.startswith("mixer."):
        value = value_heads_in_turn(part, value, config)
    if part in SMALL:
        value = -value.exp() if part == "mixer.A_log" else value
        return {SMALL[part]: value if architecture.startswith("qwen") or "dt" in part else value[:, None]}
    if part == "mixer.norm.weight" and not architecture.startswith("qwen"):
        value = value.view(2, -1)
    stem, _, ending = part.rpartition(".")
    if architecture == "granitehybrid" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        value = neighbours(value, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
    names = PARTS | ({"post_attention_layernorm": "post_attention_norm"} if architecture.startswith("qwen") else {})
    return {f"{names[stem]}.{ending}": value.squeeze(1) if "conv" in stem and value.dim() == 3 else value.squeeze()}


def by_part(value: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """What Qwen3-Next stores key head by key head, part by part."""
    keys, per_key = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
    values = per_key * config.linear_value_head_dim
    q, k, v, z = value.view(config.linear_num_key_heads, -1, value.shape[1]).split((keys, keys, values, values), 1)
    return {
        "attn_qkv.weight": torch.cat([part.flatten(0, 1) for part in (q, k, v)]),
        "attn_gate.weight": z.flatten(0, 1),
    }


def shared_mlp(part: str, value: torch.Tensor, *, mixture: bool) -> dict[str, torch.Tensor]:
    end = "_shexp" if mixture else ""
    if "output" in part:
        return {f"ffn_down{end}.weight": value}
    gate, up = value.chunk(2)
    return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}


def value_heads_in_turn(part: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """What belongs to value heads, in the order of GGUF: the first of every key head, then the second of each."""
    key_heads, size = config.linear_num_key_heads, config.linear_value_head_dim
    keys = 2 * key_heads * config.linear_key_head_dim

    def turned(rows: torch.Tensor, head: int) -> torch.Tensor:
        heads = rows.reshape(key_heads, -1, head, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in part or "conv1d" in part:
        return torch.cat([value[:keys], turned(value[keys:], size)])
    if "out_proj" in part:
        return turned(value.t(), size).t()
    if "norm" in part:
        return value
    return turned(value, size if "in_proj_z" in part else 1)


def describe(writer: Any, architecture: str, config: Any) -> None:
    types = {"full_attention": 1, "attention": 1}
    keyed = [types.get(kind, 0) for kind in getattr(config, "layer_types", [])]
    numbers: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "expert_count": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    if architecture == "lfm2moe":
        numbers |= {"shortconv.l_cache": config.conv_L_cache, "leading_dense_block_count": config.num_dense_layers}
        numbers |= {"expert_gating_func": 2, "expert_feed_forward_length": config.moe_intermediate_size}
    elif architecture == "lfm2":
        inner = 32 * -(-int(2 * config.intermediate_size / 3) // 32)
        numbers |= {"shortconv.l_cache": config.conv_L_cache, "feed_forward_length": inner}
    elif architecture.startswith("qwen"):
        numbers |= qwen(config)
        writer.add_array(f"{architecture}.attention.recurrent_layers", [not one for one in keyed])
        if architecture != "qwen3next":
            writer.add_array(f"{architecture}.rope.dimension_sections", [11, 11, 10, 0])
    else:
        numbers |= mamba2(config)
        numbers["expert_shared_feed_forward_length"] = getattr(config, "shared_intermediate_size", None)
    if architecture in ("lfm2", "lfm2moe", "granitehybrid"):
        counts = [config.num_key_value_heads * one for one in keyed]
        del numbers["attention.head_count_kv"]
        writer.add_array(f"{architecture}.attention.head_count_kv", counts)
    for key, value in numbers.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    describe_numbers(writer, architecture, config)


def describe_numbers(writer: Any, architecture: str, config: Any) -> None:
    epsilon = config.norm_eps if architecture.startswith("lfm2") else config.rms_norm_eps
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", epsilon)
    writer.add_float32(f"{architecture}.rope.freq_base", (config.rope_parameters or {}).get("rope_theta", 10000.0))
    if config.model_type == "bamba":
        writer.add_bool("granitehybrid.rope.scaling.finetuned", True)
        writer.add_uint32("granitehybrid.rope.dimension_count", 8)
    elif architecture == "granitehybrid":
        writer.add_bool("granitehybrid.rope.scaling.finetuned", False)
        scales = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
        scales |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
        for theirs, ours in scales.items():
            writer.add_float32(f"granitehybrid.{theirs}", getattr(config, ours))


def mamba2(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def qwen(config: Any) -> dict[str, Any]:
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim // 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }


def write(path: Path, architecture: str, model: Any, kind: gguf.GGMLQuantizationType | None = None) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, architecture, model.config)
    byte_level(writer)
    for key, tensor in tensors_of(architecture, model).items():
        array = tensor.contiguous().numpy()
        wide = array.ndim == 2 and key.endswith("weight") and array.shape[1] % 32 == 0 and "norm" not in key
        if kind is None or not wide:
            writer.add_tensor(key, array)
        else:
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
    finish(writer)
    return path


@pytest.mark.parametrize("case", MODELS, indirect=True)
def test_every_architecture_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, _ = MODELS[case.removesuffix("-gguf")]
    found = values_of(write(tmp_path / "model.gguf", architecture, oracle(case)))
    wanted = logits_of(oracle(case), TEXT)
    assert (found - wanted).abs().max() < 1e-3
    assert (found - wanted.roll(1, 0)).abs().max() > 0.1


@pytest.mark.parametrize("case", ["qwen3_5_text", "granitemoehybrid"], indirect=True)
def test_quantised_matrices_of_mixers(case: str, tmp_path: Path) -> None:
    """Read with the file's values, and rounded to int8, they are near each other."""
    architecture, _ = MODELS[case.removesuffix("-gguf")]
    path = write(tmp_path / "model.gguf", architecture, oracle(case), gguf.GGMLQuantizationType.Q8_0)
    rounded: Any = load_runner(path, dtype="float32")
    near = rounded.extend([rounded.open()], [TEXT], all_logits=True).logits
    wanted = values_of(path)
    assert 0 < (wanted - logits_of(oracle(case), TEXT)).std() < 0.1 * wanted.std()
    assert 0 < (near - wanted).std() < 0.1 * wanted.std()


def test_blocks_with_value_heads_in_turn_run_compiled(tmp_path: Path) -> None:
    """The gates of attention are blocks, too."""
    model = oracle("qwen3_5_text-wide")
    path = write(tmp_path / "model.gguf", "qwen35", model, gguf.GGMLQuantizationType.Q8_0)
    runner: Any = load_runner(path, dtype="float32", activation_bits=16)
    assert (runner.info.passes, runner.info.quantization) == ("compiled", "blocks")
    found, wanted = runner.extend([runner.open()], [TEXT], all_logits=True).logits, values_of(path)
    assert (found - wanted).std() < 0.01 * wanted.std() < (logits_of(model, TEXT) - wanted).std()


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_text-wide"])
def test_value_heads_in_the_order_of_safetensors_are_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.value_heads_in_turn", lambda part, value, config: value)
    found = values_of(write(tmp_path / "model.gguf", "qwen35", oracle(name)))
    assert (found - logits_of(oracle(name), TEXT)).abs().max() > 0.1


def test_layers_with_and_without_keys_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = oracle("lfm2")
    monkeypatch.setattr(model.config, "layer_types", ["conv", "full_attention"])
    with pytest.raises(CheckpointError, match="head_count_kv must be a list with a number for each layer"):
        values_of(write(tmp_path / "model.gguf", "lfm2", model))
