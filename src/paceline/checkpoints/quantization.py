"""Weight-only quantisation: which weights become int8 or int4, and how they are rounded.

Rounding is to the nearest whole number, ties to even. *int8*: scale = largest magnitude of an output's weights / 127,
what torchao calls int8_weight_only, written down here because four lines need no dependency. *int4*: a scale and a zero
for every GROUP inputs of an output, weight = (number - zero) * scale, the zero in eighths. Of several grids the one of
least squared error is taken: those that clip a little of the group's range, and those that divide it into fewer than 15
steps. The latter find the numbers again that other 4-bit formats wrote, as those of GGUF files of types Q4_0, Q4_1 and
Q4_K, whose groups have the same size. On the bundled target logits err by 0.069 of their standard deviation, with
symmetric numbers (half a bit less per weight) by 0.076.

The linear layers, the experts of mixtures and the head are quantised; embeddings, norms, routers and biases are not.
The head is to int8 always, and so is what reads the source of an encoder-decoder model: its matrices multiply many rows
at once, which gains by short numbers, not by few bytes. A tied embedding is kept beside the quantised head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from paceline.checkpoints.weights import empty, targets
from paceline.errors import UnsupportedModelError
from paceline.models import ModelSpec

Form = Literal["int8", "int4", "blocks"]

BLOCKS: Final = "blocks"
"""Matrices of a GGUF file with the numbers that they have there (checkpoints.gguf_rows)."""

Forms = Form | Mapping[str, Form]
"""One form for all matrices of the layers, or each one's by its canonical name; the head is int8 always."""

NATIVE_ONLY = "needs a model of the native runner; leave quantization out, or take a checkpoint of a supported family"

MATRICES = re.compile(
    r"^(layers\.\d+\.(qkv|attn_gate|q_b|o|cross_q|cross_o|mixer\.in|mixer\.out|(shared\.)?(gate_up|down))\.weight|layers\.\d+\.experts\.(gate_up|down)|head\.weight)$"
)
"""Names of the weights that are quantised and packed for compiled passes."""

READING = re.compile(r"^(encoder\.layers\.\d+\.(qkv|o|gate_up|down)|layers\.\d+\.cross_kv)\.weight$")
"""Of those that are quantised, too, and read a source."""

HIGHEST, ROWS = 127, 64
"""The largest int8; rows that are rounded at a time, so that their float32 copies stay in the processor's cache."""

AT_ONCE = 2**18
"""Weights that are rounded to int4 at a time: what many small steps cost counts more than the cache."""

GROUP = 32
"""Inputs that share a scale and a zero in int4; the last group of a row may have fewer."""

HIGHEST_NUMBER = 15
STEPS = (15, 14, 13, 12, 11, 10, 9, 8)
"""Numbers of steps that are tried for a group's range."""

SHARES = (0.95, 0.9, 0.85)
"""Parts of the range, around its middle, that are tried with 15 steps."""

FOUND = 0.6
"""Error of a group, in steps (a tenth of one per weight), below which it was rounded to this grid before."""

ERROR_ROWS: Final = 64
"""Rows of a matrix by which `RoundingError` goes."""

