"""Scoring at fixed shapes, captured as CUDA graphs: one upload, one replay, whatever the batch, the trees and the
contexts are.

Where no bucket fits, `run` gives None, which sends the caller to the eager path (also the oracle of the tests: without
capture the same body runs on any device).

A call is padded to a bucket (b sequences, n rows fed of m pending ones, s cache slots). Everything that varies goes
into one int64 buffer: tokens, positions, write slots, lengths, depths, who sees whom, block tables; the graph computes
masks and rotations from it. From so many slots on, prefix and inputs are attended to apart, without a mask of rows by
slots (models.attention.fixed_shape_attention). Padding rows write to the arena's spare block and see one finite slot.
Graphs die when the arena or the tables move. Streams, events and graphs are those of the model's own device, whichever
device is the current one; on more than one GPU this has never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from paceline.models.attention.fixed_shape_attention import LONG_CONTEXT, ChunkedPrefixStep, PaddedStep, padded_masks
from paceline.models.attention.segments import Segment
from paceline.models.attention.tree_attention import AttentionStep
from paceline.models.base import ALL_LAYERS, PassResult
from paceline.models.layers.decoder import Decoder
from paceline.models.layers.rope import Rotary
from paceline.models.state.arena import Arena, blocks_for
from paceline.models.state.window_slots import BLOCK

MAX_GRAPHS = 96
MAX_BATCH, MAX_ROWS, MIN_SLOTS = 64, 64, 256

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A fixed shape: sequences, rows fed of each, root and nodes of each, cache slots seen, and the taps taken."""

    batch: int
    rows: int
    pending: int
    slots: int
    taps: tuple[int, ...]

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The parts of the upload and their shapes."""
        return {
            "tokens": (self.batch * self.rows,),
            "positions": (self.batch, self.rows),
            "write": (self.batch * self.rows,),
            "lengths": (self.batch,),
            "depths": (self.batch, self.pending),
            "sees": (self.batch, self.rows, self.pending),
            "tables": (self.batch, self.slots // BLOCK),
        }


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def bucket_for(segments: Sequence[Segment], taps: Sequence[int]) -> Bucket | None:
    """The smallest bucket that holds these segments, or None if they are too many or too long."""
    rows, pending = (_power(max(getattr(s, name) for s in segments)) for name in ("rows", "slots"))
    batch = _power(len(segments))
    if batch > MAX_BATCH or pending > MAX_ROWS:
        return None
    slots = _power(max(MIN_SLOTS, *(s.cache.length + s.slots for s in segments)))
    return Bucket(batch, rows, pending, slots, tuple(sorted(set(taps))))


class ScoringGraphs:
    """Runs scoring passes at bucketed shapes; with `capture` each bucket is captured once and then replayed."""

    def __init__(self, decoder: Decoder, rotary: Rotary, arena: Arena, *, capture: bool) -> None:
        self._decoder, self._rotary, self._arena, self._capture = decoder, rotary, arena, capture
        self._passes: dict[Bucket, _Pass] = {}
        self._state = (-1, -1)
        self._capturing: _Capturing | None = None

    def run(
        self, segments: Sequence[Segment], tokens: Sequence[Sequence[int]], taps: Sequence[int]
    ) -> PassResult | None:
        """Logits (r, v) and taps (r, hidden) of the fed rows as fresh tensors, or None where no bucket fits."""
        bucket = bucket_for(segments, taps)
        if bucket is None or self._rotary.depends_on_length:
            return None
        with _current(self._arena.kv.device):
            return self._run(bucket, segments, tokens)

    def _run(self, bucket: Bucket, segments: Sequence[Segment], tokens: Sequence[Sequence[int]]) -> PassResult:
        self._rotary.reserve(bucket.slots + bucket.pending)
        state = (self._arena.version, self._rotary.size)
        if state != self._state or len(self._passes) >= MAX_GRAPHS:
            self._passes.clear()
            self._state = state
            self._capturing = _Capturing() if self._capture else None
        chosen = self._passes.get(bucket)
        if chosen is None:
            chosen = self._passes[bucket] = _Pass(bucket, self._decoder, self._rotary, self._arena)
        chosen.upload(pack(bucket, segments, tokens))
        result = chosen.body() if self._capturing is None else chosen.replay(self._capturing)
        counts = [segment.rows for segment in segments]
        taps = {layer: _valid(rows, bucket, counts) for layer, rows in result.taps.items()}
        return PassResult(_valid(result.logits, bucket, counts), result.states, taps)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Within it, a CUDA device is the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pack(bucket: Bucket, segments: Sequence[Segment], tokens: Sequence[Sequence[int]]) -> Ints:
    """Everything that varies, as one flat int64 array in the order of `Bucket.sizes`."""
    parts = {name: np.zeros(size, np.int64) for name, size in bucket.sizes().items()}
    write = parts["write"].reshape(bucket.batch, bucket.rows)
    write[:] = np.arange(bucket.rows) % BLOCK
    parts["sees"][:, :, 0] = 1
    for i, segment in enumerate(segments):
        cache, n, m, done = segment.cache, segment.rows, segment.slots, segment.done
        parts["tokens"].reshape(bucket.batch, bucket.rows)[i, :n] = tokens[i]
        parts["positions"][i, :n] = segment.positions()
        write[i, :n] = cache.slot_index(cache.length + done, cache.length + m)
        parts["lengths"][i] = cache.length
        parts["depths"][i, :m], parts["sees"][i, :n, :m] = segment.depths, segment.sees[done:]
        table = cache.blocks[: blocks_for(cache.length + m)]
        parts["tables"][i, : len(table)] = table
    return np.concatenate([part.reshape(-1) for part in parts.values()])


def _valid(padded: torch.Tensor, bucket: Bucket, counts: Sequence[int]) -> torch.Tensor:
    by_sequence = padded.view(bucket.batch, bucket.rows, -1)
    return torch.cat([by_sequence[i, :n] for i, n in enumerate(counts)])


class _Capturing:
    """Streams and memory of graphs that live and die together.

    cuBLAS keeps a workspace for every stream that it has served. On a stream of its own the first capture makes it in
    the memory of the graphs; one from before, as the warm-up's, would be freed under them by whoever clears the
    workspaces (torch.compile does). Graphs share their memory: they run one after the other, and what they give is
    copied.
    """

    def __init__(self) -> None:
        self.warming, self.stream = torch.cuda.Stream(), torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()


class _Pass:
    """The body of one bucket over its static buffers, and its graph once captured."""

    def __init__(self, bucket: Bucket, decoder: Decoder, rotary: Rotary, arena: Arena) -> None:
        self._bucket, self._decoder, self._arena, self._rotary = bucket, decoder, arena, rotary
        sizes = {name: int(np.prod(size)) for name, size in bucket.sizes().items()}
        device = arena.kv.device
        self._host = torch.zeros(sum(sizes.values()), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._buffer = torch.zeros_like(self._host, device=device)
        views = self._buffer.split(list(sizes.values()))
        self._in = {name: view.view(size) for view, (name, size) in zip(views, bucket.sizes().items(), strict=True)}
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None
        self._captured: tuple[torch.cuda.CUDAGraph, PassResult] | None = None

    def upload(self, values: Ints) -> None:
        """Fill the static buffer; ordered before the replay on the current stream."""
        if self._uploaded is not None:
            self._uploaded.synchronize()  # the pinned buffer may still be read by the call before
        self._host.copy_(torch.from_numpy(values))
        self._buffer.copy_(self._host, non_blocking=True)
        if self._uploaded is not None:
            self._uploaded.record()

    def body(self) -> PassResult:
        """The whole pass, reading nothing but the static buffer, the weights and the arena."""
        buffers, decoder = self._in, self._decoder
        x = decoder.embed_index(buffers["tokens"])
        step = self._step(x.dtype)
        rotations = self._rotary.select(buffers["positions"].reshape(-1))
        kept = decoder.run(x, step, rotations, ALL_LAYERS, self._bucket.taps)
        if len(decoder.layers) in self._bucket.taps:
            kept[len(decoder.layers)] = decoder.final_norm(x)
        return PassResult(decoder.head(x), x.new_empty(0, x.shape[1]), kept)

    def _step(self, dtype: torch.dtype) -> AttentionStep:
        buffers, slots, shape = self._in, self._bucket.slots, self._decoder.shape
        if slots >= LONG_CONTEXT:
            return ChunkedPrefixStep(shape, self._arena.layers, buffers, dtype)
        within = torch.arange(BLOCK, device=self._buffer.device)
        read = (buffers["tables"].unsqueeze(-1) * BLOCK + within).reshape(self._bucket.batch, slots)
        masks = padded_masks(buffers, shape, slots, dtype)
        return PaddedStep(shape, self._arena.layers, buffers["write"], read, masks)

    def replay(self, capturing: _Capturing) -> PassResult:
        """Capture at the first call (after a warm-up on another stream), then replay.

        The capture names its stream: PyTorch's default one belongs to the device on which the process captured first.
        """
        if self._captured is None:
            warming = capturing.warming
            warming.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warming):
                self.body()
            torch.cuda.current_stream().wait_stream(warming)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=capturing.pool, stream=capturing.stream):
                output = self.body()
            self._captured = graph, output
        graph, output = self._captured
        graph.replay()
        return output
