"""What runs a model on the CPU: compiled passes wherever they cover it, whatever they were measured to cost; PyTorch's
operators elsewhere, and where the user says so. Measured costs belong to the one or the other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import CPU, spec_of, tiny_llama

from paceline.checkpoints import Form, quantize, targets
from paceline.controllers.auto import CostKey
from paceline.errors import ConfigError
from paceline.models import ModelSpec
from paceline.models.passes import eligibility
from paceline.models.runners import NativeRunner

SPEC = spec_of(tiny_llama(hidden_size=64, head_dim=32, intermediate_size=96, vocab_size=72).config)
ODD = spec_of(tiny_llama().config)
LARGE = replace(SPEC, intermediate_size=88_000, layers=SPEC.layers[:1])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(eligibility.SWITCH, raising=False)
    return tmp_path


def runner(spec: ModelSpec, dtype: torch.dtype = torch.float32, form: Form | None = None, **how: bool) -> NativeRunner:
    weights = {target.name: torch.ones(target.shape, dtype=dtype) for target in targets(spec)}
    weights = quantize(weights, spec, form) if form else weights
    return NativeRunner(spec, weights, name="tiny", device=CPU, dtype=dtype, cache_slots=64, **how)


KINDS: list[tuple[torch.dtype, Form | None]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, "int8"),
    (torch.bfloat16, "int4"),
]


@pytest.mark.parametrize(("dtype", "form"), KINDS)
def test_every_kind_of_weights_is_compiled_unless_the_user_says_no(
    dtype: torch.dtype, form: Form | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner(SPEC, dtype, form).info.passes == "compiled"
    assert runner(SPEC, dtype, form, strict=True).info.passes == "compiled"
    assert runner(SPEC, dtype, form, compiled=False).info.passes == "operators"
    assert runner(ODD, dtype, form).info.passes == "operators"
    monkeypatch.setenv(eligibility.SWITCH, "off")
    assert runner(SPEC, dtype, form).info.passes == "operators"
    assert runner(SPEC, dtype, form, strict=True).info.passes == "strict operators"
    assert eligibility.lacks(SPEC, dtype, CPU, quantization=form) == "PACELINE_COMPILED is off"


def test_float16_is_not_covered() -> None:
    assert runner(SPEC, torch.float16).info.passes == "operators"


def test_a_large_model_is_compiled_without_a_measurement(folder: Path) -> None:
    """What one process measures, on a busy machine, is not what others must live with."""
    assert sum(torch.Size(target.shape).numel() for target in targets(LARGE)) > 2**24
    assert runner(LARGE, torch.bfloat16).info.passes == "compiled"
    assert list(folder.rglob("*")) == []


def test_the_switch_is_off_or_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(eligibility.SWITCH, "1")
    assert runner(SPEC).info.passes == "compiled"
    monkeypatch.setenv(eligibility.SWITCH, "flase")
    with pytest.raises(ConfigError, match=r"PACELINE_COMPILED must be 0 \(compiled passes off\) or 1 .*, got 'flase'"):
        runner(SPEC)


def test_costs_belong_to_the_passes_that_they_were_measured_in() -> None:
    """Also those of a process in which a compiler was missing."""
    kinds = ({}, {"compiled": False}, {"compiled": False, "strict": True})
    keys = [CostKey.of(runner(SPEC, **how).info) for how in kinds]
    assert len(set(keys)) == len(kinds)
    assert keys[0] == CostKey.of(runner(SPEC).info)
