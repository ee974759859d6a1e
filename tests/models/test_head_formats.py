"""Heads in the files of other engines: what is written for them is read again bit for bit, and theirs are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import head_weights
from paceline import LLM
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.heads import HeadConfig, exported, read_head, write_folder, write_head
from paceline.training import convert
from tests.models.test_heads import INFO, LAYER, config

IDS = torch.tensor([0, 2, 3, 5, 8, 9, 12, 13, 17, 19])


def whole(own: HeadConfig) -> dict[str, torch.Tensor]:
    """All tensors of a head, with ids that are not the first ones."""
    found = head_weights(own, shared=False)
    plain = {name: one for name, one in found.items() if not name.endswith(".bias")}
    return plain | {"draft_to_target": IDS.clone()}


def written(own: HeadConfig, weights: dict[str, torch.Tensor], to: str, folder: Path) -> Path:
    return write_folder(folder, *exported(own, weights, to, name="org/target", kind="LlamaForCausalLM"))


@pytest.mark.parametrize(("method", "to"), [("eagle3", "speculators"), ("eagle3", "eagle"), ("eagle", "eagle")])
def test_what_is_written_for_others_is_read_again(method: str, to: str, tmp_path: Path) -> None:
    taps = {"taps": (1, 1, 0)} if method == "eagle3" else {}  # those that EAGLE's layout implies for four layers
    own = config(method, **taps)
    weights = whole(own)
    if method == "eagle":
        weights.pop("layers.0.input_layernorm.weight")
    found, read = read_head(written(own, weights, to, tmp_path / "out"), INFO, dtype=torch.float32)
    assert (found.method, found.taps, found.draft_vocab_size) == (own.method, own.taps, 10)
    assert dict(found.layer) == dict(own.layer)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (torch.arange(10) + stored["d2t"]).tolist() == IDS.tolist() == stored["t2d"].nonzero().squeeze(1).tolist()


def test_offsets_are_no_ids(tmp_path: Path) -> None:
    """The control: ids in place of offsets are seen."""
    own = config("eagle3")
    folder = written(own, whole(own), "speculators", tmp_path)
    tensors = load_file(folder / "model.safetensors") | {"d2t": IDS}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="ascending int64 token ids below 20"):
        read_head(folder, INFO)


def test_medusa_heads_are_read(tmp_path: Path) -> None:
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.randn(8, 8)
        tensors[f"{head}.0.linear.bias"] = torch.randn(8)
        tensors[f"{head}.1.weight"] = torch.randn(20, 8)
    write_folder(tmp_path / "medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors)
    found, read = read_head(tmp_path / "medusa", INFO, dtype=torch.float32)
    assert (found.method, found.num_heads, found.num_layers) == ("medusa", 2, 1)
    assert torch.equal(read["heads.1.blocks.0.bias"], tensors["1.0.linear.bias"])
    assert torch.equal(read["heads.1.head.weight"], tensors["1.1.weight"])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"speculators_model_type": "mtp"}, "type 'mtp' are not supported"),
        ({"norm_before_residual": True}, "norm_before_residual is not supported"),
        ({"draft_vocab_size": 11}, "must have shape"),
        ({"draft_vocab_size": None}, "draft_vocab_size"),
        ({"transformer_layer_config": {}}, "no key 'hidden_size'"),
        ({"transformer_layer_config": 3}, "does not describe a head"),
    ],
)
def test_what_cannot_be_read_is_named(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    own = config("eagle3")
    folder = written(own, whole(own), "speculators", tmp_path)
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | change))
    with pytest.raises(CheckpointError, match=match):
        read_head(folder, INFO)


def test_another_target_and_pickles_are_rejected(tmp_path: Path) -> None:
    own = HeadConfig(
        method="eagle3", hidden_size=8, vocab_size=30, draft_vocab_size=10, taps=(0, 1, 3), layer=LAYER, normed=False
    )
    with pytest.raises(CheckpointError, match="vocab_size 30, but target has 20"):
        read_head(written(own, whole(own), "speculators", tmp_path / "other"), INFO)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (pickled / "medusa_lm_head.pt").write_bytes(b"\x80")
    with pytest.raises(UnsupportedModelError, match=r"safetensors\.torch\.save_file"):
        read_head(pickled, INFO)


def test_a_head_is_made_whole_and_drafts_the_same(tmp_path: Path) -> None:
    llm = LLM(dtype="float32")
    info = llm.runner.info
    layer = {**LAYER, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    own = HeadConfig(
        method="eagle3", hidden_size=info.hidden_size, vocab_size=info.vocab_size, draft_vocab_size=64, taps=(0, 1, 2),
        layer=layer,
    )  # fmt: skip
    write_head(tmp_path / "own", own, head_weights(own))
    made = convert(llm, tmp_path / "own", "speculators", tmp_path / "theirs")
    back = convert(llm, made, "paceline", tmp_path / "back")
    mine, theirs = (read_head(folder, info)[1] for folder in (tmp_path / "own", back))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert theirs.keys() - mine.keys() == {"head.weight", "embed.weight"}
    for folder in (tmp_path / "own", made):
        drafting = {"method": "eagle3", "model": str(folder), "controller": "fixed", "num_speculative_tokens": 2}
        (found,) = llm.with_speculative_config(drafting).generate("a b c")
        assert found.metrics.num_draft_tokens > 0
    with pytest.raises(ConfigError, match="no form in the format 'speculators'"):
        exported(config("eagle"), {}, "speculators", name="", kind="")
