"""Products of many rows, as encoders take them: their numbers, and that a row keeps its bits."""

from __future__ import annotations

import pytest
import torch
from models.test_processor import HASWELL, printed

from paceline.checkpoints.quantization import quantize_rows
from paceline.models.cpu import features
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.processor import has_fast_bfloat
from paceline.models.cpu.products import BLOCK, MatrixProduct

SIZES = pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (100, 36), (200, 600)])
ERROR = 0.02
"""Of all sums, by their size, where activations are rounded to a byte."""


KINDS = pytest.mark.parametrize(
    "kind",
    [
        torch.int8,
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not has_fast_bfloat(), reason="needs fast bfloat16")),
    ],
    ids=str,
)
NEAR = {torch.int8: ERROR, torch.float32: 2e-6, torch.bfloat16: 3e-3}


def made(
    outputs: int, inputs: int, rows: int, *, bias: bool = True, kind: torch.dtype = torch.int8
) -> tuple[MatrixProduct, torch.Tensor, torch.Tensor]:
    """A product, rows for it, and the result in float64."""
    generator = torch.Generator().manual_seed(rows)
    weight, offset = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    x, scale = torch.randn(rows, inputs, generator=generator), None
    if kind is torch.int8:
        weight, scale = quantize_rows(weight)
        wide = weight.double() * scale.double()[:, None]
    else:
        weight, x = weight.to(kind), x.to(kind)
        wide = weight.double()
    wanted = x.double() @ wide.T + (offset.double() if bias else 0.0)
    return MatrixProduct(weight, scale, offset if bias else None, pages=Pages()), x, wanted


def error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours.double() - wanted).norm() / wanted.norm())


@SIZES
@KINDS
@pytest.mark.parametrize("rows", [1, 7, BLOCK, 2 * BLOCK + 5])
def test_products_are_those_of_the_weights(outputs: int, inputs: int, rows: int, kind: torch.dtype) -> None:
    product, x, wanted = made(outputs, inputs, rows, kind=kind)
    assert product(x).shape == (rows, outputs)
    assert product(x).dtype is x.dtype
    assert error(product(x), wanted) < NEAR[kind]
    assert error(product(x.roll(1, 1)), wanted) > 0.5
    plain, _, without = made(outputs, inputs, rows, bias=False, kind=kind)
    assert error(plain(x), without) < NEAR[kind]
    assert error(plain(x), wanted) > NEAR[kind]


def test_rows_of_bfloat16_are_rounded_to_bytes_too() -> None:
    product, x, wanted = made(100, 36, 7)
    half = product(x.bfloat16())
    assert half.dtype is torch.bfloat16
    assert error(half, wanted) < ERROR


def test_large_and_small_rows_are_rounded_alike() -> None:
    product, x, _ = made(64, 64, 5, bias=False)
    factors = torch.tensor([1e-20, 1e-3, 1.0, 1e3, 1e20])[:, None]
    assert torch.allclose(product(x * factors), product(x) * factors, rtol=1e-5)
    assert not product(torch.zeros(2, 64)).any()


@SIZES
@KINDS
def test_a_row_keeps_its_bits(outputs: int, inputs: int, kind: torch.dtype) -> None:
    """Alone and among others, on one thread and on two, whether these divide rows or strips."""
    product, x, _ = made(outputs, inputs, 2 * BLOCK + 5, kind=kind)
    whole, before = product(x), torch.get_num_threads()
    parts = [product(part) for part in x.split((1, 2, 40, BLOCK, BLOCK - 38))]
    try:
        torch.set_num_threads(3 - before if before < 3 else 1)
        beside = [product(x), torch.cat([product(part) for part in x.split(50)])]
    finally:
        torch.set_num_threads(before)
    for one in (torch.cat(parts), *beside):
        assert torch.equal(one, whole)
    assert not torch.equal(whole[1:], whole[:-1])


@KINDS
def test_what_is_not_finite_stays_in_its_row(kind: torch.dtype) -> None:
    product, x, wanted = made(64, 64, 9, kind=kind)
    x[2, 5], x[4, 6] = torch.nan, torch.inf
    found = product(x)
    assert not found[[2, 4]].isfinite().any()
    fine = [0, 1, 3, 5, 6, 7, 8]
    assert error(found[fine], wanted[fine]) < NEAR[kind]


AVX2 = """
import torch
from models.test_products import error, made
from paceline.models.cpu.pages import Pages
from paceline.models.cpu.products import ONE_BYTE

assert not ONE_BYTE
for outputs, inputs, rows in ((64, 64, 1), (100, 36, 7), (200, 2048, 200)):
    product, x, wanted = made(outputs, inputs, rows)
    print(error(product(x), wanted), error(product(x.roll(1, 1)), wanted))
    x[:] = x.abs().amax() * (made(outputs, inputs, rows)[1][:1] > 0)  # the largest sums that there are
    print(bool(product(x).isfinite().all()))
"""


@pytest.mark.skipif(not features().get("avx2"), reason="needs a processor with AVX2")
def test_products_for_avx2_round_less() -> None:
    for numbers in zip(*[iter(printed(AVX2, **HASWELL))] * 3, strict=True):
        assert float(numbers[0]) < 1e-3
        assert float(numbers[1]) > 0.5
        assert numbers[2] == "True"
