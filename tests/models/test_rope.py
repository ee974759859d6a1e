"""Rotary tables against the formulas of transformers and against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.errors import UnsupportedModelError
from paceline.models import RopeSpec
from paceline.models.layers.rope import Rope

CPU = torch.device("cpu")
SHORT, LONG = [1.0, 1.1, 1.3, 1.5, 1.8, 2.0, 2.5, 3.0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
SCALINGS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 3.0}),
    ("dynamic", {"factor": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 0.7, "truncate": False}),
    (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.9, "mscale_all_dim": 0.4, "beta_fast": 8.0},
    ),
    ("yarn", {"factor": 0.5, "original_max_position_embeddings": 64}),
    ("longrope", {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16}),
    ("longrope", {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16, "factor": 8.0}),
    (
        "longrope",
        {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16, "attention_factor": 1.3},
    ),
    (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    ),
]


def oracle(kind: str, scaling: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **scaling},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    return frequencies, factor


def spec_of(kind: str, scaling: dict[str, Any]) -> RopeSpec:
    return RopeSpec(theta=5000.0, dims=16, kind=kind, scaling=scaling, max_position=64)


@pytest.mark.parametrize(("kind", "scaling"), SCALINGS)
@pytest.mark.parametrize("length", [1, 16, 17, 64, 65, 200])
def test_scaled_kinds_equal_transformers(kind: str, scaling: dict[str, Any], length: int) -> None:
    rope = Rope(spec_of(kind, scaling), CPU)
    frequencies, factor = oracle(kind, scaling, length)
    torch.testing.assert_close(rope.inverse_frequencies(length), frequencies, rtol=1e-6, atol=0)
    assert rope.attention_scaling == pytest.approx(factor, rel=1e-12)
    positions = torch.tensor([0, length - 1, 3])
    cos, sin = rope.cos_sin(positions, length)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "scaling"), SCALINGS)
def test_the_check_catches_another_base(kind: str, scaling: dict[str, Any]) -> None:
    rope = Rope(replace(spec_of(kind, scaling), theta=5100.0), CPU)
    frequencies, _ = oracle(kind, scaling, 65)
    assert not torch.allclose(rope.inverse_frequencies(65), frequencies, rtol=1e-3)


def test_default_by_hand() -> None:
    rope = Rope(RopeSpec(theta=100.0, dims=4), CPU)
    cos, sin = rope.cos_sin(torch.tensor([0, 1, 30]), 31)
    wanted = torch.tensor([[0.0, 0.0], [1.0, 0.1], [30.0, 3.0]])
    torch.testing.assert_close(cos, wanted.cos().repeat(1, 2))
    torch.testing.assert_close(sin, wanted.sin().repeat(1, 2))
    assert cos.dtype == torch.float32
    assert cos.shape == (3, 4)


def test_linear_and_dynamic_by_hand() -> None:
    linear = Rope(RopeSpec(theta=100.0, dims=4, kind="linear", scaling={"factor": 4.0}), CPU)
    torch.testing.assert_close(linear.inverse_frequencies(1), torch.tensor([0.25, 0.025]))
    dynamic = Rope(RopeSpec(theta=100.0, dims=4, kind="dynamic", scaling={"factor": 2.0}, max_position=8), CPU)
    torch.testing.assert_close(dynamic.inverse_frequencies(8), torch.tensor([1.0, 0.1]))
    base = 100.0 * (2.0 * 12 / 8 - 1.0) ** 2  # 400: its square root divides
    torch.testing.assert_close(dynamic.inverse_frequencies(12), torch.tensor([1.0, base**-0.5]))


def test_longrope_by_hand() -> None:
    scaling = {"short_factor": [1.0, 2.0], "long_factor": [5.0, 10.0], "original_max_position_embeddings": 8}
    rope = Rope(RopeSpec(theta=100.0, dims=4, kind="longrope", scaling=scaling, max_position=32), CPU)
    torch.testing.assert_close(rope.inverse_frequencies(8), torch.tensor([1.0, 0.05]))
    torch.testing.assert_close(rope.inverse_frequencies(9), torch.tensor([0.2, 0.01]))
    assert rope.attention_scaling == pytest.approx(math.sqrt(1 + math.log(4) / math.log(8)))


def test_a_table_serves_lengths_in_any_order() -> None:
    for kind, scaling in SCALINGS:
        rope = Rope(spec_of(kind, scaling), CPU)
        for length in (500, 3, 70, 16, 17, 300):
            positions = torch.arange(length)
            cos, sin = rope.cos_sin(positions, length)
            alone = Rope(spec_of(kind, scaling), CPU).cos_sin(positions, length)
            assert torch.equal(cos, alone[0])
            assert torch.equal(sin, alone[1])


def test_no_positions() -> None:
    cos, sin = Rope(RopeSpec(theta=100.0, dims=4), CPU).cos_sin(torch.empty(0, dtype=torch.int64), 0)
    assert cos.shape == sin.shape == (0, 4)


def test_an_unknown_kind_is_rejected_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="'mrope'"):
        Rope(RopeSpec(theta=100.0, dims=4, kind="mrope"), CPU)
