"""Chains of drafts from a one-layer model in compiled code, for many sequences in one call.

In: a ModelSpec of one plain layer with its weights and tables, caches, tokens to feed. Out: drafted tokens and their chances. Not
here: compiled code (models.kernels.draft), the same arithmetic step by step in NumPy (models.one_layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ConfigError, DrafterError
from paceline.models.decoder import attention_shape
from paceline.models.kernels import draft_frame as of
from paceline.models.kernels import draft_tiles as small
from paceline.models.kernels import frame as at
from paceline.models.kernels.draft import compiled
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

_OUT = MOST_STEPS + 8
"""Fields of a row of results: a chance is written with the seven fields behind it."""
_RECORD = of.SEQUENCE_FIELDS // at.FIELD
_STEPS, _PAUSE, _DONE, _ROWS = of.STEPS // at.FIELD, of.PAUSE // at.FIELD, of.DONE // at.FIELD, at.ROWS // at.FIELD


def _integers(array: npt.NDArray[np.int64]) -> memoryview[int]:
    """An array's memory as one row of int64: single numbers are quicker to reach than in the array."""
    return array.reshape(-1).data.cast("B").cast("q")


def _floats(array: npt.NDArray[np.int64]) -> memoryview[float]:
    """An array's memory as one row of float32."""
    return array.reshape(-1).data.cast("B").cast("f")


@dataclass(slots=True)
class _Chain:
    """One chain under construction.

    Attributes:
        feed: tokens to feed next. fed: length of the cache without drafted tokens. reach: chance of the path so far.
    """

    cache: OneLayerCache
    feed: Sequence[int]
    fed: int
    steps: int
    stop: Stop | None
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    reach: float = 1.0

    def take(self, tokens: Sequence[int], chances: Sequence[float]) -> bool:
        """Add tokens up to the first one behind which `stop` says stop, and set the cache back to them; whether to go on."""
        going = True
        for token, chance in zip(tokens, chances, strict=True):
            if not chance > 0.0:
                raise DrafterError("the draft model gave NaN; check its checkpoint")
            self.tokens.append(token)
            self.chances.append(chance)
            self.reach *= chance
            depth = len(self.tokens) + 1
            if depth > self.steps or (self.stop is not None and self.stop(depth, self.reach)):
                going = False
                break
        self.cache.length, self.feed = self.fed + len(self.tokens) - 1, self.tokens[-1:]
        return going


class Chains:
    """Drafts for up to `ROWS` sequences at once.

    Args:
        weights: canonical names, in the dtype of the head.
        embedding, table, turned, cos, sin: as `models.one_layer.OneLayerRunner` has them.
        bytes_head: keep the head in 8 bits; None: where the CPU has instructions for it and weights are not float32.
    """

    most_fed = MOST_FED

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
        self._tokens, self._chances = (np.zeros((ROWS + 1, _OUT), np.int64) for _ in range(2))
        self._records = Table(of.SEQUENCE_FIELDS, ROWS)
        self._records.fields[:, of.FEED // at.FIELD] = address(self._feed) + np.arange(ROWS) * self._feed.strides[0]
        self._fed, self._drafted, self._rows = map(_integers, (self._feed, self._tokens, self._records.fields))
        self._frame_fields, self._data_fields = _integers(self._frame.fields), _integers(self._data.fields)
        self._sure, self._pause = _floats(self._chances), _floats(self._data.fields)
        self._threads = 0
        self._scratch: list[torch.Tensor | Workspace] = []
        self._run, self._team = compiled(), find_team()
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
        self._threads, hidden = torch.get_num_threads(), self.spec.hidden_size
        threads = 1 if self._team is None else self._threads
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
        if torch.get_num_threads() != self._threads:
            self._ready()
        fed, records, frame, data = self._fed, self._rows, self._frame_fields, self._data_fields
        place = record = 0
        for cache, feed in zip(caches, feeds, strict=True):
            records[record], records[record + 1], records[record + 2] = cache.places
            records[record + 3], records[record + 5] = cache.length, len(feed)
            for i, token in enumerate(feed, place):
                fed[i] = token
            place, record = place + MOST_FED, record + _RECORD
        data[_STEPS], frame[_ROWS] = steps, len(caches)
        self._pause[2 * _PAUSE] = pause
        if self._team is None:
            self._run.ctypes(self._data.address)
        else:
            self._team.run(self._run.address, self._data.address)
        done = data[_DONE]
        for cache, feed in zip(caches, feeds, strict=True):
            cache.length += len(feed) + done - 1
        starts = range(0, len(caches) * _OUT, _OUT)
        drafted: list[list[int]] = [self._drafted[start : start + done].tolist() for start in starts]
        sure: list[list[float]] = [self._sure[2 * start : 2 * (start + done) : 2].tolist() for start in starts]  # type: ignore[misc]  # typeshed: always int
        return drafted, sure

    def draft(
        self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]], steps: Sequence[int], stops: Sequence[Stop | None]
    ) -> list[Found]:
        """See `OneLayerRunner.draft_chains`; any number of sequences."""
        each = zip(caches, feeds, steps, stops, strict=True)
        chains = [_Chain(cache, feed, cache.length + len(feed), most, stop) for cache, feed, most, stop in each]
        active, pause = chains, PAUSE if any(stop is not None for stop in stops) else 0.0
        while active:
            now, later = active[:ROWS], active[ROWS:]
            burst = min([MOST_STEPS, *(one.steps - len(one.tokens) for one in now)])
            for one in now:
                self._check(one.fed + len(one.tokens) + burst - 1)
                one.cache.reserve(one.fed + len(one.tokens) + burst - 1)
            answers = self.once([one.cache for one in now], [one.feed for one in now], burst, pause)
            active = [one for one, tokens, chances in zip(now, *answers, strict=True) if one.take(tokens, chances)] + later
        return [(one.tokens, one.chances) for one in chains]

    def _check(self, length: int) -> None:
        if length > len(self._arrays[3]):
            raise ConfigError(f"position {length - 1} lies outside the context of {len(self._arrays[3])} tokens")


_SIZES = {of.PARTS: of.PARTS_SIZE, of.FINE: of.FINE_SIZE, of.BYTES: of.BYTES_SIZE}
