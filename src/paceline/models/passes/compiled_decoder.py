"""The decoder on the CPU in compiled passes: a drop-in for models.layers.decoder.Decoder where the model and the
machine allow it.

Weights, workspace and everything that does not change from pass to pass are packed once into the tables that compiled
code reads (models.cpu.offsets); a pass points them at its rows. Every row of every pass goes through the same code: its
bits depend on the text before it, not on how it was fed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.checkpoints import BlockRows, Blocks, is_quantized
from paceline.models.attention.double_sparsity import DoubleSparsity
from paceline.models.attention.gaps import Gaps
from paceline.models.attention.segments import Segment, split_into_passes
from paceline.models.attention.slot_lists import SlotLists, fill, fill_gaps, fill_source
from paceline.models.base import ALL_LAYERS, LayerPlan, PassResult
from paceline.models.cpu import offsets as at
from paceline.models.cpu.attention_strips import CHUNK, IN_STRIPS, QUERIES
from paceline.models.cpu.attention_tiles import MAX_QUERIES
from paceline.models.cpu.block_packing import packer
from paceline.models.cpu.forward import BEST_BYTES, compiled
from paceline.models.cpu.latent import compiled_latent
from paceline.models.cpu.matrix_unit import has_matrix_unit
from paceline.models.cpu.pages import address
from paceline.models.cpu.processor import has_fast_bfloat
from paceline.models.cpu.threads import TeamSize, find_team
from paceline.models.cpu.tiles import DOT, FULL, HALF, STRIP
from paceline.models.cpu.vectors import LANES
from paceline.models.layers.decoder import placement_of
from paceline.models.layers.positions import relative_biases
from paceline.models.layers.rope import Rotary, Rotation
from paceline.models.passes.mixer_tables import MixerTables
from paceline.models.passes.packed_weights import PackedWeights
from paceline.models.passes.packing import ROWS, Packing, RecordTable, Weights, constants
from paceline.models.passes.selection_tables import SelectionTables
from paceline.models.passes.workspace import PassWorkspace
from paceline.models.spec import ModelSpec, attention_shape
from paceline.models.state.arena import Arena
from paceline.models.state.recurrent import LayerState
from paceline.models.state.window_slots import Ints
from paceline.utils import parts_of


def best_kind(dtype: torch.dtype) -> int:
    """The fastest kind of product that the processor has for weights of a dtype."""
    if dtype is torch.float32:
        return FULL
    return DOT if has_matrix_unit() or has_fast_bfloat() else HALF


def _beside_bytes(kind: int) -> int:
    """The kind in place of another where matrices are quantised: bytes are made of float32 activations."""
    return HALF if kind == DOT else kind


Lengths = Sequence[tuple[int, int]]


def _keys_of(segment: Segment) -> int:
    """The longest list of keys that a row sees."""
    own = segment.cache.length + segment.slots
    return own if segment.memory is None else max(own, segment.memory.cache.length)


def _attends(spec: ModelSpec) -> bool:
    """Whether any layer attends to anything."""
    return spec.encoder is not None or any(layer.attention for layer in spec.layers)


class _Distances:
    """What distances add to the scores of attention, as compiled code reads it: by layer and head, falling distances,
    so that the numbers of the positions 0 .. p are the last ones.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, layers: RecordTable, frame: RecordTable) -> None:
        self._biases, self._layers, self._frame = relative_biases(spec, weights), layers, frame
        self._scale, self._each = spec.scale, len(layers.fields) // spec.num_layers
        self._tables: dict[int, torch.Tensor] = {}
        self._count = 0

    def reserve(self, longest: int) -> None:
        """Have numbers for texts of so many tokens."""
        if not self._biases or longest <= self._count:
            return
        self._count = 2 * longest
        behind = torch.arange(1 - self._count, 1)
        self._tables = {
            id(bias): torch.nn.functional.pad(bias.of(behind).float() / self._scale, (0, LANES)).contiguous()
            for bias in self._biases
        }
        self._frame.put({at.BIAS_COUNT: self._count, at.BIAS_PITCH: self._count + LANES})
        for index, bias in enumerate(self._biases):
            self._layers.put({at.BIASES: self._tables[id(bias)].data_ptr()}, self._each * index)


