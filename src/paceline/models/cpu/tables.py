"""The tables that compiled code reads for one model: layer records, rope records, workspace, all packed once.

In: a ModelSpec with canonical weights. Out: a `Program`: packed weights, the layers' records, the frame with everything
that does
not change from pass to pass. Not here: passes (models.cpu.compiled_decoder), offsets (models.cpu.layout).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from paceline.models.cpu import layout as at
from paceline.models.cpu.attention_tiles import MOST_QUERIES
from paceline.models.cpu.bfloat16 import has_bfloat
from paceline.models.cpu.int8 import half_pitch
from paceline.models.cpu.matrix import Packed, pack
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.tiles import ACTIVATION, DOT, FULL, HALF, STRIP
from paceline.models.cpu.visible_slots import Ints, address
from paceline.models.decoder.tree_attention import AttentionShape
from paceline.models.loading.quantization import GROUP, form_of
from paceline.models.spec import ModelSpec

Weights = dict[str, torch.Tensor]

ROWS = 64
"""Most rows of one pass; more are fed in several."""


class Table:
    """Records of 8-byte fields: integers and float32 by byte offset."""

    def __init__(self, size: int, count: int = 1) -> None:
        self.fields: Ints = np.zeros((count, size // at.FIELD), np.int64)
        self.address = address(self.fields)
        self._floats = self.fields.view(np.float32)

    def put(self, values: Mapping[int, int | float], record: int = 0) -> None:
        """Set fields by offset; a float goes in as float32."""
        for offset, value in values.items():
            if isinstance(value, float):
                self._floats[record, offset // 4] = value
            else:
                self.fields[record, offset // at.FIELD] = value


def head_order(shape: AttentionShape) -> torch.Tensor:
    """Row order that turns query heads stored (h, g, d) into (g, h, d)."""
    index = torch.arange(shape.heads * shape.head_dim).view(shape.kv_heads, shape.groups, shape.head_dim)
    return index.transpose(0, 1).reshape(-1)


class Packing:
    """Takes a model's weights out of the mapping one by one, packs them, and keeps them alive."""

    def __init__(self, spec: ModelSpec, shape: AttentionShape, weights: Weights) -> None:
        self._spec, self._weights, self._order = spec, weights, head_order(shape)
        self.quantized = {None: 0, "int8": 1, "int4": 2}[form_of(weights)]
        self._pages = Pages()
        self.kept: list[torch.Tensor | Packed] = []

    def record(self, index: int) -> dict[int, int]:
        """The fields of one layer that hold weights."""
        name = f"layers.{index}."
        order = torch.cat([self._order, torch.arange(len(self._order), self._weights[f"{name}qkv.weight"].shape[0])])
        qkv_bias = self._take(f"{name}qkv.bias")
        qkv, qkv_scale = self._take_matrix(f"{name}qkv")
        o, o_scale = self._take_matrix(f"{name}o")
        return {
            at.ATTENTION_NORM: self._vector(self._norm(f"{name}attn_norm.weight")),
            at.QKV_WEIGHT: self._matrix(qkv[order], None if qkv_scale is None else qkv_scale[order]),
            at.QKV_BIAS: self._vector(None if qkv_bias is None else qkv_bias[order]),
            at.Q_NORM: self._vector(self._norm(f"{name}q_norm.weight")),
            at.K_NORM: self._vector(self._norm(f"{name}k_norm.weight")),
            at.O_WEIGHT: self._matrix(*self._by_group(o, o_scale)),
            at.O_BIAS: self._vector(self._take(f"{name}o.bias")),
            at.MLP_NORM: self._vector(self._norm(f"{name}mlp_norm.weight")),
            at.GATE_UP_WEIGHT: self._matrix(*self._take_matrix(f"{name}gate_up"), paired=True),
            at.GATE_UP_BIAS: self._vector(self._take(f"{name}gate_up.bias"), paired=True),
            at.DOWN_WEIGHT: self._matrix(*self._take_matrix(f"{name}down")),
            at.DOWN_BIAS: self._vector(self._take(f"{name}down.bias")),
        }

    def ends(self) -> dict[int, int]:
        """The fields of the frame that hold the final norm and the head."""
        tied = self._spec.tied and not self.quantized
        head = (self._weights["embed.weight"], None) if tied else self._take_matrix("head")
        return {at.FINAL_NORM: self._vector(self._norm("final_norm.weight")), at.HEAD: self._matrix(*head)}

    def _take(self, name: str) -> torch.Tensor | None:
        return self._weights.pop(name, None)

    def _take_matrix(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._weights.pop(f"{name}.weight"), self._take(f"{name}.scale")

    def _by_group(self, weight: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A weight whose inputs are heads, in the order of heads that attention leaves."""
        if scale is None or scale.dim() == 1:
            return weight[:, self._order], scale
        order = self._order[::GROUP] // GROUP
        return weight.view(len(weight), -1, GROUP // 2)[:, order].flatten(1), scale[:, order]

    def _norm(self, name: str) -> torch.Tensor | None:
        weight = self._take(name)
        return weight.float() + 1.0 if weight is not None and self._spec.norm_offset else weight

    def _matrix(self, weight: torch.Tensor, scale: torch.Tensor | None = None, *, paired: bool = False) -> int:
        packed = pack(weight, self._pages, paired=paired, scale=scale)
        self.kept.append(packed)
        return packed.address

    def _vector(self, vector: torch.Tensor | None, *, paired: bool = False) -> int:
        """Address of float32 values padded to whole strips, 0 for none."""
        if vector is None:
            return 0
        if paired:
            gate, up = (
                torch.nn.functional.pad(half, (0, -len(half) % 32)).view(-1, 32)
                for half in vector.split(len(vector) // 2)
            )
            vector = torch.cat((gate, up), 1).flatten()
        own = torch.zeros(-(-len(vector) // STRIP) * STRIP)
        own[: len(vector)] = vector
        self.kept.append(own)
        return own.data_ptr()


def constants(spec: ModelSpec, dtype: torch.dtype, kind: int, *, quantized: int = 0) -> dict[int, int | float]:
    """The frame's fields that follow from the model's shape."""
    return {
        at.KIND: kind, at.QUANTIZED: quantized, at.NARROW: int(dtype is torch.bfloat16),
        at.HIDDEN: spec.hidden_size, at.INTERMEDIATE: spec.intermediate_size, at.VOCAB: spec.vocab_size,
        at.HEADS: spec.num_heads, at.KV_HEADS: spec.num_kv_heads, at.HEAD_DIM: spec.head_dim,
        at.SLOT_PITCH: 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
        at.ATTENTION_SCALE: float(spec.scale), at.EPSILON: float(spec.norm_eps),
        at.RESIDUAL: float(spec.residual_multiplier),
        at.LOGIT_SCALE: float(spec.logit_multiplier), at.GELU: int(spec.activation == "gelu_tanh"),
    }  # fmt: skip


class Workspace:
    """Memory for the activations of a pass, in one piece; `threads` copies of what each thread has for itself."""

    def __init__(self, spec: ModelSpec, kind: int, threads: int, *, quantized: int = 0) -> None:
        item, self.threads = ACTIVATION[kind], threads
        heads = spec.num_heads * spec.head_dim
        qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
        widths = {
            at.X: 4 * spec.hidden_size, at.NORMED: item * spec.hidden_size, at.MIXED: item * heads,
            at.QKV: 4 * max(qkv, spec.hidden_size), at.INNER: item * spec.intermediate_size,
        }  # fmt: skip
        # An odd number of lines: rows of one column spread over the sets of the first-level cache.
        pitches = {field: (-(-width // 256) * 4 + 1) * 64 for field, width in widths.items()}
        if quantized:
            pitches[at.NORMED] = 2 * half_pitch(max(spec.hidden_size, heads, spec.intermediate_size))
        spare = ROWS * pitches[at.NORMED]
        normed, sums = (
            spare + (-(-4 * spec.hidden_size // 64) * 64 if quantized else 0),
            ROWS * 4 * STRIP * (1 + bool(quantized)),
        )
        query = MOST_QUERIES * (4 * spec.head_dim + 128 + 64)
        sizes = {field: ROWS * pitch for field, pitch in pitches.items()}
        sizes |= {at.NORMED: threads * normed, at.SUMS: threads * sums, at.QUERY: threads * query}
        self._memory = torch.zeros(sum(sizes.values()) + 64, dtype=torch.uint8)
        self.fields: dict[int, int] = {}
        start = -(-self._memory.data_ptr() // 64) * 64
        for field, size in sizes.items():
            self.fields[field] = start
            start += size
        pitch_of = {at.X: at.X_PITCH, at.NORMED: at.NORMED_PITCH, at.QKV: at.QKV_PITCH, at.MIXED: at.MIXED_PITCH}
        self.fields |= {other: pitches[field] for field, other in pitch_of.items()} | {
            at.INNER_PITCH: pitches[at.INNER]
        }
        self.fields |= {at.NORMED_SIZE: normed, at.SPARE: spare, at.SUMS_SIZE: sums, at.QUERY_SIZE: query}


def best_kind(dtype: torch.dtype) -> int:
    """The fastest kind of product that this CPU has for weights of a dtype."""
    if dtype is torch.float32:
        return FULL
    return DOT if has_bfloat() else HALF
