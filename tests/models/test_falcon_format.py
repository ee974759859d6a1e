"""Falcon heads in their authors' names: what is published is read, and what is written is read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import head_weights
from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads import HeadConfig, HeadTarget, read_head, write_folder, writer
from paceline.models.layers import counting, gated
from tests.models.test_heads import INFO, config

THEIRS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 20,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bias": True, "qkv_bias": True,
    "k_mask": 2,
}  # fmt: skip


def whole(**more: Any) -> HeadConfig:
    return config("falcon", draft_vocab_size=20, block_size=3, **more)


def published(folder: Path, **changes: Any) -> tuple[Path, torch.nn.LSTM]:
    """A head with their names, and its LSTM."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(THEIRS | changes))
    torch.manual_seed(0)
    module, tensors = torch.nn.LSTM(16, 8, num_layers=2), {"embed_tokens.weight": torch.randn(20, 8)}
    for part, size in {"q": 8, "k": 4, "v": 4}.items():
        tensors[f"layers.0.self_attn.{part}_proj.weight"] = torch.randn(size, 8)
        tensors[f"layers.0.self_attn.{part}_proj.bias"] = torch.randn(size)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.randn(8, 8)
    tensors |= {f"layers.0.mlp.{part}_proj.weight": torch.randn(12, 8) for part in ("gate", "up")}
    tensors["layers.0.mlp.down_proj.weight"] = torch.randn(8, 12)
    tensors["layers.0.post_attention_layernorm.weight"] = torch.rand(8)
    tensors |= {f"lstm.{name}": tensor.detach() for name, tensor in module.named_parameters()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder, module


@torch.no_grad()
def test_a_head_of_falcons_authors_is_read(tmp_path: Path) -> None:
    """Its gates make of rows what PyTorch's LSTM makes of texts of one token; gates in another order show."""
    folder, module = published(tmp_path / "head")
    found, read = read_head(folder, INFO, dtype=torch.float32)
    assert (found.method, found.block_size, found.draft_vocab_size, found.kv_heads) == ("falcon", 2, 20, 1)

    def fused(*order: int) -> torch.Tensor:
        y = x
        for layer in range(2):
            weight = counting(read[f"lstm.weight_ih_l{layer}"]).chunk(3)
            bias = counting(read[f"lstm.bias_ih_l{layer}"] + read[f"lstm.bias_hh_l{layer}"]).chunk(3)
            y = gated(y @ torch.cat([weight[i] for i in order]).T + torch.cat([bias[i] for i in order]))
        return y

    x = torch.randn(5, 16)
    expected = module(x[None])[0][0]
    assert torch.allclose(fused(0, 1, 2), expected, atol=1e-6)
    assert not torch.allclose(fused(1, 0, 2), expected, atol=1e-2)
    stored = load_file(folder / "model.safetensors")
    again = write_folder(tmp_path / "again", *writer("falcon", "falcon").written(found, read, HeadTarget("x", "y", 4)))
    back = load_file(again / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) for name in stored if "weight_hh" not in name)
    other, others = read_head(again, INFO, dtype=torch.float32)
    assert other == found
    assert all(torch.allclose(others[name], read[name]) for name in read | others)


def test_our_heads_go_there_and_back(tmp_path: Path) -> None:
    """Without biases, which are zeros there."""
    own = whole()
    weights = head_weights(own)
    written = writer("falcon", "falcon").written(own, weights, HeadTarget("x", "y", 4))
    found, read = read_head(write_folder(tmp_path / "head", *written), INFO, dtype=torch.float32)
    assert replace(found, layer=own.layer) == own
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert not any(bool(read[name].any()) for name in read.keys() - weights.keys())


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({}, {"head.weight": torch.zeros(20, 8)}, "a reduced vocabulary, or a head of its own"),
        ({"layer": {**config("falcon").layer, "head_dim": 8}}, {}, "attention heads that are together wider"),
    ],
)
def test_what_it_has_no_place_for_is_said(changes: Any, more: Any, message: str) -> None:
    own = replace(whole(), **changes)
    with pytest.raises(ConfigError, match=f"the format 'falcon' has no place for {message}"):
        writer("falcon", "falcon").written(own, head_weights(own) | more, HeadTarget("x", "y", 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_hidden_layers": 2}, "num_layers must be"), ({"k_mask": 0}, "block_size must be"), ({"x": 1}, "x=1 is not")],
)
def test_other_heads_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_head(published(tmp_path / "head", **changes)[0], INFO)
