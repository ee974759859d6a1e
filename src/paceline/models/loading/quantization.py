"""Weight-only quantisation: which weights become int8 or int4, and how they are rounded.

Rounding is symmetric, to the nearest whole number, ties to even. *int8*: scale = largest magnitude of an output's
weights / 127, what torchao calls int8_weight_only, written down here because four lines need no dependency. *int4*: a
scale for every GROUP inputs of an output; the weight of largest magnitude becomes -8, so that all sixteen numbers are
used, and of five scales that clip a little or not at all the one of least squared error is taken. On the bundled target
logits then err by 0.077 of their standard deviation; with the plain scale of largest / 7 by 0.090, with an offset
beside each scale (half a bit more per weight) by 0.071.

The linear layers, the experts of mixtures and the head are quantised, the head to int8 always; embeddings, norms,
routers and biases are not. A tied embedding is kept beside the quantised head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch.nn import functional as F

from paceline.errors import UnsupportedModelError
from paceline.models.loading.weights import empty, targets
from paceline.models.model_spec import ModelSpec

Form = Literal["int8", "int4"]

NATIVE_ONLY = "needs a model of the native runner; leave quantization out, or take a checkpoint of a supported family"

MATRICES = re.compile(
    r"^(layers\.\d+\.(qkv|q_b|o|(shared\.)?(gate_up|down))\.weight|layers\.\d+\.experts\.(gate_up|down)|head\.weight)$"
)
"""Names of the weights that are quantised."""

HIGHEST, ROWS = 127, 64
"""The largest int8; rows that are rounded at a time, so that their float32 copies stay in the processor's cache."""

GROUP = 32
"""Inputs that share a scale in int4; the last group of a row may have fewer."""

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales that are tried for a group, as parts of the one that clips nothing."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight (out, in) and scales (out,) float32 whose product is near `weight` (out, in), to half a scale.

    A row of zeros has scale 1; a row that is not finite has scale NaN, so that nobody takes its products for numbers.
    """
    device = weight.device
    whole, scale = empty(weight.shape, torch.int8, device), empty((len(weight),), torch.float32, device)
    for block, out, factor in zip(weight.split(ROWS), whole.split(ROWS), scale.split(ROWS), strict=True):
        wide = block.float()
        most = wide.abs().amax(1) / HIGHEST
        factor.copy_(torch.where(most.isfinite(), torch.where(most == 0, 1.0, most), torch.nan))
        out.copy_((wide / factor[:, None]).nan_to_num_().round_().clamp_(-HIGHEST, HIGHEST))
    return whole, scale


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int4 of a weight (out, in): pairs (out, in / 2) uint8 and scales (out, groups) bfloat16.

    A byte holds inputs 2j (low half) and 2j + 1, each plus 8. A group of zeros has scale 1, one that is not finite NaN.
    """
    outputs, inputs = weight.shape
    if inputs % 2:
        raise UnsupportedModelError(
            f"int4 needs an even number of inputs, a weight has {inputs}; use quantization='int8'"
        )
    groups, device = -(-inputs // GROUP), weight.device
    pairs = empty((outputs, inputs // 2), torch.uint8, device)
    scale = empty((outputs, groups), torch.bfloat16, device)
    for block, out, factor in zip(weight.split(ROWS), pairs.split(ROWS), scale.split(ROWS), strict=True):
        wide = F.pad(block.float(), (0, groups * GROUP - inputs)).view(-1, groups, GROUP)
        whole, found = _nearest(wide)
        factor.copy_(found.squeeze(-1))
        moved = whole.view(len(block), -1)[:, :inputs].add_(8).to(torch.uint8)
        torch.bitwise_or(moved[:, ::2], moved[:, 1::2] << 4, out=out)
    return pairs, scale


def _nearest(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers -8 .. 7 (out, groups, GROUP) and scales (out, groups, 1), both float32, of least squared error."""
    extreme = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    extreme = torch.where(extreme.isfinite(), extreme, torch.nan)
    scales = torch.cat([extreme * (-share / 8) for share in SHARES], -1).bfloat16().float()
    scales = torch.where(scales == 0, 1.0, scales)
    errors = torch.empty_like(scales)
    for i in range(len(SHARES)):
        scaled = wide / scales[..., i : i + 1]
        scaled.sub_(scaled.round().clamp_(-8, 7))
        torch.sum(scaled.square_(), -1, out=errors[..., i])
    best = scales.gather(-1, errors.mul_(scales.square()).argmin(-1, keepdim=True))
    return (wide / best).round_().clamp_(-8, 7).nan_to_num_(), best


def unpacked(weight: torch.Tensor) -> torch.Tensor:
    """Whole numbers (..., in) int8 of an int8 weight, which stays as it is, or of pairs (..., in / 2) uint8."""
    if weight.dtype is torch.int8:
        return weight
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2).to(torch.int8).sub_(8)


def factors(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scales that `unpacked(weight)` is multiplied by, of a shape that fits: (..., out, 1) or (..., out, in)."""
    if weight.dtype is torch.int8:
        return scale.unsqueeze(-1)
    return scale.repeat_interleave(GROUP, -1)[..., : 2 * weight.shape[-1]]


def scale_of(name: str) -> str:
    """The name of a weight's scales."""
    return name.removesuffix(".weight") + ".scale"


def quantized(
    name: str, weight: torch.Tensor, spec: ModelSpec, form: Form = "int8"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that take the place of a canonical one."""
    if name == "embed.weight":
        yield name, weight
        if spec.tied:
            yield from quantized("head.weight", weight, spec)
    elif MATRICES.match(name):
        rounded = quantize_groups if form == "int4" and not name.startswith("head.") else quantize_rows
        whole, scale = rounded(weight.flatten(0, -2))
        outer = weight.shape[:-1]
        yield name, whole.view(*outer, -1)
        yield scale_of(name), scale.view(*outer, *scale.shape[1:])
    else:
        yield name, weight


def quantize(weights: Mapping[str, torch.Tensor], spec: ModelSpec, form: Form = "int8") -> dict[str, torch.Tensor]:
    """All canonical weights with `quantized` ones in their place."""
    return {name: tensor for whole, weight in weights.items() for name, tensor in quantized(whole, weight, spec, form)}


def dequantized(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What quantised weights stand for, in float64, and the others as they are; a tied head is a tensor of its own."""
    found = {}
    for name, weight in weights.items():
        scale = weights.get(scale_of(name))
        if not name.endswith(".scale"):
            found[name] = weight if scale is None else unpacked(weight).double() * factors(scale.double(), weight)
    return found


def is_quantized(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether canonical weights went through `quantized`."""
    return "head.scale" in weights


def form_of(weights: Mapping[str, torch.Tensor]) -> Form | None:
    """How canonical weights were quantised."""
    if not is_quantized(weights):
        return None
    return "int4" if weights["layers.0.qkv.weight"].dtype is torch.uint8 else "int8"


def quantized_sizes(spec: ModelSpec, dtype: torch.dtype, form: Form = "int8") -> dict[str, int]:
    """Canonical name -> bytes of a model whose other weights are in `dtype`; a tied embedding counts its head."""
    sizes = {}
    for target in targets(spec):
        count, inputs = torch.Size(target.shape).numel(), target.shape[-1]
        small = count + 4 * (count // inputs)
        if form == "int4" and target.name not in {"embed.weight", "head.weight"}:
            small = count // 2 + 2 * (count // inputs) * -(-inputs // GROUP)
        sizes[target.name] = small if MATRICES.match(target.name) else count * dtype.itemsize
        if target.name == "embed.weight" and spec.tied:
            sizes[target.name] += small
    return sizes
