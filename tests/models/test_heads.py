"""Folders of trained heads: what is written is read again, and what is no head for this target is rejected by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.stand_ins import head_weights
from paceline.errors import CheckpointError, ConfigError, PacelineError, UnsupportedModelError
from paceline.models import ModelInfo
from paceline.models.heads import HeadConfig, read_head, tensors_of, write_head
from paceline.models.heads.head_config import BLOCKS, HEAD_METHODS, SINGLE, TAPPED, WITH_LAYER

LAYER = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 64}
INFO = ModelInfo(
    name="target",
    family="llama",
    vocab_size=20,
    hidden_size=8,
    num_layers=4,
    max_context=64,
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    weight_bytes=1,
    fingerprint="llama-8x4-2/1x4-12-20-bfloat16-int8",
)


OF_METHOD: dict[str, dict[str, Any]] = {
    "dovetail": {"num_layers": 2},
    "p_eagle": {"mask_token_id": 7, "num_layers": 2},
    "longspec": {"sliding_window": 5},
    "falcon": {"block_size": 3},
    "mlp_speculator": {"inner_size": 6},
    "fspad": {"inner_size": 5},
    "lud": {"draft_vocab_size": 20, "num_layers": 1, "mask_token_id": 7},
    "ppd": {"draft_vocab_size": 20, "num_layers": 1},
    "hidden_transfer": {"draft_vocab_size": 20, "num_layers": 1, "taps": (1, 2, 2)},
    "dspark": {
        "markov_rank": 3,
        "markov_head_type": "gated",
        "sample_from_anchor": True,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}


def config(method: Any = "eagle", **more: Any) -> HeadConfig:
    """A head of that method for `INFO`."""
    given: dict[str, Any] = {"hidden_size": 8, "vocab_size": 20, "draft_vocab_size": 10, "normed": method not in TAPPED}
    if method in WITH_LAYER:
        given["layer"] = LAYER
    if method in TAPPED:
        given["taps"] = (0, 1, 3)
    if method in BLOCKS:
        given |= {"taps": (-1, 2), "num_layers": 2, "block_size": 4, "mask_token_id": 3}
    if method not in (*SINGLE, *BLOCKS):
        given |= {"num_heads": 3, "num_layers": 2}
    return HeadConfig(method=method, **(given | OF_METHOD.get(method, {}) | more))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("method", HEAD_METHODS)
def test_what_is_written_is_read(method: str, shared: bool, tmp_path: Path) -> None:
    own = config(method, provenance={"tokens": 5})
    weights = head_weights(own, shared=shared)
    assert weights
    write_head(tmp_path / "head", own, weights)
    found, read = read_head(tmp_path / "head", INFO, dtype=torch.float32)
    assert found == own
    assert read.keys() == weights.keys()
    assert all(read[name].dtype == weights[name].dtype and torch.equal(read[name], weights[name]) for name in read)


def test_weights_have_the_targets_dtype(tmp_path: Path) -> None:
    read = read_head(write_head(tmp_path / "head", config(), head_weights(config())), INFO)[1]
    assert read["fc.weight"].dtype == torch.bfloat16
    assert read["draft_to_target"].dtype == torch.int64


def test_a_head_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A new one that is not whole leaves the old one alone; nothing stays beside them."""
    folder = write_head(tmp_path / "head", config(), head_weights(config()))
    with pytest.raises(CheckpointError, match=r"lacks fc\.weight and"):
        write_head(folder, config(), {"draft_to_target": torch.arange(10)})
    new = head_weights(config(), seed=1)
    write_head(folder, config(), new)
    assert torch.equal(read_head(folder, INFO, dtype=torch.float32)[1]["fc.weight"], new["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_every_shape_of_a_tensor_is_checked(tmp_path: Path) -> None:
    own = config("eagle3")
    weights = head_weights(own)
    shapes = {one.name: one.shape for one in tensors_of(own)}
    assert shapes["layers.0.self_attn.k_proj.weight"] == (4, 16)
    assert shapes["fc.weight"] == (8, 24)
    for name in weights:
        with pytest.raises(CheckpointError, match=f"{name} must have shape"):
            write_head(tmp_path / "head", own, weights | {name: weights[name].repeat_interleave(2, 0)})


TARGET = {"name": "trained-for-me", "fingerprint": "llama-8x4-2/1x4-12-20-float32", "tokenizer": "aa"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, r"is for hidden_size 8, but target has 16"),
        ({"vocab_size": 21}, r"is for vocab_size 20, but target has 21"),
        ({"fingerprint": "llama-8x5-2/1x4-12-20-bfloat16"}, r"is for shape llama-8x4.*, but target has llama-8x5"),
        ({"num_layers": 2}, r"num_layers 3, but target has 2"),
    ],
)
def test_a_head_of_another_model_is_rejected(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    own = config("eagle3", target=TARGET)
    folder = write_head(tmp_path / "head", own, head_weights(own))
    assert read_head(folder, INFO)[0].target == TARGET  # another dtype and rounding are no other model
    read_head(folder, replace(INFO, fingerprint="transformers-llama-1f-float32"))
    with pytest.raises(CheckpointError, match=message):
        read_head(folder, replace(INFO, **changes))
    with pytest.raises(CheckpointError, match=r"trained for trained-for-me\) is for tokenizer aa, but target has bb"):
        read_head(folder, INFO, tokenizer=lambda: "bb")


def test_pickled_heads_are_rejected_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match=r"pickled weights only \(pytorch_model.bin\).*save_file"):
        read_head(tmp_path, INFO)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("method", "eagle9", "method must be one of"),
        ("hidden_size", 0, "hidden_size must be an integer of 1 or more, got 0"),
        ("draft_vocab_size", 21, r"draft_vocab_size must be an integer in 1..20, got 21"),
        ("taps", [1, 2], "taps must name at most one layer for method 'eagle'"),
        ("taps", "x", "taps must be a list of layers"),
        ("layer", {"num_attention_heads": 2}, "layer must have intermediate_size"),
        ("layer", LAYER | {"num_key_value_heads": 3}, "layer.num_key_value_heads must divide"),
        ("layer", LAYER | {"rope_thetta": 3}, "layer does not know 'rope_thetta'; did you mean rope_theta"),
        ("colour", 1, "paceline_head does not know 'colour'"),
        ("normed", 1, "normed must be true or false"),
    ],
)
def test_a_wrong_config_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    write_head(tmp_path, config(), head_weights(config()))
    found = json.loads((tmp_path / "config.json").read_text())
    found["paceline_head"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=message):
        read_head(tmp_path, INFO)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', '{"paceline_head": 3}'])
def test_what_is_no_head_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="give the folder of a"):
        read_head(tmp_path, INFO)


@pytest.mark.parametrize("ids", [torch.arange(10).flip(0), torch.arange(11, 21), torch.arange(10).int()])
def test_draft_ids_ascend_within_the_vocabulary(ids: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="draft_to_target must hold ascending int64 token ids below 20"):
        write_head(tmp_path, config(), head_weights(config()) | {"draft_to_target": ids})


def test_a_layer_is_for_methods_that_have_one() -> None:
    with pytest.raises(ConfigError, match="layer must be left out for method 'medusa'"):
        config("medusa", layer=LAYER)
