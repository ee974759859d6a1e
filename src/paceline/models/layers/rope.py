"""Rotary position embedding: cosines and sines of positions, for every way of scaling that checkpoints ask for.

Tables are float32 in the half-duplicated convention (pair i is made of dimensions i and i + dims / 2), attention
scaling multiplied in; `Rotary` keeps them in the dtype and on the device of a model.

The kinds default, linear, yarn and llama3 depend on the position alone and come from a table that grows on demand. Two
kinds also depend on the length: *longrope* has one table for lengths up to `original_max_position_embeddings` and one
beyond; *dynamic* has a base of its own for every length beyond `max_position`. What "length" means is the caller's
choice; nothing is remembered here. Sources: RoFormer (arXiv:2104.09864), position interpolation (arXiv:2306.15595),
YaRN (arXiv:2309.00071), LongRoPE (arXiv:2402.13753), the Llama 3 models (arXiv:2407.21783); dynamic NTK scaling was
published as a post without a paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from paceline.errors import UnsupportedModelError
from paceline.models.spec import RopeSpec

Table = tuple[torch.Tensor, torch.Tensor]


class Rope:
    """The rotary tables of one RopeSpec on one device.

    Raises:
        UnsupportedModelError: a kind that is not implemented.
    """

    def __init__(self, spec: RopeSpec, device: torch.device) -> None:
        if spec.kind not in KINDS:
            raise UnsupportedModelError(
                f"rope type {spec.kind!r} is not implemented; known are {', '.join(sorted(KINDS))}"
            )
        self.spec, self.device = spec, device
        self.attention_scaling = _attention_scaling(spec)
        self._tables: dict[int, Table] = {}

    def inverse_frequencies(self, length: int) -> torch.Tensor:
        """(dims / 2,) float32: angle per position of each pair, in a sequence of `length` tokens."""
        return KINDS[self.spec.kind](self.spec, length).to(self.device)

    def cos_sin(self, positions: torch.Tensor, length: int) -> Table:
        """Cosines and sines of positions (r,) int64 in a sequence of `length` tokens; each (r, width) float32."""
        if self.spec.kind == "dynamic" and length > self.spec.max_position:
            return self._compute(positions, length)
        regime = int(self.spec.kind == "longrope" and length > _original(self.spec))
        table = self._tables.get(regime)
        top = int(positions.max()) + 1 if len(positions) else 0
        if table is None or table[0].shape[0] < top:
            size = max(256, 2 * top)
            table = self._tables[regime] = self._compute(torch.arange(size, device=self.device), length)
        return table[0].index_select(0, positions), table[1].index_select(0, positions)

    def growth(self, positions: torch.Tensor) -> torch.Tensor | None:
        """What queries at positions (r,) int64 are multiplied by, (r,) float32; None where that is 1."""
        if self.spec.growth is None:
            return None
        rate, length = self.spec.growth
        return 1 + rate * torch.log1p((positions // length).float())

    def _compute(self, positions: torch.Tensor, length: int) -> Table:
        angles = torch.outer(positions.float(), self.inverse_frequencies(length))
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        unrotated = (0, ((self.spec.width or self.spec.dims) - self.spec.dims) // 2)
        cos, sin = F.pad(cos, unrotated, value=1.0), F.pad(sin, unrotated)
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _number(spec: RopeSpec, key: str) -> float:
    value: Any = spec.scaling[key]
    return float(value)


def _optional(spec: RopeSpec, key: str) -> float | None:
    value: Any = spec.scaling.get(key)
    return None if value is None else float(value)


def _original(spec: RopeSpec) -> int:
    value: Any = spec.scaling.get("original_max_position_embeddings")
    return spec.max_position if value is None else int(value)


def _factor(spec: RopeSpec) -> float:
    """The stretch of the context; where it is not given, the ratio of the two lengths that are."""
    factor = _optional(spec, "factor")
    return spec.max_position / _original(spec) if factor is None else factor


def _powers(spec: RopeSpec, theta: float | None = None) -> torch.Tensor:
    """theta^(2 i / dims): the wavelengths of the pairs over 2 pi."""
    exponents = torch.arange(0, spec.dims, 2, dtype=torch.float32) / spec.dims
    return torch.pow(spec.theta if theta is None else theta, exponents)


def _default(spec: RopeSpec, length: int) -> torch.Tensor:
    return 1.0 / _powers(spec)


def _linear(spec: RopeSpec, length: int) -> torch.Tensor:
    return 1.0 / _powers(spec) / _number(spec, "factor")


def _dynamic(spec: RopeSpec, length: int) -> torch.Tensor:
    factor, longest = _number(spec, "factor"), max(length, spec.max_position)
    stretch = factor * longest / spec.max_position - (factor - 1)
    return 1.0 / _powers(spec, spec.theta * stretch ** (spec.dims / (spec.dims - 2)))


def _yarn(spec: RopeSpec, length: int) -> torch.Tensor:
    """Fast pairs keep their frequency, slow ones are interpolated, with a ramp between (arXiv:2309.00071, section
    3.2).
    """

    def pair_of(rotations: float) -> float:
        ratio = _original(spec) / (rotations * 2 * math.pi)
        return spec.dims * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = pair_of(_optional(spec, "beta_fast") or 32.0), pair_of(_optional(spec, "beta_slow") or 1.0)
    if spec.scaling.get("truncate", True):
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, spec.dims - 1.0)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(spec.dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(spec)
    return interpolated / (_factor(spec) * powers) + (1 - interpolated) / powers


def _longrope(spec: RopeSpec, length: int) -> torch.Tensor:
    key = "long_factor" if length > _original(spec) else "short_factor"
    return 1.0 / (torch.tensor(spec.scaling[key], dtype=torch.float32) * _powers(spec))


def _factors(spec: RopeSpec, length: int) -> torch.Tensor:
    """Wavelengths stretched by a factor for each pair: how GGUF files store `llama3`."""
    return 1.0 / (torch.tensor(spec.scaling["factors"], dtype=torch.float32) * _powers(spec))


def _llama3(spec: RopeSpec, length: int) -> torch.Tensor:
    """Long waves are stretched, short ones kept, those between blended by their number of turns in the original
    context.
    """
    low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
    frequencies = 1.0 / _powers(spec)
    turns = _original(spec) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / _number(spec, "factor")


KINDS: Mapping[str, Callable[[RopeSpec, int], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "factors": _factors,
}


def _attention_scaling(spec: RopeSpec) -> float:
    """The factor on cosines and sines: 1 but for yarn and longrope."""
    if spec.kind not in {"yarn", "longrope"}:
        return 1.0
    if (declared := _optional(spec, "attention_factor")) is not None:
        return declared
    factor = _factor(spec)
    if factor <= 1.0:
        return 1.0
    if spec.kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(_original(spec)))
    mscale, all_dims = _optional(spec, "mscale"), _optional(spec, "mscale_all_dim")
    if mscale and all_dims:
        return _yarn_temperature(factor, mscale) / _yarn_temperature(factor, all_dims)
    return _yarn_temperature(factor, 1.0)


def _yarn_temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


class Rotation(NamedTuple):
    """Cosines and signed sines of rows, each (r, 1, dims).

    Attributes:
        growth: what the rows' queries are multiplied by besides, (r, 1, 1); None where that is 1.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor
    growth: torch.Tensor | None = None

    def of_rows(self, take: Callable[[torch.Tensor], torch.Tensor]) -> Rotation:
        """Those of the rows that `take` takes out of a table."""
        growth = None if self.growth is None else take(self.growth)
        return Rotation(take(self.cos), take(self.signed_sin), growth)


