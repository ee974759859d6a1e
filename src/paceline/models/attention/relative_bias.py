"""Numbers that depend on the distance of query and key, added to the scores of attention (RelativeBiasSpec).

Source: T5 (arXiv:1910.10683).
"""

from __future__ import annotations

import math

import torch

from paceline.models.spec import RelativeBiasSpec


class RelativeBias:
    """What distances add to the scores of attention.

    Args:
        weight: (buckets, heads).
    """

    def __init__(self, spec: RelativeBiasSpec, weight: torch.Tensor) -> None:
        self.spec, self._by_head = spec, weight.t().contiguous()

    def of(self, distances: torch.Tensor) -> torch.Tensor:
        """(heads, ...) of distances (...) int64: positions of keys less those of queries."""
        return self._by_head[:, bucket(self.spec, distances)]


def bucket(spec: RelativeBiasSpec, distances: torch.Tensor) -> torch.Tensor:
    """The bucket of each distance; see `RelativeBiasSpec`."""
    buckets, first = spec.buckets, torch.zeros_like(distances)
    if spec.two_sided:
        buckets //= 2
        first = (distances > 0).to(distances.dtype) * buckets
        distances = distances.abs()
    else:
        distances = -distances.clamp(max=0)
    single = buckets // 2
    far = torch.log(distances.float() / single) / math.log(spec.max_distance / single) * (buckets - single)
    wide = (single + far.clamp(min=0).to(distances.dtype)).clamp(max=buckets - 1)
    return first + torch.where(distances < single, distances, wide)
