"""Chains of drafts from a one-layer model in compiled code, for many sequences in one call.

In: a ModelSpec of one plain layer with its weights and tables, caches, tokens to feed. Out: drafted tokens and their chances. Not
here: compiled code (models.one_layer_kernel), the same arithmetic step by step in NumPy (models.one_layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.models import one_layer_kernel as of
from paceline.models import one_layer_tiles as small
from paceline.models.decoder import attention_shape
from paceline.models.kernels import frame as at
from paceline.models.kernels.fused import best_kind
from paceline.models.kernels.pages import Pages
from paceline.models.kernels.program import ROWS, Packing, Table, Workspace, constants
from paceline.models.kernels.team import find_team
from paceline.models.kernels.tiles import STRIP
from paceline.models.kernels.vectors import LANES
from paceline.models.kernels.visible import SPARE, address
from paceline.models.spec import ModelSpec

if TYPE_CHECKING:
    from paceline.models.one_layer import OneLayerCache

Array = npt.NDArray[np.float32]
Found = tuple[list[int], list[float]]
Stop = Callable[[int, float], bool]

MOST_STEPS: Final = 32
"""Most tokens of one call."""
MOST_FED: Final = 512
"""Most tokens fed before the first draft of a call."""
PAUSE: Final = 0.3
"""Compiled code asks whether to go on only where the chance of the path so far is no greater: above, the answer is nearly always
yes, and a token drafted in vain costs about as much as the question."""

_SPARE_FIELDS = 8


class Chains:
    """Drafts for up to `ROWS` sequences at once.

    Args:
        weights: canonical names, in the dtype of the head.
        embedding, table, turned, cos, sin: as `models.one_layer.OneLayerRunner` has them.
        bytes_head: keep the head in 8 bits; None: where the CPU has instructions for it and weights are not float32.
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
        bytes_head: bool | None = None,
    ) -> None:
        dtype = weights["embed.weight"].dtype
        self.spec, self._kind = spec, best_kind(dtype)
        able = small.has_bytes() and small.fits(spec.hidden_size)
        self.bytes_head = able and (dtype is not torch.float32 if bytes_head is None else bytes_head)
        self._arrays = [embedding, table, turned, cos, sin]
        self._frame, self._layer, self._data = Table(at.FRAME_FIELDS), Table(at.LAYER_FIELDS), Table(of.CHAIN_FIELDS)
        self._packing = Packing(spec, attention_shape(spec), dict(weights))
        head = weights["embed.weight"] if spec.tied else weights["head.weight"]
        self._strips = small.pack(head, Pages()) if self.bytes_head else None
        self._layer.put(self._packing.record(0))
        self._frame.put(constants(spec, dtype, self._kind) | self._packing.ends())
        self._iota = np.arange(-(-len(cos) // LANES) * LANES + SPARE)
        self._feed = np.zeros((ROWS, MOST_FED), np.int64)
        self._tokens, self._chances = (np.zeros((ROWS + 1, MOST_STEPS + _SPARE_FIELDS), np.int64) for _ in range(2))
        self._floats = self._chances.view(np.float32)
        self._records = Table(of.SEQUENCE_FIELDS, ROWS)
        self._feed_at, self._feed_pitch = address(self._feed), self._feed.strides[0]
        self._threads = 0
        self._scratch: list[torch.Tensor | Workspace] = []
        self._run, self._team = of.compiled(), find_team()
        self._fill()

    def _fill(self) -> None:
        embedding, table, turned, cos, sin = self._arrays
        if self._team is not None:
            self._frame.put({at.THREAD: self._team.thread, at.TEAM: self._team.size, at.BARRIER: self._team.barrier})
        strips, scales = (one.data_ptr() for one in self._strips) if self._strips else (0, 0)
        self._data.put(
            {
                of.FRAME: self._frame.address, of.LAYER: self._layer.address, of.SEQUENCES: self._records.address,
                of.EMBEDDING: embedding.ctypes.data, of.TABLE: table.ctypes.data, of.TABLE_PITCH: table.strides[0],
                of.TURNED: turned.ctypes.data, of.TURNED_PITCH: turned.strides[0],
                of.COSINE: cos.ctypes.data, of.SINE: sin.ctypes.data, of.IOTA: address(self._iota),
                of.TOKENS: address(self._tokens), of.CHANCES: address(self._chances), of.OUT_PITCH: self._tokens.strides[0],
                of.STRIPS: strips, of.SCALES: scales,
            }
        )  # fmt: skip

    def _ready(self) -> None:
        """Scratch memory for as many threads as PyTorch uses."""
        threads = 1 if self._team is None else torch.get_num_threads()
        if threads == self._threads:
            return
        self._threads, hidden = threads, self.spec.hidden_size
        workspace = Workspace(self.spec, self._kind, threads)
        padded = -(-self.spec.vocab_size // STRIP) * STRIP + 3 * LANES
        fine, small_pitch = 4 * hidden + 64, hidden + 128
        scores = 4 * (len(self._iota) + 3 * LANES)
        sizes = {
            of.PARTS: (192 * ROWS, threads), of.FINE: (fine * ROWS, threads), of.BYTES: (small_pitch * ROWS, threads),
            of.LOGITS: (4 * padded * ROWS, 1),
        }  # fmt: skip
        memory = {field: torch.zeros(size * count, dtype=torch.uint8) for field, (size, count) in sizes.items()}
        rows = torch.zeros(scores * threads, dtype=torch.uint8)
        self._scratch = [workspace, rows, *memory.values()]
        self._frame.put(workspace.fields | {at.SCORES: rows.data_ptr(), at.SCORES_SIZE: scores})
        self._data.put({field: one.data_ptr() for field, one in memory.items()})
        pitches = {of.FINE_PITCH: fine, of.BYTES_PITCH: small_pitch, of.LOGITS_PITCH: 4 * padded}
        self._data.put({size: sizes[field][0] for field, size in _SIZES.items()} | pitches)

    def once(
        self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]], steps: int, pause: float
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Append `feeds`, then draft up to `steps` tokens of each row; stops where no row's chance exceeds `pause`.

        Caches must have room; all drafted tokens but the last are appended too. Returns (rows, tokens) and their chances.
        """
        self._ready()
        for row, (cache, feed) in enumerate(zip(caches, feeds, strict=True)):
            count, (keys, values, pitch) = len(feed), cache.places
            self._feed[row, :count] = feed
            self._records.fields[row] = (keys, values, pitch, cache.length, self._feed_at + row * self._feed_pitch, count)
        self._data.put({of.STEPS: steps, of.PAUSE: pause})
        self._frame.fields[0, at.ROWS // at.FIELD] = len(caches)
        if self._team is None:
            self._run.ctypes(self._data.address)
        else:
            self._team.run(self._run.address, self._data.address)
        done = int(self._data.fields[0, of.DONE // at.FIELD])
        for cache, feed in zip(caches, feeds, strict=True):
            cache.length += len(feed) + done - 1
        return self._tokens[: len(caches), :done].tolist(), self._floats[: len(caches), : 2 * done : 2].tolist()

    def draft(
        self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]], steps: Sequence[int], stops: Sequence[Stop]
    ) -> list[Found]:
        """See `OneLayerRunner.draft_chains`; any number of sequences."""
        found: list[Found] = [([], []) for _ in caches]
        reach, coming = [1.0] * len(caches), list(feeds)
        ends = [cache.length + len(feed) - 1 for cache, feed in zip(caches, feeds, strict=True)]
        active = list(range(len(caches)))
        while active:
            now = active[:ROWS]
            burst = min(MOST_STEPS, *(steps[i] - len(found[i][0]) for i in now))
            answers = self.once([caches[i] for i in now], [coming[i] for i in now], burst, PAUSE)
            going = []
            for i, tokens, chances in zip(now, *answers, strict=True):
                reach[i] = taken(found[i], tokens, chances, reach[i], steps[i], stops[i])
                caches[i].length = ends[i] + len(found[i][0])
                if reach[i] >= 0.0:
                    coming[i] = found[i][0][-1:]
                    caches[i].length -= 1
                    going.append(i)
                else:
                    caches[i].length -= 1
            active = going + active[ROWS:]
        return found


_SIZES = {of.PARTS: of.PARTS_SIZE, of.FINE: of.FINE_SIZE, of.BYTES: of.BYTES_SIZE}


def taken(found: Found, tokens: Sequence[int], chances: Sequence[float], reach: float, steps: int, stop: Stop) -> float:
    """Add tokens up to the first one behind which `stop` says stop; the chance of the path so far, -1 for a chain that is done."""
    for token, chance in zip(tokens, chances, strict=True):
        found[0].append(token)
        found[1].append(chance)
        reach *= chance
        if len(found[0]) >= steps or stop(len(found[0]) + 1, reach):
            return -1.0
    return reach