ZEROS, LOWEST_ZERO, HIGHEST_ZERO = 8, -8.0, 23.875
"""Parts of one in which zeros are kept, and the range that a byte has room for."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight (out, in) and scales (out,) float32 whose product is near `weight` (out, in), to half a scale.

    A row of zeros has scale 1; a row that is not finite has scale NaN, so that nobody takes its products for numbers.
    """
    device = weight.device
    whole, scale = empty(weight.shape, torch.int8, device), empty((len(weight),), torch.float32, device)
    if weight.is_meta:
        return whole, scale
    for block, out, factor in zip(weight.split(ROWS), whole.split(ROWS), scale.split(ROWS), strict=True):
        wide = block.float()
        most = wide.abs().amax(1) / HIGHEST
        factor.copy_(torch.where(most.isfinite(), torch.where(most == 0, 1.0, most), torch.nan))
        out.copy_((wide / factor[:, None]).nan_to_num_().round_().clamp_(-HIGHEST, HIGHEST))
    return whole, scale


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int4 of a weight (out, in): pairs (out, in / 2) uint8, and (out, groups, 2) bfloat16 of scales and zeros.

    A byte holds the numbers of inputs 2j (low half) and 2j + 1. A group of zeros has scale 1, one that is not finite
    NaN.
    """
    outputs, inputs = weight.shape
    if inputs % 2:
        raise UnsupportedModelError(
            f"int4 needs an even number of inputs, a weight has {inputs}; use quantization='int8'"
        )
    groups, device = -(-inputs // GROUP), weight.device
    pairs = empty((outputs, inputs // 2), torch.uint8, device)
    scale = empty((outputs, groups, 2), torch.bfloat16, device)
    if weight.is_meta:
        return pairs, scale
    rows = max(1, AT_ONCE // inputs)
    for block, out, factor in zip(weight.split(rows), pairs.split(rows), scale.split(rows), strict=True):
        filling = block[:, -1:].expand(-1, groups * GROUP - inputs)
        whole, scales = _nearest(torch.cat((block, filling), 1).float().view(-1, GROUP))
        factor.copy_(scales.view_as(factor))
        moved = whole.view(len(block), -1)[:, :inputs].to(torch.uint8)
        torch.bitwise_or(moved[:, ::2], moved[:, 1::2] << 4, out=out)
    return pairs, scale


def _nearest(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers 0 .. 15 (n, GROUP) of groups, with scales and zeros (n, 2) of least squared error, all float32.

    Groups whose numbers are found again need no further grids.
    """
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    odd = ~(low.isfinite() & high.isfinite())
    low, high = low.masked_fill(odd, 0.0), high.masked_fill(odd, 0.0)
    tries = [(1.0 / steps, 0.0) for steps in STEPS]
    tries += [(share / HIGHEST_NUMBER, (1.0 - share) / 2) for share in SHARES]
    best, least = wide.new_ones(len(wide), 2), torch.full_like(low, torch.inf)
    rest, groups, span = torch.arange(len(wide), device=wide.device), wide, high - low
    for step, cut in tries:
        grid = torch.cat(_grid(low, span, step, cut), -1)
        moved = _on_grid(groups, grid)
        moved.sub_(moved.round().clamp_(0, HIGHEST_NUMBER))
        steps = moved.square_().sum(-1, keepdim=True).sqrt_()
        errors = steps * grid[..., :1]
        better = errors < least[rest]
        best[rest] = torch.where(better, grid, best[rest])
        least[rest] = torch.where(better, errors, least[rest])
        lost = (steps > FOUND).squeeze(-1)
        if int(lost.sum()) < len(rest) // 2:
            rest, groups, low, span = rest[lost], groups[lost], low[lost], span[lost]
    numbers = _on_grid(wide, best).round_().clamp_(0, HIGHEST_NUMBER).nan_to_num_()
    best[..., :1].masked_fill_(odd, torch.nan)
    return numbers, best


