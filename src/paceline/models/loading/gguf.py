"""GGUF files: their metadata as a `config.json`, their tensors under the names of safetensors checkpoints.

A file is a header of typed key-value pairs, then descriptions of tensors, then their data, aligned. The header is read
here and not by `gguf.GGUFReader`, which takes 17 seconds for a vocabulary of 262,144 tokens; what the blocks of
quantised types mean is known by the package `gguf` (MIT), which multiplies them out. Tensors are read and multiplied
out some rows at a time, so that loading needs little more memory than its result.

Conversion to GGUF changes some weights, which is undone here: rows of queries and keys are reordered for
architectures whose rotary embedding turns neighbours, and Gemma's norms are stored with the 1 added.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from paceline.errors import CheckpointError, PacelineError, UnsupportedModelError
from paceline.models.loading.checkpoint import Checkpoint, Entry, some

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS: Mapping[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_TENSORS, MOST_FIELDS, MOST_DIMS = 2**20, 2**16, 4
ROWS = 2**22
"""Weights that are multiplied out at a time: 16 MiB in float32."""

SPLIT = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
PLAIN = ("F32", "F16", "BF16")
FOUR_BITS = ("Q4", "Q3", "Q2", "IQ", "MXFP4", "NVFP4", "TQ")
"""Beginnings of the names of types that spend 4 bits or less on a weight, scales not counted."""

Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One tensor of a file: type by gguf's number, shape as in PyTorch, bytes from the start of the file."""

    path: Path
    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


class _Header:
    """Reads values from the front of a file, every length checked against what is left of it."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is cut off or no GGUF file ({what}); download it again")

    def take(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{kind}"
        size = struct.calcsize(form)
        if count < 0 or self.at + size > len(self.data):
            raise self.broken(f"{count} values at byte {self.at} of {len(self.data)}")
        found = struct.unpack_from(form, self.data, self.at)
        self.at += size
        return found

    def text(self) -> str:
        (size,) = self.take("Q")
        start = self.at
        if start + size > len(self.data):
            raise self.broken(f"a text of {size} bytes at byte {start} of {len(self.data)}")
        self.at = start + size
        return str(self.data[start : self.at], "utf-8", "replace")

    def value(self, kind: int, *, nested: bool = True) -> Any:
        if kind in SCALARS:
            return self.take(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY or not nested:
            raise self.broken(f"a value of unknown kind {kind} at byte {self.at}")
        inner, count = *self.take("I"), *self.take("Q")
        if inner in SCALARS:
            return list(self.take(SCALARS[inner], count))
        if count > len(self.data):
            raise self.broken(f"a list of {count} values at byte {self.at}")
        return [self.value(inner, nested=False) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed GGUF file, or all parts of a split one.

    Attributes:
        path: the file, the first of split ones.
        metadata: key -> value.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, _Tensor] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of this architecture, such as "context_length"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def array(self, name: str, first: int = 0, stop: int | None = None) -> torch.Tensor:
        """Rows first to stop of a tensor, multiplied out to float32 (a copy)."""
        import gguf

        tensor = self.tensors[name]
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        pitch = tensor.nbytes // rows
        stop = rows if stop is None else stop
        raw = np.memmap(tensor.path, np.uint8, "r", tensor.start + first * pitch, ((stop - first) * pitch,))
        kind = gguf.GGMLQuantizationType(tensor.kind)
        shape = (stop - first, *tensor.shape[1:]) if len(tensor.shape) > 1 else tensor.shape
        try:
            flat = gguf.quants.dequantize(raw.reshape(stop - first, pitch) if kind > 1 else _plain(raw, kind), kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(
                f"{self.path}: {name} is stored as {kind.name}, which cannot be read; use a file of another type, "
                f"such as Q8_0 or Q4_K_M"
            ) from error
        return torch.from_numpy(np.array(flat, np.float32)).view(shape)

    @property
    def kind(self) -> str:
        """The type of most bytes in the layers' matrices, as gguf calls it ("Q4_K")."""
        import gguf

        total: dict[int, int] = {}
        for name, tensor in self.tensors.items():
            if name.startswith("blk.") and len(tensor.shape) > 1:
                total[tensor.kind] = total.get(tensor.kind, 0) + tensor.nbytes
        return str(gguf.GGMLQuantizationType(max(total, key=lambda kind: total[kind], default=0)).name)

    @property
    def quantization(self) -> Literal["int8", "int4"] | None:
        """What weights are quantised to where the user says nothing: int4 for types of up to 4 bits, int8 for others,
        None for plain floats.
        """
        if self.kind in PLAIN:
            return None
        return "int4" if self.kind.startswith(FOUR_BITS) else "int8"


def _plain(raw: np.ndarray, kind: int) -> np.ndarray:
    """Bytes of F32 (0) and F16 (1) as numbers."""
    return raw.view(np.float32 if kind == 0 else np.float16)


def is_gguf(path: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return str(path).endswith(".gguf")


def read_gguf(path: Path) -> GgufFile:
    """Parse a GGUF file, and the other parts of a split one; kept for the next call while the file stays as it is.

    Raises:
        CheckpointError: not such a file, cut off, or a part is missing.
    """
    parts = _parts(path)
    try:
        return _read(tuple((part, part.stat().st_mtime_ns, part.stat().st_size) for part in parts))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); check the path") from error


