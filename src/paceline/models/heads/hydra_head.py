"""Hydra's heads: each predicts a token so many places ahead from a state of the target and the tokens up to there.

Head k reads [state; embedding of the root; those of k tokens behind it]. Its first block reduces that to a state,
R x + SiLU(W x); further ones are residual, as Medusa's. Hydra++ reads not the target's state but what a decoder layer
makes of it and of those before (the *prefix layer*); it sees committed tokens alone.

The authors' prefix layer is a Llama of one layer, with the norm behind it; that one may be left out here.

Source: Hydra: sequentially-dependent draft heads for Medusa decoding (arXiv:2402.05109).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.path_heads import HeadStep, PathHeads, linear, residual
from paceline.models.heads.shared_rows import embedding_of
from paceline.models.layers.linear import Map, make_linear
from paceline.models.layers.own_weights import Weights


class HydraHead(PathHeads):
    """The heads in a folder, for one target; see `PathHeads`."""

    method = "hydra"

    def _build(self, config: HeadConfig, weights: Weights) -> None:
        heads, blocks = range(config.num_heads), range(1, config.num_layers)
        self._embed = embedding_of(weights.get("embed.weight"), self.target, self.name)
        self._first = [_both(weights, f"heads.{k}") for k in heads]
        self._blocks = [[linear(weights, f"heads.{k}.blocks.{j}") for j in blocks] for k in heads]
        self._heads = [self._rows(weights, k) for k in heads]

    @torch.inference_mode()
    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        memory = torch.cat((memory, self._embed(tokens)), 1)
        inner, reduced = self._first[depth](memory).chunk(2, 1)
        return HeadStep(self._heads[depth](residual(self._blocks[depth], reduced + F.silu(inner))), memory)


def _both(weights: Weights, head: str) -> Map:
    """W and R of a head's first block as one map."""
    parts = [f"{head}.blocks.0", f"{head}.reduce"]
    matrices = [weights[f"{part}.weight"] for part in parts]
    biases = [weights.get(f"{part}.bias", matrices[0].new_zeros(len(matrices[0]))) for part in parts]
    lacking = not any(f"{part}.bias" in weights for part in parts)
    return make_linear(torch.cat(matrices), None if lacking else torch.cat(biases), row_invariant=False)
