"""The doctor's figures of passes: which forms are measured, by whose time, and when they are not judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from models.checkpoints import old_config
from tiny_llama import CPU, spec_of, tiny_llama, weights_of

from paceline.checkpoints import quantize, spec_from_config, targets
from paceline.doctor import passes
from paceline.models import LayerSpec, MambaSpec, MoeSpec
from paceline.models.passes import eligibility
from paceline.models.runners import NativeRunner

MODEL = tiny_llama(hidden_size=64, head_dim=32, intermediate_size=96, vocab_size=72)
SPEC = spec_of(MODEL.config)


def runner(dtype: torch.dtype = torch.bfloat16, form: Any = None, **options: Any) -> NativeRunner:
    weights = {name: weight.to(dtype) for name, weight in weights_of(MODEL).items()}
    weights = quantize(weights, SPEC, form) if form else weights
    return NativeRunner(SPEC, weights, name="tiny", device=CPU, dtype=dtype, **options)


class Machine:
    """Clocks, and passes that take the CPU time that they are told; `waits`: seconds that others take beside each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: float = 0.0) -> None:
        self.wall, self.cpu, self.count, self.waits = 0.0, 0.0, 0, waits
        monkeypatch.setattr(passes, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(passes, "thread_time", lambda: self.cpu)

    def taking(self, seconds: float) -> passes.Pass:
        def run(rows: int) -> None:
            self.count += 1
            first = 1.0 if self.count <= 4 else 0.0
            self.cpu += seconds * rows + first
            self.wall += seconds * rows + first + self.waits

        return run


@pytest.mark.parametrize("waits", [0.0, 5.0])
def test_only_our_own_time_counts_and_a_busy_machine_is_told(waits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first pass either, which is slow. The wall clock would give 5 s and more for each."""
    machine = Machine(monkeypatch, waits)
    seconds, crowded = passes.least_seconds([machine.taking(0.25), machine.taking(0.5)])
    assert seconds == [{1: 0.25, 8: 2.0}, {1: 0.5, 8: 4.0}]
    assert crowded is (waits > 0)


def test_a_measurement_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Machine(monkeypatch)
    passes.least_seconds([slow.taking(1.0)] * 2)
    assert slow.count == 4 * 3
    quick = Machine(monkeypatch)
    passes.least_seconds([quick.taking(2.0**-20)] * 2)
    quick.count = 4
    passes.least_seconds([quick.taking(2.0**-20)] * 2)
    assert quick.count == 4 + 4 * (passes.TURNS + 1)


@pytest.mark.parametrize(
    ("dtype", "form", "options", "wanted"),
    [
        (torch.float32, None, {}, ["compiled float32", "operators float32"]),
        (torch.bfloat16, None, {}, ["compiled bfloat16", "operators bfloat16", "compiled float32"]),
        (torch.bfloat16, None, {"compiled": False}, ["operators bfloat16", "compiled float32"]),
        (torch.float16, None, {}, ["operators float16", "compiled bfloat16", "compiled float32"]),
        (torch.bfloat16, "int8", {}, ["compiled int8", "operators int8"]),
        (torch.bfloat16, "int4", {}, ["compiled int4", "operators int4"]),
        (torch.float32, None, {"compiled": False, "strict": True}, []),
    ],
)
def test_the_forms_that_could_run_a_model_are_measured(
    dtype: torch.dtype, form: Any, options: dict[str, Any], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of quantised weights in no other dtype: theirs is that of the activations alone."""
    monkeypatch.setattr(passes, "TURNS", 1)
    found = passes.pass_facts(runner(dtype, form, **options))
    assert found is not None
    assert [f"{one.passes} {one.dtype}" for one in found.forms] == wanted
    assert list(found.seconds) == [1, 8]
    assert (found.lacks is None) is (found.passes == "compiled") is bool(found.instructions)
    assert found.fault is None


def test_what_the_machine_lacks_is_told_apart_from_what_the_model_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "TURNS", 1)
    monkeypatch.setattr(eligibility, "machine_lacks", lambda *of, **more: "fused multiply-add")
    lacking, odd = passes.pass_facts(runner()), passes.pass_facts(runner(torch.float16))
    assert lacking is not None
    assert odd is not None
    assert (lacking.passes, lacking.lacks, lacking.fault) == ("operators", "fused multiply-add", "fused multiply-add")
    assert (odd.passes, odd.lacks, odd.fault) == ("operators", "dtype torch.float16", None)


def test_where_there_is_no_room_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "available", lambda device: 4 * passes.ROOM * passes.weights_of(SPEC) // 2)
    found = passes.pass_facts(runner())
    assert found is not None
    assert (found.forms, found.passes) == ([], "compiled")


def test_the_threads_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(passes, "least_seconds", lambda runs: seen.append(torch.get_num_threads()) or ([{}], False))
    torch.set_num_threads(2)
    try:
        passes.measured(SPEC, [(torch.float32, True)], None)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)


def test_the_part_has_enough_weights_or_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = sum(torch.Size(target.shape).numel() for target in targets(SPEC) if target.name.startswith("layers.0."))
    spec = replace(SPEC, layers=(LayerSpec(),) * 3)
    for least, layers in ((1, 1), (layer, 1), (layer + 1, 2), (3 * layer + 1, 3)):
        monkeypatch.setattr(passes, "WEIGHTS", least)
        assert passes.measured_part(spec).num_layers == layers


@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_both_forms_are_run(form: Any) -> None:
    mixture = MoeSpec(experts=5, top_k=2, intermediate=40, norm_top_k=True, bias=True)
    changes = {"layers": (LayerSpec(moe=True),) * 2, "moe": mixture, "activation": "clamped_swiglu"}
    mixer = LayerSpec(attention=False, rope=None, mixer=MambaSpec(channels=64, state_dim=16, rank=16, taps=3))
    for spec in (SPEC, replace(SPEC, **changes), replace(SPEC, layers=(LayerSpec(), mixer))):
        found = dict(passes.random_weights(spec, torch.float32, form))
        plain = {target.name: torch.ones(target.shape) for target in targets(spec)}
        wanted = quantize(plain, spec, form) if form else plain
        assert {name: weight.shape for name, weight in found.items()} == {n: w.shape for n, w in wanted.items()}
        before = torch.random.get_rng_state()
        for compiled, name in ((True, "compiled"), (False, "operators")):
            runs, run = passes.part_pass(passes.measured_part(spec), torch.float32, form, compiled=compiled)
            assert runs == name
            assert all(run(rows).logits.isfinite().all() for rows in passes.ROWS)  # type: ignore[attr-defined]
        assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("weights", [1, 2**24])
@pytest.mark.parametrize("name", ["granitemoehybrid-wide", "phi4flash"])
def test_models_with_states_are_measured(name: str, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "WEIGHTS", weights)
    part = passes.measured_part(spec_from_config(old_config(name)))
    assert part.states
    _, run = passes.part_pass(part, torch.float32, None, compiled=name != "phi4flash")
    assert all(run(rows).logits.isfinite().all() for rows in passes.ROWS)  # type: ignore[attr-defined]