@functools.lru_cache(maxsize=4)
def _read(parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    """Files with the time of their last change and their size."""
    metadata, tensors = Metadata(), dict[str, _Tensor]()
    for part, _, _ in parts:
        own, found = _read_one(part)
        metadata = {**own, **metadata}
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{part} holds {some(twice)} a second time; download its parts again")
        tensors.update(found)
    return GgufFile(parts[0][0], metadata, tensors)


def split_names(name: str) -> list[str]:
    """The names of all parts of a split file, in order; otherwise the name alone."""
    if (match := SPLIT.match(name)) is None:
        return [name]
    count = int(match["count"])
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _parts(path: Path) -> list[Path]:
    names = split_names(path.name)
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise CheckpointError(f"{path.parent} lacks {some(missing)} of {len(names)} parts; download them too")
    return [path.parent / name for name in names]


def _read_one(path: Path) -> tuple[Metadata, dict[str, _Tensor]]:
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            data = memoryview(mapped)
            try:
                return _parse(_Header(path, data))
            finally:
                data.release()
    except PacelineError:
        raise
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path} cannot be read ({error}); download it again") from error


def _parse(header: _Header) -> tuple[Metadata, dict[str, _Tensor]]:
    path = header.path
    if bytes(header.data[:4]) != MAGIC:
        raise header.broken("it does not begin with GGUF")
    header.at = 4
    (version,) = header.take("I")
    if version not in VERSIONS:
        raise UnsupportedModelError(
            f"{path} is GGUF version {version}, and versions 2 and 3 can be read; convert the model again"
        )
    count, fields = header.take("Q", 2)
    if count > MOST_TENSORS or fields > MOST_FIELDS:
        raise header.broken(f"{count} tensors and {fields} keys")
    metadata = {}
    for _ in range(fields):
        key = header.text()
        (kind,) = header.take("I")
        metadata[key] = header.value(kind)
    described = [_description(header) for _ in range(count)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-header.at // max(1, alignment)) * max(1, alignment)
    return metadata, {name: _tensor(header, name, kind, shape, start + at) for name, shape, kind, at in described}


def _description(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name = header.text()
    (dims,) = header.take("I")
    if not 1 <= dims <= MOST_DIMS:
        raise header.broken(f"tensor {name!r} of {dims} dimensions")
    shape = tuple(reversed(header.take("Q", dims)))
    kind, offset = *header.take("I"), *header.take("Q")
    return name, shape, kind, offset


def _tensor(header: _Header, name: str, kind: int, shape: tuple[int, ...], start: int) -> _Tensor:
    import gguf

    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise UnsupportedModelError(
            f"{header.path}: {name} is stored as type {kind}, which is not known; update the package gguf, or use a "
            f"file of another type, such as Q8_0"
        ) from None
    count = int(np.prod(shape, dtype=object))
    if shape[-1] % block:
        raise header.broken(f"{name} has rows of {shape[-1]} weights in blocks of {block}")
    nbytes = count // block * size
    if start + nbytes > len(header.data):
        raise header.broken(f"{name} ends at byte {start + nbytes} of {len(header.data)}")
    return _Tensor(header.path, kind, shape, start, nbytes)


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
        heads = int(self.file.get("attention.head_count"))
        return heads if part == "attn_q" else int(self.file.get("attention.head_count_kv", heads))

    def _place(self, stored: str, place: _Place) -> None:
        tensor = self.file.tensors[place.source]
        shape = tensor.shape if place.expert is None else tensor.shape[1:]
        self._places[stored] = place
        self.entries[stored] = Entry(tensor.path, "F32", shape, tensor.nbytes)

    def dtype(self) -> torch.dtype:
        """The type that most weights have, bfloat16 where they are quantised."""
        total: dict[int, int] = {}
        for tensor in self.file.tensors.values():
            total[tensor.kind] = total.get(tensor.kind, 0) + tensor.nbytes
        kinds = {0: torch.float32, 1: torch.float16}
        return kinds.get(max(total, key=lambda kind: total[kind], default=0), torch.bfloat16)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor in float32."""
        out = torch.empty(self.entries[name].shape)
        self.fill(name, out)
        return out

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor into `out` of the same shape, some rows at a time."""
        place = self._places[name]
        if out.dim() == 1:
            values = self.file.array(place.source).flatten().add_(place.add)
            out.copy_(_in_order(values[:, None], place.heads)[:, 0])
            return
        if place.expert is not None:
            out.copy_(self.file.array(place.source, place.expert, place.expert + 1)[0])
            return
        unit = len(out) // place.heads if place.heads else 1
        step = max(1, ROWS // (out.shape[1] * unit)) * unit
        for first in range(0, len(out), step):
            stop = min(len(out), first + step)
            rows = self.file.array(place.source, first, stop)
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
    if int(file.get("block_count")) == largest:
        return float(file.get("embedding_length")) / int(file.get("attention.head_count"))
    return float(file.get("attention.key_length", 256))


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
    if "hidden_size" not in found:
        raise CheckpointError(f"{path} lacks {file.architecture}.embedding_length; download it again")
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
        **_rotary(file, found),
    }
    return found


def _one(value: Any) -> Any:
    """The value of all layers, where a file gives a list with one for each."""
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        return value[0]
    return value


def _rotary(file: GgufFile, found: Metadata) -> Metadata:
    """Rotated share of a head, and the scaling of angles."""
    heads = max(1, int(found.get("num_attention_heads") or 1))
    head = int(found.get("head_dim") or int(found["hidden_size"]) // heads)
    dims, longest = int(file.get("rope.dimension_count", head)), found.get("max_position_embeddings")
    share = {} if dims >= head else {"partial_rotary_factor": dims / head}
    original = file.get("rope.scaling.original_context_length", longest)
    tables = {
        name: file.array(f"{name}.weight").flatten().tolist() for name in TABLES if f"{name}.weight" in file.tensors
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
