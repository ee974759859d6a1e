"""Checkpoints of many families as GGUF files for llama.cpp, with a dummy vocabulary of the right size.

Some architectures of llama.cpp rotate neighbouring pairs of a head (0,1), (2,3), ...; checkpoints rotate (0, d/2),
(1, d/2 + 1), ... There the rows of the query and key projections are put into llama.cpp's order, which leaves every
attention score as it was. Gemma's norms are stored with the 1 that the model adds. What a checkpoint asks for and
llama.cpp would do differently is an error that names it. Prompts are token ids, so that the vocabulary needs no words:
256 byte tokens, where there is room, and numbered ones.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.peers.drivers.weights import Weights, rope_factors

Config = dict[str, Any]
Array = NDArray[np.float32]

QUANTS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
EXPERTS = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)


# ------------------------------------------------------------------------------------------------ families


@dataclass(frozen=True)
class Family:
    """How checkpoints of a `model_type` become GGUF files.

    Attributes:
        architecture: its name in GGUF.
        turned: llama.cpp rotates neighbouring pairs.
        norms_plus_one: norms are stored with the 1 that the model adds.
        slides: layers have the window of `sliding_window`, in the order that llama.cpp takes from `windowed`.
        head: the file holds the head even where it is the embedding.
        activations: that llama.cpp may be meant by.
        keys: further metadata.
    """

    architecture: str
    turned: bool = False
    norms_plus_one: bool = False
    slides: bool = False
    head: bool = False
    activations: tuple[str, ...] = SILU
    keys: Callable[[Config], dict[str, Any]] = lambda config: {}


def _gemma2(config: Config) -> dict[str, Any]:
    _check_scale(config, largest=46)
    return _windows(config, 2) | {
        "attn_logit_softcapping": float(config.get("attn_logit_softcapping") or 0.0),
        "final_logit_softcapping": float(config.get("final_logit_softcapping") or 0.0),
    }


def _gemma3(config: Config) -> dict[str, Any]:
    _check_scale(config, largest=62)
    local = (config.get("rope_parameters") or {}).get("sliding_attention") or {}
    found = {"rope.freq_base_swa": float(local.get("rope_theta") or config.get("rope_local_base_freq") or 1e4)}
    if softcap := config.get("final_logit_softcapping"):
        found["final_logit_softcapping"] = float(softcap)
    return _windows(config, 6) | found


def _check_scale(config: Config, *, largest: int) -> None:
    """llama.cpp derives by what queries are divided; the largest model of a family has a rule of its own."""
    layers, wanted = config["num_hidden_layers"], float(config.get("query_pre_attn_scalar", 256))
    if wanted != (config["hidden_size"] / config["num_attention_heads"] if layers == largest else head_dim(config)):
        raise ValueError(f"query_pre_attn_scalar is {wanted:g}; llama.cpp takes the head dimension")


def _windows(config: Config, pattern: int) -> dict[str, Any]:
    """The window, and which layers have it: all but every so-many-th where the configuration names no types."""
    pattern = config.get("sliding_window_pattern") or pattern
    types = config.get("layer_types") or [
        "sliding_attention" if (layer + 1) % pattern else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]
    return {
        "attention.sliding_window": int(config["sliding_window"]),
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
    }


def _granite(config: Config) -> dict[str, Any]:
    return {
        "logit_scale": float(config.get("logits_scaling", 1.0)),
        "residual_scale": float(config.get("residual_multiplier", 1.0)),
        "embedding_scale": float(config.get("embedding_multiplier", 1.0)),
        "attention.scale": float(config.get("attention_multiplier", 1.0)),
    }


def _smollm3(config: Config) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    rotated = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    if (config.get("no_rope_layers") or rotated) != rotated or config.get("no_rope_layer_interval", 4) != 4:
        raise ValueError("no_rope_layers differ from every fourth layer, which llama.cpp takes")
    return {}


def experts_of(config: Config) -> int:
    """How many experts a mixture has; 0 in other models."""
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def _mixtral(config: Config) -> dict[str, Any]:
    return {"expert_count": experts_of(config), "expert_used_count": config["num_experts_per_tok"]}


def _qwen3_moe(config: Config) -> dict[str, Any]:
    plain = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    for key, value in plain.items():
        if (config.get(key) or value) != value or (key == "norm_topk_prob" and not config.get(key)):
            raise ValueError(f"{key} is {config.get(key)!r}; llama.cpp takes {value!r}")
    return _mixtral(config) | {"expert_feed_forward_length": config["moe_intermediate_size"]}


def _starcoder2(config: Config) -> dict[str, Any]:
    if not config.get("use_bias", True):
        raise ValueError("use_bias is False; llama.cpp takes a starcoder2 with biases")
    return {"attention.layer_norm_epsilon": float(config.get("norm_epsilon", 1e-5))}


def _cohere2(config: Config) -> dict[str, Any]:
    found = {"attention.layer_norm_epsilon": float(config.get("layer_norm_eps", 1e-5))}
    return _windows(config, 4) | found | {"logit_scale": float(config.get("logit_scale", 1.0))}


_GEMMA: dict[str, Any] = {"norms_plus_one": True, "slides": True, "activations": GELU}
FAMILIES = {
    "llama": Family("llama", turned=True),
    "mistral": Family("llama", turned=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2", keys=_gemma2, **_GEMMA),
    "gemma3_text": Family("gemma3", keys=_gemma3, **_GEMMA),
    "phi3": Family("phi3"),
    "smollm3": Family("smollm3", turned=True, keys=_smollm3),
    "olmo2": Family("olmo2", head=True),
    "granite": Family("granite", turned=True, keys=_granite),
    "mixtral": Family("llama", turned=True, keys=_mixtral),
    "qwen3_moe": Family("qwen3moe", keys=_qwen3_moe),
    "starcoder2": Family("starcoder2", activations=GELU, keys=_starcoder2),
    "glm4": Family("glm4"),
    "cohere2": Family("cohere2", slides=True, keys=_cohere2),
}


def family_of(config: Config) -> Family:
    """How a checkpoint is converted.

    Raises:
        ValueError: a family, an activation or a window that is not converted.
    """
    name = config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(f"the checkpoint is a {name}; the converter takes {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    activation = config.get("hidden_activation") or config.get("hidden_act") or family.activations[0]
    if activation not in family.activations:
        raise ValueError(f"the activation is {activation}; the converter takes {' and '.join(family.activations)}")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and not family.slides and window < config["max_position_embeddings"]:
        raise ValueError(f"sliding_window is {window}; llama.cpp attends to everything in a {name}")
    return family


# ------------------------------------------------------------------------------------------------ metadata


def head_dim(config: Config) -> int:
    """Of queries, keys and values."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def rope_of(config: Config) -> dict[str, Any]:
    """Rotary parameters of layers that attend to everything, the base under `rope_theta`."""
    given: dict[str, Any] = config.get("rope_parameters") or {}
    rope: dict[str, Any] = given.get("full_attention", given)
    known = {"rope_theta": config.get("rope_theta", 1e4), **(config.get("rope_scaling") or {})}
    return known | {key: value for key, value in rope.items() if value is not None}


