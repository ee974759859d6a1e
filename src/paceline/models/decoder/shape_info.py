"""What a loaded model's weights say about it: the bytes that one pass reads, and a name for its shape.

In: a ModelSpec, canonical weights, a dtype. Out: numbers and names for `models.base.ModelInfo`. Not here: packing,
running.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.models.loading.quantization import is_quantized
from paceline.models.spec import ModelSpec


def bytes_read(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes of weights that one pass of one row reads: all but the embedding (unless tied) and the experts left out."""
    total = 0
    for name, weight in weights.items():
        share = 1.0
        if name == "embed.weight" and (not spec.tied or is_quantized(weights)):
            continue
        if ".experts." in name and spec.moe is not None:
            share = spec.moe.top_k / spec.moe.experts
        total += int(weight.nbytes * share)
    return total


def fingerprint(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Names the shape and type of a model: what costs that were measured belong to."""
    experts = f"-{spec.moe.experts}x{spec.moe.intermediate}" if spec.moe else ""
    return (
        f"{spec.family}-{spec.hidden_size}x{spec.num_layers}-{spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}"
        f"-{spec.intermediate_size}{experts}-{spec.vocab_size}-{str(dtype).removeprefix('torch.')}"
    )