def _addresses(table: Rotation) -> dict[int, int]:
    """The fields of a rope record that hold a table."""
    growth = 0 if table.growth is None else table.growth.data_ptr()
    return {at.COSINE: table.cos.data_ptr(), at.SINE: table.signed_sin.data_ptr(), at.GROWTH: growth}


class CompiledDecoder:
    """All layers, the embedding and the head; takes its weights out of `weights` as it packs them.

    Args:
        kind: of product (models.cpu.tiles); None takes the fastest that this CPU has for the dtype.
        blocks: matrices that are not among the weights, as they lie in a GGUF file.
        packed: makes the packed matrices, or has them; None makes them.
        activation_bits: 8 or 16, of the activations that blocks are multiplied with.
        selection: attends to a part of the text; ready for the model.
        gaps: says which layers have no keys of some positions.

    Attributes:
        frame, layers, seen, entry, team: the tables of a pass (models.cpu.offsets), what runs them, on which threads.
    """

    name, row_invariant = "compiled", True

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        arena: Arena,
        *,
        kind: int | None = None,
        blocks: Blocks | None = None,
        packed: PackedWeights | None = None,
        activation_bits: int = 8,
        selection: DoubleSparsity | None = None,
        gaps: Gaps | None = None,
    ) -> None:
        self.spec, self.shape, self._arena = spec, attention_shape(spec), arena
        rows = (blocks or {}).get("embed.weight")
        self.embedding: torch.Tensor | BlockRows = rows or weights["embed.weight"].contiguous()
        self.dtype, self._quantized = arena.kv.dtype, bool(blocks) or is_quantized(weights)
        kind = best_kind(self.dtype) if kind is None else kind
        self._kind = _beside_bytes(kind) if self._quantized else kind
        packed = packed or PackedWeights()
        self._packing = Packing(
            spec, self.shape, weights, kind=self._kind, blocks=blocks or {}, packed=packed,
            activation_bits=activation_bits,
        )  # fmt: skip
        self._rotary, self.frame = Rotary(spec.ropes, torch.device("cpu"), torch.float32), RecordTable(at.FRAME_FIELDS)
        self._each = 1 if spec.encoder is None else 2  # records of a layer, the last of which has its MLP
        self.layers = RecordTable(at.LAYER_FIELDS, self._each * spec.num_layers)
        self._ropes = {key: RecordTable(at.ROPE_FIELDS) for key in spec.ropes}
        self._gaps, self._gap_layers = gaps, frozenset[int]()
        kinds = len(self.shape.windows) + int(gaps is not None)  # the last one is that of layers with gaps
        self.seen = np.zeros((kinds, ROWS, at.SEEN_FIELDS // at.FIELD), np.int64)
        self._seen_of_source = np.zeros((ROWS, at.SEEN_FIELDS // at.FIELD), np.int64)
        self._placement = placement_of(spec, weights, self.dtype, torch.device("cpu"))
        self._distances = _Distances(spec, weights, self.layers, self.frame)
        self._iota, self._aimed, self._row_bytes = np.arange(ROWS), False, spec.hidden_size * self.dtype.itemsize
        self._made = torch.empty(0)  # embeddings that the pass reads
        self._no_states = torch.empty(0, spec.hidden_size, dtype=self.dtype)
        self._planned: LayerPlan | None = None
        # Addresses of inputs, slots, places in the rope tables, rows of the head, slots in layers that give back.
        self._rows = np.zeros((5, ROWS), np.int64)
        self._best = np.zeros(ROWS, np.int64)
        self._in_strips = IN_STRIPS and self.dtype is torch.bfloat16 and _attends(spec)
        if blocks and not packed.found:
            packer()  # which may have to be compiled first
        self._pack()
        packed.store()
        weights.pop("embed.weight", None)
        self._states = MixerTables(spec, self.layers, self.frame) if spec.states else None
        self._selection = None if selection is None else SelectionTables(selection, self.layers, self.frame)
        self._slots, self._version, self._table_size = SlotLists(arena), -1, -1
        self._workspace: PassWorkspace | None = None
        self._team_size, self._extent = TeamSize(1), (0, 0, 0, 0)
        self._room, self._scores, self._parts = 0, torch.zeros(0), torch.zeros(0)
        arena.masked, self._adds = False, False
        self._fitting = (0, -1, 0)  # threads, version of the arena and positions that `_ready` has prepared for
        self.entry, self.team = compiled(), find_team()
        self._point_at_code()

    def _point_at_code(self) -> None:
        if self.spec.latent is not None:
            self.frame.put({at.LATENT: compiled_latent().address})
        if self.team is not None:
            self.frame.put({at.THREAD: self.team.thread, at.TEAM: self.team.size, at.BARRIER: self.team.barrier})

    def _pack(self) -> None:
        """Pack the weights, and fill the records that point at them."""
        with parts_of(self.spec.num_layers + 1, "packing the weights") as done:
            self.frame.put(constants(self.spec, self.dtype, self._kind) | self._packing.ends())
            done(1)
            self._pack_layers(self.spec, done)

    def _pack_layers(self, spec: ModelSpec, done: Callable[[int], None]) -> None:
        start, size, rows = address(self.seen), self.seen[0].nbytes, address(self._rows)
        for index, layer in enumerate(spec.layers):
            rope = 0 if layer.rope is None else self._ropes[layer.rope].address
            slots = rows + 8 * ROWS * (1 if self._arena.windowed is None or layer.window is None else 4)
            in_strips = self._in_strips and layer.window is None  # rows with a window share no list of slots
            places = {at.ROPE: rope, at.SEEN: start + size * self.shape.kind_of[index], at.SLOT: slots}
            places[at.IN_STRIPS] = int(in_strips)
            for number, record in enumerate(self._packing.records(index)):
                of_source = {at.SEEN: address(self._seen_of_source), at.ROPE: 0} if number else {}
                self.layers.put(record | places | of_source, self._each * index + number)
            done(1)
        self.frame.put({at.BEST: address(self._best), at.SOURCE: rows, at.PICKED: rows + 24 * ROWS})
        self.frame.put({at.POSITIONS: rows + 16 * ROWS})
        for key, table in self._ropes.items():
            table.put({at.PLACE: rows + 16 * ROWS, at.TURNED: spec.ropes[key].width or spec.ropes[key].dims})

    def _point_at_gaps(self, gaps: Gaps) -> None:
        """Have the layers with gaps read lists of their own."""
        self._gap_layers = gaps.layers
        for layer in gaps.layers:
            self.layers.put({at.SEEN: address(self.seen) + self.seen[:-1].nbytes}, self._each * layer)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) new tensor, the family's multiplier included."""
        if isinstance(self.embedding, BlockRows):
            x = self.embedding.values(tokens).to(self.dtype)
        else:
            x = self.embedding.index_select(0, torch.tensor(tokens, dtype=torch.int64))
        scale = self.spec.embedding_multiplier
        return x if scale == 1.0 else x.mul_(torch.tensor(scale, dtype=self.dtype).item())

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """Logits (r, v) of hidden states (r, hidden), after the final norm unless `norm` is False."""
        norms = int(self.frame.fields[0, at.FINAL_NORM // at.FIELD])
        self.frame.put({at.FINAL_NORM: norms if norm else 0})
        try:
            return torch.cat([self._outside(part) for part in hidden.split(ROWS)])
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
        fed: Sequence[int] | torch.Tensor,
        lengths: Lengths,
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        *,
        logits: Sequence[int] | None = None,
        states: bool = False,
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        """See `models.passes.base.Passes.run`."""
        if added_qkv is not None:
            added_qkv = torch.nn.functional.pad(added_qkv.float(), (0, -added_qkv.shape[1] % STRIP))
        rows = sum(segment.rows for segment in segments)
        kept = {layer: torch.empty(rows, self.spec.hidden_size, dtype=self.dtype) for layer in taps}
        result = torch.empty(rows, self.spec.hidden_size, dtype=self.dtype) if states else self._no_states
        wanted = range(rows) if logits is None else logits
        longest = max(_keys_of(segment) for segment in segments)
        self._ready(longest if self._selection is None else max(longest, self._selection.room))
        self._plan(plan)
        if self._gaps is not None and self._gaps.layers != self._gap_layers:
            self._point_at_gaps(self._gaps)
        logits_of, best, done = list[torch.Tensor](), list[int](), 0
        for parts in split_into_passes(segments, ROWS):
            count = sum(part.rows for part in parts)
            states_in = fed[done : done + count]
            if plan.first == 0 and self._placement:
                states_in = self._placed(states_in, parts)
            self._from(states_in, count)
            if -1 in kept and plan.first == 0:
                kept[-1][done : done + count] = (
                    states_in if isinstance(states_in, torch.Tensor) else self.embed(states_in)
                )
            self._targets(kept, result, done)
            self._add_to_qkv(added_qkv, done)
            lists = self._place(parts, lengths, done)
            kept_states = self._states.place(parts) if self._states is not None else ()
            labels = self._selection.place(parts) if self._selection is not None else ()
            picked = wanted if count == rows else [row - done for row in wanted if done <= row < done + count]
            logits_of.append(self._go(picked, count))
            best += self._best[: len(picked)].tolist()
            del lists, kept_states, labels
            done += count
        return PassResult(logits_of[0] if len(logits_of) == 1 else torch.cat(logits_of), result, kept, best)

    def settle(self, states: Sequence[LayerState], nodes: Sequence[int], alone: bool) -> Sequence[torch.Tensor]:
        """See `models.state.recurrent.Settle`."""
        assert self._states is not None, "a model without mixers"
        self._ready(0)
        return self._states.settle(states, nodes, alone, self._run)

    def _run(self, entry: Any) -> None:
        if self.team is None:
            entry.ctypes(self.frame.address)
        else:
            self.team.run(entry.address, self.frame.address, self._team_size.now)

    def _ready(self, longest: int) -> None:
        """Make workspace, cache addresses and score buffers fit."""
        threads, version = 1 if self.team is None else torch.get_num_threads(), self._arena.version
        if self._fitting[0] == threads and self._fitting[1] == version and self._fitting[2] >= longest:
            return
        self._fitting = (0, -1, 0)
        if self._workspace is None or self._workspace.threads != threads:
            self._workspace = PassWorkspace(self.spec, self._kind, threads, quantized=self._quantized)
            self._team_size = TeamSize(threads)
            self._parts = torch.zeros(threads * ROWS * BEST_BYTES, dtype=torch.uint8)
            self.frame.put(self._workspace.fields | {at.PARTS: self._parts.data_ptr(), at.PARTS_ROWS: ROWS})
            self._room = 0
        self._distances.reserve(longest)
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
            for index, layer in enumerate(self._caches()):
                for number in range(self._each):
                    self.layers.put({at.CACHE: layer.data_ptr()}, self._each * index + number)
        self._fitting = (threads, version, longest)

    def _caches(self) -> Sequence[torch.Tensor]:
        """Where each layer's keys and values lie."""
        return self._arena.layers

    def _plan(self, plan: LayerPlan) -> None:
        if plan is self._planned:
            return
        before, self._planned, count = self._planned, None, self.spec.num_layers
        stop = count if plan.stop is None else plan.stop
        first, each = self.layers.address + self._each * plan.first * at.LAYER_FIELDS, self._each
        self.frame.put({at.PROGRAM: first, at.LAYERS: each * (stop - plan.first)})
        self._extent = plan.first, stop, len(plan.skip_attention), len(plan.skip_mlp)
        same = before and (before.skip_attention, before.skip_mlp) == (plan.skip_attention, plan.skip_mlp)
        for index in range(0 if same else count):
            layer = self.spec.layers[index]
            mixes = (layer.attention or layer.mixer is not None) and index not in plan.skip_attention
            runs = {at.ATTENTION: int(mixes), at.MLP: int(layer.mlp and index not in plan.skip_mlp)}
            for number in range(each - 1):
                self.layers.put(runs | {at.MLP: 0}, each * index + number)
            self.layers.put(runs, each * index + each - 1)
        self._planned = plan

    def _placed(self, fed: Sequence[int] | torch.Tensor, parts: Sequence[Segment]) -> torch.Tensor:
        """Embeddings of the rows in their places; kept for the pass."""
        x = fed.clone() if isinstance(fed, torch.Tensor) else self.embed(fed)
        self._made = self._placement.apply(x, [position for part in parts for position in part.positions()])
        return self._made

    def source_queries(
        self, segment: Segment, fed: Sequence[int], layers: Collection[int]
    ) -> Mapping[int, torch.Tensor]:
        """See `QueriesSource.source_queries`."""
        found = {layer: torch.empty(segment.rows, self.shape.heads, self.shape.head_dim) for layer in layers}
        done = 0
        try:
            for (part,) in split_into_passes([segment], ROWS):
                for layer, queries in found.items():
                    self.layers.put({at.QUERIES_TAP: queries[done].data_ptr()}, self._each * layer + 1)
                self.run([part], fed[done : done + part.rows], (), logits=())
                done += part.rows
        finally:
            self.layers.fields[:, at.QUERIES_TAP // at.FIELD] = 0
        return found

    def _from(self, fed: Sequence[int] | torch.Tensor, count: int) -> None:
        """Point at the rows' inputs."""
        size, scale = self._row_bytes, 1.0
        if isinstance(fed, torch.Tensor):
            self._rows[0, :count] = fed.data_ptr() + size * np.arange(count)
        elif isinstance(self.embedding, BlockRows):
            self._made = self.embed(fed)
            self._rows[0, :count] = self._made.data_ptr() + size * np.arange(count)
        else:
            first = self.embedding.data_ptr()
            self._rows[0, :count] = [first + size * token for token in fed]
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
                self.layers.put({at.TAP: tap.data_ptr() + offset}, self._each * (layer + 1) - 1)
        states = result.data_ptr() + offset if len(result) else 0
        self.frame.put({at.RESULT: states, at.FINAL_TAP: kept[last].data_ptr() + offset if last in kept else 0})

    def _place(self, segments: Sequence[Segment], lengths: Lengths, done: int) -> list[Ints]:
        """Slots, visible slots and rotations of the rows; returns what must live until the pass is over."""
        row = 0
        lists: list[Ints] = []
        for segment in segments:
            cache = segment.cache
            first, end = cache.length + segment.done, cache.length + segment.slots
            stop = row + end - first
            slots = windowed = self._slots.of(cache, end, lists)
            self._rows[1, row:stop] = slots[0][first:end]
            self._rows[2, row:stop] = list(segment.positions())
            if self._arena.windowed is not None:
                windowed = self._slots.windowed(self._arena.windowed, cache, slots[0], lists)
                self._rows[4, row:stop] = windowed[0][first:end]
            for seen, window in zip(self.seen, self.shape.windows, strict=False):
                fill(segment, window, slots if window is None else windowed, seen[row:stop], lists)
            if self._gap_layers and self._gaps is not None:
                if (there := self._gaps.gaps_before(segment)) is None:
                    fill(segment, None, slots, self.seen[-1, row:stop], lists)
                else:
                    fill_gaps(segment, there, slots[0], self.seen[-1, row:stop], lists)
            if segment.memory is not None:
                fill_source(segment.memory.cache, self._slots, self._seen_of_source[row:stop], lists)
            row = stop
        return self._rotations(row, lengths, done, lists)

    def _rotations(self, count: int, lengths: Lengths, done: int, lists: list[Ints]) -> list[Any]:
        """Bring the rope records up to date."""
        positions = self._rows[2, :count]
        kept: list[Any] = list(lists)
        self._rotary.reserve(max(positions.tolist()) + 1)
        if self._table_size != self._rotary.size:
            self._table_size = self._rotary.size
            for key, table in self._rotary.tables.items():
                self._ropes[key].put(_addresses(table))
        if self._rotary.depends_on_length:
            each = [length for rows, length in lengths for _ in range(rows)][done : done + count]
            for key, table in self._rotary.by_length(positions.tolist(), [(1, length) for length in each]).items():
                self._ropes[key].put(_addresses(table) | {at.PLACE: address(self._iota)})
                kept.append(table)
        return kept

    def _go(self, picked: Sequence[int], rows: int) -> torch.Tensor:
        """Run the pass; returns the logits (picked, v) of the picked rows, whose best tokens are then in `_best`."""
        vocab = self.spec.vocab_size
        self._rows[3, : len(picked)] = picked
        out = torch.empty(len(picked), -(-vocab // LANES) * LANES, dtype=self.dtype)
        self.frame.put({at.HEAD_ROWS: len(picked), at.LOGITS: out.data_ptr()})
        start = perf_counter()
        self._run(self.entry)
        self._team_size.took((rows, *self._extent), perf_counter() - start)
        return out if out.shape[1] == vocab else out[:, :vocab].contiguous()