def _grid(low: torch.Tensor, span: torch.Tensor, step: float, cut: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale `step` * span and the zero of a range that begins `cut` * span above `low`, rounded as they are kept.

    The scale is larger where the zero would have no room.
    """
    start = low + cut * span
    least = torch.maximum(-start / HIGHEST_ZERO, start / -LOWEST_ZERO)
    scale = torch.maximum(span * step, least).bfloat16().float()
    scale = torch.where(scale == 0, 1.0, scale)
    zero = (-start / scale).mul_(ZEROS).round_().div_(ZEROS).clamp_(LOWEST_ZERO, HIGHEST_ZERO)
    return scale, zero


def _on_grid(wide: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return wide.div(grid[..., :1]).add_(grid[..., 1:])


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """Whole numbers (..., in) int8 of an int8 weight, which stays as it is, or of pairs (..., in / 2) uint8."""
    if weight.dtype is torch.int8:
        return weight
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(torch.int8)


def values_of(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The weights (..., out, in) that whole numbers stand for, in the dtype of `scale`, scales and zeros."""
    if weight.dtype is torch.int8:
        return weight * scale.unsqueeze(-1)
    factor, zero = (part.repeat_interleave(GROUP, -1)[..., : 2 * weight.shape[-1]] for part in scale.unbind(-1))
    return unpacked(weight).to(scale.dtype).sub_(zero).mul_(factor)


def scale_of(name: str) -> str:
    """The name of a weight's scales."""
    return name.removesuffix(".weight") + ".scale"


def _form(forms: Forms, name: str) -> Form:
    if name in {"embed.weight", "head.weight"} or READING.match(name):
        return "int8"
    return forms if isinstance(forms, str) else forms[name]


def quantized(
    name: str, weight: torch.Tensor, spec: ModelSpec, form: Forms = "int8", *, shape_only: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that take the place of a canonical one; nothing is rounded on the meta device.

    Args:
        shape_only: the head of a tied embedding is on the meta device.
    """
    if name == "embed.weight":
        yield name, weight
        if spec.tied:
            yield from quantized("head.weight", weight.to("meta") if shape_only else weight, spec)
    elif MATRICES.match(name) or READING.match(name):
        rounded = quantize_groups if _form(form, name) == "int4" else quantize_rows
        whole, scale = rounded(weight.flatten(0, -2))
        outer = weight.shape[:-1]
        yield name, whole.view(*outer, -1)
        yield scale_of(name), scale.view(*outer, *scale.shape[1:])
    else:
        yield name, weight


def quantize(weights: Mapping[str, torch.Tensor], spec: ModelSpec, form: Forms = "int8") -> dict[str, torch.Tensor]:
    """All canonical weights with `quantized` ones in their place."""
    return {name: tensor for whole, weight in weights.items() for name, tensor in quantized(whole, weight, spec, form)}


def dequantized(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What quantised weights stand for, in float64, and the others as they are; a tied head is a tensor of its own."""
    dense = {}
    for name, weight in weights.items():
        scale = weights.get(scale_of(name))
        if not name.endswith(".scale"):
            dense[name] = weight if scale is None else values_of(weight, scale.double())
    return dense


def is_quantized(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether canonical weights went through `quantized`."""
    return "head.scale" in weights


def form_of(weights: Mapping[str, torch.Tensor]) -> Form | None:
    """How canonical weights were quantised: int4 where any matrix is."""
    if not is_quantized(weights):
        return None
    return "int4" if torch.uint8 in _dtypes(weights) else "int8"


def is_mixed(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether matrices of the layers have both forms."""
    return {torch.uint8, torch.int8} <= _dtypes(weights)


def _dtypes(weights: Mapping[str, torch.Tensor]) -> set[torch.dtype]:
    return {weight.dtype for name, weight in weights.items() if MATRICES.match(name) and name != "head.weight"}


def quantized_sizes(spec: ModelSpec, dtype: torch.dtype, form: Forms = "int8") -> dict[str, int]:
    """Canonical name -> bytes of a model whose other weights are in `dtype`; a tied embedding counts its head."""
    sizes = {}
    for target in targets(spec):
        count, inputs = torch.Size(target.shape).numel(), target.shape[-1]
        small = count + 4 * (count // inputs)
        rounded = MATRICES.match(target.name) or READING.match(target.name)
        if rounded and _form(form, target.name) == "int4":
            small = count // 2 + 4 * (count // inputs) * -(-inputs // GROUP)
        sizes[target.name] = small if rounded else count * dtype.itemsize
        if target.name == "embed.weight" and spec.tied:
            sizes[target.name] += small
    return sizes


@dataclass(slots=True)
class RoundingError:
    """How far rounded weights lie from those of the file.

    Attributes:
        share: root mean square of the error over that of the weights, in the first rows of the first matrix; None:
            nothing was rounded.
    """

    share: float | None = None

    def note(self, weight: torch.Tensor, made: Mapping[str, torch.Tensor]) -> None:
        """Take what has become of a weight."""
        for name, whole in made.items():
            scale = made.get(scale_of(name))
            if self.share is None and scale is not None and whole.dim() == 2 and not whole.is_meta:
                wide = weight[:ERROR_ROWS].float()
                near = values_of(whole[:ERROR_ROWS], scale[:ERROR_ROWS].float())
                self.share = float((near - wide).norm() / wide.norm())
