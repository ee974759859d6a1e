"""What compiled passes read: a model's weights, packed once into the tables of models.cpu.offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch

from paceline.checkpoints import GROUP, BlockRows, Blocks, stacked
from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention import BY_HEAD, ROTATED, WHOLE
from paceline.models.cpu.block_packing import in_strips, pack_strips, strip_table
from paceline.models.cpu.experts import routing
from paceline.models.cpu.latent import projection
from paceline.models.cpu.matrix import pack
from paceline.models.cpu.pages import address
from paceline.models.cpu.sublayers import CLAMPED, GELU, GELU_TANH, RELU, RELU2, SILU, XIELU
from paceline.models.cpu.tiles import BLOCKS, BYTES, FINE_BLOCKS, FULL, HALF, NIBBLES, STRIP
from paceline.models.layers.decoder import head_order
from paceline.models.layers.experts import xielu_numbers
from paceline.models.mixer_spec import MambaSpec, MixerSpec
from paceline.models.passes.mixer_constants import mixer_constants
from paceline.models.passes.packed_weights import PackedWeights
from paceline.models.spec import AttentionShape, LatentSpec, LayerSpec, ModelSpec, MoeSpec
from paceline.models.state.window_slots import Ints

Weights = dict[str, torch.Tensor]
Maybe = torch.Tensor | None

ACTIVATIONS = {
    "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "relu": RELU, "relu2": RELU2, "clamped_swiglu": CLAMPED,
    "xielu": XIELU,
}  # fmt: skip

EXPERT_PARTS = {
    "gate_up": (at.EXPERT_GATE_UP, at.EXPERT_GATE_UP_KIND, at.EXPERT_GATE_UP_BIAS),
    "down": (at.EXPERT_DOWN, at.EXPERT_DOWN_KIND, at.EXPERT_DOWN_BIAS),
}

MIXER_MAPS = (
    ("in", at.MIX_IN, at.MIX_IN_KIND, at.MIX_IN_BIAS),
    ("out", at.MIX_OUT, at.MIX_OUT_KIND, at.MIX_OUT_BIAS),
    ("gates", at.MIX_GATES, at.MIX_GATES_KIND, at.MIX_GATES_BIAS),
)
FURTHER_MAPS = ("steps", "decays", "gate")
"""Maps of what others have made of a row, of which a mixer has two at most."""
MIXER_VECTORS = {
    "step_bias": at.MIX_STEP_BIAS,
    "skip": at.MIX_SKIP,
    "norm.weight": at.MIX_NORM,
}
ORDERS = {
    at.QKV_WEIGHT: at.QKV_ORDER, at.O_WEIGHT: at.O_ORDER, at.GATE_UP_WEIGHT: at.GATE_UP_ORDER,
    at.DOWN_WEIGHT: at.DOWN_ORDER,
}  # fmt: skip
"""Where a layer's record has a matrix -> where it has the order of its inputs."""

ROWS = 256
"""Most rows of one pass; more are fed in several."""


class RecordTable:
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


