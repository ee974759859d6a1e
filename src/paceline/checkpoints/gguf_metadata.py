"""A GGUF file's metadata as a `config.json`: sizes, sliding windows, rotary embedding, what its architecture adds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.config_keys import FULL, SLIDING
from paceline.checkpoints.gguf_architectures import Architecture, architecture_of, layers_before_others
from paceline.checkpoints.gguf_file import GgufFile, Metadata, read_gguf
from paceline.checkpoints.gguf_keys import refuse_unread
from paceline.errors import CheckpointError, UnsupportedModelError

TABLES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that belong to the rotary embedding, and are read with the configuration."""

SIZES: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
YARN: Mapping[str, str] = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}


def gguf_config(path: Path) -> Metadata:
    """What a `config.json` would say of a GGUF file's model.

    Raises:
        CheckpointError: a damaged file.
        UnsupportedModelError: an architecture that is not read from GGUF, or a key that is not understood.
    """
    file = read_gguf(path)
    architecture = architecture_of(file)
    sizes = {ours: _one(file.get(theirs)) for ours, theirs in SIZES.items() if file.get(theirs) is not None}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{path} holds no embedding (token_embd.weight), so it is no whole model; download it again"
        )
    sizes |= {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        **_windows(file, architecture.window_period),
        **_rotary(file, architecture),
        **architecture.extra(file),
    }
    if (layers := layers_before_others(file)) is not None:
        sizes["num_hidden_layers"] = layers
    refuse_unread(file)
    return sizes


def _windows(file: GgufFile, period: int | None) -> Metadata:
    """The sliding window, and which layers have it: a flag for each, or one in so many attends to everything.

    Args:
        period: where the file does not say, see `Architecture.window_period`.
    """
    key = "attention.sliding_window_pattern"
    window, pattern = file.get("attention.sliding_window"), file.get(key, period)
    if not window:
        return {} if window is None else {"sliding_window": None}
    if pattern is None:
        return {"sliding_window": window}
    if not isinstance(pattern, list):
        every = file.number(key, period)
        pattern = [every == 0 or (layer + 1) % every != 0 for layer in range(file.number("block_count"))]
    return {"sliding_window": window, "layer_types": [SLIDING if slides else FULL for slides in pattern]}


def _one(value: Any) -> Any:
    """The value of all layers, where a file gives a list with one for each."""
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        return value[0]
    return value


def _stretch(file: GgufFile, tables: Metadata) -> tuple[str, float]:
    """The kind of scaling and its factor, 1 where there is none.

    A factor without a kind is a linear one; older files call it `rope.scale_linear`, and 0 is none.
    """
    kind, older = file.get("rope.scaling.type", "linear"), file.get("rope.scale_linear")
    factor = file.get("rope.scaling.factor", older) or 1.0
    alone = {"none": True, "linear": "rope_factors_long" not in tables, "yarn": not tables, "longrope": False}
    if kind not in alone or (factor != 1.0 and not alone[kind]):
        raise UnsupportedModelError(
            f"{file.path.name}: rope.scaling.type={kind!r} with a factor of {factor} is not supported; use the "
            f"safetensors checkpoint it was made from"
        )
    return kind, 1.0 if kind == "none" else factor


def _growth(file: GgufFile, original: Any) -> Metadata:
    """What queries grow by with their positions, where they do."""
    rate = file.get("attention.temperature_scale")
    return {"llama_4_scaling_beta": rate, "original_max_position_embeddings": original} if rate else {}


def _rotary(file: GgufFile, architecture: Architecture) -> Metadata:
    """Rotated share of a head, and the scaling of angles."""
    heads = max(1, file.number("attention.head_count"))
    head = file.number("attention.key_length", file.number("embedding_length") // heads)
    dims, longest = file.number("rope.dimension_count", head), file.get("context_length")
    share = {"partial_rotary_factor": min(1.0, dims / max(1, head))}
    original = file.get("rope.scaling.original_context_length", longest)
    tables = {
        name: file.read(f"{name}.weight").flatten().tolist() for name in TABLES if f"{name}.weight" in file.tensors
    }
    kind, factor = _stretch(file, tables)
    if "rope_freqs" in tables:
        return share | {
            "rope_scaling": {"rope_type": "factors", "factors": [value * factor for value in tables["rope_freqs"]]}
        }
    if "rope_factors_long" in tables:
        scaling: Metadata = {"rope_type": "longrope", "long_factor": tables["rope_factors_long"]}
        scaling |= {"short_factor": tables.get("rope_factors_short", tables["rope_factors_long"])}
        if (attention := file.get("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        return share | {"rope_scaling": scaling, "original_max_position_embeddings": original}
    yarn = {ours: file.get(f"rope.scaling.{theirs}") for ours, theirs in YARN.items()}
    growth = file.get("rope.scaling.yarn_log_multiplier")
    if factor == 1.0:
        return share | {"rope_scaling": {"rope_type": "default", **_growth(file, original)}}
    scaling = {"rope_type": kind, "factor": factor, **_growth(file, original)}
    if kind == "yarn":
        scaling |= {**architecture.yarn, "original_max_position_embeddings": original}
        scaling |= {key: value for key, value in yarn.items() if value is not None}
        if growth is not None:
            mscale = 10 * growth if file.architecture in ("deepseek2", "mistral4") else growth
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale}  # which are the same in all known models
    return share | {"rope_scaling": scaling}
