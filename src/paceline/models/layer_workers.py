"""Workers: places where the attention of some of a model's layers is computed, each with the keys and values of its own layers.

In: segments, hidden states. Out: what attention makes of them, at once or on the worker's own thread. Not here: which layers are
whose, and what is done with the results (models.layer_parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.models.attention import AttentionShape, BatchStep, Masks, SequenceStep, Step
from paceline.models.cache import Arena
from paceline.models.decoder import Decoder, Rotary, Rotations

if TYPE_CHECKING:
    from paceline.models.segments import Segment
    from paceline.models.spec import ModelSpec


class _Own:
    """The attention of a pass for a worker's own layers, which are numbered anew in its cache."""

    __slots__ = ("_places", "_step")

    def __init__(self, step: Step, places: dict[int, int]) -> None:
        self._step, self._places = step, places

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """See `Step`."""
        return self._step.attend(self._places[layer], qkv)


class Worker:
    """A place where attention is computed.

    Args:
        layers: its own. shape: of the model's attention. threads: of PyTorch on the CPU, for work on its thread; 0 leaves them.
    """

    def __init__(
        self,
        device: torch.device,
        layers: Sequence[int],
        *,
        shape: AttentionShape,
        spec: ModelSpec,
        dtype: torch.dtype,
        threads: int,
    ) -> None:
        self.device, self._places, self._threads = device, {layer: i for i, layer in enumerate(layers)}, threads
        self._shape = replace(shape, kind_of=tuple(shape.kind_of[layer] for layer in layers))
        self.arena = Arena(len(layers), shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
        self._masks, self._rotary = Masks(dtype, device), Rotary(spec.ropes, device, dtype)
        self._pool = ThreadPoolExecutor(1, "paceline-layers")
        self._part: tuple[Step, Rotations] | None = None

    def prepare(self, segments: Sequence[Segment]) -> None:
        """Get ready for a pass over the rows of these."""
        alone = len(segments) == 1
        step: Step = SequenceStep(self._shape, self._masks, segments[0]) if alone else BatchStep(self._shape, self._masks, segments)
        positions = segments[0].positions() if alone else [p for segment in segments for p in segment.positions()]
        self._part = _Own(step, self._places), self._rotary.at(positions, ())

    def attended(self, decoder: Decoder, layer: int, x: torch.Tensor) -> torch.Tensor:
        """(r, hidden) what a layer's attention makes of x, on the device of x."""
        assert self._part is not None, "a pass begins with prepare()"
        return decoder.layers[layer].attended(x.to(self.device), *self._part).to(x.device)

    def begin(self, decoder: Decoder, layers: Sequence[int], x: torch.Tensor) -> Future[dict[int, torch.Tensor]]:
        """`attended` for its own ones of some layers, on its thread; x must stay as it is until the result is there."""
        return self._pool.submit(self._work, decoder, [layer for layer in layers if layer in self._places], x)

    @torch.inference_mode()
    def _work(self, decoder: Decoder, layers: Sequence[int], x: torch.Tensor) -> dict[int, torch.Tensor]:
        if self._threads and torch.get_num_threads() != self._threads:  # each thread has its own number
            torch.set_num_threads(self._threads)
        return {layer: self.attended(decoder, layer, x) for layer in layers}
