"""Fusing, casting, and tensors that are missing, surplus or of the wrong shape."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from models import checkpoints
from models.checkpoints import CASES, STYLES, Tensors, load_tensors, save_tensors

from paceline.checkpoints import (
    SINGLE,
    Checkpoint,
    load_weights,
    read_config,
    spec_from_config,
    targets,
    untie_if_different,
    weight_bytes,
)
from paceline.errors import CheckpointError, UnsupportedModelError

CPU = torch.device("cpu")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    spec = spec_from_config(read_config(folder))
    return load_weights(Checkpoint(folder), spec, device=CPU, dtype=dtype)


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; dots are written as __ in names."""
    tensors: dict[str, torch.Tensor | None] = {**load_tensors(folder)}
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_tensors(folder / SINGLE, {name: value for name, value in tensors.items() if value is not None})


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("-wide")])
def test_all_styles_give_the_same_shape_and_canonical_weights(name: str, tmp_path: Path) -> None:
    """So that one of them is enough in other tests."""
    loaded = [load(checkpoints.write(name, style, tmp_path / style)) for style in STYLES]
    spec, *others = (spec_from_config(read_config(tmp_path / style)) for style in STYLES)
    assert others == [spec, spec]
    assert {key: tuple(value.shape) for key, value in loaded[0].items()} == {t.name: t.shape for t in targets(spec)}
    for other in loaded[1:]:
        assert other.keys() == loaded[0].keys()
        assert all(torch.equal(other[key], value) for key, value in loaded[0].items())


def test_the_order_inside_fused_tensors(tmp_path: Path) -> None:
    weights = load(checkpoints.write("llama3", "new", tmp_path))
    stored = load_tensors(tmp_path)
    at = "model.layers.1.self_attn."
    wanted = torch.cat([stored[f"{at}{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(weights["layers.1.qkv.weight"], wanted)
    assert torch.equal(weights["layers.1.qkv.bias"], torch.cat([stored[f"{at}{part}_proj.bias"] for part in "qkv"]))
    assert not torch.equal(wanted, torch.cat([stored[f"{at}{part}_proj.weight"] for part in "kqv"]))
    at = "model.layers.1.mlp."
    wanted = torch.cat([stored[f"{at}gate_proj.weight"], stored[f"{at}up_proj.weight"]])
    assert torch.equal(weights["layers.1.gate_up.weight"], wanted)


def test_experts_are_stacked(tmp_path: Path) -> None:
    weights = load(checkpoints.write("mixtral", "old", tmp_path))
    stored = load_tensors(tmp_path)
    at = "model.layers.2.block_sparse_moe.experts.3."
    gate_up = torch.cat([stored[f"{at}w1.weight"], stored[f"{at}w3.weight"]])
    assert torch.equal(weights["layers.2.experts.gate_up"][3], gate_up)
    assert torch.equal(weights["layers.2.experts.down"][3], stored[f"{at}w2.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = checkpoints.write("qwen2", "new", tmp_path)
    cast, whole = load(folder, dtype), load(folder)
    assert all(torch.equal(cast[key], value.to(dtype)) for key, value in whole.items())
    spec = spec_from_config(read_config(folder))
    assert weight_bytes(spec, dtype) == {key: value.nbytes for key, value in cast.items()}


def test_missing(tmp_path: Path) -> None:
    folder = checkpoints.write("llama", "new", tmp_path)
    edit(folder, model__layers__1__self_attn__k_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks layers.1.self_attn.k_proj.weight; the checkpoint is incomplete"):
        load(folder)


def test_missing_head(tmp_path: Path) -> None:
    folder = checkpoints.write("llama", "new", tmp_path)
    edit(folder, lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight"):
        load(folder)


def test_one_expert_missing(tmp_path: Path) -> None:
    folder = checkpoints.write("qwen3_moe", "old", tmp_path)
    edit(folder, model__layers__1__mlp__experts__4__up_proj__weight=None)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.4.up_proj.weight"):
        load(folder)


def test_surplus(tmp_path: Path) -> None:
    folder = checkpoints.write("llama", "new", tmp_path)
    edit(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(
        CheckpointError, match=r"holds layers.0.self_attn.q_proj.bias which its architecture does not have"
    ):
        load(folder)


def test_wrong_shape(tmp_path: Path) -> None:
    folder = checkpoints.write("llama", "new", tmp_path)
    edit(folder, model__layers__0__mlp__down_proj__weight=torch.zeros(64, 95))
    with pytest.raises(
        CheckpointError, match=r"down_proj.weight has shape \(64, 95\), but its configuration asks for \(64, 96\)"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model__layers__0__self_attn__q_proj__lora_A__weight", "LoRA"),
        ("model__layers__0__self_attn__q_proj__qweight", "GPTQ or AWQ"),
        ("model__layers__0__self_attn__q_proj__weight_scale", "FP8"),
        ("model__layers__0__mlp__up_proj__weight__quant_state__bitsandbytes__nf4", "bitsandbytes"),
    ],
)
def test_foreign_tensors_are_rejected_by_name(name: str, text: str, tmp_path: Path) -> None:
    folder = checkpoints.write("llama", "new", tmp_path)
    edit(folder, **{name: torch.zeros(3)})
    with pytest.raises(UnsupportedModelError, match=text):
        load(folder)


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    folder = checkpoints.write("llama", "new", tmp_path)
    edit(folder, norm__weight=torch.ones(64))
    with pytest.raises(CheckpointError, match="only in their prefix"):
        load(folder)


def test_a_tied_head_that_differs_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoints.write("qwen2", "old", tmp_path)
    spec = spec_from_config(read_config(folder))
    assert spec.tied
    assert untie_if_different(Checkpoint(folder), spec) is spec
    edit(folder, lm_head__weight=torch.ones(128, 64))
    with caplog.at_level(logging.WARNING, "paceline"):
        untied = untie_if_different(Checkpoint(folder), spec)
    assert not untied.tied
    assert "ties head and embedding" in caplog.text
    weights = load_weights(Checkpoint(folder), untied, device=CPU, dtype=torch.float32)
    assert torch.equal(weights["head.weight"], torch.ones(128, 64))
