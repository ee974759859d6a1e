"""Linear layers and norms as plain callables, in the form that is fastest on the device.

On CPUs where it works, oneDNN reorders the weights once for few rows, which makes 8 rows cost about as much as one, and
gives a row the same bits whatever the number of other rows (bfloat16). The operators are internal ones of PyTorch, so a
probe checks them at first use; where it fails, `F.linear` serves.

Weights of int8 and int4 are multiplied out to the dtype of the activations, block by block, for each product. That
saves memory, not time: a step reads the small weights and writes and reads the large ones. PyTorch has operators that
multiply small weights directly; they are internal too, so each is compared with the readable form for every shape,
dtype and device it would serve, and taken where it agrees. (Compiled passes of the CPU multiply whole numbers, see
models.cpu.)
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch.nn import functional as F

from paceline.checkpoints import GROUP, unpacked, values_of

Map = Callable[[torch.Tensor], torch.Tensor]
RowInvariance = bool | Literal["proven"]

PACK_ROWS = 8
"""Rows that the reordered layout is chosen for; measured to be as good as any up to 512 rows."""


MIN_PACKED_ELEMENTS = 2**17
"""Float32 weights of fewer elements are multiplied faster densely: the packed operator costs about 9 microseconds a
call.
"""


PINNED_ROWS = 16
"""Rows of a product whose shape is fixed."""


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    packed: bool | None = None,
    row_invariant: RowInvariance = True,
) -> Map:
    """x (r, in) -> (r, out) for a weight (out, in); `packed` None packs where the probe passed.

    A packed layer holds a copy of its own; the dense weight can be freed. Without `row_invariant`, small float32
    weights stay dense, which is faster, but the bits of a row then depend on the number of rows. With "proven", a layer
    whose rows depend on their number here is multiplied in blocks of PINNED_ROWS rows.
    """
    if packed is None:
        small = weight.dtype is torch.float32 and weight.numel() < MIN_PACKED_ELEMENTS
        packed = can_pack(weight.device, weight.dtype) and (bool(row_invariant) or not small)
    linear = packed_linear(weight, bias) if packed else functools.partial(F.linear, weight=weight, bias=bias)
    return keeping_rows(linear, weight, weight.device, (packed, bias is None), row_invariant)


def make_head_linear(weight_hoi: torch.Tensor, *, row_invariant: RowInvariance = True) -> Map:
    """x (r, heads * in) -> (r, heads * out): each head's inputs by its own weights, of (heads, out, in)."""
    heads, outputs, inputs = weight_hoi.shape
    turned = weight_hoi.transpose(1, 2).contiguous()

    def linear(x: torch.Tensor) -> torch.Tensor:
        by_head = x.view(len(x), heads, inputs).transpose(0, 1)
        return torch.bmm(by_head, turned).transpose(0, 1).flatten(1)

    sizes = torch.empty(heads * outputs, heads * inputs, dtype=weight_hoi.dtype, device="meta")
    return keeping_rows(linear, sizes, weight_hoi.device, ("heads", heads), row_invariant)


def keeping_rows(
    linear: Map, weight: torch.Tensor, device: torch.device, kind: tuple[object, ...], row_invariant: RowInvariance
) -> Map:
    """The map itself, or where "proven" is asked for and it does not keep a row's bits, the map `pinned`.

    Args:
        weight: (out, in), of which shape and dtype are looked at: those of the map and its inputs.
        kind: tells forms of maps apart.
    """
    if row_invariant == "proven" and not _keeps_rows(linear, weight, device, kind):
        return pinned(linear)
    return linear


