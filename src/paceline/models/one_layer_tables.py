"""The tables that the compiled draft of a one-layer model reads: packed weights, scratch memory, records, filled once.

In: a ModelSpec of one plain layer with its weights and tables. Out: memory to write tokens into and read drafts from, and the run
of the compiled function over it. Not here: compiled code (models.kernels.draft_run), what is written for a draft
(models.one_layer_chain, models.one_layer_tree).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.decoder import attention_shape
from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import draft_tiles as small
from paceline.models.kernels import frame as at
from paceline.models.kernels.attention_tiles import MOST_QUERIES
from paceline.models.kernels.draft_head import PART_BYTES
from paceline.models.kernels.draft_run import compiled
from paceline.models.kernels.pages import Pages
from paceline.models.kernels.program import ROWS, Packing, Table, Workspace, best_kind, constants, head_order
from paceline.models.kernels.team import find_team
from paceline.models.kernels.tiles import DOT, HALF, STRIP
from paceline.models.kernels.vectors import LANES
from paceline.models.kernels.visible import SPARE, address
from paceline.models.spec import ModelSpec

Array = npt.NDArray[np.float32]

MOST_STEPS: Final = 32
"""Most tokens of one call."""
MOST_FED: Final = 512
"""Most tokens fed before the first draft of a call."""
MOST_DEPTH: Final = 256
"""Most levels of a tree."""
OUT: Final = MOST_STEPS + 8
"""Fields of a row of results of chains: a chance is written with the seven fields behind it."""
OWN: Final = MOST_DEPTH + LANES + SPARE
"""Slots of a row's own list."""

_MODE, _ROWS = of.MODE // at.FIELD, at.ROWS // at.FIELD


def integers(array: npt.NDArray[np.int64]) -> memoryview[int]:
    """An array's memory as one row of int64: single numbers are quicker to reach than in the array."""
    return array.reshape(-1).data.cast("B").cast("q")


def as_floats(array: npt.NDArray[np.int64]) -> memoryview[float]:
    """An array's memory as one row of float32."""
    return array.reshape(-1).data.cast("B").cast("f")


