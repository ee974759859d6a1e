"""GGUF files: every architecture against transformers on the same values, quantised types, tokenizers, and files that
are damaged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models.checkpoints import SIZES, perturb

from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.models import load_runner
from paceline.models.loading import Tokenizer

TEXT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
LETTERS = [chr(i) for i in range(33, 127)]
"""Printable ASCII, which byte-level BPE writes as itself."""

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r"]
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS, "Ġ", "Ċ", *(merge.replace(" ", "") for merge in MERGES)]
TOKENS += [f"<spare{i}>" for i in range(128 - len(TOKENS))]
KINDS = [2, 3, 3] + [1] * (len(TOKENS) - 3)

GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.5, 4.0, 9.0]}
SLIDING = ["sliding_attention", "full_attention"]


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": False} | rope("default", 500.0)),
    "llama3": ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 24}
               | rope("llama3", **LLAMA3)),
    "llama-linear": ("llama", "llama", rope("linear", factor=3.0)),
    "mixtral": ("llama", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 24} | rope("default", 1e6)),
    "qwen3_moe": ("qwen3moe", "qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                                            "head_dim": 16, "norm_topk_prob": True}),
    "gemma2": ("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("gemma3", "gemma3_text", GEMMA | {"num_hidden_layers": 7, "layer_types": [SLIDING[0]] * 5 + [SLIDING[1],
               SLIDING[0]], "rope_parameters": {
                   "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("phi3", "phi3", {"sliding_window": None} | rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": ("phi3", "phi3", {"sliding_window": None, "original_max_position_embeddings": 48}
                      | rope("longrope", partial_rotary_factor=0.5, **LONGROPE)),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4,
                                       "tie_word_embeddings": True}),
    "olmo2": ("olmo2", "olmo2", {}),
    "granite": ("granite", "granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                                       "attention_multiplier": 0.1, "logits_scaling": 0.5}),
}  # fmt: skip
"""Name -> architecture in GGUF, model_type of transformers, keys of its configuration."""

TURNED = {"llama", "smollm3", "granite"}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@cache
def oracle(name: str) -> Any:
    """The transformers model of a case, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _, kind, more = MODELS[name]
    config = AutoConfig.for_model(kind, **{**SIZES, **more})
    return perturb(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def stored(name: str, model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model under GGUF's names, changed as its converters change them."""
    architecture = MODELS[name][0]
    config, found = model.config, dict[str, torch.Tensor]()
    parts = PARTS | (SANDWICH if architecture in {"gemma2", "gemma3", "olmo2"} else {})
    for key, tensor in model.state_dict().items():
        short = key.removeprefix("model.")
        value = tensor + 1.0 if architecture.startswith("gemma") and "norm" in short else tensor
        if not short.startswith("layers."):
            ends = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
            if short != "lm_head.weight" or not config.tie_word_embeddings:
                found[ends.get(short, "output.weight")] = value
            continue
        _, layer, part = short.split(".", 2)
        stem, _, ending = part.rpartition(".")
        at = f"blk.{layer}."
        if part == "mlp.experts.gate_up_proj":
            found[f"{at}ffn_gate_exps.weight"], found[f"{at}ffn_up_exps.weight"] = value.chunk(2, 1)
        elif part == "mlp.experts.down_proj":
            found[f"{at}ffn_down_exps.weight"] = value
        else:
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            if architecture in TURNED and stem in heads:
                value = neighbours(value, heads[stem])
            found[f"{at}{parts[stem]}.{ending}"] = value
    return found


def neighbours(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the order of a rotary embedding that turns neighbours."""
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def tables(model: Any) -> dict[str, list[float]]:
    """What a file stores of rotary scaling as tensors."""
    parameters = model.config.rope_parameters
    if parameters.get("rope_type") == "llama3":
        plain = 10000.0 ** (-torch.arange(0, 24, 2).float() / 24)
        return {"rope_freqs.weight": (plain / model.model.rotary_emb.inv_freq).tolist()}
    if parameters.get("rope_type") == "longrope":
        return {f"rope_factors_{kind}.weight": LONGROPE[f"{kind}_factor"] for kind in ("long", "short")}
    return {}


def write(
    path: Path, name: str, model: Any, kind: Kind = Kind.F32, tokenizer: Callable[..., None] | None = None
) -> Path:
    """Write a model; matrices in `kind`, the rest in float32."""
    architecture = MODELS[name][0]
    writer = gguf.GGUFWriter(path, architecture)
    describe(writer, architecture, model.config)
    (tokenizer or byte_level)(writer)
    for key, values in tables(model).items():
        writer.add_tensor(key, np.array(values, np.float32))
    for key, tensor in stored(name, model).items():
        array = tensor.contiguous().numpy()
        if array.ndim > 1 and kind is not Kind.F32 and "gate_inp" not in key:
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def describe(writer: Any, architecture: str, config: Any) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for key, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "expert_count": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "attention.sliding_window": config.sliding_window if architecture.startswith("gemma") else None,
    }.items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", parameters["rope_theta"])
    writer.add_uint32(f"{architecture}.rope.dimension_count", int(head * parameters.get("partial_rotary_factor", 1.0)))
    if parameters["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", parameters["factor"])
    if parameters["rope_type"] == "longrope":
        writer.add_uint32(f"{architecture}.rope.scaling.original_context_length", 48)
    scales = {"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"}
    scales |= {"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"}
    scales |= {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    for theirs, ours in scales.items():
        if getattr(config, ours, None) is not None:
            writer.add_float32(f"{architecture}.{theirs}", getattr(config, ours))


def byte_level(writer: Any, pre: str = "gpt-2") -> None:
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", pre)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", KINDS)
    writer.add_array("tokenizer.ggml.merges", MERGES)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.add_string("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}:")


def values_of(path: Path, **more: Any) -> torch.Tensor:
    runner = load_runner(path, dtype="float32", **more)
    return runner.extend([runner.open()], [TEXT], all_logits=True).logits


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_gives_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    found = values_of(write(tmp_path / "model.gguf", name, oracle(name)))
    wanted = logits_of(oracle(name), TEXT)
    assert (found - wanted).abs().max() < 1e-4
    assert (found - wanted.roll(1, 0)).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_files_mean_what_their_blocks_say(tmp_path: Path, name: str, kind: Kind) -> None:
    """transformers' own model with the values that the blocks stand for."""
    import copy

    model = copy.deepcopy(oracle(name))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:
                value.copy_(torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind)))
    path = write(tmp_path / "model.gguf", name, oracle(name), kind)
    assert (values_of(path, quantization="none") - logits_of(model, TEXT)).abs().max() < 1e-4
    if kind is not Kind.F16 and kind is not Kind.BF16:
        assert (values_of(path, quantization="none") - logits_of(oracle(name), TEXT)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "form"), [(Kind.F32, None), (Kind.Q8_0, "int8"), (Kind.Q5_1, "int8"), (Kind.Q4_0, "int4")]
)
def test_quantised_files_are_rounded_again_by_default(tmp_path: Path, kind: Kind, form: str | None) -> None:
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"), kind)
    assert load_runner(path).info.quantization == form
    assert load_runner(path, quantization="none").info.quantization is None
    assert load_runner(path, quantization="int8").info.quantization == "int8"


