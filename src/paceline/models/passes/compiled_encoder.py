"""What of an encoder is compiled for this CPU, where that is faster than PyTorch's operators, which run all else.

These are products with int8 weights (models.cpu.products) and attention (models.cpu.two_sided): in products of bfloat16
for models in bfloat16 or with int8 weights, where the processor is fast at these, else of float32. Other products of
float32 and bfloat16 are as fast in PyTorch; where the processor has no instruction for the latter, they take several
times as long, and such models encode in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from paceline.checkpoints import Form, quantize_rows
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.processor import has_bfloat, has_fast_bfloat
from paceline.models.cpu.products import WholeProduct
from paceline.models.cpu.two_sided import TwoSidedAttention
from paceline.models.layers.encoder import CompiledParts
from paceline.models.layers.linear import Map, multiplied_out
from paceline.models.layers.own_weights import WholeMaps
from paceline.models.spec import EncoderSpec, ModelSpec, attention_shape


def compiled_parts(encoder: EncoderSpec, dtype: torch.dtype, quantization: Form | None) -> CompiledParts:
    """What is compiled of an encoder, as far as a comparison gives the right numbers here."""
    whole: WholeMaps = multiplied_out
    if quantization is not None and products_agree():
        whole = functools.partial(WholeProduct, pages=Pages())
    widened = torch.float32 if dtype is torch.bfloat16 and not has_bfloat() else None
    forms = [torch.bfloat16] if dtype is torch.bfloat16 or quantization is not None else []
    forms += [torch.float32] if (widened or dtype) is torch.float32 else []
    return CompiledParts(whole, _attention(encoder.model, forms), widened)


def _attention(model: ModelSpec, forms: Sequence[torch.dtype]) -> Map | None:
    """Attention in products of the first of some dtypes that fits the model and this processor."""
    shape = attention_shape(model)
    for form in forms if model.relative_bias is None else ():
        if shape.head_dim % (64 // form.itemsize) == 0 and attention_agrees(form):
            return TwoSidedAttention(shape.heads, shape.kv_heads, shape.head_dim, shape.scale, form)
    return None


@functools.cache
def products_agree() -> bool:
    """Whether compiled products are those of the weights that whole numbers stand for."""
    weight, x = _random(80, 48), _random(7, 48)
    whole, scale = quantize_rows(weight)
    wanted = x.double() @ (whole.double() * scale[:, None]).T
    return _near(WholeProduct(whole, scale, None, pages=Pages())(x), wanted, 0.02)


@functools.cache
def attention_agrees(dtype: torch.dtype) -> bool:
    """Whether compiled attention is PyTorch's; in products of bfloat16 it needs a fast instruction for these."""
    if dtype is torch.bfloat16 and not has_fast_bfloat():
        return False
    qkv = _random(70, 4 * 32).view(70, 4, 32)
    queries, keys, values = (part.transpose(0, 1)[None] for part in qkv.double().split((2, 1, 1), 1))
    keys, values = (part.expand_as(queries) for part in (keys, values))
    wanted = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, scale=0.2)[0]
    ours = TwoSidedAttention(2, 1, 32, 0.2, dtype)(qkv)
    return _near(ours, wanted.transpose(0, 1).flatten(1), 0.02 if dtype is torch.bfloat16 else 1e-5)


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def _near(ours: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    return float((ours.double() - wanted).norm()) < share * float(wanted.norm())
