"""Where a draft model runs: the fastest device by what was measured, in words; what the user names is taken or
refused.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.assembly import DraftModels, draft_models
from paceline.assembly.draft_models import AUTO, devices_for, level_seconds, place_draft_model, requested_device
from paceline.bench import BUNDLED_DRAFT, BUNDLED_TARGET, bundled_prompts
from paceline.config import EngineConfig
from paceline.errors import ConfigError, OutOfMemoryError

CPU = torch.device("cpu")
TIMES = {"cpu": 3e-4, "cuda:0": 1e-4, "cuda:1": 1e-4}


@pytest.mark.parametrize("first", ["cpu", "cuda:0", "cuda:1"])
def test_the_fastest_device_is_taken_and_of_equal_ones_the_first(first: str) -> None:
    devices = [first, *(device for device in TIMES if device != first)]
    found = place_draft_model(devices, TIMES.__getitem__)
    assert found.device == (first if first != "cpu" else "cuda:0")
    assert found.words("d") == f"draft model 'd' runs on {found.device}: a level takes " + ", ".join(
        f"{1e3 * TIMES[device]:.3g} ms on {device}" for device in devices
    )
    slow = TIMES | {"cuda:0": 1.0, "cuda:1": 1.0}
    assert place_draft_model(devices, slow.__getitem__).device == "cpu", (
        "what is measured decides, not the kind of device"
    )


def test_where_there_is_one_device_nothing_is_measured() -> None:
    found = place_draft_model(["cpu"], lambda device: pytest.fail("measured"))
    assert found.words("d") == "draft model 'd' runs on cpu: there is no other device here"


def test_a_device_without_room_is_left_out() -> None:
    def seconds(device: str) -> float:
        if device.startswith("cuda"):
            raise OutOfMemoryError(f"{device} is full")
        return 1.0

    found = place_draft_model(["cuda:0", "cpu"], seconds)
    assert found.device == "cpu"
    assert found.words("d").endswith("; cuda:0 has no room for it")
    with pytest.raises(OutOfMemoryError, match="cuda:1 is full"):
        place_draft_model(["cuda:1", "cuda:0"], seconds)


def test_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_for(CPU) == ["cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices_for(CPU) == ["cpu", "cuda:0", "cuda:1"]
    assert devices_for(torch.device("cuda")) == ["cuda", "cuda:1", "cpu"]
    assert devices_for(torch.device("cuda:1")) == ["cuda:1", "cuda:0", "cpu"]
    assert requested_device("cuda:0", torch.device("cuda")) == requested_device(None, torch.device("cuda")) == "cuda", (
        "one device, one name"
    )
    assert requested_device("cuda:1", torch.device("cuda")) == "cuda:1"
    assert requested_device("cpu", torch.device("cuda")) == "cpu"
    assert requested_device(AUTO, CPU) == AUTO


@pytest.mark.parametrize("given", ["tpu", "cuda:x", "", 0, ["cpu"]])
def test_what_is_no_device_is_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match="draft_device must be auto, cpu, cuda or cuda:N, got "):
        requested_device(given, CPU)


def test_a_level_is_timed_on_a_scratch_sequence() -> None:
    for runner in (ToyRunner(11), ToyRunner(11, max_context=7), ToyRunner(11, pad=3)):
        assert level_seconds(runner) > 0
        assert runner.open_caches == 0


class Loads:
    """Loads nothing, and says where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.loaded: list[str] = []
        monkeypatch.setattr(draft_models, "load_runner", self.load)
        monkeypatch.setattr(draft_models, "devices_for", lambda target: list(times))
        monkeypatch.setattr(draft_models, "level_seconds", lambda runner: times[str(runner.info.device)])
        monkeypatch.setattr(DraftModels, "check_tokens", lambda *given: None)

    def load(self, folder: Any, *, device: str, **more: Any) -> Any:
        self.loaded.append(device)
        return SimpleNamespace(info=SimpleNamespace(device=torch.device(device)))


def opened() -> DraftModels:
    info: Any = SimpleNamespace(device=CPU)
    return DraftModels(BUNDLED_TARGET, None, info, EngineConfig())  # type: ignore[arg-type]


