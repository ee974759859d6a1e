"""What a model needs, what is at hand, and what is done when the one exceeds the other."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.checkpoints import OLD

from paceline.checkpoints import spec_from_config
from paceline.errors import OutOfMemoryError
from paceline.models import available
from paceline.models.memory import HEADROOM, estimate, fit_context
from paceline.models.state.free_memory import cgroup_available

CPU = torch.device("cpu")
SPEC = spec_from_config({"model_type": "llama", **OLD, "max_position_embeddings": 100_000})
PER_TOKEN = 2 * 3 * 2 * 16 * 4  # keys and values, layers, kv heads, head dim, bytes


def fit(budget: int, max_context: int | None = None) -> int:
    return fit_context(SPEC, name="tiny", dtype=torch.float32, device=CPU, max_context=max_context, budget=budget)


def test_estimate_by_hand() -> None:
    need = estimate(SPEC, torch.float32, CPU)
    layer = 128 * 64 + 64 * 64 + 3 * 96 * 64 + 2 * 64  # qkv, o, the MLP, two norms
    assert need.weights == 4 * (2 * 128 * 64 + 64 + 3 * layer)
    assert need.packing == 4 * layer
    assert need.per_token == PER_TOKEN
    assert need.total(10) == need.weights + need.packing + 10 * PER_TOKEN
    assert estimate(SPEC, torch.bfloat16, CPU).weights * 2 == need.weights


def test_a_tied_packed_head_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tied = replace(SPEC, tied=True)
    for packs in (True, False):
        monkeypatch.setattr("paceline.models.memory.can_pack", lambda device, dtype, packs=packs: packs)
        extra = estimate(tied, torch.float32, CPU).packing - estimate(SPEC, torch.float32, CPU).packing
        assert extra == (128 * 64 * 4 if packs else 0)


@pytest.mark.parametrize("tied", [False, True])
def test_quantised_weights_take_a_byte_each_and_one_dense_tensor_at_a_time(tied: bool) -> None:
    spec = replace(SPEC, tied=tied)
    need, embed = estimate(spec, torch.bfloat16, CPU, quantization="int8"), 2 * 128 * 64
    layer = 128 * 64 + 64 * 64 + 3 * 96 * 64 + 4 * (128 + 64 + 192 + 64) + 2 * 2 * 64  # a scale per output, two norms
    assert need.weights == embed + (128 * 64 + 4 * 128) + 2 * 64 + 3 * layer
    assert need.packing == 2 * 192 * 64 + layer
    assert need.per_token == PER_TOKEN // 2
    assert need.weights < estimate(spec, torch.bfloat16, CPU).weights * (0.8 if tied else 0.7)


def test_int4_weights_take_half_a_byte_and_a_scale_and_a_zero_a_group() -> None:
    need, embed = estimate(SPEC, torch.bfloat16, CPU, quantization="int4"), 2 * 128 * 64
    inputs = ((128, 64), (64, 64), (192, 64), (64, 96))  # qkv, o, the MLP
    layer = sum(out * wide // 2 + 4 * out * wide // 32 for out, wide in inputs) + 2 * 2 * 64
    assert need.weights == embed + (128 * 64 + 4 * 128) + 2 * 64 + 3 * layer
    assert need.total(100) < estimate(SPEC, torch.bfloat16, CPU, quantization="int8").total(100)


def test_layers_with_a_window_hold_no_more_than_twice_window_and_chunk() -> None:
    layers = tuple(replace(layer, window=2000 if i else None) for i, layer in enumerate(SPEC.layers))
    spec, held = replace(SPEC, layers=layers), 2 * (2000 + 512)
    need, all_of_it = estimate(spec, torch.float32, CPU), estimate(SPEC, torch.float32, CPU)
    assert need.cache(held) == all_of_it.cache(held)
    assert need.cache(held + 300) - need.cache(held) == 100 * PER_TOKEN
    for context in (4000, 50_000):
        assert need.fitting(need.total(context)) == context
    alike = replace(SPEC, layers=layers[1:2] * 3)
    assert estimate(alike, torch.float32, CPU).cache(90_000) == held * PER_TOKEN


def test_the_context_asked_for_or_an_error() -> None:
    need = estimate(SPEC, torch.float32, CPU)
    enough = int(need.total(3000) / HEADROOM) + 2
    assert fit(enough, 3000) == 3000
    with pytest.raises(
        OutOfMemoryError, match=r"tiny needs .* GiB on cpu .* weights in float32.* cache for 4000 tokens"
    ) as caught:
        fit(enough, 4000)
    assert "\n" not in str(caught.value)


def test_a_context_nobody_asked_for_is_shortened(caplog: pytest.LogCaptureFixture) -> None:
    need = estimate(SPEC, torch.float32, CPU)
    with caplog.at_level(logging.WARNING, "paceline"):
        found = fit(int(need.total(5000) / HEADROOM) + 2)
    assert abs(found - 5000) <= 1
    assert "limited to" in caplog.text
    assert fit(10**12) == 100_000
    with pytest.raises(OutOfMemoryError):
        fit(need.total(1000))


def test_something_is_available_here() -> None:
    assert 10**7 < available(CPU) < 10**14


def test_control_groups(tmp_path: Path) -> None:
    assert cgroup_available(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert cgroup_available(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_available(tmp_path) == 700
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 50\n")
    assert cgroup_available(tmp_path) == 750
    old = tmp_path / "v1" / "memory"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text("500\n")
    (old / "memory.usage_in_bytes").write_text("600\n")
    assert cgroup_available(tmp_path / "v1") == 0
