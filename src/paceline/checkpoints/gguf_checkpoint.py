"""Models of GGUF files: their metadata as a `config.json`, their tensors under the names of safetensors checkpoints.

Conversion to GGUF changes some weights, which is undone here: rows of queries and keys are reordered for
architectures whose rotary embedding turns neighbours, and Gemma's norms are stored with the 1 added. Tensors are read
some rows at a time, so that loading needs little more memory than its result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.checkpoints import gguf_hybrids as hybrids
from paceline.checkpoints.checkpoint import Checkpoint, TensorEntry
from paceline.checkpoints.config_keys import FULL, SLIDING
from paceline.checkpoints.gguf_file import GgufFile, Metadata, read_gguf
from paceline.checkpoints.gguf_keys import refuse_unread
from paceline.errors import CheckpointError, UnsupportedModelError

ROWS = 2**16
"""Weights that are read at a time, so few that what is held for a moment hardly counts, and stays in the cache."""

NAMES: Mapping[str, str] = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "token_embd_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "attn_sinks": "self_attn.sinks",
}
EXPERTS: Mapping[str, str] = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
TABLES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that belong to the rotary embedding, and are read with the configuration."""

BLOCK = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")
FORMED = re.compile(r"^blk\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class _TensorSource:
    """Where a tensor comes from: one of the file, an expert of it, with rows of heads to bring into order; or `values`
    beside it, see `_fill_latent`; or what `form` makes of it.
    """

    source: str
    expert: int | None = None
    heads: int = 0
    add: float = 0.0
    values: str | None = None
    form: Callable[[torch.Tensor], torch.Tensor] | None = None


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names that safetensors checkpoints give them; see `Checkpoint`.

    Attributes:
        folder: the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.file = read_gguf(path)
        self.folder = path
        self._architecture = _architecture(self.file)
        self._places: dict[str, _TensorSource] = {}
        self.entries: dict[str, TensorEntry] = {}
        layers = _layers_before_others(self.file)
        for name in self.file.tensors:
            block = FORMED.match(name)
            if block is None or layers is None or int(block[1]) < layers:  # others predict further tokens
                self._add(name)

    def _add(self, name: str) -> None:
        stem, _, ending = name.rpartition(".")
        if stem in TABLES or ((match := BLOCK.match(name)) is not None and match[2] in TABLES):
            return
        formed = FORMED.match(name)
        if formed is not None and formed[2] in hybrids.FORMS:
            self._place_formed(formed[1], formed[2], name)
            return
        if match is None:
            self._place(f"{NAMES.get(stem, stem)}.{ending}", _TensorSource(name, add=self._offset(stem)))
            return
        layer, part, kind = match.groups()
        if part == "attn_k_b":
            self._place_latent(layer, name)
            return
        if part == "attn_v_b":
            return
        if part in EXPERTS:
            for expert in range(self.file.tensors[name].shape[0]):
                stored = f"layers.{layer}.mlp.experts.{expert}.{EXPERTS[part]}.{kind}"
                self._place(stored, _TensorSource(name, expert=expert))
            return
        names = {**NAMES, **self._architecture.names}
        stored = f"layers.{layer}.{names.get(part, part)}" + ("" if part == "attn_sinks" else f".{kind}")
        self._place(stored, _TensorSource(name, None, self._turned(part), self._offset(part)))

    def _offset(self, part: str) -> float:
        return -1.0 if self._architecture.norms_plus_one and part.endswith("norm") else 0.0

    def _turned(self, part: str) -> int:
        if not self._architecture.turned or part not in {"attn_q", "attn_k"}:
            return 0
        heads = self.file.number("attention.head_count")
        counts = self.file.get("attention.head_count_kv")
        if part == "attn_q":
            return heads
        return max(counts) if isinstance(counts, list) else self.file.number("attention.head_count_kv", heads)

    def _place_formed(self, layer: str, part: str, name: str) -> None:
        tensor, (stored, form) = self.file.tensors[name], hybrids.FORMS[part]
        shape = form(torch.empty(tensor.shape, device="meta")).shape
        self._places[f"layers.{layer}.{stored}"] = _TensorSource(name, form=form)
        self.entries[f"layers.{layer}.{stored}"] = TensorEntry(tensor.path, "F32", tuple(shape), tensor.nbytes)

    def _place(self, stored: str, place: _TensorSource) -> None:
        tensor = self.file.tensors[place.source]
        shape = tensor.shape if place.expert is None else tensor.shape[1:]
        if stored.endswith("shared_expert_gate.weight"):
            shape = (1, shape[-1])
        self._places[stored] = place
        self.entries[stored] = TensorEntry(tensor.path, "F32", shape, tensor.nbytes)

    def _place_latent(self, layer: str, keys: str) -> None:
        """The matrix that latent attention makes keys and values of, stored in two."""
        values = keys.replace("attn_k_b", "attn_v_b")
        if values not in self.file.tensors:
            raise CheckpointError(f"{self.folder} lacks {values}; download it again")
        tensor, other = self.file.tensors[keys], self.file.tensors[values].shape
        if len(tensor.shape) != 3 or len(other) != 3 or (tensor.shape[0], tensor.shape[1]) != (other[0], other[2]):
            raise CheckpointError(f"{self.folder}: {keys} and {values} do not fit each other; download it again")
        shape = (tensor.shape[0] * (tensor.shape[2] + other[1]), tensor.shape[1])
        stored = f"layers.{layer}.self_attn.kv_b_proj.weight"
        self._places[stored] = _TensorSource(keys, values=values)
        self.entries[stored] = TensorEntry(tensor.path, "F32", shape, tensor.nbytes)

    @property
    def kind(self) -> str:
        """See `Checkpoint`."""
        return f"mostly {self.file.kind}"

    def is_narrow(self, name: str) -> bool:
        """See `Checkpoint`."""
        return self.file.is_narrow(self._places[name].source)

    def place(self, name: str) -> tuple[str, Path, int, npt.NDArray[np.int64]]:
        """Of a matrix its type, its file, the bytes before it, and (rows,) the order of its rows there."""
        place = self._places[name]
        tensor, count = self.file.tensors[place.source], self.entries[name].shape[0]
        rows = _in_order(torch.arange(count)[:, None], place.heads)[:, 0].numpy()
        return tensor.kind, tensor.path, tensor.start, rows

    def header_sizes(self) -> dict[Path, int]:
        """See `Checkpoint`."""
        positions: dict[Path, int] = {}
        for tensor in self.file.tensors.values():
            positions[tensor.path] = min(tensor.start, positions.get(tensor.path, tensor.start))
        return positions

    def dtype(self) -> torch.dtype:
        """What is computed in, whatever the file's types are."""
        return torch.bfloat16

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in float32."""
        out = torch.empty(self.entries[name].shape)
        self.fill(name, out)
        return out

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor into `out` of the same shape, some rows at a time."""
        place = self._places[name]
        if place.values is not None:
            self._fill_latent(place.source, place.values, out)
            return
        if place.form is not None:
            out.copy_(place.form(self.file.read(place.source).view(self.file.tensors[place.source].shape)))
            return
        if out.dim() == 1:
            row = place.expert or 0
            values = self.file.read(place.source, row, row + 1).flatten().add_(place.add)
            out.copy_(_in_order(values[:, None], place.heads)[:, 0])
            return
        before = len(out) * (place.expert or 0)
        unit = len(out) // place.heads if place.heads else 1
        step = max(1, ROWS // (out.shape[1] * unit)) * unit
        for first in range(0, len(out), step):
            stop = min(len(out), first + step)
            rows = self.file.read(place.source, before + first, before + stop)
            out[first:stop].copy_(_in_order(rows, (stop - first) // unit if place.heads else 0))

    def _fill_latent(self, keys: str, values: str, out: torch.Tensor) -> None:
        """Keys (heads, rank, nope) and values (heads, value, rank), into rows of both in each head."""
        k, v = (self.file.read(name).view(self.file.tensors[name].shape) for name in (keys, values))
        out.copy_(torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1))


def _in_order(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads whose pairs are neighbours, with the pairs half a head apart as elsewhere; 0 heads: as they are."""
    if not heads:
        return rows
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


Extra = Callable[[GgufFile], Metadata]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a GGUF architecture is here.

    Attributes:
        model_type: of `config.json`.
        turned: rows of queries and keys are stored for a rotary embedding that turns neighbours.
        norms_plus_one: norms are stored with the 1 that the model adds.
        names: of tensors, where they differ from NAMES.
        yarn: parameters of YaRN that the model has and its files do not say. (llama.cpp rounds the ends of YaRN's ramp
            for gpt-oss too, which its makers do not.)
        extra: further keys of `config.json`.
    """

    model_type: str
    turned: bool = False
    norms_plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: {"ffn_norm": "post_attention_layernorm"})
    yarn: Mapping[str, Any] = field(default_factory=dict)
    extra: Extra = lambda file: {}


def _gemma2(file: GgufFile) -> Metadata:
    return {
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, largest=46),
    }


def _gemma3(file: GgufFile) -> Metadata:
    metadata: Metadata = {
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(file, largest=62),
    }
    if (local := file.get("rope.freq_base_swa")) is not None:
        metadata["rope_local_base_freq"] = local
    return metadata


def _query_scalar(file: GgufFile, *, largest: int) -> float:
    """What queries are divided by the root of: the file does not say; the largest Gemma has a value of its own."""
    if file.number("block_count") == largest:
        return file.number("embedding_length") / max(1, file.number("attention.head_count"))
    return float(file.number("attention.key_length", 256))


def _granite(file: GgufFile) -> Metadata:
    if file.get("rope.scaling.finetuned", True) is not True:
        raise UnsupportedModelError(f"{file.path.name}: a Granite without rotary embedding is not supported")
    return _multipliers(file)


def _multipliers(file: GgufFile) -> Metadata:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: file.get(theirs) for ours, theirs in keys.items() if file.get(theirs) is not None}


def _qwen2_moe(file: GgufFile) -> Metadata:
    return _qwen3_moe(file) | {
        "shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _qwen3_moe(file: GgufFile) -> Metadata:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": bool(file.get("expert_weights_norm", True)),
    }


def _mixtral(file: GgufFile) -> Metadata:
    return {"num_local_experts": file.get("expert_count"), "num_experts_per_tok": file.get("expert_used_count")}


def _olmo2(file: GgufFile) -> Metadata:
    windows = _windows(file, period=4)
    return windows | {"model_type": "olmo3"} if windows.get("sliding_window") else windows  # both have one name


def _exaone4(file: GgufFile) -> Metadata:
    return {"sliding_window": file.get("attention.sliding_window")}  # where it is not said, there is none


def _starcoder2(file: GgufFile) -> Metadata:
    return {
        "norm_epsilon": file.get("attention.layer_norm_epsilon", 1e-5),
        "use_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _ernie4_5(file: GgufFile) -> Metadata:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors}


def _glm4(file: GgufFile) -> Metadata:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _seed_oss(file: GgufFile) -> Metadata:
    return _glm4(file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _cohere2(file: GgufFile) -> Metadata:
    return {
        "layer_norm_eps": file.get("attention.layer_norm_epsilon", 1e-5),
        "logit_scale": file.get("logit_scale", 1.0),
    }


def _gpt_oss(file: GgufFile) -> Metadata:
    inner = file.get("expert_feed_forward_length", file.get("feed_forward_length"))
    return _mixtral(file) | {"intermediate_size": inner}


def _hunyuan_moe(file: GgufFile) -> Metadata:
    inner = file.get("expert_feed_forward_length", file.get("feed_forward_length"))
    return {
        "num_experts": file.get("expert_count"),
        "moe_topk": file.get("expert_used_count"),
        "intermediate_size": inner,
    }


def _deepseek2(file: GgufFile) -> Metadata:
    rope, groups = file.number("rope.dimension_count"), file.get("expert_group_count") or 1
    metadata = {
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": file.get("attention.kv_lora_rank"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": file.number("attention.key_length_mla", file.number("attention.key_length")) - rope,
        "v_head_dim": file.get("attention.value_length_mla", file.get("attention.value_length")),
        **_routed_experts(file),
    }
    if metadata["scoring_func"] == "sigmoid":
        return metadata | {"model_type": "deepseek_v3"}
    return metadata | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _glm4_moe(file: GgufFile) -> Metadata:
    return _routed_experts(file) | _glm4(file) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def _minimax_m2(file: GgufFile) -> Metadata:
    scores = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}.get(file.get("expert_gating_func", SIGMOID), "unknown")
    norm = file.get("expert_weights_norm", True)
    return _gpt_oss(file) | {"scoring_func": scores, "norm_topk_prob": norm}


def _routed_experts(file: GgufFile) -> Metadata:
    """Experts chosen by groups, with an MLP beside them."""
    gating = file.get("expert_gating_func") or SOFTMAX
    return {
        "n_routed_experts": file.get("expert_count"),
        "n_shared_experts": file.get("expert_shared_count", 0),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "first_k_dense_replace": file.get("leading_dense_block_count", 0),
        "routed_scaling_factor": file.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.get("expert_weights_norm", False)),
        "scoring_func": {SOFTMAX: "softmax", SIGMOID: "sigmoid"}.get(gating, f"number {gating}"),
        "n_group": file.get("expert_group_count") or 1,
        "topk_group": file.get("expert_group_used_count") or 1,
    }


SOFTMAX, SIGMOID = 1, hybrids.SIGMOID
"""Numbers of the functions that make shares of experts of what the router says."""

SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
PHI3 = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj"}
STARCODER2 = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
GLM4 = PHI3 | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
QWEN2_MOE = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GPT_OSS = {"ffn_gate_inp": "mlp.router"}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
HUNYUAN_MOE = SHARED_EXPERTS | {"ffn_norm": "post_attention_layernorm"}
DEEPSEEK2 = SHARED_EXPERTS | {
    "ffn_norm": "post_attention_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", turned=True),
    "mistral3": Architecture(model_type="llama", turned=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen2moe": Architecture(model_type="qwen2_moe", names=QWEN2_MOE, extra=_qwen2_moe),
    "qwen3moe": Architecture(model_type="qwen3_moe", extra=_qwen3_moe),
    "gemma2": Architecture(model_type="gemma2", norms_plus_one=True, names=SANDWICH, extra=_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", norms_plus_one=True, names=SANDWICH, extra=_gemma3),
    "phi3": Architecture(model_type="phi3", names=PHI3),
    "smollm3": Architecture(model_type="smollm3", turned=True),
    "olmo2": Architecture(model_type="olmo2", extra=_olmo2),
    "exaone4": Architecture(model_type="exaone4", extra=_exaone4),
    "granite": Architecture(model_type="granite", turned=True, extra=_granite),
    "starcoder2": Architecture(model_type="starcoder2", names=STARCODER2, extra=_starcoder2),
    "glm4": Architecture(model_type="glm4", names=GLM4, extra=_glm4),
    "ernie4_5": Architecture(model_type="ernie4_5", extra=_ernie4_5),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "hunyuan-moe": Architecture(model_type="hunyuan_v1_moe", names=HUNYUAN_MOE, extra=_hunyuan_moe),
    "seed_oss": Architecture(model_type="seed_oss", names={}, extra=_seed_oss),
    "cohere2": Architecture(model_type="cohere2", extra=_cohere2),
    "gpt-oss": Architecture(model_type="gpt_oss", names=GPT_OSS, yarn={"truncate": False}, extra=_gpt_oss),
    "deepseek2": Architecture(model_type="deepseek_v2", names=DEEPSEEK2, extra=_deepseek2),
    "glm4moe": Architecture(model_type="glm4_moe", names=SHARED_EXPERTS, extra=_glm4_moe),
    "minimax-m2": Architecture(model_type="minimax_m2", extra=_minimax_m2),
    "lfm2": Architecture(model_type="lfm2", names=hybrids.LFM2, extra=hybrids.lfm2),
    "lfm2moe": Architecture(model_type="lfm2_moe", names=hybrids.LFM2, extra=hybrids.lfm2_moe),
    "falcon-h1": Architecture(model_type="falcon_h1", names=hybrids.FALCON_H1, extra=hybrids.falcon_h1),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        turned=True,
        names=hybrids.GRANITE_HYBRID,
        extra=lambda file: _multipliers(file) | hybrids.granite_hybrid(file),
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next", norms_plus_one=True, names=hybrids.QWEN3_NEXT, extra=hybrids.qwen3_next_moe
    ),
    "qwen35": Architecture(
        model_type="qwen3_5_text", norms_plus_one=True, names=hybrids.QWEN3_NEXT, extra=hybrids.qwen3_next
    ),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text", norms_plus_one=True, names=hybrids.QWEN3_NEXT, extra=hybrids.qwen3_next_moe
    ),
}
MIXTRAL = Architecture(model_type="mixtral", turned=True, extra=_mixtral)


def _architecture(file: GgufFile) -> Architecture:
    name = file.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path} is a GGUF file of architecture {name!r}, which is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}; or use the safetensors checkpoint it was made from"
        )
    return MIXTRAL if name == "llama" and file.get("expert_count") else ARCHITECTURES[name]


def _layers_before_others(file: GgufFile) -> int | None:
    """How many layers come before those that predict further tokens; None where there are none of these."""
    further = file.number("nextn_predict_layers", 0)
    return file.number("block_count") - further if further else None


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
    architecture = _architecture(file)
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
        **_windows(file),
        **_rotary(file, architecture),
        **architecture.extra(file),
    }
    if (layers := _layers_before_others(file)) is not None:
        sizes["num_hidden_layers"] = layers
    refuse_unread(file)
    return sizes


def _windows(file: GgufFile, period: int | None = None) -> Metadata:
    """The sliding window, and which layers have it: a flag for each, or one in so many attends to everything.

    Args:
        period: where the file does not say; None is the family's default.
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
            mscale = 10 * growth if file.architecture == "deepseek2" else growth
            scaling |= {"mscale": mscale, "mscale_all_dim": mscale}  # which are the same in all known models
    return share | {"rope_scaling": scaling}
