"""Whole files, shards, and every way in which files can be broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models.checkpoints import load_json, save_json, save_tensors

from paceline.checkpoints import SINGLE, Checkpoint
from paceline.checkpoints.checkpoint import INDEX
from paceline.errors import CheckpointError, UnsupportedModelError

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_tensors(tmp_path / SINGLE, {"a": A, "b": B})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_tensors(tmp_path / "model-00001-of-00002.safetensors", {"a": A})
    save_tensors(tmp_path / "model-00002-of-00002.safetensors", {"b": B})
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    save_json(tmp_path / INDEX, {"metadata": {"total_size": 32}, "weight_map": names})
    return tmp_path


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_names_shapes_and_data(kind: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(kind))
    assert {name: entry.shape for name, entry in checkpoint.entries.items()} == {"a": (2, 3), "b": (4,)}
    assert torch.equal(checkpoint.tensor("a"), A)
    assert torch.equal(checkpoint.tensor("b"), B)
    assert checkpoint.dtype() is torch.float32


def test_the_data_is_mapped_not_copied(single: Path) -> None:
    checkpoint = Checkpoint(single)
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")
    assert first.data_ptr() == second.data_ptr()


def _cut_header(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:20])


def _cut_data(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-5])


def _empty(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"")


def _text(folder: Path) -> None:
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345678\n")


def _no_json(folder: Path) -> None:
    (folder / SINGLE).write_bytes((6).to_bytes(8, "little") + b"nojson")


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (_cut_header, "cut off in its header"),
        (_cut_data, "half-written: .* bytes of"),
        (_empty, "cut off in its header"),
        (_text, "pointer of Git LFS, not the weights; run `git lfs pull`"),
        (_no_json, "not a safetensors file"),
    ],
)
def test_broken_files(single: Path, harm: Callable[[Path], None], text: str) -> None:
    Checkpoint(single)
    harm(single)
    _expect(single, text)


def _lose_shard(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def _break_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def _empty_index(folder: Path) -> None:
    save_json(folder / INDEX, {"weight_map": {}})


def _escape(folder: Path) -> None:
    save_json(folder / INDEX, {"weight_map": {"a": "../model.safetensors"}})


def _promise_more(folder: Path) -> None:
    index = load_json(folder / INDEX)
    index["weight_map"]["c"] = index["weight_map"]["a"]
    save_json(folder / INDEX, index)


def _lose_index(folder: Path) -> None:
    (folder / INDEX).unlink()


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (_lose_shard, "lacks model-00002-of-00002.safetensors of 2 shards"),
        (_break_index, "index.json cannot be read"),
        (_empty_index, "no weight_map"),
        (_escape, "not a file of the same folder"),
        (_promise_more, "c named in model.safetensors.index.json but in no file"),
        (_lose_index, "no weights in"),
    ],
)
def test_broken_shards(sharded: Path, harm: Callable[[Path], None], text: str) -> None:
    Checkpoint(sharded)
    harm(sharded)
    _expect(sharded, text)


def _expect(folder: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=text) as caught:
        Checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_integer_weights_are_rejected(tmp_path: Path) -> None:
    save_tensors(tmp_path / SINGLE, {"a": torch.zeros(3, dtype=torch.int8)})
    with pytest.raises(UnsupportedModelError, match="stored as I8"):
        Checkpoint(tmp_path).tensor("a")
