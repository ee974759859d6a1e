"""The choice between compiled passes and PyTorch's operators: measured once, kept, and never for small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_llama import CPU, spec_of, tiny_llama

from paceline.models import LayerSpec, ModelSpec, MoeSpec
from paceline.models.cpu import CompiledDecoder, choice
from paceline.models.decoder import EagerPasses, NativeRunner
from paceline.models.loading import quantize, targets

SPEC = spec_of(tiny_llama(hidden_size=64, head_dim=32, intermediate_size=96, vocab_size=72).config)


class Machine:
    """A clock, and passes that take the times they are told."""

    def __init__(self, compiled: float, operators: float) -> None:
        self.now, self.times, self.passes = 0.0, (compiled, operators), 0

    def clock(self) -> float:
        return self.now

    def measured(self, *model: object) -> tuple[choice.Pass, choice.Pass]:
        def taking(seconds: float) -> choice.Pass:
            def run(rows: int) -> None:
                self.passes += 1
                self.now += seconds * rows + (1.0 if self.passes <= 4 else 0.0)  # the first passes are slow

            return run

        return taking(self.times[0]), taking(self.times[1])


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choice, "WEIGHTS", 1)


def machine(monkeypatch: pytest.MonkeyPatch, compiled: float, operators: float) -> Machine:
    made = Machine(compiled, operators)
    monkeypatch.setattr(choice, "perf_counter", made.clock)
    monkeypatch.setattr(choice, "part_passes", made.measured)
    return made


def runner(spec: ModelSpec = SPEC, **options: bool) -> NativeRunner:
    weights = {target.name: torch.ones(target.shape) for target in targets(spec)}
    return NativeRunner(spec, weights, name="tiny", device=CPU, dtype=torch.float32, **options)


@pytest.mark.parametrize(
    ("operators", "compiled"), [(0.5, False), (0.89, False), (0.91, True), (1.0, True), (3.0, True)]
)
def test_pytorch_serves_where_it_is_clearly_faster(
    operators: float, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 1.0, operators)
    assert isinstance(runner().passes, CompiledDecoder if compiled else EagerPasses)


def test_the_choice_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = machine(monkeypatch, 1.0, 0.5)
    assert not choice.compiled_serves(SPEC, torch.float32, None, NativeRunner)
    assert first.passes > 4
    other = machine(monkeypatch, 0.5, 1.0)
    assert not choice.compiled_serves(SPEC, torch.float32, None, NativeRunner)
    assert not choice.compiled_serves(replace(SPEC, vocab_size=99), torch.float32, None, NativeRunner), (
        "the head is not measured"
    )
    assert other.passes == 0
    (kept,) = (tmp_path / "passes").glob("*.json")
    assert json.loads(kept.read_text())["costs"]["compiled"] is False
    assert choice.compiled_serves(SPEC, torch.bfloat16, None, NativeRunner)
    assert choice.compiled_serves(SPEC, torch.float32, "int8", NativeRunner)
    assert choice.compiled_serves(replace(SPEC, intermediate_size=128), torch.float32, None, NativeRunner)
    assert other.passes > 4


def test_a_measurement_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = machine(monkeypatch, 1e-4, 1e-4), machine(monkeypatch, 1.0, 1.0)
    assert choice.least_seconds(slow.measured()) == pytest.approx([9.0, 9.0])
    assert slow.passes == 4 * 3
    monkeypatch.setattr(choice, "perf_counter", quick.clock)
    monkeypatch.setattr(choice, "BUDGET", 100.0)
    choice.least_seconds(quick.measured())
    assert quick.passes == 4 * (choice.TURNS + 1)


def test_what_is_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = machine(monkeypatch, 1.0, 0.5)
    assert isinstance(runner(compiled=True).passes, CompiledDecoder)
    assert isinstance(runner(compiled=False).passes, EagerPasses)
    assert isinstance(runner(strict=True).passes, CompiledDecoder)
    assert counted.passes == 0


def test_small_models_are_compiled_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = machine(monkeypatch, 1.0, 0.5)
    layer = sum(torch.Size(target.shape).numel() for target in targets(SPEC) if target.name.startswith("layers.0."))
    for weights, layers in ((layer, 1), (layer + 1, 2), (3 * layer, 3)):
        monkeypatch.setattr(choice, "WEIGHTS", weights)
        part = choice.measured_part(SPEC)
        assert part is not None
        assert part.num_layers == layers
    monkeypatch.setattr(choice, "WEIGHTS", 3 * layer + 1)
    assert choice.measured_part(SPEC) is None
    assert isinstance(runner().passes, CompiledDecoder)
    assert counted.passes == 0


@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_both_forms_are_run(form: choice.Form | None) -> None:
    mixture = MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True, bias=True)
    changes = {"layers": (LayerSpec(moe=True),) * 2, "moe": mixture, "activation": "clamped_swiglu"}
    for spec in (SPEC, replace(SPEC, **changes)):
        found = dict(choice.random_weights(spec, torch.float32, form))
        plain = {target.name: torch.ones(target.shape) for target in targets(spec)}
        wanted = quantize(plain, spec, form) if form else plain
        assert {name: weight.shape for name, weight in found.items()} == {n: w.shape for n, w in wanted.items()}
        before = torch.random.get_rng_state()
        for run in choice.part_passes(choice.measured_part(spec), torch.float32, form, NativeRunner):
            assert all(run(rows).logits.isfinite().all() for rows in choice.ROWS)
        assert torch.equal(torch.random.get_rng_state(), before)
