"""Attention of rows that all see each other, in float32 and in pairs of bfloat16: its numbers, and that rows keep their
bits.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from paceline.models.cpu.processor import has_fast_bfloat
from paceline.models.cpu.two_sided import QUERIES, TwoSidedAttention

FAST = pytest.mark.skipif(not has_fast_bfloat(), reason="needs a fast instruction for pairs of bfloat16")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=FAST)])
NEAR = {torch.float32: 2e-6, torch.bfloat16: 0.01}

SHAPES = pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 64), (4, 2, 32), (2, 1, 96), (2, 2, 128)])
ROWS = pytest.mark.parametrize("rows", [1, 2 * QUERIES + 3, 300])


def numbers(rows: int, heads: int, size: int) -> torch.Tensor:
    return torch.randn(rows, heads, size, generator=torch.Generator().manual_seed(rows))


def expected(qkv: torch.Tensor, heads: int, kv_heads: int, added: torch.Tensor | None = None) -> torch.Tensor:
    """In float64; query heads come group by group. `added`: to scores, (heads, queries, keys)."""
    queries, keys, values = (part.transpose(0, 1)[None] for part in qkv.double().split((heads, kv_heads, kv_heads), 1))
    keys, values = (part.repeat(1, heads // kv_heads, 1, 1) for part in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, added, scale=0.3)[0].transpose(0, 1).flatten(1)


def error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours.double() - wanted).norm() / wanted.norm())


@SHAPES
@ROWS
@DTYPES
def test_numbers_are_those_of_attention(heads: int, kv_heads: int, size: int, rows: int, dtype: torch.dtype) -> None:
    attention, qkv = TwoSidedAttention(heads, kv_heads, size, 0.3, dtype), numbers(rows, heads + 2 * kv_heads, size)
    wanted = expected(qkv, heads, kv_heads)
    assert error(attention(qkv), wanted) < NEAR[dtype]
    half = attention(qkv.bfloat16())
    assert half.dtype is torch.bfloat16
    assert 1e-4 < error(half, wanted) < 0.01
    if rows > 1:
        assert error(attention(qkv.roll(1, 0)), wanted) > 0.1
        assert error(attention(torch.cat((qkv[:-1], qkv[:1]))), wanted) > 0.01, "the last key counts"


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 64), (4, 2, 32)])
@ROWS
@DTYPES
def test_what_distances_add_is_of_their_query_and_head(
    heads: int, kv_heads: int, size: int, rows: int, dtype: torch.dtype
) -> None:
    attention, qkv = TwoSidedAttention(heads, kv_heads, size, 0.3, dtype), numbers(rows, heads + 2 * kv_heads, size)
    biases, index = 3 * numbers(heads, 1, 2 * rows - 1)[:, 0], torch.arange(rows)
    added = biases[:, index[None] - index[:, None] + rows - 1]
    wanted = expected(qkv, heads, kv_heads, added.double())
    assert error(attention(qkv, biases), wanted) < NEAR[dtype]
    assert error(attention(qkv), expected(qkv, heads, kv_heads)) < NEAR[dtype]
    for wrong in (biases.roll(1, 1), biases.roll(1, 0), biases.flip(1)) if rows > 1 else ():
        assert error(attention(qkv, wrong), wanted) > 0.1


def test_heads_of_sixteen_dimensions_fit_in_float32() -> None:
    qkv = numbers(QUERIES + 5, 6, 16)
    assert error(TwoSidedAttention(2, 2, 16, 0.3, torch.float32)(qkv), expected(qkv, 2, 2)) < NEAR[torch.float32]


@SHAPES
@DTYPES
def test_bits_are_the_same_on_any_number_of_threads(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    attention, qkv = TwoSidedAttention(heads, kv_heads, size, 0.3, dtype), numbers(300, heads + 2 * kv_heads, size)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attention(qkv))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@DTYPES
def test_a_query_keeps_its_bits_whatever_block_it_is_in(dtype: torch.dtype) -> None:
    """Rows that share keys in the same order, of which one comes first, or last of its block."""
    attention, qkv = TwoSidedAttention(2, 2, 64, 0.3, dtype), numbers(200, 6, 64)
    moved = qkv.clone()
    moved[[0, QUERIES - 1], :2] = qkv[[QUERIES - 1, 0], :2]
    first, second = attention(qkv), attention(moved)
    assert torch.equal(second[[QUERIES - 1, 0]], first[[0, QUERIES - 1]])
    assert not torch.equal(first[0], first[QUERIES - 1])


@DTYPES
def test_large_scores_take_one_key(dtype: torch.dtype) -> None:
    """In all rows but those whose best two keys are near ties."""
    attention, qkv = TwoSidedAttention(1, 1, 32, 1e4, dtype), numbers(70, 3, 32)
    scores = qkv[:, 0].to(dtype).double() @ qkv[:, 1].to(dtype).double().T
    first, second = scores.topk(2).values.unbind(1)
    clear, best = first - second > 1e-3, qkv[scores.argmax(1), 2].double()
    assert clear.sum() > 60
    assert error(attention(qkv)[clear], best[clear]) < 0.01
    assert error(TwoSidedAttention(1, 1, 32, 0.1, dtype)(qkv)[clear], best[clear]) > 0.1