class DraftTables:
    """Everything that a compiled draft of up to `ROWS` rows works on.

    Args:
        weights: canonical names, in the dtype of the head.
        embedding, table, turned, cos, sin: as `models.one_layer.OneLayerRunner` has them.
        in_bytes: keep weights in 8 bits; None: where the CPU has instructions for it and weights are not float32.

    Attributes:
        in_bytes: whether they are. context: positions of the rotary tables.
        strips: if so, strips and scales of the head, the output projection, gate and up, down.
        fed: (ROWS * MOST_FED,) tokens to feed, MOST_FED for a sequence. records: fields of sequences, ROWS records.
        laid, own_ro: fields of rows (ROWS, ...), and (ROWS, OWN) their own slots.
        drafted, sure: results of chains, rows of OUT fields: int64 tokens; float32 chances, two to a field.
        data, frame: fields of the tables of models.kernels.draft_frame and models.kernels.frame.
        growths: records of growing trees.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        *,
        embedding: Array,
        table: Array,
        turned: Array,
        cos: Array,
        sin: Array,
        in_bytes: bool | None = None,
    ) -> None:
        dtype = weights["embed.weight"].dtype
        self.spec, self._kind, self.context = spec, best_kind(dtype), len(cos)
        self.in_bytes = _able(spec) and (dtype is not torch.float32 if in_bytes is None else in_bytes)
        self.arrays = [embedding, table, turned, cos, sin]
        self._frame, self._layer, self._data = Table(at.FRAME_FIELDS), Table(at.LAYER_FIELDS), Table(of.CHAIN_FIELDS)
        if self.in_bytes and self._kind == DOT:
            self._kind = HALF  # bytes are made of float32 activations
        self._frame.put(constants(spec, dtype, self._kind))
        self.strips: list[torch.Tensor] = []
        self._kept = self._pack_bytes(weights) if self.in_bytes else self._pack(weights)
        self._iota = np.arange(-(-len(cos) // LANES) * LANES + SPARE)
        self._feed = np.zeros((ROWS, MOST_FED), np.int64)
        self._tokens, self._chances = (np.zeros((ROWS + 1, OUT), np.int64) for _ in range(2))
        self._sequences, self._laid = Table(of.SEQUENCE_FIELDS, ROWS), Table(of.ROW_FIELDS, ROWS)
        self.growths = Table(of.GROWTH_FIELDS, ROWS)
        self._sequences.fields[:, of.FEED // at.FIELD] = address(self._feed) + np.arange(ROWS) * self._feed.strides[0]
        self.own_ro = np.zeros((ROWS, OWN), np.int64)
        self.fed, self.drafted, self.sure = integers(self._feed), integers(self._tokens), as_floats(self._chances)
        self.records, self.laid = integers(self._sequences.fields), integers(self._laid.fields)
        self.frame, self.data, self.data_floats = (
            integers(self._frame.fields), integers(self._data.fields), as_floats(self._data.fields)
        )  # fmt: skip
        self._threads = 0
        self._scratch: list[torch.Tensor | Workspace] = []
        self._run, self._team = compiled(), find_team()
        self.fill()

    def _pack(self, weights: Mapping[str, torch.Tensor]) -> object:
        """Weights in their own dtype."""
        packing = Packing(self.spec, attention_shape(self.spec), dict(weights))
        self._layer.put(packing.record(0))
        self._frame.put(packing.ends())
        return packing

    def _pack_bytes(self, weights: Mapping[str, torch.Tensor]) -> object:
        """Weights in 8 bits, and the norms."""
        spec, pages = self.spec, Pages()
        order, head = head_order(attention_shape(spec)), weights["embed.weight"] if spec.tied else weights["head.weight"]
        gate, up = weights["layers.0.gate_up.weight"].split(spec.intermediate_size)
        paired = torch.stack((gate.unflatten(0, (-1, STRIP // 2)), up.unflatten(0, (-1, STRIP // 2))), 1).flatten(0, 2)
        matrices = head, weights["layers.0.o.weight"][:, order], paired, weights["layers.0.down.weight"]
        self.strips = [part for matrix in matrices for part in small.pack(matrix, pages)]
        norms = [weights[name].float().contiguous() for name in ("layers.0.mlp_norm.weight", "final_norm.weight")]
        self._layer.put({at.MLP_NORM: norms[0].data_ptr()})
        self._frame.put({at.FINAL_NORM: norms[1].data_ptr()})
        return norms

    def fill(self) -> None:
        """Enter all addresses that stay."""
        embedding, table, turned, cos, sin = self.arrays
        if self._team is not None:
            self._frame.put({at.THREAD: self._team.thread, at.TEAM: self._team.size, at.BARRIER: self._team.barrier})
        fields = range(of.STRIPS, of.DOWN_SCALES + at.FIELD, at.FIELD)
        self._data.put({field: one.data_ptr() for field, one in zip(fields, self.strips, strict=False)})
        self._data.put(
            {
                of.FRAME: self._frame.address, of.LAYER: self._layer.address, of.SEQUENCES: self._sequences.address,
                of.EMBEDDING: embedding.ctypes.data, of.TABLE: table.ctypes.data, of.TABLE_PITCH: table.strides[0],
                of.TURNED: turned.ctypes.data, of.TURNED_PITCH: turned.strides[0],
                of.COSINE: cos.ctypes.data, of.SINE: sin.ctypes.data, of.IOTA: address(self._iota),
                of.TOKENS: address(self._tokens), of.CHANCES: address(self._chances), of.OUT_PITCH: self._tokens.strides[0],
                of.LAID: self._laid.address, of.GROWTHS: self.growths.address,
                of.OWN: address(self.own_ro), of.OWN_PITCH: self.own_ro.strides[0],
            }
        )  # fmt: skip

    def ready(self) -> None:
        """Scratch memory for as many threads as PyTorch uses."""
        if torch.get_num_threads() == self._threads:
            return
        self._threads, hidden = torch.get_num_threads(), self.spec.hidden_size
        threads = 1 if self._team is None else self._threads
        workspace = Workspace(self.spec, self._kind, threads)
        padded = -(-self.spec.vocab_size // STRIP) * STRIP + 3 * LANES
        strips = -(-padded // STRIP // LANES) * LANES
        widest = max(hidden, self.spec.num_heads * self.spec.head_dim, self.spec.intermediate_size)
        fine, small_pitch, scores = 4 * hidden + 64, widest + 128, 4 * (len(self._iota) + OWN + 3 * LANES)
        sizes = {
            of.PARTS: (PART_BYTES * ROWS, threads), of.FINE: (fine, threads), of.BYTES: (small_pitch * ROWS, threads),
            of.LOGITS: (4 * padded * ROWS, 1),
        }  # fmt: skip
        memory = {field: torch.zeros(size * count, dtype=torch.uint8) for field, (size, count) in sizes.items()}
        rows, maxima = torch.zeros(scores * MOST_QUERIES * threads, dtype=torch.uint8), torch.full((ROWS, strips), -torch.inf)
        self._scratch = [workspace, rows, maxima, *memory.values()]
        lines = {at.SCORES: rows.data_ptr(), at.SCORES_PITCH: scores, at.SCORES_SIZE: scores * MOST_QUERIES}
        self._frame.put(workspace.fields | lines)
        self._data.put({field: one.data_ptr() for field, one in memory.items()})
        pitches = {of.BYTES_PITCH: small_pitch, of.LOGITS_PITCH: 4 * padded}
        pitches |= {of.MAXIMA: maxima.data_ptr(), of.MAXIMA_PITCH: 4 * strips}
        self._data.put({size: sizes[field][0] for field, size in _SIZES.items()} | pitches)
        self._scratch_logits = memory[of.LOGITS].view(torch.float32).view(ROWS, padded)

    def run(self, mode: int, rows: int) -> None:
        """Run the compiled function on PyTorch's threads."""
        self.data[_MODE], self.frame[_ROWS] = mode, rows
        if self._team is None:
            self._run.ctypes(self._data.address)
        else:
            self._team.run(self._run.address, self._data.address)

    def logits(self, rows: int) -> torch.Tensor:
        """(rows, v) float32 logits of the last run, a copy."""
        return self._scratch_logits[:rows, : self.spec.vocab_size].clone()


def _able(spec: ModelSpec) -> bool:
    """Whether the CPU multiplies bytes and the model's sizes fill their strips."""
    inputs = spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size
    return small.has_bytes() and small.fits(*inputs) and spec.intermediate_size % (STRIP // 2) == 0


_SIZES = {of.PARTS: of.PARTS_SIZE, of.FINE: of.FINE_SIZE, of.BYTES: of.BYTES_SIZE}
