"""Multi-head latent attention, as attention with one key-value head.

Keys and values of all heads are linear maps of one latent vector c of each position, beside which stands one rotated
key. The map to keys can as well be applied to the query, and the map to values to what attention returns: then c itself
is the key of every head, and the value too. A cache row is (rotated key, c), and the value's row is the same, so that
the first part of what attention returns means nothing.
Source: DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import torch

from paceline.models.layers.linear import Map, RowInvariance, make_head_linear, make_norm
from paceline.models.spec import LATENT_EPS, LatentSpec


def make_latent_norm(weight: torch.Tensor) -> Map:
    """The norm of a latent vector."""
    return make_norm(weight, LATENT_EPS)


class LatentAttention:
    """The maps before and behind the attention of one layer.

    Args:
        both: x (r, hidden) -> what queries are made of, and behind it the rotated key and the latent vector.
        query: makes queries (r, heads * (rope + nope)), None where `both` does.
        norm: of the latent vector.
        kv_b: (heads * (nope + value), rank), in each head rows of keys before those of values.
        o: (r, heads * value) -> (r, hidden).
    """

    def __init__(
        self,
        latent: LatentSpec,
        heads: int,
        *,
        both: Map,
        query: Map | None,
        norm: Map,
        kv_b: torch.Tensor,
        o: Map,
        row_invariant: RowInvariance,
    ) -> None:
        self._latent, self._heads, self._both, self._query, self._norm, self._o = latent, heads, both, query, norm, o
        by_head = kv_b.view(heads, latent.nope + latent.value, latent.rank)
        keys, values = by_head.split((latent.nope, latent.value), 1)
        self._to_latent = make_head_linear(keys.transpose(1, 2), row_invariant=row_invariant)
        self._to_values = make_head_linear(values, row_invariant=row_invariant)

    def qkv(self, x: torch.Tensor) -> torch.Tensor:
        """(r, hidden) -> (r, heads + 2, rope + rank): queries, key and value, not yet rotated."""
        rows, heads, rope, rank = len(x), self._heads, self._latent.rope, self._latent.rank
        q, rotated, c = self._both(x).tensor_split((-rope - rank, -rank), -1)
        q = (q if self._query is None else self._query(q)).reshape(rows, heads, -1)
        out = x.new_empty(rows, heads + 2, rope + rank)
        out[:, :heads, :rope] = q[..., :rope]
        out[:, :heads, rope:] = self._to_latent(q[..., rope:].flatten(1)).view(rows, heads, rank)
        out[:, heads:, :rope] = rotated[:, None]
        out[:, heads:, rope:] = self._norm(c)[:, None]
        return out

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """(r, heads * (rope + rank)) -> (r, hidden)."""
        latents = attended.view(len(attended), self._heads, -1)[..., self._latent.rope :]
        return self._o(self._to_values(latents.flatten(1)))
