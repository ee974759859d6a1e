"""The decoder on the CPU in compiled passes: a drop-in for models.decoder.decoder.Decoder where the model and the
machine allow it.

Weights, workspace and everything that does not change from pass to pass are packed once into the tables that compiled
code reads (models.cpu.offsets); a pass points them at its rows. Every row of every pass goes through the same code: its
bits depend on the text before it, not on how it was fed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention_strips import BLOCK, CHUNK, QUERIES
from paceline.models.cpu.attention_tiles import MAX_QUERIES
from paceline.models.cpu.experts import routing
from paceline.models.cpu.forward import BEST_BYTES, compiled
from paceline.models.cpu.integer_products import half_pitch
from paceline.models.cpu.latent import compiled_latent, projection
from paceline.models.cpu.matrix import OWN_ROWS, Packed, pack
from paceline.models.cpu.matrix_unit import has_matrix_unit
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.processor import has_bfloat
from paceline.models.cpu.sublayers import CLAMPED, GELU, GELU_TANH, SILU
from paceline.models.cpu.threads import TeamSize, find_team
from paceline.models.cpu.tiles import ACTIVATION, BYTES, DOT, FULL, HALF, NIBBLES, STRIP
from paceline.models.cpu.vectors import LANES
from paceline.models.cpu.visible_slots import SlotLists, address, fill
from paceline.models.decoder.arena import Arena
from paceline.models.decoder.decoder import ALL_LAYERS, LayerPlan, attention_shape, head_order
from paceline.models.decoder.eager import PassResult
from paceline.models.decoder.rope import Rotary
from paceline.models.decoder.segments import Segment, SegmentPart, split_into_passes
from paceline.models.decoder.window_slots import Ints
from paceline.models.loading.quantization import GROUP, is_quantized
from paceline.models.model_spec import AttentionShape, LatentSpec, ModelSpec

Weights = dict[str, torch.Tensor]
Maybe = torch.Tensor | None

ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH, "clamped_swiglu": CLAMPED}

EXPERT_PARTS = {
    "gate_up": (at.EXPERT_GATE_UP, at.EXPERT_GATE_UP_KIND, at.EXPERT_GATE_UP_BIAS),
    "down": (at.EXPERT_DOWN, at.EXPERT_DOWN_KIND, at.EXPERT_DOWN_BIAS),
}

ROWS = 256
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


class Packing:
    """Takes a model's weights out of the mapping one by one, packs them, and keeps them alive.

    Args:
        kind: of the products with matrices that are not quantised.
    """

    def __init__(self, spec: ModelSpec, shape: AttentionShape, weights: Weights, kind: int) -> None:
        self._spec, self._weights, self._order, self._kind = spec, weights, head_order(shape), kind
        self._pages = Pages()
        self.kept: list[torch.Tensor | Packed | Table] = []

    def record(self, index: int) -> dict[int, int]:
        """The fields of one layer that hold weights."""
        name = f"layers.{index}."
        norm = self._norm(f"{name}attn_norm")
        return {
            at.ATTENTION_NORM: norm,
            **(self._attention(name) if self._spec.latent is None else self._latent(name, self._spec.latent)),
            at.POST_ATTENTION_NORM: self._norm(f"{name}post_attn_norm"),
            at.MLP_NORM: norm if self._spec.parallel else self._norm(f"{name}mlp_norm"),
            at.POST_MLP_NORM: self._norm(f"{name}post_mlp_norm"),
            **(self._mixture(name) if self._spec.layers[index].moe else self._mlp(name)),
        }

    def _attention(self, name: str) -> dict[int, int]:
        order = torch.cat([self._order, torch.arange(len(self._order), self._weights[f"{name}qkv.weight"].shape[0])])
        q_norm = self._scaled(f"{name}q_norm.weight")
        if q_norm is not None and self._spec.qk_norm == "full":
            q_norm = q_norm[self._order]
        qkv_bias = self._take(f"{name}qkv.bias")
        qkv, qkv_scale = self._take_matrix(f"{name}qkv")
        o, o_scale = self._take_matrix(f"{name}o")
        return {
            at.QKV_KIND: self._kind_of(qkv),
            at.QKV_WEIGHT: self._matrix(qkv[order], None if qkv_scale is None else qkv_scale[order]),
            at.QKV_BIAS: self._vector(None if qkv_bias is None else qkv_bias[order]),
            at.Q_NORM: self._vector(q_norm),
            at.K_NORM: self._vector(self._scaled(f"{name}k_norm.weight")),
            at.SINKS: self._sinks(f"{name}sinks"),
            at.O_KIND: self._kind_of(o),
            at.O_WEIGHT: self._matrix(*self._by_group(o, o_scale)),
            at.O_BIAS: self._vector(self._take(f"{name}o.bias")),
        }

    def _latent(self, name: str, latent: LatentSpec) -> dict[int, int]:
        """Maps of latent attention; with one kv head, heads keep their order."""
        by_head = self._weights.pop(f"{name}kv_b.weight").view(-1, latent.nope + latent.value, latent.rank)
        keys, values = by_head.split((latent.nope, latent.value), 1)
        found = {
            at.LATENT_NORM: self._vector(self._take(f"{name}kv_norm.weight")),
            at.TO_LATENT: self._matrix(keys.transpose(1, 2).flatten(0, 1)),
            at.TO_VALUES: self._matrix(values.flatten(0, 1)),
        }
        maps = [("qkv", at.QKV_KIND, at.QKV_WEIGHT), ("o", at.O_KIND, at.O_WEIGHT)]
        if latent.query_rank is not None:
            maps.append(("q_b", at.QUERY_KIND, at.QUERY_WEIGHT))
            found[at.QUERY_NORM] = self._vector(self._take(f"{name}q_norm.weight"))
        for one, kind, place in maps:
            weight, scale = self._take_matrix(f"{name}{one}")
            found |= {kind: self._kind_of(weight), place: self._matrix(weight, scale)}
        return found

    def _mlp(self, name: str) -> dict[int, int]:
        gate_up, down = self._take_matrix(f"{name}gate_up"), self._take_matrix(f"{name}down")
        return {
            at.GATE_UP_KIND: self._kind_of(gate_up[0]),
            at.GATE_UP_WEIGHT: self._matrix(*gate_up, paired=self._spec.gated),
            at.GATE_UP_BIAS: self._vector(self._take(f"{name}gate_up.bias"), paired=self._spec.gated),
            at.DOWN_KIND: self._kind_of(down[0]),
            at.DOWN_WEIGHT: self._matrix(*down),
            at.DOWN_BIAS: self._vector(self._take(f"{name}down.bias")),
        }

    def _mixture(self, name: str) -> dict[int, int]:
        moe = self._spec.moe
        assert moe is not None
        router, gate = self._weights.pop(f"{name}router.weight"), self._take(f"{name}shared.gate.weight")
        if gate is not None:
            router = torch.cat((router, gate))
        records = Table(at.EXPERT_FIELDS, moe.experts + (1 if moe.shared else 0))
        self.kept.append(records)
        for part, (strips, kind, offsets) in EXPERT_PARTS.items():
            for index, (weight, scale, bias) in enumerate(self._experts(name, part)):
                found = {
                    strips: self._matrix(weight, scale, paired=part == "gate_up"), kind: self._kind_of(weight),
                    offsets: self._vector(bias, paired=part == "gate_up"),
                    at.EXPERT_INNER: moe.intermediate if index < moe.experts else moe.shared,
                }  # fmt: skip
                records.put(found, index)
        return {
            at.ROUTER: self._matrix(router.float()), at.ROUTER_BIAS: self._vector(self._take(f"{name}router.bias")),
            at.EXPERT_RECORDS: records.address,
        }  # fmt: skip

    def _experts(self, layer: str, part: str) -> Iterator[tuple[torch.Tensor, Maybe, Maybe]]:
        """One matrix, its scale and bias, of all experts and then of the MLP beside them."""
        name = f"{layer}experts.{part}"
        stack, scales, biases = self._weights.pop(name), self._take(f"{name}.scale"), self._take(f"{name}.bias")
        for index, weight in enumerate(stack):
            yield weight, None if scales is None else scales[index], None if biases is None else biases[index]
        if f"{layer}shared.{part}.weight" in self._weights:
            yield *self._take_matrix(f"{layer}shared.{part}"), None

    def ends(self) -> dict[int, int]:
        """The fields of the frame that hold the final norm and the head."""
        tied = self._spec.tied and "head.weight" not in self._weights
        head = (self._weights["embed.weight"], None) if tied else self._take_matrix("head")
        kind = self._kind_of(head[0])
        return {at.FINAL_NORM: self._norm("final_norm"), at.HEAD_KIND: kind, at.HEAD: self._matrix(*head)}

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
        at.WHOLE_NORM: int(spec.qk_norm == "full"),
    } | projection(spec) | ({} if spec.moe is None else routing(spec.moe))  # fmt: skip


class Workspace:
    """Memory for the activations of a pass, in one piece; `threads` copies of what each thread has for itself."""

    def __init__(self, spec: ModelSpec, kind: int, threads: int, *, quantized: bool) -> None:
        item, inner, self.threads = ACTIVATION[kind], max(spec.inner_sizes), threads
        heads, latent = spec.num_heads * spec.head_dim, spec.latent
        qkv = heads + 2 * spec.num_kv_heads * spec.head_dim
        widest = max(spec.hidden_size, 0 if latent is None else latent.query_rank or 0)
        widths = {
            at.X: 4 * widest, at.NORMED: item * widest, at.MIXED: item * heads,
            at.QKV: 4 * max(qkv, spec.hidden_size), at.INNER: item * inner,
        }  # fmt: skip
        if latent is not None:
            given, queries = projection(spec), spec.num_heads * (latent.rope + latent.nope)
            made = max(4 * given[at.PROJECTED_SIZE], given[at.LATENT_QUERIES] + 4 * queries)
            widths[at.PROJECTED] = int(max(made, item * spec.attended_size))
            widths[at.NORMED] = item * max(widest, latent.nope)
        # An odd number of lines: rows of one column spread over the sets of the first-level cache.
        pitches = {field: (-(-width // 256) * 4 + 1) * 64 for field, width in widths.items()}
        if quantized:
            pitches[at.NORMED] = 2 * half_pitch(max(widest, spec.attended_size, inner))
        spare = (ROWS if spec.moe or latent else OWN_ROWS) * pitches[at.NORMED]
        own = spare + pitches[at.X] + (spare if spec.moe else 0)
        sums = ROWS * 4 * STRIP * (1 + quantized)
        query = max(
            MAX_QUERIES * (4 * spec.head_dim + 128 + 64),
            QUERIES * (2 * spec.head_dim + 4 * STRIP + 64) + 8 * BLOCK + 2 * CHUNK * max(STRIP, spec.head_dim),
        )
        sizes = {field: ROWS * pitch for field, pitch in pitches.items()}
        sizes |= {at.OWN_NORMED: threads * own, at.SUMS: threads * sums, at.QUERY: threads * query}
        if spec.moe is not None:
            experts = -(-(spec.moe.experts + spec.moe.shared_gate) // STRIP) * STRIP
            chosen = ROWS * (spec.moe.top_k + (1 if spec.moe.shared else 0))
            choice = -(-(8 * (experts + 2) + 32 * chosen + 4 * (experts + LANES)) // 64) * 64
            sizes |= {at.INNER: chosen * pitches[at.INNER], at.ROUTE: ROWS * 4 * experts, at.CHOICE: threads * choice}
        self._memory = torch.zeros(sum(sizes.values()) + 64, dtype=torch.uint8)
        self.fields: dict[int, int] = {}
        start = -(-self._memory.data_ptr() // 64) * 64
        for field, size in sizes.items():
            self.fields[field] = start
            start += size
        for field, pitch, own_field in (
            (at.PROJECTED, at.PROJECTED_PITCH, at.QKV), (at.ATTENDED, at.ATTENDED_PITCH, at.MIXED),
        ):  # fmt: skip
            buffer = own_field if latent is None else at.PROJECTED
            self.fields |= {field: self.fields[buffer], pitch: pitches[buffer]}
        pitch_of = {at.X: at.X_PITCH, at.NORMED: at.NORMED_PITCH, at.QKV: at.QKV_PITCH, at.MIXED: at.MIXED_PITCH}
        self.fields |= {other: pitches[field] for field, other in pitch_of.items()} | {
            at.INNER_PITCH: pitches[at.INNER]
        }
        if spec.moe is not None:
            self.fields |= {at.ROUTE_PITCH: 4 * experts, at.CHOICE_SIZE: choice}
        self.fields |= {at.OWN_SIZE: own, at.SPARE: spare, at.SUMS_SIZE: sums, at.QUERY_SIZE: query}


def best_kind(dtype: torch.dtype) -> int:
    """The fastest kind of product that the processor has for weights of a dtype."""
    if dtype is torch.float32:
        return FULL
    return DOT if has_bfloat() else HALF


Lengths = Sequence[tuple[int, int]]


class CompiledDecoder:
    """All layers, the embedding and the head; takes its weights out of `weights` as it packs them.

    Args:
        kind: of product (models.cpu.tiles); None takes the fastest that this CPU has for the dtype.

    Attributes:
        best: per row of the logits made last its best token, as `Scores.best` has it.
        frame, layers, seen, entry, team: the tables of a pass (models.cpu.offsets), what runs them, on which threads.
    """

    row_invariant = True
    best: list[int]

    def __init__(self, spec: ModelSpec, weights: Weights, arena: Arena, *, kind: int | None = None) -> None:
        self.spec, self.shape, self._arena = spec, attention_shape(spec), arena
        self.embedding = weights["embed.weight"].contiguous()
        self.dtype = self.embedding.dtype
        self._kind, self._quantized = best_kind(self.dtype) if kind is None else kind, is_quantized(weights)
        if self._quantized and self._kind == DOT:
            self._kind = HALF  # bytes are made of float32 activations
        self._packing = Packing(spec, self.shape, weights, self._kind)
        self._rotary = Rotary(spec.ropes, torch.device("cpu"), torch.float32)
        self.frame, self.layers = Table(at.FRAME_FIELDS), Table(at.LAYER_FIELDS, spec.num_layers)
        self._ropes = {key: Table(at.ROPE_FIELDS) for key in spec.ropes}
        self.seen = np.zeros((len(self.shape.windows), ROWS, at.SEEN_FIELDS // at.FIELD), np.int64)
        self._iota, self._embedded, self._aimed = np.arange(ROWS), self.embedding.data_ptr(), False
        self._row_bytes = spec.hidden_size * self.dtype.itemsize
        self._no_states = torch.empty(0, spec.hidden_size, dtype=self.dtype)
        self._planned: LayerPlan | None = None
        self._rows = np.zeros(
            (5, ROWS), np.int64
        )  # addresses of inputs, slots, places in the rope tables, rows of the head, slots in layers that give back
        self._best = np.zeros(ROWS, np.int64)
        self.frame.put(constants(spec, self.dtype, self._kind) | self._packing.ends())
        halves = self._kind == DOT or (self.dtype is torch.bfloat16 and self._quantized)
        self._in_strips = halves and has_matrix_unit()
        self._pack_layers(spec)
        weights.pop("embed.weight")
        self._slots, self._version, self._table_size = SlotLists(arena), -1, -1
        self._workspace: Workspace | None = None
        self._team_size, self._extent = TeamSize(1), (0, 0, 0, 0)
        self._room, self._scores, self._parts = 0, torch.zeros(0), torch.zeros(0)
        self.best, arena.masked, self._adds = [], False, False
        self._fitting = (0, -1, 0)  # threads, version of the arena and positions that `_ready` has prepared for
        self.entry, self.team = compiled(), find_team()
        if spec.latent is not None:
            self.frame.put({at.LATENT: compiled_latent().address})
        if self.team is not None:
            self.frame.put({at.THREAD: self.team.thread, at.TEAM: self.team.size, at.BARRIER: self.team.barrier})

    def _pack_layers(self, spec: ModelSpec) -> None:
        start, size, rows = address(self.seen), self.seen[0].nbytes, address(self._rows)
        for index, layer in enumerate(spec.layers):
            rope = 0 if layer.rope is None else self._ropes[layer.rope].address
            slots = rows + 8 * ROWS * (1 if self._arena.near is None or layer.window is None else 4)
            in_strips = self._in_strips and layer.window is None  # rows with a window share no list of slots
            places = {at.ROPE: rope, at.SEEN: start + size * self.shape.kind_of[index], at.SLOT: slots}
            places[at.IN_STRIPS] = int(in_strips)
            self.layers.put(self._packing.record(index) | places, index)
        self.frame.put({at.BEST: address(self._best), at.SOURCE: rows, at.PICKED: rows + 24 * ROWS})
        for key, table in self._ropes.items():
            table.put({at.PLACE: rows + 16 * ROWS, at.TURNED: spec.ropes[key].width or spec.ropes[key].dims})

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) new tensor, the family's multiplier included."""
        x = self.embedding.index_select(0, torch.tensor(tokens, dtype=torch.int64))
        scale = self.spec.embedding_multiplier
        return x if scale == 1.0 else x.mul_(torch.tensor(scale, dtype=self.dtype).item())

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """Logits (r, v) of hidden states (r, hidden), after the final norm unless `norm` is False."""
        norms = int(self.frame.fields[0, at.FINAL_NORM // at.FIELD])
        self.frame.put({at.FINAL_NORM: norms if norm else 0})
        try:
            found = [(self._outside(part), self.best) for part in hidden.split(ROWS)]
            self.best = [token for _, best in found for token in best]
            return torch.cat([logits for logits, _ in found])
        finally:
            self.frame.put({at.FINAL_NORM: norms})

    def _outside(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head of given states."""
        hidden = hidden.to(self.dtype).contiguous()
        self._ready(0)
        self._from(hidden, len(hidden))
        self._planned, self._extent = None, (0, 0, 0, 0)
        self.frame.put({at.LAYERS: 0, at.RESULT: 0, at.FINAL_TAP: 0})
        return self._go(range(len(hidden)), len(hidden))

    def run(
        self,
        segments: Sequence[Segment],
        inputs: Sequence[int] | torch.Tensor,
        lengths: Lengths,
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """See `models.decoder.eager.Passes.run`."""
        if added_qkv is not None:
            added_qkv = torch.nn.functional.pad(added_qkv.float(), (0, -added_qkv.shape[1] % STRIP))
        rows = sum(segment.rows for segment in segments)
        kept = {layer: torch.empty(rows, self.spec.hidden_size, dtype=self.dtype) for layer in taps}
        result = torch.empty(rows, self.spec.hidden_size, dtype=self.dtype) if states else self._no_states
        wanted = range(rows) if logits is None else logits
        self._ready(max(segment.cache.length + segment.inputs for segment in segments))
        self._plan(plan)
        found, best, done = [], list[int](), 0
        for parts in split_into_passes(segments, ROWS):
            count = sum(part.stop - part.first for part in parts)
            self._from(inputs[done : done + count], count)
            if -1 in kept and plan.first == 0:
                given = inputs[done : done + count]
                kept[-1][done : done + count] = given if isinstance(given, torch.Tensor) else self.embed(given)
            self._targets(kept, result, done)
            self._add_to_qkv(added_qkv, done)
            lists = self._place(parts, lengths, done)
            picked = wanted if count == rows else [row - done for row in wanted if done <= row < done + count]
            found.append(self._go(picked, count))
            best += self.best
            del lists
            done += count
        self.best = best
        return found[0] if len(found) == 1 else torch.cat(found), result, kept

    def _ready(self, longest: int) -> None:
        """Make workspace, cache addresses and score buffers fit."""
        threads, version = 1 if self.team is None else torch.get_num_threads(), self._arena.version
        if self._fitting[0] == threads and self._fitting[1] == version and self._fitting[2] >= longest:
            return
        self._fitting = (0, -1, 0)
        if self._workspace is None or self._workspace.threads != threads:
            self._workspace = Workspace(self.spec, self._kind, threads, quantized=self._quantized)
            self._team_size = TeamSize(threads)
            self._parts = torch.zeros(threads * ROWS * BEST_BYTES, dtype=torch.uint8)
            self.frame.put(self._workspace.fields | {at.PARTS: self._parts.data_ptr(), at.PARTS_ROWS: ROWS})
            self._room = 0
        if longest > self._room:
            self._room = 2 * longest
            queries = QUERIES if self._in_strips else MAX_QUERIES
            pitch = ((self._room + STRIP + 2 * LANES) // LANES | 1) * 64  # an odd number of lines
            packed = -(-self._room // CHUNK) * CHUNK if self._in_strips else 0
            head_dim = self.spec.head_dim + -(-self.spec.head_dim // STRIP) * STRIP  # values come in whole strips
            size = queries * pitch + 2 * packed * head_dim
            self._scores = torch.empty(threads * size + 64, dtype=torch.uint8)
            start = -(-self._scores.data_ptr() // 64) * 64
            self.frame.put({at.SCORES: start, at.SCORES_PITCH: pitch, at.SCORES_SIZE: size, at.PACKED: packed})
        if self._version != version:
            self._version = version
            for index, layer in enumerate(self._arena.layers):
                self.layers.put({at.CACHE: layer.data_ptr()}, index)
        self._fitting = (threads, version, longest)

    def _plan(self, plan: LayerPlan) -> None:
        if plan is self._planned:
            return
        before, self._planned, count = self._planned, None, self.spec.num_layers
        stop = count if plan.stop is None else plan.stop
        self.frame.put({at.PROGRAM: self.layers.address + plan.first * at.LAYER_FIELDS, at.LAYERS: stop - plan.first})
        self._extent = plan.first, stop, len(plan.skip_attention), len(plan.skip_mlp)
        same = before and (before.skip_attention, before.skip_mlp) == (plan.skip_attention, plan.skip_mlp)
        for index in range(0 if same else count):
            runs = {at.ATTENTION: int(index not in plan.skip_attention), at.MLP: int(index not in plan.skip_mlp)}
            self.layers.put(runs, index)
        self._planned = plan

    def _from(self, inputs: Sequence[int] | torch.Tensor, count: int) -> None:
        """Point at the rows' inputs."""
        size, scale = self._row_bytes, 1.0
        if isinstance(inputs, torch.Tensor):
            self._rows[0, :count] = inputs.data_ptr() + size * np.arange(count)
        else:
            self._rows[0, :count] = [self._embedded + size * token for token in inputs]
            scale = float(self.spec.embedding_multiplier)
        self.frame.put({at.ROWS: count, at.SCALE: scale})

    def _add_to_qkv(self, rows: torch.Tensor | None, done: int) -> None:
        """Point at what is added to the rows' projections."""
        if rows is not None:
            pitch = rows.stride(0) * rows.itemsize
            self.frame.put({at.ADDED_QKV: rows.data_ptr() + done * pitch, at.ADDED_QKV_PITCH: pitch})
            self._adds = True
        elif self._adds:
            self.frame.put({at.ADDED_QKV: 0})
            self._adds = False

    def _targets(self, kept: dict[int, torch.Tensor], result: torch.Tensor, done: int) -> None:
        """Point at where taps and states go."""
        aimed = bool(kept) or len(result) > 0
        if not aimed and not self._aimed:
            return
        offset, last, self._aimed = done * self._row_bytes, self.spec.num_layers, aimed
        self.layers.fields[:, at.TAP // at.FIELD] = 0
        for layer, tap in kept.items():
            if 0 <= layer < last:
                self.layers.put({at.TAP: tap.data_ptr() + offset}, layer)
        states = result.data_ptr() + offset if len(result) else 0
        self.frame.put({at.RESULT: states, at.FINAL_TAP: kept[last].data_ptr() + offset if last in kept else 0})

    def _place(self, parts: Sequence[SegmentPart], lengths: Lengths, done: int) -> list[Ints]:
        """Slots, visible slots and rotations of the rows; returns what must live until the pass is over."""
        row = 0
        lists: list[Ints] = []
        for part in parts:
            segment, count = part.segment, part.stop - part.first
            length = segment.cache.length
            slots = self._slots.of(segment.cache, length + segment.inputs, lists)
            self._rows[1, row : row + count] = slots[0][length + part.first : length + part.stop]
            if segment.depths is None:
                self._rows[2, row : row + count] = list(range(length + part.first, length + part.stop))
            else:
                self._rows[2, row : row + count] = segment.depths[part.first : part.stop] + length
            near = slots
            if self._arena.near is not None:
                near = self._slots.near(self._arena.near, segment.cache, slots[0], lists)
                self._rows[4, row : row + count] = near[0][length + part.first : length + part.stop]
            for seen, window in zip(self.seen, self.shape.windows, strict=True):
                fill(part, window, slots if window is None else near, seen[row : row + count], lists)
            row += count
        return self._rotations(row, lengths, done, lists)

    def _rotations(self, count: int, lengths: Lengths, done: int, lists: list[Ints]) -> list[Any]:
        """Bring the rope records up to date."""
        positions = self._rows[2, :count]
        kept: list[Any] = list(lists)
        self._rotary.reserve(max(positions.tolist()) + 1)
        if self._table_size != self._rotary.size:
            self._table_size = self._rotary.size
            for key, (cos, sin) in self._rotary.tables.items():
                self._ropes[key].put({at.COSINE: cos.data_ptr(), at.SINE: sin.data_ptr()})
        if self._rotary.depends_on_length:
            each = [length for rows, length in lengths for _ in range(rows)][done : done + count]
            for key, (cos, sin) in self._rotary.by_length(positions.tolist(), [(1, length) for length in each]).items():
                self._ropes[key].put(
                    {at.COSINE: cos.data_ptr(), at.SINE: sin.data_ptr(), at.PLACE: address(self._iota)}
                )
                kept.append((cos, sin))
        return kept

    def _go(self, picked: Sequence[int], rows: int) -> torch.Tensor:
        """Run the pass; returns the logits (picked, v) of the picked rows."""
        vocab = self.spec.vocab_size
        self._rows[3, : len(picked)] = picked
        out = torch.empty(len(picked), -(-vocab // LANES) * LANES, dtype=self.dtype)
        self.frame.put({at.HEAD_ROWS: len(picked), at.LOGITS: out.data_ptr()})
        if self.team is None:
            self.entry.ctypes(self.frame.address)
        else:
            start = perf_counter()
            self.team.run(self.entry.address, self.frame.address, self._team_size.now)
            self._team_size.took((rows, *self._extent), perf_counter() - start)
        self.best = self._best[: len(picked)].tolist()
        return out if out.shape[1] == vocab else out[:, :vocab].contiguous()
