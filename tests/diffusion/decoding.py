"""Decode one canvas in a line; denoisers that watch what is asked of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.diffusion import Canvas, ConfiguredMethod, FinishedCanvas, decode
from paceline.models import Call
from tests.diffusion.toys import Independent


def fill(toy: Any, config: Any, length: int = 12, prompt: Sequence[int] = (3, 4, 5), seed: int = 0) -> FinishedCanvas:
    return complete(
        toy, Canvas.of(prompt, length, mask_token_id=toy.mask_token_id, eos_token_ids=toy.eos_token_ids), config, seed
    )


def complete(toy: Any, canvas: Canvas, config: Any, seed: int = 0) -> FinishedCanvas:
    [outcome] = decode([canvas], toy, [ConfiguredMethod(config).parts(toy, canvas, seed=seed)])
    assert outcome.error is None, outcome.error
    return outcome


def same(ours: FinishedCanvas, theirs: FinishedCanvas) -> bool:
    """Canvas, order of commits, rounds of birth."""
    pairs = [(ours.canvas.tokens, theirs.canvas.tokens), (ours.trajectory.order, theirs.trajectory.order)]
    return all(np.array_equal(a, b) for a, b in [*pairs, (ours.canvas.born, theirs.canvas.born)])


class Watched:
    """A denoiser that passes calls on and keeps them, with what they gave."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.passes: list[tuple[list[Call], list[torch.Tensor]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        outputs = self.inner.forward(calls)
        self.passes.append((list(calls), outputs))
        return outputs

    @property
    def computed(self) -> list[list[list[int]]]:
        """Slots of each call of each pass."""
        return [[call.slots.tolist() for call in calls] for calls, _ in self.passes]


class Stored:
    """A SlotCache without keys: which slots are stored."""

    def __init__(self) -> None:
        self.slots: set[int] = set()

    @property
    def stored(self) -> np.ndarray:
        return np.array(sorted(self.slots))

    def truncate(self, length: int) -> None:
        self.slots = {slot for slot in self.slots if slot < length}

    def clear(self) -> None:
        self.slots = set()


class Planned(Independent):
    """T1 that checks every call: only stored slots are read, none of them is computed."""

    def new_cache(self, length: int) -> Stored:
        return Stored()

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        for call in calls:
            read = set() if call.read is None else set(call.read.tolist())
            assert not read or read <= call.cache.slots, "only stored slots are read"
            assert not read & set(call.slots.tolist()), "a slot is read or computed"
        for call in calls:
            if call.write:
                call.cache.slots |= set(call.slots.tolist())
        return super().forward(calls)


class PlannedBlocks(Planned):
    """The same with block-causal attention."""

    attention = "block"

    def __init__(self, *args: Any, block_length: int = 4, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_length = block_length
