"""Positions that are not rotary, made of a model's weights: vectors that are added to the embeddings, and tables of
numbers that are added to the scores of attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from paceline.models.attention.relative_bias import RelativeBias
from paceline.models.spec import ModelSpec, PositionSpec


def position_table(
    spec: ModelSpec, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """(rows, hidden): what each position adds to an embedding, in `dtype`; None where nothing is added.

    Args:
        weights: canonical ones; those that are learned are among them.
    """
    positions = spec.positions
    if positions is None:
        return None
    if positions.kind == "learned":
        table = weights["positions.weight"]
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
