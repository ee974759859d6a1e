"""The self-test of strict mode passes where rows keep their bits, and finds each of the ways in which they may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_llama import CPU, runner_of, spec_of, tiny_llama, tokens
from torch.nn import functional as F

from paceline.models import LayerSpec
from paceline.models.attention import Masks, strict_attention
from paceline.models.layers import Decoder, linear
from paceline.models.layers.linear import make_linear, pinned
from paceline.models.passes import StrictPasses, why_not_strict
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners import NativeRunner, what_varies
from paceline.models.runners.invariance import depth_of_all_kinds
from paceline.models.state import NativeCache

WIDE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 72, "max_position_embeddings": 1024}
DTYPES = [torch.float32, torch.bfloat16]
in_both = pytest.mark.parametrize("dtype", DTYPES)


def made(dtype: torch.dtype = torch.float32, **kwargs: Any) -> NativeRunner:
    return runner_of(tiny_llama(**WIDE).to(dtype), cache_slots=64, **kwargs)


@in_both
def test_compiled_passes_keep_every_row(dtype):
    runner = made(dtype)
    assert isinstance(runner.passes, CompiledDecoder)
    assert what_varies(runner) is None


@in_both
@pytest.mark.parametrize("windows", [(), (40, None)])
def test_operators_in_strict_form_keep_every_row(dtype, windows):
    runner = made(dtype, compiled=False, strict=True, windows=windows)
    assert isinstance(runner.passes, StrictPasses)
    if not runner.passes.row_invariant:
        pytest.skip("matrix products of this machine do not keep the order")
    assert what_varies(runner) is None


def test_the_trial_leaves_nothing_behind():
    runner = made()
    assert what_varies(runner) is None
    assert runner.arena.pool.free == len(runner.arena.pool.counts) - 1
    assert runner.arena.slots <= 5120


@in_both
def test_operators_in_their_fastest_form_are_found_out(dtype):
    assert what_varies(made(dtype, compiled=False)) is not None


def variant(change: Callable[[Decoder], None], dtype: torch.dtype = torch.float32) -> NativeRunner:
    """A runner in strict form with one part changed."""
    runner = made(dtype, compiled=False, strict=True)
    passes = runner.passes
    assert isinstance(passes, StrictPasses)
    assert what_varies(runner) is None
    change(passes.passes.decoder)
    return runner


def reversed_if(condition: Callable[[int], bool], weight: torch.Tensor) -> linear.Map:
    """A product whose order of summation depends on the number of rows."""
    halves = [part.contiguous() for part in weight.split(weight.shape[1] // 2, 1)]

    def product(x: torch.Tensor) -> torch.Tensor:
        if condition(len(x)):
            return sum(F.linear(one, part) for one, part in zip(x.split(x.shape[1] // 2, 1), halves, strict=True))
        return kept(x)

    kept = make_linear(weight, row_invariant="proven")
    return product


@pytest.mark.parametrize("rows", [1, 2, 5, 13, 33, 130])
def test_a_layer_that_sums_otherwise_for_some_number_of_rows_is_found_out(rows):
    down = reversed_if(lambda count: count == rows, torch.randn(64, 96))

    def change(decoder: Decoder) -> None:
        decoder.layers[1].feed_forward = lambda x: down(F.pad(x, (0, 32)))

    assert what_varies(variant(change)) is not None


def test_a_head_that_sums_otherwise_for_many_rows_is_found_out():
    weight = torch.randn(72, 64)

    def change(decoder: Decoder) -> None:
        decoder.to_logits = reversed_if(lambda count: count > 6, weight)

    runner = variant(change)
    assert "logits" in str(what_varies(runner))


def test_dense_attention_is_found_out():
    runner = made(compiled=False, strict=True)
    runner.passes.passes.masks = Masks(torch.float32, CPU, row_invariant=False)
    assert what_varies(runner) is not None


def test_sums_over_slots_instead_of_positions_are_found_out(monkeypatch):
    runner = made(compiled=False, strict=True)
    whole = lambda self, begin, keys, rows: [strict_attention.KeyPiece(0, len(keys))]  # noqa: E731 - one line in place of a method
    monkeypatch.setattr(strict_attention.ChunkPlanner, "pieces", whole)
    assert what_varies(runner) is not None


def test_a_commit_that_moves_nothing_is_found_out(monkeypatch):
    runner = made()
    commit = NativeCache.commit

    def lazy(self: NativeCache, path: Any) -> None:
        commit(self, range(len(path)))

    monkeypatch.setattr(NativeCache, "commit", lazy)
    assert what_varies(runner) == "a row behind an accepted path"


def test_every_kind_of_layer_is_run():
    spec = spec_of(tiny_llama(**WIDE).config)
    assert depth_of_all_kinds(spec) == 1
    near, far = LayerSpec(window=8), LayerSpec()
    assert depth_of_all_kinds(replace(spec, layers=(near, near, near, far, near))) == 4


def test_products_in_blocks_do_not_depend_on_the_number_of_rows():
    weight = torch.randn(48, 64).bfloat16()
    product = pinned(lambda x: F.linear(x, weight))
    x = torch.randn(40, 64).bfloat16()
    want = product(x)
    for rows in range(1, 41):
        assert torch.equal(product(x[-rows:]), want[-rows:])
    assert product(x[:0]).shape == (0, 48)
    assert torch.allclose(want.float(), F.linear(x, weight).float(), atol=0.2)


def test_a_layer_is_multiplied_in_blocks_where_its_rows_depend_on_their_number(monkeypatch):
    monkeypatch.setattr(linear, "KEEPS_ROWS", {})
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    calls: list[int] = []

    def by_number(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        calls.append(len(x))
        return (x @ weight.T) + (1e-3 if len(x) == 3 else 0.0)

    monkeypatch.setattr(linear.F, "linear", by_number)
    product = make_linear(torch.randn(8, 16), row_invariant="proven")
    calls.clear()
    product(torch.randn(35, 16))
    assert calls == [linear.PINNED_ROWS] * 3
    assert not any(linear.KEEPS_ROWS.values())


def test_long_inputs_come_in_parts_with_the_same_rows(monkeypatch):
    runner = made(compiled=False, strict=True)
    ids = tokens(90)
    want = runner.extend([runner.open()], [ids], taps=(0, 2), all_logits=True)
    monkeypatch.setattr(runner.passes, "most_rows", 32)
    found = runner.extend([runner.open()], [ids], taps=(0, 2), all_logits=True)
    assert torch.equal(found.logits, want.logits)
    assert all(torch.equal(found.taps[layer], want.taps[layer]) for layer in (0, 2))
    last = runner.extend([runner.open(), runner.open()], [ids, ids[:40]])
    assert torch.equal(last.logits[0], want.logits[-1])
    assert torch.equal(last.logits[1], want.logits[39])


def test_a_rejection_names_its_reason():
    spec = spec_of(tiny_llama(**WIDE).config)
    assert why_not_strict(spec, CPU) is None
    assert "CUDA" in str(why_not_strict(spec, torch.device("cuda")))
    rope = replace(spec.ropes["default"], kind="dynamic")
    assert "dynamic" in str(why_not_strict(replace(spec, ropes={"default": rope}), CPU))
