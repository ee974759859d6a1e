"""Which keys and values a pass reads of a long text: the seam for methods that attend to a part of it.

A method makes the attention step of each sequence, in the place of the one that reads everything (`SequenceStep`), and
keeps what it must know of a text beside the cache of keys and values. Nothing is ever taken out of that cache, so what
was left out in one step may be read in the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from paceline.errors import UnsupportedModelError
from paceline.models.attention.segments import Segment
from paceline.models.attention.strict_attention import sinks_of_rows
from paceline.models.attention.tree_attention import Masks, WritingStep, attention
from paceline.models.spec import AttentionShape, ModelSpec
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache


class KVSelection(ABC):
    """A method that attends to a part of the text. One serves one model.

    Attributes:
        name: in the registry.
        compiles: compiled passes have it too.
    """

    name: ClassVar[str]
    compiles: ClassVar[bool] = False

    @abstractmethod
    def step(self, shape: AttentionShape, masks: Masks, segment: Segment) -> WritingStep:
        """The attention of one sequence in one pass."""

    def cache(self, arena: Arena, prompt_length: int) -> NativeCache:
        """Keys and values of a new sequence; a method that must know of the text beside them has a class of its own,
        which follows what is committed, taken back and forked.
        """
        return NativeCache(arena, prompt_length)

    @property
    def key(self) -> str:
        """Tells settings apart whose passes cost differently (`ModelInfo.fingerprint`)."""
        return self.name

    def held_bytes(self, tokens: int, itemsize: int) -> int:
        """Most bytes that it keeps beside the cache of a text of so many tokens, whose keys take so many each."""
        return 0

    @property
    def held(self) -> int:
        """Bytes that it keeps beside the caches of all texts."""
        return 0

    def prepare(self, spec: ModelSpec, device: torch.device, *, name: str) -> None:
        """Get ready for a model.

        Args:
            name: of the model, for messages.
        Raises:
            UnsupportedModelError: its attention has no keys of single tokens that a method could choose from.
            ConfigError, CheckpointError: as the method says.
        """
        lacking = {
            "latent attention": spec.latent is not None,
            "differential attention": spec.differential,
            "an encoder": spec.encoder is not None,
            "scores by distance": spec.relative_bias is not None,
            "layers that read keys of other layers": any(layer.kv_of is not None for layer in spec.layers),
            "keys that change when a text grows": any(rope.kind == "longrope" for rope in spec.ropes.values()),
        }
        if found := [what for what, there in lacking.items() if there]:
            raise UnsupportedModelError(
                f"{name} has {found[0]}, for which kv_selection={self.name!r} is not there; leave it out"
            )


def keys_between(segment: Segment, layer: int, start: int, stop: int) -> torch.Tensor:
    """(kv heads, stop - start, head dim) keys of positions of a layer without a window, which may be a view."""
    cache = segment.cache
    kept = cache.arena.layers[layer]
    if cache.base >= 0:
        rows = kept.narrow(0, cache.base + start, stop - start)
    else:
        rows = kept[slots_of(segment, start, stop, kept.device)]
    return rows.narrow(1, 0, rows.shape[1] // 2).transpose(0, 1)


def slots_of(segment: Segment, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """(stop - start,) int64 slots of positions of a layer without a window."""
    cache = segment.cache
    if cache.base >= 0:
        return torch.arange(cache.base + start, cache.base + stop, device=device)
    return torch.from_numpy(cache.slot_index(start, stop)).to(device)


def attend_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    shape: AttentionShape,
    *,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """(n, g * h * d) attention of queries (n, g, h, d) over keys and values (h, s, d); axes as in `tree_attention`.

    Args:
        mask: (n, s) additive. sinks: see `AttentionStep`.
    """
    rows, groups = queries.shape[:2]
    folded = mask.unsqueeze(1).expand(-1, groups, -1).reshape(rows * groups, -1)
    asked = queries.permute(2, 0, 1, 3).reshape(1, shape.kv_heads, rows * groups, shape.head_dim)
    own = None if sinks is None else sinks_of_rows(sinks, rows * groups)
    mixed = attention(asked, keys[None], values[None], folded, shape, sinks=own)
    by_row = mixed.view(shape.kv_heads, rows, groups, shape.head_dim).permute(1, 2, 0, 3)
    return by_row.reshape(rows, shape.heads * shape.head_dim)
