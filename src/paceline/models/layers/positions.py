"""Positions that are not rotary, made of a model's weights: vectors that are added to the embeddings, and tables of
numbers that are added to the scores of attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.models.attention.relative_bias import RelativeBias
from paceline.models.layers.linear import Map
from paceline.models.spec import ModelSpec, PositionSpec


class Placement:
    """What an embedding gets for its position, and the norm behind that, as far as a model has them.

    Args:
        table: (rows, hidden), or None (`position_table`).
        empty_start: see `ModelSpec.empty_start`.
    """

    def __init__(self, table: torch.Tensor | None, norm: Map | None, *, empty_start: bool = False) -> None:
        self._table, self._norm, self._empty_start = table, norm, empty_start

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self._table is not None or self._norm is not None or self._empty_start

    def apply(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Embeddings (r, hidden) in their places; x may be changed."""
        if self._empty_start and 0 in positions:
            x[[row for row, position in enumerate(positions) if position == 0]] = 0
        if self._table is not None:
            x += self._table[list(positions)]
        return x if self._norm is None else self._norm(x)


def position_table(
    spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """(rows, hidden): what each position adds to an embedding, in `dtype`; None where nothing is added.

    Args:
        weights: canonical ones; those that are learned are taken out.
    """
    positions = spec.positions
    if positions is None:
        return None
    if positions.kind == "learned":
        table = weights.pop("positions.weight")
    else:
        table = sinusoids(positions, spec.hidden_size).to(device, dtype)
    return table[positions.offset :]


def sinusoids(positions: PositionSpec, size: int) -> torch.Tensor:
    """(offset + rows, size) float32: sines, then cosines; the last column of an odd size is 0."""
    half, count = size // 2, positions.offset + positions.rows
    if positions.kind == "sinusoidal":
        frequencies = 10000.0 ** -(2 * torch.arange(half, dtype=torch.float64) / size)
    else:
        frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(count, dtype=frequencies.dtype)[:, None] * frequencies
    table = torch.zeros(count, size)
    table[:, :half], table[:, half : 2 * half] = angles.sin().float(), angles.cos().float()
    return table


def relative_biases(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> list[RelativeBias]:
    """Those of all layers, taken out of the weights; none where the model has none."""
    bias = spec.relative_bias
    if bias is None:
        return []
    tables = [
        RelativeBias(bias, weights.pop(f"layers.{index}.relative_bias.weight"))
        for index in range(spec.num_layers if bias.per_layer else 1)
    ]
    return tables if bias.per_layer else tables * spec.num_layers