def test_a_model_answers_from_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "second.gguf", "llama", oracle("llama"))
    greedy = SamplingParams(temperature=0, max_tokens=8)
    llm = LLM(path)
    (out,) = llm.generate("hello world", greedy)
    assert out.prompt_token_ids == llm.tokenizer.encode("hello world")
    assert llm.defaults.eos_ids == (2,)
    (again,) = LLM(tmp_path / "other").generate("hello world", greedy)
    (named,) = LLM(tmp_path / "other", gguf_file="second.gguf").generate("hello world", greedy)
    assert out.outputs[0].token_ids == again.outputs[0].token_ids == named.outputs[0].token_ids
    (chat,) = llm.chat([{"role": "user", "content": "hello"}], greedy)
    assert llm.tokenizer.decode(chat.prompt_token_ids) == "hello:"
    write(tmp_path / "other" / "third.gguf", "llama", oracle("llama"))
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one with gguf_file: second.gguf, third.gguf"):
        LLM(tmp_path / "other")


def test_text_is_cut_by_the_rule_that_the_file_names(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    tokenizer = Tokenizer.load(path)
    spelt = [TOKENS[i] for i in tokenizer.encode("hello world", add_special_tokens=False)]
    assert spelt == ["hello", "Ġw", "or", "l", "d"]
    assert tokenizer.decode(tokenizer.encode("hello world\n")) == "hello world\n"

    def digits(writer: Any) -> None:
        byte_level(writer, "an-unknown-rule")

    path = write(tmp_path / "unknown.gguf", "llama", oracle("llama"), tokenizer=digits)
    with pytest.raises(
        UnsupportedModelError, match=r"rule 'an-unknown-rule' \(tokenizer.ggml.pre\), which is not known"
    ):
        Tokenizer.load(path)


def by_scores(writer: Any) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(64)), "▁", "a", "b", "ab", "▁ab", "ba", "▁a"]
    tokens += [f"<spare{i}>" for i in range(128 - len(tokens))]
    scores = [0.0] * 67 + [-9.0, -7.0, -8.0, -1.0, -3.0, -2.0, -4.0] + [-1e4] * (len(tokens) - 74)
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", scores)
    writer.add_array("tokenizer.ggml.token_type", [2, 3, 3] + [6] * 64 + [1] * (len(tokens) - 67))
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path / "model.gguf", "llama", oracle("llama"), tokenizer=by_scores))
    spelt = tokenizer.tokens()
    assert [spelt[i] for i in tokenizer.encode("ab aba\n")] == ["<s>", "▁ab", "▁ab", "a", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("ab aba\n")) == "ab aba\n"