def test_auto_loads_everywhere_once_and_keeps_the_fastest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    loads, models = Loads(monkeypatch, {"cpu": 2.0, "cuda:0": 1.0}), opened()
    found = models.open(str(BUNDLED_DRAFT), device="auto")
    assert str(found.info.device) == "cuda:0"
    assert models.open(str(BUNDLED_DRAFT), device="auto") is found
    assert loads.loaded == ["cpu", "cuda:0"]
    assert len(models.known) == 1, "what lost is let go"
    assert "runs on cuda:0: a level takes 2e+03 ms on cpu, 1e+03 ms on cuda:0" in caplog.text


def test_what_others_use_stays_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loads, models = Loads(monkeypatch, {"cpu": 2.0, "cuda:0": 1.0}), opened()
    own = models.open(str(BUNDLED_DRAFT))
    assert str(models.open(str(BUNDLED_DRAFT), device="auto").info.device) == "cuda:0"
    assert models.open(str(BUNDLED_DRAFT), device="cpu") is own
    assert loads.loaded == ["cpu", "cuda:0"]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1, device="cpu")


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[Any]:
    return [
        {"prompt_token_ids": plain.chat_ids([{"role": "user", "content": p.prompt}])}
        for p in bundled_prompts()[::9][:3]
    ]


def texts(llm: LLM, prompts: list[Any]) -> list[list[int]]:
    greedy, seeded = (
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=3, max_tokens=12),
    )
    found = [one for params in (greedy, seeded) for one in llm.generate(prompts, params)]
    assert not any(out.metrics.dropped_drafters for out in found)
    return [out.outputs[0].token_ids for out in found]


METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {"model": str(BUNDLED_DRAFT)},
    "pearl": {"model": str(BUNDLED_DRAFT), "overlap": False},
    "s2d": {"model": str(BUNDLED_TARGET)},
    "tli": {"model": str(BUNDLED_DRAFT)},
    "slem": {"model": str(BUNDLED_DRAFT)},
}


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_on_the_cpu_beside_a_target_there(plain: LLM, prompts: list[Any], method: str) -> None:
    config = {"method": method, "num_speculative_tokens": 3, **METHODS[method]}
    models = plain.models
    other, cpu = (plain.with_speculative_config(config | more) for more in ({}, {"draft_device": "cpu"}))
    assert texts(cpu, prompts) == texts(plain, prompts)
    one, two = (getattr(llm.engine.parts.drafter_set.drafters[0], "runner") for llm in (other, cpu))  # noqa: B009  of any drafter
    assert getattr(one, "inner", one) is getattr(two, "inner", two), "it is the target's own device: loaded once"
    with pytest.raises(ConfigError, match="draft_device='cuda:99', but PyTorch sees"):
        plain.with_speculative_config(config | {"draft_device": "cuda:99"})
    assert models is cpu.models


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
def test_auto_on_a_machine_of_one_device_says_so(plain: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "paceline")
    llm = replace_models(plain)
    llm.with_speculative_config({"method": "draft_model", "model": str(BUNDLED_DRAFT), "draft_device": "auto"})
    assert "runs on cpu: there is no other device here" in caplog.text


def replace_models(llm: LLM) -> LLM:
    """The same target, with nothing opened beside it yet."""
    other = llm.with_speculative_config(None)
    other.models = DraftModels(llm.folder, llm.tokenizer, llm.runner.info, replace(llm.config))
    return other


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["cuda:0", "auto"])
@pytest.mark.parametrize("method", METHODS)
def test_a_draft_on_another_device_changes_no_token(plain: LLM, prompts: list[Any], method: str, where: str) -> None:
    """Drawn drafts too: their rows cross to the target's device, where they are judged."""
    config = {"method": method, "num_speculative_tokens": 3, **METHODS[method], "draft_device": where}
    fast = plain.with_speculative_config(config)
    assert texts(fast, prompts) == texts(plain, prompts)
    found = fast.generate(prompts, SamplingParams(temperature=1.0, max_tokens=12))
    assert not any(out.metrics.dropped_drafters for out in found)
    gpu = LLM(speculative_config=None, dtype="float32", seed=1, device="cuda:0")
    beside = gpu.with_speculative_config(config | {"draft_device": "cpu"})
    assert texts(beside, prompts) == texts(gpu, prompts)