def metadata(config: Config, family: Family) -> dict[str, Any]:
    """GGUF keys without the architecture before them."""
    rope, heads = rope_of(config), config["num_attention_heads"]
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    found: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim(config),
        "attention.value_length": head_dim(config),
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "rope.dimension_count": int(head_dim(config) * share),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope.get("rope_type", rope.get("type")) == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return found | family.keys(config)


def _write_keys(writer: Any, found: dict[str, Any], vocab: int) -> None:
    import gguf

    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    for key, value in found.items():
        if isinstance(value, list):
            writer.add_array(f"{writer.arch}.{key}", value)
        else:
            writer.add_key_value(f"{writer.arch}.{key}", value, gguf.GGUFValueType[kinds[type(value)]])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(vocab)])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([6 if i < 256 else 1 for i in range(vocab)])  # byte, normal
    writer.add_add_bos_token(False)


# ------------------------------------------------------------------------------------------------ tensors


def pair_neighbours(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a query or key projection reordered from halves to neighbouring pairs.

    Args:
        weight: (heads * d, inputs) or a bias (heads * d,), d even; row i of a head's first half turns with row i of its
            second half.
        heads: how many heads the rows make.
    Returns:
        The same shape; within each head rows 0, d/2, 1, d/2 + 1, ...
    """
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def tensors(weights: Weights, family: Family) -> Iterator[tuple[str, Array]]:
    """Names and values as the file holds them, in float32.

    Raises:
        ValueError: a tensor that the architecture has no place for, or a scaling of the rotary embedding.
    """
    import gguf

    config = weights.config
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[family.architecture]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"]}
    heads["attn_k"] = config.get("num_key_value_heads") or heads["attn_q"]
    tied = bool(config.get("tie_word_embeddings"))
    for ours in weights.names:
        if ".experts." in ours or ours.endswith("rotary_emb.inv_freq") or (tied and ours == "lm_head.weight"):
            continue
        theirs = names.get_name(ours, (".weight", ".bias"))
        if theirs is None:
            raise ValueError(f"{ours} has no place in GGUF's {family.architecture}")
        data, part = weights.f32(ours), theirs.split(".")[-2]
        if family.turned and part in heads:
            data = pair_neighbours(data, heads[part])
        if family.norms_plus_one and part.endswith("norm"):
            data = data + np.float32(1.0)
        yield theirs, data
    if tied and family.head:
        yield "output.weight", weights.f32("model.embed_tokens.weight")
    for layer in range(config["num_hidden_layers"] if experts_of(config) else 0):
        yield from _experts(weights, layer)
    yield from _rope_freqs(config, family)


def _experts(weights: Weights, layer: int) -> Iterator[tuple[str, Array]]:
    """The stacked experts (experts, outputs, inputs) of a layer, however the checkpoint stores them."""
    known, count = set(weights.names), experts_of(weights.config)
    blocks = [f"model.layers.{layer}.{block}.experts." for block in ("mlp", "block_sparse_moe")]
    for at in blocks:
        if f"{at}gate_up_proj" in known:
            gate, up = np.split(weights.f32(f"{at}gate_up_proj"), 2, axis=1)
            found = {"gate": gate, "up": up, "down": weights.f32(f"{at}down_proj")}
            yield from ((f"blk.{layer}.ffn_{part}_exps.weight", data) for part, data in found.items())
            return
    for part, spellings in EXPERTS.items():
        ends = [(at, f".{name}.weight") for at in blocks for name in spellings]
        at, end = next((at, end) for at, end in ends if f"{at}0{end}" in known)
        yield (
            f"blk.{layer}.ffn_{part}_exps.weight",
            np.stack([weights.f32(f"{at}{expert}{end}") for expert in range(count)]),
        )


def _rope_freqs(config: Config, family: Family) -> Iterator[tuple[str, Array]]:
    rope = rope_of(config)
    factors = rope_factors(rope, float(rope["rope_theta"]), head_dim(config))
    if rope.get("rope_type", rope.get("type")) == "llama3":
        if family.architecture != "llama":
            raise ValueError(f"rope scaling llama3 has no place in GGUF's {family.architecture}")
        yield "rope_freqs.weight", np.array(factors, dtype=np.float32)


def write_gguf(weights: Weights, path: Path, precision: str, family: Family | None = None) -> None:
    """Write the whole model.

    Args:
        precision: a key of QUANTS, of the matrices. Norms, biases and routers stay float32; in Q4_0 the embedding and
            the head are Q8_0, since llama.cpp's own tool does not round them to 4 bits either.
        family: how; None is what the configuration says.
    Raises:
        ValueError: a precision that is not in QUANTS, or a checkpoint that is not converted.
    """
    import gguf

    if precision not in QUANTS:
        raise ValueError(f"precision {precision!r} is not one of {', '.join(QUANTS)}")
    family = family or family_of(weights.config)
    writer = gguf.GGUFWriter(str(path), family.architecture)
    _write_keys(writer, metadata(weights.config, family), weights.config["vocab_size"])
    for name, data in tensors(weights, family):
        kind = gguf.GGMLQuantizationType[_kind(name, data, QUANTS[precision])]
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(name: str, data: Array, kind: str) -> str:
    if data.ndim == 1 or "ffn_gate_inp" in name:
        return "F32"
    if kind.startswith("Q") and data.shape[-1] % 32:  # of a block
        return "F16"
    return "Q8_0" if kind == "Q4_0" and name in ("token_embd.weight", "output.weight") else kind
