"""Weight-only quantisation: which weights become int8, and how they are rounded.

In: canonical weights one by one (models.weights). Out: int8 weights with a float32 scale per output. Not here: products with them
(models.kernels.quantized).

Rounding is symmetric, per output channel: scale = largest magnitude / 127, nearest whole number, ties to even. It is what torchao
calls int8_weight_only, written down here because four lines need no dependency. The linear layers and the head are quantised;
embeddings, norms and biases are not. A tied embedding is kept beside the quantised head.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch

from paceline.models.spec import ModelSpec
from paceline.models.weights import targets

NATIVE_ONLY = "needs a model of the native runner; leave quantization out, or take a checkpoint of a supported family"
REFUSED = "int8 weights run in the compiled passes of the CPU alone; load the model without quantization"

MATRICES = re.compile(r"^(layers\.\d+\.(qkv|o|gate_up|down)|head)\.weight$")
"""Names of the weights that are quantised."""

HIGHEST, ROWS = 127, 1024
"""The largest whole number; rows that are rounded at a time, so that few float32 copies exist."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An int8 weight (out, in) and scales (out,) float32 whose product is near `weight` (out, in), to half a scale.

    A row of zeros has scale 1; a row that is not finite has scale NaN, so that nobody takes its products for numbers.
    """
    whole, scale = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for block, out, factor in zip(weight.split(ROWS), whole.split(ROWS), scale.split(ROWS), strict=True):
        wide = block.float()
        most = wide.abs().amax(1) / HIGHEST
        factor.copy_(torch.where(most.isfinite(), torch.where(most == 0, 1.0, most), torch.nan))
        out.copy_((wide / factor[:, None]).nan_to_num_().round_().clamp_(-HIGHEST, HIGHEST))
    return whole, scale


def quantized(name: str, weight: torch.Tensor, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that take the place of a canonical one."""
    if name == "embed.weight":
        yield name, weight
        if spec.tied:
            yield from quantized("head.weight", weight, spec)
    elif MATRICES.match(name):
        whole, scale = quantize_rows(weight)
        yield name, whole
        yield name.replace(".weight", ".scale"), scale
    else:
        yield name, weight


def quantize(weights: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """All canonical weights with `quantized` ones in their place."""
    return {name: tensor for whole, weight in weights.items() for name, tensor in quantized(whole, weight, spec)}


def dequantized(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What quantised weights stand for, in float64, and the others as they are; a tied head is a tensor of its own."""
    found = {}
    for name, weight in weights.items():
        scale = weights.get(name.replace(".weight", ".scale"))
        if not name.endswith(".scale"):
            found[name] = weight if scale is None else weight.double() * scale.double()[:, None]
    return found


def is_quantized(weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether canonical weights went through `quantized`."""
    return "head.scale" in weights


def quantized_sizes(spec: ModelSpec, dtype: torch.dtype) -> dict[str, int]:
    """Canonical name -> bytes of a model whose other weights are in `dtype`; a tied embedding counts its head."""
    sizes = {}
    for target in targets(spec):
        count, outputs = torch.Size(target.shape).numel(), target.shape[0]
        small = count + 4 * outputs
        sizes[target.name] = small if MATRICES.match(target.name) else count * dtype.itemsize
        if target.name == "embed.weight" and spec.tied:
            sizes[target.name] += small
    return sizes
