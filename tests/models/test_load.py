"""Native or fallback, dtypes, devices, contexts, and errors before anything is read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import load_json, reference, save_json

from paceline.errors import CheckpointError, ConfigError, OutOfMemoryError, UnsupportedModelError
from paceline.models import load_runner, resolve_device
from paceline.models.devices import resolve_dtype
from paceline.models.runners import NativeRunner
from paceline.models.runners.fallback.runner import TransformersRunner

TOKENS = list(range(3, 20))
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write("qwen3", "new", tmp_path)


def prefill(runner: Any) -> torch.Tensor:
    logits: torch.Tensor = runner.extend([runner.open()], [TOKENS], all_logits=True).logits
    return logits


def test_known_architectures_are_native(folder: Path) -> None:
    runner: Any = load_runner(folder)
    assert isinstance(runner, NativeRunner)
    info = runner.info
    assert (info.name, info.family, info.vocab_size, info.max_context) == (str(folder), "qwen3", 128, 64)
    assert (info.dtype, info.device) == (torch.float32, CPU)


def test_native_false_takes_the_fallback(folder: Path) -> None:
    runner: Any = load_runner(folder, native=False, dtype="float32", device="cpu")
    assert isinstance(runner, TransformersRunner)
    assert torch.allclose(prefill(runner), reference("qwen3", TOKENS), atol=1e-4)


def test_unknown_architectures_take_the_fallback_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "paceline"):
        runner: Any = load_runner(tmp_path)
    assert isinstance(runner, TransformersRunner)
    assert "'gpt2' is not native" in caplog.text
    assert "using transformers" in caplog.text


def test_a_feature_that_is_not_native_takes_the_fallback(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_json(folder / "config.json")
    save_json(folder / "config.json", config | {"hidden_act": "relu"})
    with caplog.at_level(logging.WARNING, "paceline"):
        assert isinstance(load_runner(folder), TransformersRunner)
    assert "hidden_act='relu'" in caplog.text


def test_an_architecture_nobody_knows(folder: Path) -> None:
    save_json(folder / "config.json", {"model_type": "no-such-model", "architectures": ["NoSuchForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="no-such-model") as caught:
        load_runner(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.25), ("float16", 0.05)])
def test_dtypes(folder: Path, dtype: str, tolerance: float) -> None:
    runner: Any = load_runner(folder, dtype=dtype)
    assert runner.info.dtype == getattr(torch, dtype)
    logits = prefill(runner)
    assert logits.dtype == getattr(torch, dtype)
    assert torch.allclose(logits.float(), reference("qwen3", TOKENS), atol=tolerance)


@pytest.mark.parametrize(("key", "value"), [("dtype", "bfloat16"), ("torch_dtype", "torch.float16")])
def test_auto_is_the_dtype_that_the_checkpoint_names(folder: Path, key: str, value: str) -> None:
    config = load_json(folder / "config.json")
    del config["dtype"]
    save_json(folder / "config.json", config | {key: value})
    assert load_runner(folder).info.dtype == getattr(torch, value.removeprefix("torch."))


def test_a_checkpoint_that_names_no_dtype_has_that_of_its_tensors(folder: Path) -> None:
    config = load_json(folder / "config.json")
    del config["dtype"]
    save_json(folder / "config.json", config)
    tensors = {name: value.bfloat16() for name, value in checkpoints.load_tensors(folder).items()}
    checkpoints.save_tensors(folder / "model.safetensors", tensors)
    assert load_runner(folder).info.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "device", "line"),
    [
        ("float32", "cpu", ""),
        ("bfloat16", "cpu", ""),
        (
            "float16",
            "cpu",
            "float16 on a CPU is computed by PyTorch's operators; compiled passes take dtype='bfloat16'",
        ),
        ("float16", "cuda", ""),
        ("bfloat16", "cuda", "bfloat16 is emulated on this GPU; use dtype='float16' or 'float32'"),
    ],
)
def test_dtypes_are_warned_of_by_what_they_run_in_not_by_guessed_speed(
    dtype: str, device: str, line: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor of AVX2 alone, where compiled bfloat16 is no slower than float32, and an old GPU."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert resolve_dtype("auto", dtype, torch.device(device)) == getattr(torch, dtype)
    assert [record.message[: len(line)] for record in caplog.records] == [line] * bool(line)


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for wrong in ("tpu", "cuda:x", "cpu:1", ""):
        with pytest.raises(ConfigError, match="device must be"):
            resolve_device(wrong)
    with pytest.raises(ConfigError, match="CUDA devices"):
        resolve_device("cuda:99")


def test_contexts(folder: Path) -> None:
    assert load_runner(folder, max_context=10).info.max_context == 10
    for wrong in (1, 65):
        with pytest.raises(ConfigError, match=r"2\.\.64"):
            load_runner(folder, max_context=wrong)


def test_memory_is_checked_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.models.memory.available", lambda device: 10_000)
    monkeypatch.setattr("paceline.models.load.load_weights", lambda *args, **kwargs: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemoryError, match="needs"):
        load_runner(folder)


def test_memory_is_checked_for_the_fallback_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(value.nbytes for value in checkpoints.load_tensors(folder).values())
    monkeypatch.setattr("paceline.models.memory.available", lambda device: size)
    with pytest.raises(OutOfMemoryError, match="for its weights on cpu"):
        load_runner(folder, native=False)
    assert load_runner(folder, native=False, dtype="bfloat16").info.dtype == torch.bfloat16


def test_a_half_written_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="half-written"):
        load_runner(folder)


def test_quantised_checkpoints_do_not_reach_the_fallback(folder: Path) -> None:
    config = load_json(folder / "config.json")
    save_json(
        folder / "config.json",
        config | {"quantization_config": {"quant_method": "gptq", "bits": 4}, "model_type": "unknown"},
    )
    with pytest.raises(UnsupportedModelError, match="GPTQ"):
        load_runner(folder)


def test_wrong_dtype(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype must be one of"):
        load_runner(folder, dtype="int8")