Rotations = Mapping[str, Rotation]


def wide_rotation(spec: RopeSpec, positions: torch.Tensor, dtype: torch.dtype) -> Table:
    """Cosines and sines (r, 1, dims) of positions (r,), which lose nothing on long canvases of a model in `dtype`.

    Angles are computed in float64 from float32 frequencies; the result is float32, or float64 for a float64 model.
    """
    rope = Rope(spec, positions.device)
    length = int(positions.max()) + 1 if len(positions) else 1
    angles = torch.outer(positions.double(), rope.inverse_frequencies(length).double())
    angles = torch.cat((angles, angles), -1).unsqueeze(1)
    wide = torch.promote_types(dtype, torch.float32)
    return (angles.cos() * rope.attention_scaling).to(wide), (angles.sin() * rope.attention_scaling).to(wide)


class Rotary:
    """Cosines and signed sines for given positions, in the model's dtype, each (r, 1, dims).

    Tables are kept for the kinds whose angles depend on the position alone; dynamic and longrope also depend on the
    length.
    """

    def __init__(self, specs: Mapping[str, RopeSpec], device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._ropes = {key: Rope(spec, device) for key, spec in specs.items()}
        self._by_length = {key for key, spec in specs.items() if spec.kind in {"dynamic", "longrope"}}
        self._tables: dict[str, Rotation] = {}
        self.size = 0

    @property
    def depends_on_length(self) -> bool:
        return bool(self._by_length)

    @property
    def tables(self) -> Mapping[str, Rotation]:
        """The tables, each (size, 1, dims), of the kinds whose angles depend on the position alone."""
        return self._tables

    def by_length(self, positions: Sequence[int], lengths: Sequence[tuple[int, int]]) -> dict[str, Rotation]:
        """Rotations of the kinds that also depend on the length; see `at`."""
        return {key: self._dynamic(key, positions, lengths) for key in self._by_length}

    def at(self, positions: range | Sequence[int], lengths: Sequence[tuple[int, int]]) -> Rotations:
        """Rotations of the rows; `lengths` gives runs of (rows, sequence length) for the kinds that depend on it."""
        if not self._ropes:
            return {}
        self.reserve((positions[-1] if isinstance(positions, range) else max(positions)) + 1)
        if isinstance(positions, range):
            start, count = positions[0], len(positions)
            tables = {
                key: table.of_rows(lambda whole: whole.narrow(0, start, count)) for key, table in self._tables.items()
            }
        else:
            tables = self.select(torch.tensor(positions, device=self._device))
        return tables | self.by_length(positions, lengths)

    def select(self, positions: torch.Tensor) -> dict[str, Rotation]:
        """Rotations of the kinds that depend on the position alone, for (r,) int64 positions below `size`."""
        return {
            key: table.of_rows(lambda whole: whole.index_select(0, positions)) for key, table in self._tables.items()
        }

    def reserve(self, size: int) -> None:
        """Grow the tables to at least `size` positions."""
        if size <= self.size:
            return
        self.size = max(512, 2 * size)
        positions = torch.arange(self.size, device=self._device)
        for key, rope in self._ropes.items():
            if key not in self._by_length:
                self._tables[key] = self._cast(rope.cos_sin(positions, self.size), rope.growth(positions))

    def _dynamic(self, key: str, positions: Sequence[int], lengths: Sequence[tuple[int, int]]) -> Rotation:
        index, rope = torch.tensor(list(positions), device=self._device), self._ropes[key]
        parts = [
            rope.cos_sin(part, length)
            for part, (_, length) in zip(index.split([n for n, _ in lengths]), lengths, strict=True)
        ]
        table = torch.cat([cos for cos, _ in parts]), torch.cat([sin for _, sin in parts])
        return self._cast(table, rope.growth(index))

    def _cast(self, cos_sin: Table, growth: torch.Tensor | None) -> Rotation:
        cos, sin = (table.unsqueeze(1) for table in cos_sin)
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        grown = None if growth is None else growth[:, None, None].to(self._dtype)
        return Rotation(cos.to(self._dtype), signed.to(self._dtype), grown)
