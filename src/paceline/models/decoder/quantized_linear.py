"""Products with int8 and int4 weights by PyTorch's operators: the readable form, and what runs where no kernels serve.

In: quantised weights (models.loading.quantization). Out: closures like those of models.decoder.linear. Not here:
compiled passes of the CPU (models.cpu), which multiply whole numbers.

Weights are multiplied out to the dtype of the activations, block by block, for each product. That saves memory, not
time: a step reads the small weights and writes and reads the large ones. PyTorch has operators that multiply small
weights directly; they are internal, so each is compared with the readable form for every shape, dtype and device it
would serve, and taken where it agrees.
"""

from __future__ import annotations

import logging
from functools import partial

import torch
from torch.nn import functional as F

from paceline.models.decoder.linear import Map, RowInvariance, keeping_rows
from paceline.models.loading.quantization import GROUP, factors, unpacked

log = logging.getLogger("paceline")

BLOCK = 2**24
"""Weights that are multiplied out at a time: 64 MiB in float32."""

TILES = 8
"""Inner tiles of 16 inputs in PyTorch's layout of int4 weights."""

PROBE_ROWS, TOLERANCE = 5, 2.0**-6
"""Rows of the comparison; root mean square difference relative to the result that a direct operator may have in
bfloat16.
"""


def dense(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights (..., out, in) that whole numbers and scales stand for, rounded to `dtype` once."""
    if dtype is torch.float32:
        return unpacked(weight) * factors(scale.float(), weight)
    out = torch.empty(
        *weight.shape[:-1],
        weight.shape[-1] * (1 if weight.dtype is torch.int8 else 2),
        dtype=dtype,
        device=weight.device,
    )
    return torch.mul(unpacked(weight), factors(scale.float(), weight), out=out)


def make_quantized_linear(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    row_invariant: RowInvariance = True,
    columns: torch.Tensor | None = None,
) -> Map:
    """x (r, in) -> (r, out) in x's dtype for an int8 weight (out, in) or pairs (out, in / 2) uint8, with their scales.

    Args:
        dtype: of the activations.
        row_invariant: see `models.decoder.linear.make_linear`; "proven" multiplies in blocks of equally many rows where
            that is needed.
        columns: (in,) the input that each element of x is; None: in order.
    """
    linear = _direct(weight, scale, bias, dtype) or partial(_by_blocks, weight, scale, bias)
    if columns is not None:
        linear = _reordered(linear, columns.argsort().to(weight.device))
    inputs = weight.shape[1] * (1 if weight.dtype is torch.int8 else 2)
    kind = (weight.dtype, bias is None, columns is None)
    return keeping_rows(
        linear, torch.empty(len(weight), inputs, dtype=dtype, device="meta"), weight.device, kind, row_invariant
    )


def _by_blocks(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    rows = max(1, BLOCK // x.shape[-1])
    if len(weight) <= rows:
        return F.linear(x, dense(weight, scale, x.dtype), bias)
    parts = zip(weight.split(rows), scale.split(rows), strict=True)
    out = torch.cat([F.linear(x, dense(own, factor, x.dtype)) for own, factor in parts], -1)
    return out if bias is None else out.add_(bias)


def _reordered(linear: Map, order: torch.Tensor) -> Map:
    return lambda x: linear(x.index_select(-1, order))


def _direct(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> Map | None:
    """The product by an operator that takes small weights, if this PyTorch has one that agrees with the readable
    form.
    """
    if dtype is not torch.bfloat16:
        return None
    key = (weight.dtype, *weight.shape, weight.device)
    if _SERVES.get(key) is False:
        return None
    try:
        found = _direct_int8(weight, scale, bias) if weight.dtype is torch.int8 else _direct_int4(weight, scale, bias)
        if key not in _SERVES:
            _SERVES[key] = found is not None and _agrees(found, partial(_by_blocks, weight, scale, bias), weight, dtype)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as reason:
        log.debug("no direct product with %s weights here: %s", weight.dtype, reason)
        _SERVES[key] = False
    return found if _SERVES[key] else None


_SERVES: dict[tuple[object, ...], bool] = {}
"""What `_direct` found, by dtype and shape of the weight, and device."""


def _direct_int8(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Map:
    ones, offset = (
        torch.ones(len(weight), dtype=torch.bfloat16, device=weight.device),
        None if bias is None else bias.float(),
    )

    def linear(x: torch.Tensor) -> torch.Tensor:
        out = (
            torch._weight_int8pack_mm(x, weight, ones).float().mul_(scale)
        )  # scales in bfloat16 would err as much as int8 does
        return (out if offset is None else out.add_(offset)).to(x.dtype)

    return linear


def _direct_int4(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Map | None:
    outputs, inputs = len(weight), 2 * weight.shape[1]
    if weight.device.type != "cuda" or outputs % 8 or inputs % (16 * TILES):
        return None
    swapped = (weight << 4) | (weight >> 4)  # the operator wants the first of a pair in the high half
    packed = torch._convert_weight_to_int4pack(swapped, TILES)
    both = torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch._weight_int4pack_mm(x, packed, GROUP, both)
        return out if bias is None else out.add_(bias)

    return linear


def _agrees(candidate: Map, reference: Map, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    inputs = weight.shape[1] * (1 if weight.dtype is torch.int8 else 2)
    x = torch.randn(PROBE_ROWS, inputs, generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    with torch.inference_mode():
        for rows in (1, PROBE_ROWS):
            ours, theirs = candidate(x[:rows]).float(), reference(x[:rows]).float()
            if not (ours - theirs).square().mean().sqrt() <= TOLERANCE * theirs.square().mean().sqrt():
                return False
    return True
