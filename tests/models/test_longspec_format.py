"""LongSpec heads in their authors' files: what is published is read, and what is written is read again."""

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
from tests.models.test_heads import INFO, config

THEIRS: dict[str, Any] = {
    "architectures": ["LlamaGlideDecoderLayer"], "model_type": "llama", "hidden_size": 8, "vocab_size": 20,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip
"""The target's config.json, which they leave beside the layer."""


def whole(**more: Any) -> HeadConfig:
    return config("longspec", draft_vocab_size=20, sliding_window=512, **more)


def published(folder: Path, **changes: Any) -> Path:
    """A head with their names, biases, and projections that nothing reads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(THEIRS | changes))
    sizes = {"q": 8, "k": 4, "v": 4}
    tensors = {}
    for attention in ("self_attn", "cross_attn"):
        tensors |= {f"{attention}.{part}_proj.weight": torch.randn(size, 8) for part, size in sizes.items()}
        tensors |= {f"{attention}.{part}_proj.bias": torch.randn(size) for part, size in sizes.items()}
        tensors[f"{attention}.o_proj.weight"] = torch.randn(8, 8)
    tensors |= {f"mlp.{part}_proj.weight": torch.randn(12, 8) for part in ("gate", "up")}
    tensors["mlp.down_proj.weight"] = torch.randn(8, 12)
    norms = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")
    tensors |= {f"{name}.weight": torch.rand(8) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_head_of_longspecs_authors_is_read(tmp_path: Path) -> None:
    """By the meaning of its norms; and what is written is theirs again, but for projections that nothing reads."""
    found, read = read_head(published(tmp_path / "head"), INFO, dtype=torch.float32)
    assert (found.method, found.sliding_window, found.draft_vocab_size, found.kv_heads) == ("longspec", 512, 20, 1)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    for ours, theirs in (
        ("input_layernorm", "input_layernorm"), ("cross_layernorm", "post_self_attention_layernorm"),
        ("post_attention_layernorm", "post_cross_attention_layernorm"), ("cross_attn.q_proj", "cross_attn.q_proj"),
        ("self_attn.k_proj", "self_attn.k_proj"), ("mlp.down_proj", "mlp.down_proj"),
    ):  # fmt: skip
        assert torch.equal(read[f"layers.0.{ours}.weight"], stored[f"{theirs}.weight"])
    assert not any("cross_attn.k" in name for name in read)
    again = write_folder(
        tmp_path / "again", *writer("longspec", "longspec").written(found, read, HeadTarget("x", "y", 4))
    )
    back = load_file(again / "model.safetensors")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], stored[name]) or ".k_proj" in name or ".v_proj" in name for name in stored)
    other, others = read_head(again, INFO, dtype=torch.float32)
    assert other == found
    assert all(torch.equal(others[name], read[name]) for name in read | others)


def test_our_heads_go_there_and_back(tmp_path: Path) -> None:
    """Without biases, which are zeros there."""
    own = whole()
    weights = head_weights(own)
    folder = write_folder(
        tmp_path / "head", *writer("longspec", "longspec").written(own, weights, HeadTarget("x", "y", 4))
    )
    found, read = read_head(folder, INFO, dtype=torch.float32)
    assert replace(found, layer=own.layer) == own
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert not any(bool(read[name].any()) for name in read.keys() - weights.keys())


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"sliding_window": 40}, {}, "a sliding window of 40 tokens, which has 512 here"),
        ({}, {"head.weight": torch.zeros(20, 8)}, "a reduced vocabulary, or an embedding or a head of its own"),
        ({}, {"layers.0.self_attn.o_proj.bias": torch.zeros(8)}, "a bias behind attention"),
    ],
)
def test_what_it_has_no_place_for_is_said(changes: Any, more: Any, message: str) -> None:
    own = replace(whole(), **changes)
    with pytest.raises(ConfigError, match=f"the format 'longspec' has no place for {message}"):
        writer("longspec", "longspec").written(own, head_weights(own) | more, HeadTarget("x", "y", 4))


def test_other_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="attention_sinks=4 is not supported"):
        read_head(published(tmp_path / "head", attention_sinks=4), INFO)
    for wrong, message in (
        ({"sliding_window": 0}, "sliding_window must be an integer of 1 or more, got 0"),
        ({"sliding_window": None}, "sliding_window must be an integer"),
        ({"taps": (1,)}, "taps must be left out for method 'longspec', which reads keys and values"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(whole(), **wrong)
    with pytest.raises(ConfigError, match="sliding_window must be left out for method 'eagle'"):
        config("eagle", sliding_window=9)
