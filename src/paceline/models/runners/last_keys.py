"""The keys and values of a model's last layer, read off the blocks of its cache by what drafts for it (LongSpec).

Nothing is kept beside the cache: what is read is what attention reads, whoever has shared, copied or moved the blocks
in between.

Source: LongSpec: long-context lossless speculative decoding with efficient drafting and verification
(arXiv:2502.17421).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.layers.decoder import rotate_
from paceline.models.layers.rope import Rotary
from paceline.models.spec import ModelSpec
from paceline.models.state.arena import Arena
from paceline.models.state.parts import State, keys_of


class ArenaKeys:
    """Those of one layer; see `models.abilities.LastKeys`.

    Attributes:
        arena, layer: where they are. rope: of its rotary embedding; None where it has none.
    """

    def __init__(self, spec: ModelSpec, arena: Arena, rotary: Rotary, layer: int) -> None:
        self._rotary, self._rope = rotary, spec.layers[layer].rope
        self.arena, self.layer, self.rope = arena, layer, None if self._rope is None else spec.ropes[self._rope]
        self.kv_heads, self.head_dim = spec.num_kv_heads, spec.head_dim

    @torch.inference_mode()
    def read(self, cache: State) -> torch.Tensor:
        """See `LastKeys.read`; a copy where the sequence's blocks are not adjacent."""
        keys, cached = keys_of(cache), self.arena.layers[self.layer]
        if keys.in_order(None):
            return cached.narrow(0, keys.base, keys.length)
        return cached[torch.from_numpy(keys.slot_index(0, keys.length)).to(cached.device)]

    def turned(self, heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """See `LastKeys.turned`."""
        rotated = heads.clone()
        if self._rope is not None:
            rotation = self._rotary.at(list(positions), ())[self._rope]
            rotate_(rotated, rotation.of_rows(lambda table: table.to(heads.dtype)))
        return rotated


def last_keys_of(spec: ModelSpec, arena: Arena, rotary: Rotary) -> ArenaKeys | None:
    """Those of the last layer that keeps the whole text's, by its own keys.

    None where there is no such layer, or where what another layer's queries see in its keys is not a product: keys of a
    latent vector, differential heads, scores that depend on distances, angles that depend on the text's length.
    """
    kept = [index for index, layer in enumerate(spec.layers) if layer.keeps_keys and layer.window is None]
    other = spec.latent is not None or spec.differential or spec.relative_bias is not None or spec.encoder is not None
    if not kept or other or rotary.depends_on_length:
        return None
    return ArenaKeys(spec, arena, rotary, kept[-1])
