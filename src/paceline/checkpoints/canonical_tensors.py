"""Canonical tensors, and the stored pieces that each is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]
Arrange = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor and its place: `at` counts along the target's first free axis, inside `expert` if any.

    Attributes:
        arrange: what makes the piece of the stored tensor, where it is not the same.
        length: of the piece along that axis, where it is not the stored tensor's.
    """

    names: tuple[str, ...]
    shape: Shape
    at: int = 0
    expert: int | None = None
    arrange: Arrange | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """One canonical tensor, and the alternative lists of pieces that make it; what no piece fills is zeros.

    `wide` ones are float32 or wider whatever the model's dtype. `factors` are runs of (rows, number that they are
    multiplied by as they are read).
    """

    name: str
    shape: Shape
    recipes: tuple[tuple[StoredTensor, ...], ...]
    wide: bool = False
    factors: tuple[tuple[int, float], ...] = ()

    @property
    def size(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


def same(name: str, shape: Shape, *stored: str, arrange: Arrange | None = None) -> CanonicalTensor:
    """A tensor that is stored as one, under one of these names."""
    return CanonicalTensor(name, shape, ((StoredTensor(stored, shape, arrange=arrange),),))


def fused(
    name: str, widths: Sequence[tuple[str, int]], rest: Shape, whole: str, arrange: Mapping[str, Arrange] = {}
) -> CanonicalTensor:
    """A tensor stored in parts along its first axis, or as one called `whole`."""
    pieces, at = [], 0
    for part, width in widths:
        pieces.append(StoredTensor((part,), (width, *rest), at, arrange=arrange.get(part)))
        at += width
    alone = () if arrange else ((StoredTensor((whole,), (at, *rest)),),)
    return CanonicalTensor(name, (at, *rest), (*alone, tuple(pieces)))


def with_bias(name: str, shape: Shape, stored: str, *, bias: bool) -> Iterator[CanonicalTensor]:
    """A map's matrix, and its bias where it has one, each stored as one."""
    yield same(f"{name}.weight", shape, f"{stored}.weight")
    if bias:
        yield same(f"{name}.bias", shape[:1], f"{stored}.bias")
