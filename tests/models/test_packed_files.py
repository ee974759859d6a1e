"""Packed weights on disk: the next start takes them, and only where they are those of this model in this form."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from models import checkpoints
from models.test_block_products import llama
from models.test_gguf import write as write_gguf
from models.test_latent_passes import SIZES as LATENT
from safetensors import safe_open
from tiny_checkpoint import write
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.errors import ConfigError
from paceline.models import load_runner
from paceline.utils import make_room

TOKENS = list(range(3, 20))
SIZES = {"vocab_size": 96, "hidden_size": 64, "head_dim": 32, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, which are kept of the smallest models here."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("paceline.checkpoints.packed_files.LEAST", 1)
    return tmp_path / "cache" / "packed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", **SIZES)


def logits(path: Path, **how: Any) -> torch.Tensor:
    runner: Any = load_runner(path, **({"dtype": "float32"} | how))
    found: torch.Tensor = runner.extend([runner.open()], [TOKENS], all_logits=True).logits
    return found


def data_of(file: Path) -> int:
    """Bytes before the data of a safetensors file."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def spoil(file: Path) -> None:
    """Change what a file holds, and nothing about it."""
    raw = bytearray(file.read_bytes())
    raw[data_of(file) :] = bytes(len(raw) - data_of(file))
    file.write_bytes(raw)


def model(kind: str, folder: Path) -> Path:
    if kind == "blocks":
        return write_gguf(folder / "m.gguf", "llama", llama(), Kind.Q4_1)
    if kind == "deepseek_v2":
        config = AutoConfig.for_model("deepseek_v2", **LATENT, q_lora_rank=64, moe_intermediate_size=64)
        checkpoints.perturb(AutoModelForCausalLM.from_config(config)).save_pretrained(folder / "model")
        return folder / "model"
    if kind in checkpoints.WIDE:
        return checkpoints.write(f"{kind}-wide", "new", folder / "model")
    return write(folder / "model", **SIZES, tie_word_embeddings=kind == "tied")


@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["blocks", "gpt_oss", "qwen2_moe", "cohere2", "deepseek_v2", "tied", "untied"])
def test_the_second_start_gives_the_same_bits_from_what_the_first_has_packed(
    tmp_path: Path, packed: Path, kind: str, form: str | None
) -> None:
    path = model(kind, tmp_path)
    first = logits(path, quantization=form)
    (file,) = packed.iterdir()
    assert data_of(file) % 4096 == 0
    with safe_open(file, framework="pt") as opened:  # it is what its name says
        assert "0" in opened.keys()  # noqa: SIM118 - it is no mapping
    assert torch.equal(logits(path, quantization=form), first)
    assert list(packed.iterdir()) == [file]
    spoil(file)
    assert not torch.equal(logits(path, quantization=form), first)  # so that is what was read


def test_each_form_of_a_model_has_a_file_of_its_own(folder: Path, packed: Path) -> None:
    forms: list[dict[str, Any]] = [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"head_rows": range(40)}]
    found = [logits(folder, **one) for one in forms]
    assert len(list(packed.iterdir())) == len(forms)
    assert all(torch.equal(logits(folder, **one), first) for one, first in zip(forms, found, strict=True))


@pytest.mark.parametrize("same_time", [True, False])
def test_a_changed_model_of_the_same_size_is_packed_anew(folder: Path, tmp_path: Path, same_time: bool) -> None:
    file = folder / "model.safetensors"
    before, state = logits(folder), file.stat()
    other = write(tmp_path / "other", seed=1, **SIZES)
    expected = logits(other)
    file.write_bytes((other / "model.safetensors").read_bytes())
    if same_time:
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns == state.st_mtime_ns) == (state.st_size, same_time)
    assert torch.equal(logits(folder), expected)
    assert not torch.equal(before, expected)


def test_another_version_packs_anew(folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits(folder)
    (file,) = packed.iterdir()
    spoil(file)
    monkeypatch.setattr("paceline.models.load.layout", lambda: ["the next version"])
    assert torch.equal(logits(folder), first)
    assert len(list(packed.iterdir())) == 2


@pytest.mark.parametrize(
    "harm",
    [
        "cut",
        "empty",
        "no header",
        "longer header",
        "another place",
        "byte in header",
        "another model's",
        "of another kind",
    ],
)
def test_a_broken_file_is_made_anew_with_one_line(
    folder: Path, tmp_path: Path, packed: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(folder)
    (file,) = packed.iterdir()
    whole = file.read_bytes()
    text = b'{"a": 1}'
    broken = {
        "cut": whole[:-100],
        "empty": b"",
        "longer header": (2**60).to_bytes(8, "little") + whole[8:],
        "another place": whole.replace(b'"data_offsets": [0', b'"data_offsets": [64', 1).replace(b"  ", b" ", 1),
        "byte in header": whole[:100] + b"\xff" + whole[101:],
        "no header": b"\xff" * len(whole),
        "another model's": whole.replace(b"float32", b"float31"),
        "of another kind": len(text).to_bytes(8, "little") + text,
    }
    file.write_bytes(broken[harm])
    with caplog.at_level(logging.INFO, "paceline"):
        assert torch.equal(logits(folder), first)
    (line,) = [record.getMessage() for record in caplog.records if "packed weights" in record.getMessage()]
    assert str(file) in line
    assert len(line) < 500
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_no_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = logits(folder)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "paceline"):
        assert torch.equal(logits(folder), first)
    assert not caplog.records


def test_small_models_are_packed_each_time(folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.checkpoints.packed_files.LEAST", 10**7)
    logits(folder)
    assert not packed.exists()


def test_what_was_used_longest_ago_goes_first(
    folder: Path, tmp_path: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(folder)
    (first,) = packed.iterdir()
    logits(folder, dtype="bfloat16")
    (second,) = {*packed.iterdir()} - {first}
    for age, file in enumerate((second, first)):
        os.utime(file, (1e9 - age, 1e9 - age))
    size = first.stat().st_size
    logits(folder)  # which uses the first again
    monkeypatch.setenv("PACELINE_CACHE_GB", str(2.2 * size / 1e9))
    logits(write(tmp_path / "other", seed=1, **SIZES))
    assert {first} < {*packed.iterdir()}
    assert second not in packed.iterdir()
    monkeypatch.setenv("PACELINE_CACHE_GB", "0")
    before = {*packed.iterdir()}
    logits(write(tmp_path / "third", seed=2, **SIZES))
    assert {*packed.iterdir()} == before


def test_room_is_made_up_to_the_limit_and_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", "1e-6")  # 1000 bytes
    own = f"d.{os.getpid()}.new"
    for age, name in enumerate("abc"):
        (tmp_path / name).write_bytes(bytes(300))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / own).write_bytes(bytes(10))
    assert make_room(tmp_path, 90)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", own]
    os.utime(tmp_path / own, (1e9, 1e9))
    assert make_room(tmp_path, 400)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert not make_room(tmp_path, 1001)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_process_left_that_is_gone_is_removed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", "1e-6")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    for owner in (gone.pid, os.getpid()):
        (tmp_path / f"weights.{owner}.new").write_bytes(bytes(10))
    assert make_room(tmp_path, 90)
    assert [path.name for path in tmp_path.iterdir()] == [f"weights.{os.getpid()}.new"]


@pytest.mark.parametrize("given", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("PACELINE_CACHE_GB", given)
    with pytest.raises(ConfigError, match=f"PACELINE_CACHE_GB must be a number of gigabytes, got '{given}'"):
        make_room(folder, 1)
