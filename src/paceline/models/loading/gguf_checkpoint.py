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

import torch

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.loading.checkpoint import Checkpoint, Entry
from paceline.models.loading.gguf_file import GgufFile, Metadata, read_gguf

ROWS = 2**16
"""Weights that are read at a time, so few that what is held for a moment hardly counts, and stays in the cache."""

NAMES: Mapping[str, str] = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
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
}
EXPERTS: Mapping[str, str] = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
TABLES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that belong to the rotary embedding, and are read with the configuration."""

BLOCK = re.compile(r"^blk\.(\d+)\.(.+)\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor comes from: one of the file, an expert of it, with rows of heads to bring into order."""

    source: str
    expert: int | None = None
    heads: int = 0
    add: float = 0.0


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file under the names that safetensors checkpoints give them; see `Checkpoint`.

    Attributes:
        folder: the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.file = read_gguf(path)
        self.folder = path
        self._architecture = _architecture(self.file)
        self._places: dict[str, _Place] = {}
        self.entries: dict[str, Entry] = {}
        for name in self.file.tensors:
            self._add(name)

    def _add(self, name: str) -> None:
        stem, _, ending = name.rpartition(".")
        if stem in TABLES or ((match := BLOCK.match(name)) is not None and match[2] in TABLES):
            return
        if match is None:
            self._place(f"{NAMES.get(stem, stem)}.{ending}", _Place(name, add=self._offset(stem)))
            return
        layer, part, kind = match.groups()
        if part in EXPERTS:
            for expert in range(self.file.tensors[name].shape[0]):
                stored = f"layers.{layer}.mlp.experts.{expert}.{EXPERTS[part]}.{kind}"
                self._place(stored, _Place(name, expert=expert))
            return
        names = {**NAMES, **self._architecture.names}
        heads = self._turned(part)
        self._place(f"layers.{layer}.{names.get(part, part)}.{kind}", _Place(name, None, heads, self._offset(part)))

    def _offset(self, part: str) -> float:
        return -1.0 if self._architecture.norms_plus_one and part.endswith("norm") else 0.0

    def _turned(self, part: str) -> int:
        if not self._architecture.turned or part not in {"attn_q", "attn_k"}:
            return 0
        heads = self.file.number("attention.head_count")
        return heads if part == "attn_q" else self.file.number("attention.head_count_kv", heads)

    def _place(self, stored: str, place: _Place) -> None:
        tensor = self.file.tensors[place.source]
        shape = tensor.shape if place.expert is None else tensor.shape[1:]
        self._places[stored] = place
        self.entries[stored] = Entry(tensor.path, "F32", shape, tensor.nbytes)

    def is_narrow(self, name: str) -> bool:
        """Whether a tensor is stored in four bits a weight or fewer."""
        return self.file.is_narrow(self._places[name].source)

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
        if out.dim() == 1:
            values = self.file.read(place.source).flatten().add_(place.add)
            out.copy_(_in_order(values[:, None], place.heads)[:, 0])
            return
        before = len(out) * (place.expert or 0)
        unit = len(out) // place.heads if place.heads else 1
        step = max(1, ROWS // (out.shape[1] * unit)) * unit
        for first in range(0, len(out), step):
            stop = min(len(out), first + step)
            rows = self.file.read(place.source, before + first, before + stop)
            out[first:stop].copy_(_in_order(rows, (stop - first) // unit if place.heads else 0))


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
        extra: further keys of `config.json`.
    """

    model_type: str
    turned: bool = False
    norms_plus_one: bool = False
    names: Mapping[str, str] = field(default_factory=lambda: {"ffn_norm": "post_attention_layernorm"})
    extra: Extra = lambda file: {}


def _gemma2(file: GgufFile) -> Metadata:
    return {
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(file, largest=46),
    }


def _gemma3(file: GgufFile) -> Metadata:
    found: Metadata = {
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(file, largest=62),
    }
    if (local := file.get("rope.freq_base_swa")) is not None:
        found["rope_local_base_freq"] = local
    return found


def _query_scalar(file: GgufFile, *, largest: int) -> float:
    """What queries are divided by the root of: the file does not say; the largest Gemma has a value of its own."""
    if file.number("block_count") == largest:
        return file.number("embedding_length") / max(1, file.number("attention.head_count"))
    return float(file.number("attention.key_length", 256))


def _granite(file: GgufFile) -> Metadata:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: file.get(theirs) for ours, theirs in keys.items() if file.get(theirs) is not None}


def _qwen3_moe(file: GgufFile) -> Metadata:
    return {
        "num_experts": file.get("expert_count"),
        "num_experts_per_tok": file.get("expert_used_count"),
        "moe_intermediate_size": file.get("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _mixtral(file: GgufFile) -> Metadata:
    return {"num_local_experts": file.get("expert_count"), "num_experts_per_tok": file.get("expert_used_count")}


SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
PHI3 = {"ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.gate_up_proj"}

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(model_type="llama", turned=True),
    "mistral3": Architecture(model_type="llama", turned=True),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(model_type="qwen3_moe", extra=_qwen3_moe),
    "gemma2": Architecture(model_type="gemma2", norms_plus_one=True, names=SANDWICH, extra=_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", norms_plus_one=True, names=SANDWICH, extra=_gemma3),
    "phi3": Architecture(model_type="phi3", names=PHI3),
    "smollm3": Architecture(model_type="smollm3", turned=True),
    "olmo2": Architecture(model_type="olmo2"),
    "granite": Architecture(model_type="granite", turned=True, extra=_granite),
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
    "sliding_window": "attention.sliding_window",
}


def gguf_config(path: Path) -> Metadata:
    """What a `config.json` would say of a GGUF file's model.

    Raises:
        CheckpointError: a damaged file. UnsupportedModelError: an architecture that is not read from GGUF.
    """
    file = read_gguf(path)
    architecture = _architecture(file)
    found = {ours: _one(file.get(theirs)) for ours, theirs in SIZES.items() if file.get(theirs) is not None}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{path} holds no embedding (token_embd.weight), so it is no whole model; download it again"
        )
    found |= {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
        **architecture.extra(file),
        **_rotary(file),
    }
    return found


def _one(value: Any) -> Any:
    """The value of all layers, where a file gives a list with one for each."""
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        return value[0]
    return value


def _rotary(file: GgufFile) -> Metadata:
    """Rotated share of a head, and the scaling of angles."""
    heads = max(1, file.number("attention.head_count"))
    head = file.number("attention.key_length", file.number("embedding_length") // heads)
    dims, longest = file.number("rope.dimension_count", head), file.get("context_length")
    share = {} if dims >= head else {"partial_rotary_factor": dims / head}
    original = file.get("rope.scaling.original_context_length", longest)
    tables = {
        name: file.read(f"{name}.weight").flatten().tolist() for name in TABLES if f"{name}.weight" in file.tensors
    }
    if "rope_freqs" in tables:
        return share | {"rope_scaling": {"rope_type": "factors", "factors": tables["rope_freqs"]}}
    if "rope_factors_long" in tables:
        scaling = {"rope_type": "longrope", "long_factor": tables["rope_factors_long"]}
        scaling |= {"short_factor": tables.get("rope_factors_short", tables["rope_factors_long"])}
        if (attention := file.get("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        return share | {"rope_scaling": scaling, "original_max_position_embeddings": original}
    kind = file.get("rope.scaling.type", "none")
    if kind in {"linear", "yarn"} and file.get("rope.scaling.factor") is not None:
        scaling = {"rope_type": kind, "factor": file.get("rope.scaling.factor")}
        return share | {
            "rope_scaling": scaling | ({"original_max_position_embeddings": original} if kind == "yarn" else {})
        }
    return share