def test_parts_of_a_split_file_are_read_together(tmp_path: Path) -> None:
    whole = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    reader = gguf.GGUFReader(whole)
    for number, tensors in enumerate((reader.tensors[:5], reader.tensors[5:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"split-{number:05d}-of-00002.gguf", "llama")
        if number == 1:
            describe(writer, "llama", oracle("llama").config)
            byte_level(writer)
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    assert torch.equal(values_of(tmp_path / "split-00001-of-00002.gguf"), values_of(whole))
    (tmp_path / "split-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"lacks split-00002-of-00002.gguf of 2 parts"):
        values_of(tmp_path / "split-00001-of-00002.gguf")


def said(path: Path) -> str:
    """The error of loading a file, or nothing."""
    try:
        values_of(path)
    except PacelineError as error:
        return str(error)
    return ""


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    good = write(tmp_path / "good.gguf", "llama", oracle("llama")).read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 4, 11, 24, 60, 500, 2000, len(good) // 2, len(good) - 1):
        bad.write_bytes(good[:size])
        with pytest.raises(CheckpointError, match=r"(is cut off or no GGUF file|cannot be read).*download it again"):
            values_of(bad)
    bad.write_bytes(good[:4] + struct.pack("<I", 9) + good[8:])
    with pytest.raises(UnsupportedModelError, match="is GGUF version 9"):
        values_of(bad)
    rng = np.random.default_rng(0)
    for _ in range(200):
        data = bytearray(good)
        for at in rng.integers(0, 6000, 4):
            data[at] = rng.integers(256)
        bad.write_bytes(data)
        assert "\n" not in said(bad)
    bad.write_bytes(good.replace(b"llama", b"lamma"))
    with pytest.raises(
        UnsupportedModelError, match="of architecture 'lamma', which is not supported; supported are llama"
    ):
        values_of(bad)