class Packing:
    """Takes a model's weights out of the mapping one by one, packs them, and keeps them alive.

    Args:
        kind: of the products with matrices that are not quantised.
        blocks: matrices that are packed with the numbers of a file, and are not among the weights.
        packed: makes the matrices, or has them; then those among the weights may be on the meta device.
        activation_bits: 8 or 16, of the activations that blocks are multiplied with.
    """

    def __init__(
        self,
        spec: ModelSpec,
        shape: AttentionShape,
        weights: Weights,
        *,
        kind: int,
        blocks: Blocks,
        packed: PackedWeights,
        activation_bits: int,
    ) -> None:
        self._spec, self._weights, self._order, self._kind = spec, weights, head_order(shape), kind
        self._blocks, self._packed = dict(blocks), packed
        self._kind_of_blocks = FINE_BLOCKS if activation_bits == 16 else BLOCKS
        self.kept: list[torch.Tensor | RecordTable] = []

    def record(self, index: int) -> dict[int, int]:
        """The fields of one layer that hold weights."""
        name = f"layers.{index}."
        norm = self._norm(f"{name}attn_norm")
        layer = self._spec.layers[index]
        attention = self._attention if self._spec.latent is None else partial(self._latent, latent=self._spec.latent)
        return {
            at.ATTENTION_NORM: norm,
            **(attention(name) if layer.attention else {}),
            **(self._mixer(f"{name}mixer.", layer.mixer) if layer.mixer is not None else {}),
            at.POST_ATTENTION_NORM: self._norm(f"{name}post_attn_norm"),
            at.MLP_NORM: norm if self._spec.parallel else self._norm(f"{name}mlp_norm"),
            at.POST_MLP_NORM: self._norm(f"{name}post_mlp_norm"),
            **self._transformation(name, layer),
            at.SUM_NORM: self._norm(f"{name}residual_attn_norm"),
            at.MLP_SUM_NORM: self._norm(f"{name}residual_mlp_norm"),
        }

    def records(self, index: int) -> list[dict[int, int]]:
        """The records of one layer: of an encoder-decoder model attention first, then attention to the source and the
        MLP.
        """
        first = self.record(index)
        if self._spec.encoder is None:
            return [first]
        name = f"layers.{index}."
        bias = self._take(f"{name}cross_q.bias")
        second = first | {
            at.MIXER: 0,
            at.SOURCE_ATTENTION: 1,
            at.ATTENTION_NORM: self._norm(f"{name}cross_norm"),
            at.SUM_NORM: self._norm(f"{name}residual_cross_norm"),
            **self._product(f"{name}cross_q", at.QKV_KIND, at.QKV_WEIGHT, order=self._order),
            at.QKV_BIAS: self._vector(None if bias is None else bias[self._order]),
            **self._product(f"{name}cross_o", at.O_KIND, at.O_WEIGHT, heads=True),
            at.O_BIAS: self._vector(self._take(f"{name}cross_o.bias")),
        }
        return [first, second]

    def _attention(self, name: str) -> dict[int, int]:
        outputs = len(self._order) + 2 * self._spec.num_kv_heads * self._spec.head_dim
        order = torch.cat([self._order, torch.arange(len(self._order), outputs)])
        if self._spec.attention_gate:
            self._stack_gates(name)
            order = torch.cat([order, outputs + self._order])
        q_norm = self._scaled(f"{name}q_norm.weight")
        if q_norm is not None and self._spec.qk_norm == "full":
            q_norm = q_norm[self._order]
        qkv_bias = self._take(f"{name}qkv.bias")
        return {
            **self._product(f"{name}qkv", at.QKV_KIND, at.QKV_WEIGHT, order=order),
            at.QKV_BIAS: self._vector(None if qkv_bias is None else qkv_bias[order]),
            at.Q_NORM: self._vector(q_norm),
            at.K_NORM: self._vector(self._scaled(f"{name}k_norm.weight")),
            at.SINKS: self._sinks(f"{name}sinks"),
            **self._product(f"{name}o", at.O_KIND, at.O_WEIGHT, heads=True),
            at.O_BIAS: self._vector(self._take(f"{name}o.bias")),
        }

    def _stack_gates(self, name: str) -> None:
        """Gates behind queries, keys and values, as rows of one matrix."""
        if (rows := self._blocks.pop(f"{name}attn_gate.weight", None)) is not None:
            self._blocks[f"{name}qkv.weight"] = stacked(self._blocks[f"{name}qkv.weight"], rows)
        for kind in ("weight", "scale", "bias"):
            if (gates := self._take(f"{name}attn_gate.{kind}")) is not None:
                self._weights[f"{name}qkv.{kind}"] = torch.cat([self._weights[f"{name}qkv.{kind}"], gates])

    def _mixer(self, name: str, mixer: MixerSpec) -> dict[int, int]:
        """The record of a mixer."""
        record = RecordTable(at.MIXER_FIELDS)
        self.kept.append(record)
        record.put(mixer_constants(mixer))
        self._put_convolution(name, record)
        for part, place, kind, bias in MIXER_MAPS:
            if f"{name}{part}.weight" in self._weights.keys() | self._blocks.keys():
                record.put(self._product(f"{name}{part}", kind, place))
                record.put({bias: self._vector(self._take(f"{name}{part}.bias"))})
        further = [part for part in FURTHER_MAPS if f"{name}{part}.weight" in self._weights]
        for part, place in zip(further, (at.MIX_FURTHER, at.MIX_OTHER_FURTHER), strict=False):
            record.put(self._of_floats(f"{name}{part}", at.MIX_FURTHER_KIND, place))
        if isinstance(mixer, MambaSpec):
            record.put(self._of_floats(f"{name}selection", at.MIX_GATES_KIND, at.MIX_GATES))
            record.put({at.MIX_PART_NORM: self._vector(self._part_norms(name, mixer))})
        decay = self._take(f"{name}decay")
        record.put({at.MIX_RATE: self._vector(None if decay is None else -decay.float().exp().flatten())})
        for part, place in MIXER_VECTORS.items():
            record.put({place: self._vector(self._take(f"{name}{part}"))})
        return {at.MIXER: record.address}

    def _put_convolution(self, name: str, record: RecordTable) -> None:
        """Of queries, keys and values side by side where these have one each."""
        parts = [self._take(f"{name}{part}conv.weight") for part in ("", "query_", "key_", "value_")]
        if found := [part for part in parts if part is not None]:
            taps = torch.cat(found, 1).float().contiguous()
            self.kept.append(taps)
            record.put({at.CONV_WEIGHT: taps.data_ptr(), at.CONV_BIAS: self._vector(self._take(f"{name}conv.bias"))})

    def _of_floats(self, name: str, kind: int, place: int) -> dict[int, int]:
        """The fields `kind` and `place` of a matrix that multiplies float32 activations, and is never quantised."""
        weight = self._weights.pop(f"{name}.weight")
        return {kind: FULL if weight.dtype is torch.float32 else HALF, place: self._matrix(weight)}

    def _part_norms(self, name: str, mixer: MambaSpec) -> torch.Tensor | None:
        """Weights of the norms of steps, keys and queries, one behind the other."""
        if mixer.norm is None:
            return None
        if mixer.norm == "plain":
            return torch.ones(mixer.rank + 2 * mixer.state_dim)
        return torch.cat([self._weights.pop(f"{name}{part}_norm.weight") for part in ("step", "key", "query")])

    def _latent(self, name: str, latent: LatentSpec) -> dict[int, int]:
        """Maps of latent attention; with one kv head, heads keep their order."""
        by_head = self._weights.pop(f"{name}kv_b.weight").view(-1, latent.nope + latent.value, latent.rank)
        keys, values = by_head.split((latent.nope, latent.value), 1)
        fields = {
            at.LATENT_NORM: self._vector(self._take(f"{name}kv_norm.weight")),
            at.TO_LATENT: self._matrix(keys.transpose(1, 2).flatten(0, 1)),
            at.TO_VALUES: self._matrix(values.flatten(0, 1)),
        }
        maps = [("qkv", at.QKV_KIND, at.QKV_WEIGHT), ("o", at.O_KIND, at.O_WEIGHT)]
        if latent.query_rank is not None:
            maps.append(("q_b", at.QUERY_KIND, at.QUERY_WEIGHT))
            fields[at.QUERY_NORM] = self._vector(self._take(f"{name}q_norm.weight"))
        for part, kind, place in maps:
            fields |= self._product(f"{name}{part}", kind, place)
        return fields

    def _transformation(self, name: str, layer: LayerSpec) -> dict[int, int]:
        """The MLP, or the mixture in its place; nothing where a layer has none."""
        if layer.moe and self._spec.moe is not None:
            return self._mixture(name, self._spec.moe)
        return self._mlp(name) if layer.mlp else {}

    def _mlp(self, name: str) -> dict[int, int]:
        return {
            **self._product(f"{name}gate_up", at.GATE_UP_KIND, at.GATE_UP_WEIGHT, paired=self._spec.gated),
            at.GATE_UP_BIAS: self._vector(self._take(f"{name}gate_up.bias"), paired=self._spec.gated),
            **self._product(f"{name}down", at.DOWN_KIND, at.DOWN_WEIGHT),
            at.DOWN_BIAS: self._vector(self._take(f"{name}down.bias")),
            at.XIELU: self._vector(None if (numbers := self._take(f"{name}xielu")) is None else _of_xielu(numbers)),
        }

    def _mixture(self, name: str, moe: MoeSpec) -> dict[int, int]:
        router, gate = self._weights.pop(f"{name}router.weight"), self._take(f"{name}shared.gate.weight")
        if gate is not None:
            router = torch.cat((router, gate))
        records = RecordTable(at.EXPERT_FIELDS, moe.experts + (1 if moe.shared else 0))
        self.kept.append(records)
        for part, (strips, kind, offsets) in EXPERT_PARTS.items():
            paired = part == "gate_up" and self._spec.gated
            for index, (matrix, bias) in enumerate(self._experts(name, part, kind, strips)):
                fields = matrix | {
                    offsets: self._vector(bias, paired=paired),
                    at.EXPERT_INNER: moe.intermediate if index < moe.experts else moe.shared,
                }  # fmt: skip
                records.put(fields, index)
        return {
            at.ROUTER: self._matrix(router.float()), at.ROUTER_BIAS: self._vector(self._take(f"{name}router.bias")),
            at.EXPERT_RECORDS: records.address,
        }  # fmt: skip

    def _experts(self, layer: str, part: str, kind: int, place: int) -> Iterator[tuple[dict[int, int], Maybe]]:
        """One matrix, as fields `kind` and `place`, and the bias of all experts and then of the MLP beside them."""
        name, paired = f"{layer}experts.{part}", part == "gate_up" and self._spec.gated
        biases = self._take(f"{name}.bias")
        for index, matrix in enumerate(self._expert_matrices(name, kind, place, paired=paired)):
            yield matrix, None if biases is None else biases[index]
        if f"{layer}shared.{part}.weight" in self._weights.keys() | self._blocks.keys():
            yield self._product(f"{layer}shared.{part}", kind, place, paired=paired), None

    def _expert_matrices(self, name: str, kind: int, place: int, *, paired: bool) -> Iterator[dict[int, int]]:
        assert self._spec.moe is not None
        if (rows := self._blocks.get(name)) is not None:
            for numbers in np.split(np.arange(len(rows)), self._spec.moe.experts):
                yield self._packed_blocks(rows.take(numbers), kind, place, paired=paired)
            return
        stack, scales = self._weights.pop(name), self._take(f"{name}.scale")
        for index, weight in enumerate(stack):
            scale = None if scales is None else scales[index]
            yield {kind: self._kind_of(weight), place: self._matrix(weight, scale, paired=paired)}

    def _packed_blocks(self, rows: BlockRows, kind: int, place: int, *, paired: bool) -> dict[int, int]:
        """The fields `kind` and `place` of a matrix in blocks."""
        ordered = in_strips(rows, paired=paired)
        strips = self._packed.matrix(lambda pages: pack_strips(ordered, pages))
        table = strip_table(ordered, strips)
        self.kept += [table, strips]
        return {kind: self._kind_of_blocks, place: table.data_ptr()}

    def ends(self) -> dict[int, int]:
        """The fields of the frame that hold the final norm and the head."""
        norm = {at.FINAL_NORM: self._norm("final_norm"), at.HEAD_BIAS: self._vector(self._take("head.bias"))}
        if self._spec.tied and "head.weight" not in self._weights.keys() | self._blocks.keys():
            embedding = self._weights["embed.weight"]
            return norm | {at.HEAD_KIND: self._kind_of(embedding), at.HEAD: self._matrix(embedding)}
        return norm | self._product("head", at.HEAD_KIND, at.HEAD)

    def _product(
        self,
        name: str,
        kind: int,
        place: int,
        *,
        order: torch.Tensor | None = None,
        heads: bool = False,
        paired: bool = False,
    ) -> dict[int, int]:
        """The fields `kind` and `place` of a matrix.

        Args:
            order: of its outputs. heads: its inputs are heads, in the order of heads that attention leaves. paired: see
                `pack`.
        """
        if (rows := self._blocks.get(f"{name}.weight")) is not None:
            taken = rows if order is None else rows.take(order.numpy())
            matrix = self._packed_blocks(taken, kind, place, paired=paired)
            return matrix | self._input_order(rows, place, heads=heads)
        weight, scale = self._take_matrix(name)
        if order is not None:
            weight, scale = weight[order], None if scale is None else scale[order]
        if heads:
            weight, scale = self._by_group(weight, scale)
        return {kind: self._kind_of(weight), place: self._matrix(weight, scale, paired=paired)}

    def _input_order(self, rows: BlockRows, place: int, *, heads: bool) -> dict[int, int]:
        """The field that says in which order a layer's matrix takes its inputs, if in another; see `_product`."""
        if rows.columns is None:
            return {}
        columns = torch.from_numpy(rows.columns)
        table = 4 * (self._order.argsort()[columns] if heads else columns)
        self.kept.append(table)
        return {ORDERS[place]: table.data_ptr()}

    def _kind_of(self, weight: torch.Tensor) -> int:
        return {torch.int8: BYTES, torch.uint8: NIBBLES}.get(weight.dtype, self._kind)

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

    def _norm(self, name: str) -> int:
        """Address of a norm's weights, behind which those of a layer norm have a bias (`constants`), 0 for none."""
        weight, bias = self._scaled(f"{name}.weight"), self._take(f"{name}.bias")
        if weight is not None and self._spec.norm == "layer":
            bias = torch.zeros_like(weight) if bias is None else bias
            padding = weight.new_zeros(-len(weight) % STRIP)
            weight = torch.cat((weight, padding, bias))
        return self._vector(weight)

    def _scaled(self, name: str) -> torch.Tensor | None:
        weight = self._take(name)
        return weight.float() + 1.0 if weight is not None and self._spec.norm_offset else weight

    def _sinks(self, name: str) -> int:
        """Address of sinks in the order of heads, over the scale that scores are multiplied by."""
        sinks = self._take(name)
        if sinks is None:
            return 0
        heads = self._order[:: self._spec.head_dim] // self._spec.head_dim
        return self._vector(sinks.float()[heads] / self._spec.scale)

    def _matrix(self, weight: torch.Tensor, scale: torch.Tensor | None = None, *, paired: bool = False) -> int:
        strips = self._packed.matrix(lambda pages: pack(weight, pages, paired=paired, scale=scale).strips)
        self.kept.append(strips)
        return strips.data_ptr()

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
        strips = torch.zeros(-(-len(vector) // STRIP) * STRIP)
        strips[: len(vector)] = vector
        self.kept.append(strips)
        return strips.data_ptr()


def _of_xielu(stored: torch.Tensor) -> torch.Tensor:
    return torch.tensor(xielu_numbers(stored))


def constants(spec: ModelSpec, dtype: torch.dtype, kind: int) -> dict[int, int | float]:
    """The frame's fields that follow from the model's shape."""
    return {
        at.KIND: kind, at.NARROW: int(dtype is torch.bfloat16),
        at.HIDDEN: spec.hidden_size, at.INTERMEDIATE: spec.intermediate_size, at.VOCAB: spec.vocab_size,
        at.HEADS: spec.num_heads, at.KV_HEADS: spec.num_kv_heads, at.HEAD_DIM: spec.head_dim,
        at.SLOT_PITCH: 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
        at.VALUES: 0 if spec.latent else spec.num_kv_heads * spec.head_dim * dtype.itemsize,
        at.ATTENDED_SIZE: spec.attended_size,
        at.ATTENTION_SCALE: float(spec.scale), at.EPSILON: float(spec.norm_eps),
        at.HEAD_EPSILON: float(spec.qk_norm_eps or spec.norm_eps),
        at.NORM_BIAS: -(-spec.hidden_size // STRIP) * STRIP * 4 if spec.norm == "layer" else 0,
        at.RESIDUAL: float(spec.residual_multiplier), at.PARALLEL: int(spec.parallel), at.GATED: int(spec.gated),
        at.ALPHA: float(spec.swiglu_alpha), at.LIMIT: float(spec.swiglu_limit),
        at.LOGIT_SCALE: float(spec.logit_multiplier), at.ACTIVATE: ACTIVATIONS[spec.activation],
        at.ATTENTION_CAP: float(spec.attention_softcap or 0.0), at.LOGIT_CAP: float(spec.logit_softcap or 0.0),
        at.QK_NORM: WHOLE if spec.qk_norm == "full" else ROTATED if spec.qk_norm_rotated else BY_HEAD,
    } | projection(spec) | ({} if spec.moe is None else routing(spec.moe))  # fmt: skip