def pinned(linear: Map) -> Map:
    """The same map in blocks of PINNED_ROWS rows, the last one filled up.

    Every row is computed in a product of one shape.
    """

    def blocks(x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        x = F.pad(x, (0, 0, 0, -rows % PINNED_ROWS))
        return torch.cat([linear(block) for block in x.split(PINNED_ROWS)])[:rows] if rows else linear(x)

    return blocks


def _keeps_rows(linear: Map, weight: torch.Tensor, device: torch.device, kind: tuple[object, ...]) -> bool:
    """Whether a row has the same bits in products of any number of rows; measured once per kind, shape, dtype and
    threads.
    """
    key = (*kind, *weight.shape, weight.dtype, torch.get_num_threads())
    if key not in KEEPS_ROWS:
        x = torch.randn(512, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(device, weight.dtype)
        rows = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 64, 65, 130, 512)
        with torch.inference_mode():
            want = linear(x[-40:])
            KEEPS_ROWS[key] = all(torch.equal(linear(x[-n:])[-40:], want[-n:]) for n in rows)
    return KEEPS_ROWS[key]


KEEPS_ROWS: dict[tuple[object, ...], bool] = {}


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Map:
    blob = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = pointwise(x, blob, bias, "none", [], "")
        return out

    return linear


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed layers exist here and agree with `F.linear` on a probe; decided once per dtype."""
    return device.type == "cpu" and packing_works(dtype)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or dtype not in {torch.float32, torch.bfloat16}:
        return False
    try:
        if dtype is torch.bfloat16 and not _has_bf16():
            return False
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(n, 64, generator=generator).to(dtype) for n in (48, 3))
        bias = torch.randn(48, generator=generator).to(dtype)
        return all(
            agrees(packed_linear(weight, b), functools.partial(F.linear, weight=weight, bias=b), x[:rows])
            for b in (None, bias)
            for rows in (1, 3)
        )
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def _has_bf16() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    return "AVX512" in capability and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def agrees(candidate: Map, reference: Map, x: torch.Tensor) -> bool:
    """Whether both maps give the same values within rounding of x's dtype."""
    tolerance = 1e-5 if x.dtype is torch.float32 else 2e-2
    return torch.allclose(candidate(x).float(), reference(x).float(), rtol=tolerance, atol=tolerance * 8)


def make_norm(weight: torch.Tensor, eps: float, *, offset: bool = False) -> Map:
    """RMS norm over the last axis, computed in float32 and rounded once; with `offset` the weights are used as 1 + w.

    Weights in float64 are for inputs in float64, and computed with as they are.

    Source: Root mean square layer normalization (arXiv:1910.07467).
    """
    weight = in_float32(weight) + 1.0 if offset else in_float32(weight)
    size = weight.shape[-1]
    if weight.device.type != "cpu":
        return rms_norm(weight, size, eps)
    # The layer norm of (x, -x) has mean 0 and the mean square of x as variance: one fused kernel, twice as fast as
    # F.rms_norm.
    doubled, shape = torch.cat((weight, torch.zeros_like(weight))), (2 * size,)
    layer_norm, cat = torch.native_layer_norm, torch.cat

    def norm(x: torch.Tensor) -> torch.Tensor:
        return layer_norm(cat((x, -x), -1), shape, doubled, None, eps)[0].narrow(-1, 0, size)

    return norm


def in_float32(weight: torch.Tensor) -> torch.Tensor:
    """The weight in float32, or in float64 where it is that."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def rms_norm(weight: torch.Tensor, size: int, eps: float) -> Map:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.to(weight.dtype), (size,), weight, eps).to(x.dtype)

    return norm


def make_layer_norm(weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Map:
    """Layer norm over the last axis, computed in float32 and rounded once.

    Source: Layer normalization (arXiv:1607.06450).
    """
    weight, bias, shape = weight.float(), None if bias is None else bias.float(), weight.shape
    if weight.device.type == "cpu":
        return lambda x: torch.native_layer_norm(x, shape, weight, bias, eps)[0]
    return lambda x: F.layer_norm(x.float(), shape, weight, bias, eps).to(x.dtype)


def make_head_norm(weight_hd: torch.Tensor, eps: float, *, offset: bool = False) -> Map:
    """RMS norm over the last axis of (..., heads, head dim) with a weight for each head."""
    weight = in_float32(weight_hd) + 1.0 if offset else in_float32(weight_hd)
    plain = make_norm(torch.ones_like(weight[0]), eps)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (plain(x.to(weight.dtype)) * weight).to(x.dtype)

    return norm


log = logging.getLogger("paceline")

DENSE_BLOCK = 2**24
"""Weights that are multiplied out at a time: 64 MiB in float32."""

INNER_TILES = 8
"""Inner tiles of 16 inputs in PyTorch's layout of int4 weights."""

PROBE_ROWS, TOLERANCE = 5, 2.0**-6
"""Rows of the comparison; root mean square difference relative to the result that a direct operator may have in
bfloat16.
"""


def dense(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights (..., out, in) that whole numbers and scales stand for, rounded to `dtype` once."""
    return values_of(weight, scale.float()).to(dtype)


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
        row_invariant: see `models.layers.linear.make_linear`; "proven" multiplies in blocks of equally many rows where
            that is needed.
        columns: (in,) the input that each element of x is; None: in order.
    """
    linear = _direct(weight, scale, bias, dtype) or partial(by_blocks, weight, scale, bias)
    if columns is not None:
        linear = _reordered(linear, columns.argsort().to(weight.device))
    inputs = weight.shape[1] * (1 if weight.dtype is torch.int8 else 2)
    kind = (weight.dtype, bias is None, columns is None)
    return keeping_rows(
        linear, torch.empty(len(weight), inputs, dtype=dtype, device="meta"), weight.device, kind, row_invariant
    )


def multiplied_out(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Map:
    """x (r, in) -> (r, out) for an int8 weight (out, in) and scales (out,): by plain products, whatever is faster for
    few rows.
    """
    return partial(by_blocks, weight, scale, bias)


def by_blocks(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    rows = max(1, DENSE_BLOCK // x.shape[-1])
    if len(weight) <= rows:
        return F.linear(x, dense(weight, scale, x.dtype), bias)
    parts = zip(weight.split(rows), scale.split(rows), strict=True)
    out = torch.cat([F.linear(x, dense(part, factor, x.dtype)) for part, factor in parts], -1)
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
    if DIRECT_SERVES.get(key) is False:
        return None
    try:
        direct = _direct_int8(weight, scale, bias) if weight.dtype is torch.int8 else _direct_int4(weight, scale, bias)
        if key not in DIRECT_SERVES:
            DIRECT_SERVES[key] = direct is not None and _agrees(
                direct, partial(by_blocks, weight, scale, bias), weight, dtype
            )
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as reason:
        log.debug("no direct product with %s weights here: %s", weight.dtype, reason)
        DIRECT_SERVES[key] = False
    return direct if DIRECT_SERVES[key] else None


DIRECT_SERVES: dict[tuple[object, ...], bool] = {}
"""What `_direct` found, by dtype and shape of the weight, and device."""


def _direct_int8(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Map:
    ones = torch.ones(len(weight), dtype=torch.bfloat16, device=weight.device)
    offset = None if bias is None else bias.float()

    def linear(x: torch.Tensor) -> torch.Tensor:
        out = (
            torch._weight_int8pack_mm(x, weight, ones).float().mul_(scale)
        )  # scales in bfloat16 would err as much as int8 does
        return (out if offset is None else out.add_(offset)).to(x.dtype)

    return linear


def _direct_int4(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Map | None:
    outputs, inputs, on_gpu = len(weight), 2 * weight.shape[1], weight.device.type == "cuda"
    if outputs % 8 or inputs % (16 * INNER_TILES if on_gpu else GROUP):
        return None
    if on_gpu:
        swapped = (weight << 4) | (weight >> 4)  # the operator wants the first of a pair in the high half
        packed, multiply = torch._convert_weight_to_int4pack(swapped, INNER_TILES), torch._weight_int4pack_mm
    else:
        aten = torch.ops.aten
        packed = aten._convert_weight_to_int4pack_for_cpu(unpacked(weight).int(), INNER_TILES)
        multiply = aten._weight_int4pack_mm_for_cpu
    factor, zero = scale.unbind(-1)  # the operator's numbers begin at -8, and it adds an offset
    both = torch.stack((factor, (8 - zero) * factor), -1).transpose(0, 1).contiguous()

    def linear(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = multiply(x.contiguous(), packed, GROUP, both)
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
