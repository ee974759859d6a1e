"""What of an encoder is compiled for this CPU: its matrices (models.cpu.products) and attention (models.cpu.two_sided).

With weights of float32 and int8 everywhere, attention then in products of float32 or, where the processor is fast at
these, of bfloat16. Models in bfloat16 need that processor: where it has no instruction for bfloat16 they encode in
float32, and where it has another one PyTorch's operators multiply. Theirs is also all else, which is little:
convolutions, norms, activations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from paceline.checkpoints import Form, quantize_rows
from paceline.models.attention.source_attention import Attention
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.processor import has_bfloat, has_fast_bfloat
from paceline.models.cpu.products import MatrixProduct
from paceline.models.cpu.two_sided import TwoSidedAttention
from paceline.models.layers.encoder import CompiledParts
from paceline.models.spec import EncoderSpec, ModelSpec, attention_shape


def compiled_parts(encoder: EncoderSpec, dtype: torch.dtype, quantization: Form | None) -> CompiledParts:
    """What is compiled of an encoder, as far as a comparison gives the right numbers here."""
    widened = torch.float32 if dtype is torch.bfloat16 and not has_bfloat() else None
    forms = [torch.bfloat16] if dtype is torch.bfloat16 or quantization is not None else []
    forms += [torch.float32] if (widened or dtype) is torch.float32 else []
    return CompiledParts(functools.partial(_product, Pages()), _attention(encoder.model, forms), widened)


def _product(
    pages: Pages, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> MatrixProduct | None:
    return MatrixProduct(weight, scale, bias, pages=pages) if products_agree(weight.dtype) else None


def _attention(model: ModelSpec, forms: Sequence[torch.dtype]) -> Attention | None:
    """Attention in products of the first of some dtypes that fits the model and this processor."""
    shape = attention_shape(model)
    for form in forms:
        if shape.head_dim % (64 // form.itemsize) == 0 and attention_agrees(form):
            return TwoSidedAttention(shape.heads, shape.kv_heads, shape.head_dim, shape.scale, form)
    return None


@functools.cache
def products_agree(dtype: torch.dtype) -> bool:
    """Whether compiled products are those of weights of a dtype; in bfloat16 they need a fast instruction for it."""
    if dtype is torch.bfloat16 and not has_fast_bfloat():
        return False
    weight, x, bias, scale = _random(80, 48), _random(7, 48), _random(1, 80)[0], None
    if dtype is torch.int8:
        weight, scale = quantize_rows(weight)
        wanted = x.double() @ (weight.double() * scale[:, None]).T
    else:
        weight, x = weight.to(dtype), x.to(dtype)
        wanted = x.double() @ weight.double().T
    ours = MatrixProduct(weight, scale, bias, pages=Pages())(x)
    return _near(ours, wanted + bias, 1e-5 if dtype is torch.float32 else 0.02)


@functools.cache
def attention_agrees(dtype: torch.dtype) -> bool:
    """Whether compiled attention is PyTorch's; in products of bfloat16 it needs a fast instruction for these."""
    if dtype is torch.bfloat16 and not has_fast_bfloat():
        return False
    qkv = _random(70, 4 * 32).view(70, 4, 32)
    queries, keys, values = (part.transpose(0, 1)[None] for part in qkv.double().split((2, 1, 1), 1))
    keys, values = (part.expand_as(queries) for part in (keys, values))
    biases, index = _random(2, 139), torch.arange(70)
    added = biases[:, index[None] - index[:, None] + 69].double()
    attention, near = TwoSidedAttention(2, 1, 32, 0.2, dtype), 0.02 if dtype is torch.bfloat16 else 1e-5
    for by_distance, of_pairs in ((None, None), (biases, added)):
        wanted = F.scaled_dot_product_attention(queries, keys, values, of_pairs, scale=0.2)[0]
        if not _near(attention(qkv, by_distance), wanted.transpose(0, 1).flatten(1), near):
            return False
    return True


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def _near(ours: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    return float((ours.double() - wanted).norm()) < share * float(wanted.norm())
