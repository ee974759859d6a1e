"""Rounding of lanes to bfloat16 against PyTorch's, by one instruction and by several; the softplus of lanes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from paceline.models.cpu import vectors
from paceline.models.cpu.processor import has_bfloat
from paceline.models.cpu.vectors import load, softplus, store, store_half


def rounded(x):
    """(n,) float32 stored as bfloat16, by a function that is compiled here."""

    @njit
    def narrow(source, target, count):
        for i in range(0, count, 16):
            store_half(target + 2 * i, load(source + 4 * i))

    out = torch.zeros(len(x), dtype=torch.bfloat16)
    narrow(x.data_ptr(), out.data_ptr(), len(x))
    return out


@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(not has_bfloat(), reason="no avx512bf16"))]
)
def test_rounding_to_bfloat16_is_that_of_pytorch(native, monkeypatch):
    monkeypatch.setattr(vectors, "has_bfloat", lambda: native)
    bits = np.random.default_rng(3).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[::4] &= 0xFFFF8000  # ties
    x = torch.from_numpy(bits.view(np.float32).copy())
    edges = torch.tensor([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1.2e-38, -1.0])
    x = torch.cat((x[x.isfinite() & (x.abs() >= 2.0**-126)], edges))
    x = torch.cat((x, x.new_zeros(-len(x) % 16)))
    got, want = rounded(x), x.bfloat16()
    known = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.view(torch.int16)[known], want.view(torch.int16)[known])
    cut = (x.view(torch.int32) >> 16).to(torch.int16)
    assert not torch.equal(cut[known], want.view(torch.int16)[known])


def test_subnormals_stay_below_the_smallest_normal():
    x = torch.linspace(-1.1e-38, 1.1e-38, 64)
    got = rounded(x).float()
    assert (got.abs() <= 2.0**-126).all()
    assert (got * x >= 0).all()


def test_softplus_keeps_its_digits():
    """Where it is small, too, and where e^x would overflow."""

    @njit
    def run(source, target, count):
        for i in range(0, count, 64):
            store(target + i, softplus(load(source + i)))

    x = torch.cat([torch.linspace(-80, 80, 4096), torch.linspace(-2, 2, 4096), torch.tensor([1e4, -1e4] * 8)])
    out = torch.empty_like(x)
    run(x.data_ptr(), out.data_ptr(), 4 * len(x))
    want = torch.nn.functional.softplus(x.double(), threshold=100.0)
    assert ((out - want).abs() <= 4e-7 * want).all()
    assert not ((torch.nn.functional.relu(x) - want).abs() <= 4e-7 * want).all()
