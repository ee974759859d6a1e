"""Packed linears against F.linear, and norms against their definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.models.decoder import agrees, can_pack, linear, make_head_norm, make_linear, make_norm

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    return ours.dtype == dtype and torch.allclose(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_both_forms_multiply(dtype, packed, with_bias):
    if packed and not can_pack(CPU, dtype):
        pytest.skip("packed linears are not supported on this CPU")
    weight, bias = (torch.randn(96, 40) / 6).to(dtype), torch.randn(96).to(dtype) if with_bias else None
    layer = make_linear(weight, bias, packed=packed)
    for rows in (1, 3, 8, 33):
        x = torch.randn(rows, 40).to(dtype)
        reference = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert close(layer(x), reference, dtype)
        assert not close(layer(x), reference + 0.3, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packed_layer_owns_its_weights(dtype):
    weight, x = torch.randn(32, 16).to(dtype), torch.randn(2, 16).to(dtype)
    if not can_pack(CPU, dtype):
        pytest.skip("packed linears are not supported on this CPU")
    layer = make_linear(weight)
    before = layer(x)
    weight.zero_()
    assert torch.equal(layer(x), before)
    assert before.any()


@pytest.mark.parametrize("shape", [(96, 64), (64, 352), (512, 256)])
def test_packed_rows_have_the_same_bits_whatever_stands_beside_them(shape):
    if not can_pack(CPU, torch.bfloat16):
        pytest.skip("packed bfloat16 linears are not supported on this CPU")
    layer = make_linear(torch.randn(*shape).bfloat16())
    x = torch.randn(16, shape[1]).bfloat16()
    whole = layer(x)
    for rows in (1, 2, 3, 8):
        assert torch.equal(layer(x[:rows]), whole[:rows])
    assert not torch.equal(layer(x[1:2]), whole[:1])


def test_a_strided_input_is_read_right():
    layer, x = make_linear(weight := torch.randn(8, 16)), torch.randn(4, 32)
    assert close(layer(x[:, :16]), x[:, :16] @ weight.T, torch.float32)


def test_the_probe_falls_back_when_the_operators_are_missing_or_wrong(monkeypatch):
    for broken in (_missing, _wrong):
        linear._probe.cache_clear()
        monkeypatch.setattr(linear, "_packed", broken)
        assert not can_pack(CPU, torch.float32)
        weight, x = torch.randn(8, 4), torch.randn(2, 4)
        assert torch.equal(make_linear(weight)(x), F.linear(x, weight))
    linear._probe.cache_clear()


def _missing(weight, bias):
    raise AttributeError("no such operator")


def _wrong(weight, bias):
    return lambda x: F.linear(x, weight, bias) + 1.0


def test_other_dtypes_and_devices_are_not_packed():
    assert not can_pack(CPU, torch.float16)
    assert not can_pack(torch.device("meta"), torch.float32)


def test_agrees_has_teeth():
    x = torch.ones(1, 4)
    assert agrees(lambda v: v, lambda v: v, x)
    assert not agrees(lambda v: v + 1e-3, lambda v: v, x)


def definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_norm(dtype, offset, magnitude):
    weight, x = torch.randn(48).to(dtype), (torch.randn(5, 48) * magnitude + magnitude).to(dtype)
    theirs = definition(x, weight.float() + offset, 1e-5)
    assert close(make_norm(weight, 1e-5, offset=offset)(x), theirs, dtype)
    assert not close(make_norm(weight, 1e-5, offset=not offset)(x), theirs, dtype)


def test_norm_is_no_layer_norm():
    x = torch.randn(2, 8) + 3
    assert not close(make_norm(torch.ones(8), 1e-6)(x), F.layer_norm(x, (8,)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head_norm(dtype):
    weight, x = torch.randn(6, 16).to(dtype), torch.randn(3, 6, 16).to(dtype)
    assert close(make_head_norm(weight, 1e-6)(x), definition(x, weight, 1e-6), dtype)
    assert not close(make_head_norm(weight.flip(0), 1e-6)(x), definition(x, weight, 1e-6), dtype)


def test_the_form_for_other_devices_agrees():
    weight, x = torch.randn(32), torch.randn(4, 32)
    assert close(linear._rms_norm(weight, 32, 1e-6)(x), make_norm(weight, 1e-6)(x), torch.float32)


def test_small_float32_layers_stay_dense_where_rows_may_differ():
    weight, x = torch.randn(32, 16), torch.randn(3, 16)
    assert torch.equal(make_linear(weight, row_invariant=False)(x), F.linear(x, weight))
