"""DFlash and DSpark networks in the files of others: what is published is read, and what is written is read again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import head_weights
from paceline import LLM
from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads import HeadConfig, HeadTarget, read_head, write_folder, write_head, writer
from paceline.training import convert
from tests.models.test_heads import INFO, config

QWEN3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 17, "dtype": "bfloat16", "eos_token_id": 18,
    "head_dim": 4, "hidden_act": "silu", "hidden_size": 8, "initializer_range": 0.02, "intermediate_size": 12,
    "layer_types": ["full_attention", "full_attention"], "max_position_embeddings": 64, "max_window_layers": 2,
    "model_type": "qwen3", "num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1,
    "num_target_layers": 4, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "transformers_version": "4.57.1", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 20,
}  # fmt: skip
"""The keys of published files, with small numbers."""
ZLAB = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 19, "target_layer_ids": [1, 2]},
}
DEEPSPEC = QWEN3 | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 7, "target_layer_ids": [-1, 2], "mask_token_id": 19,
    "num_anchors": 512, "markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "speculators_version": "0.9.0",
    "aux_hidden_state_layer_ids": [2, 3], "block_size": 8, "draft_vocab_size": 10, "mask_token_id": 19,
    "sample_from_anchor": False, "sliding_window_non_causal": False, "target_hidden_size": None, "dtype": "bfloat16",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "org/target"}},
    "transformer_layer_config": {key: value for key, value in QWEN3.items() if key != "num_target_layers"},
}  # fmt: skip
LAYER_NAMES = [
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"), *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")), "input_layernorm.weight",
    "post_attention_layernorm.weight",
]  # fmt: skip
BODY = [
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(f"layers.{i}.{name}" for i in (0, 1) for name in LAYER_NAMES),
]
HEADS = [
    "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
    "confidence_head.proj.bias",
]  # fmt: skip
"""Names of published tensors."""


def weights_of(own: HeadConfig, *, shared: bool) -> dict[str, torch.Tensor]:
    """All tensors of a network without biases but that of the confidence."""
    found = head_weights(own, shared=False)
    keep = {name: one for name, one in found.items() if not name.endswith(".bias") or "confidence" in name}
    return {name: one for name, one in keep.items() if not (shared and name in ("head.weight", "embed.weight"))}


def published(folder: Path, found: dict[str, Any], names: list[str], tensors: dict[str, torch.Tensor]) -> Path:
    """A folder with these keys and tensors of these names, in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(found))
    assert len(names) == len(tensors)
    save_file({name: tensors[name].contiguous() for name in names}, folder / "model.safetensors")
    return folder


def test_a_network_of_dflashs_authors_is_read(tmp_path: Path) -> None:
    """Its layer ids mean what layers give; embedding and head are the target's. Control: a target of another depth."""
    own = config("dflash", taps=(1, 2), draft_vocab_size=20)
    tensors = {name: one for name, one in weights_of(own, shared=True).items() if name != "draft_to_target"}
    folder = published(tmp_path, ZLAB, BODY, tensors)
    found, read = read_head(folder, INFO, dtype=torch.float32)
    assert (found.method, found.taps, found.block_size, found.mask_token_id) == ("dflash", (1, 2), 16, 19)
    assert (found.num_layers, found.drafts_of_block, found.causal, found.sample_from_anchor) == (2, 15, False, False)
    assert (found.layer["rope_theta"], found.layer["head_dim"]) == (1000000, 4)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    again = write_folder(tmp_path / "again", *writer("dflash", "dflash").written(found, read, HeadTarget("x", "y", 4)))
    assert read_head(again, INFO)[0] == replace(found, layer={k: v for k, v in found.layer.items() if v is not None})
    assert load_file(again / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    with pytest.raises(CheckpointError, match="num_target_layers=4, and the model has 5 layers"):
        read_head(folder, replace(INFO, num_layers=5))


@pytest.mark.parametrize(
    ("change", "inner", "expected"),
    [
        ({"block_size": None}, {"block_size": 10}, {"block_size": 10}),
        ({}, {"target_layer_ids": None}, {"taps": (1, 1)}),
        ({}, {"causal": True}, {"causal": True}),
        ({"is_causal": False}, {"causal": True}, {"causal": False}),
        ({}, {"use_swa": False, "swa_window_size": 2048}, {}),
        ({}, {"use_swa": True}, "dflash_config: use_swa=True is not supported"),
        ({}, {"attention_sink_bias": True}, "dflash_config: attention_sink_bias=True is not supported"),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            {},
            "layers with a sliding window are not supported",
        ),
        ({}, {"mask_token_id": None}, "mask_token_id must be an integer"),
        ({"dflash_config": 3}, None, "dflash_config must be an object, got 3"),
        ({"dflash.conv_kernel_size": 4}, {}, r"dflash.conv_kernel_size=4 is not supported"),
    ],
)
def test_what_dflashs_config_says(
    change: dict[str, Any], inner: dict[str, Any] | None, expected: Any, tmp_path: Path
) -> None:
    own = config("dflash", taps=(1, 2), draft_vocab_size=20)
    tensors = {name: one for name, one in weights_of(own, shared=True).items() if name != "draft_to_target"}
    given = ZLAB | change | ({} if inner is None else {"dflash_config": ZLAB["dflash_config"] | inner})  # type: ignore[operator]
    folder = published(tmp_path, given, BODY, tensors)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            read_head(folder, INFO)
    else:
        found = read_head(folder, INFO)[0]
        assert {key: getattr(found, key) for key in expected} == expected


def test_a_network_of_dsparks_authors_is_read(tmp_path: Path) -> None:
    """-1 is the embedding; its first row drafts. vLLM's spelling says the same."""
    own = config("dspark", draft_vocab_size=20, markov_head_type="vanilla")
    tensors = {name: one for name, one in weights_of(own, shared=False).items() if name != "draft_to_target"}
    theirs = {"head.weight": "lm_head.weight", "embed.weight": "embed_tokens.weight"}
    named = {theirs.get(name, name): one for name, one in tensors.items()}
    folder = published(tmp_path / "a", DEEPSPEC, [*BODY, *HEADS, *theirs.values()], named)
    found, read = read_head(folder, INFO, dtype=torch.float32)
    assert (found.method, found.taps, found.block_size, found.mask_token_id) == ("dspark", (-1, 2), 7, 19)
    assert (found.markov_rank, found.markov_head_type, found.drafts_of_block) == (3, "vanilla", 7)
    assert (found.enable_confidence_head, found.confidence_head_with_markov, found.sample_from_anchor) == (True,) * 3
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    again = write_folder(tmp_path / "b", *writer("deepspec", "dspark").written(found, read, HeadTarget("x", "y", 4)))
    assert read_head(again, INFO)[0] == replace(found, layer={k: v for k, v in found.layer.items() if v is not None})
    assert load_file(again / "model.safetensors").keys() == named.keys()
    spelled = {"dspark_block_size": 7, "dspark_noise_token_id": 19, "dspark_target_layer_ids": [-1, 2]}
    other = {key: value for key, value in DEEPSPEC.items() if f"dspark_{key}" not in spelled and key != "mask_token_id"}
    for more, anchor in (({}, True), ({"dspark_bonus_anchor": True}, False)):
        (folder / "config.json").write_text(json.dumps(other | spelled | more))
        assert read_head(folder, INFO)[0] == replace(found, sample_from_anchor=anchor)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_network_of_speculators_is_read(kind: str, tmp_path: Path) -> None:
    """Its layer ids mean what layers read; `d2t` holds offsets. What transformers leaves out is a Qwen3's default."""
    ids = torch.tensor([0, 2, 3, 5, 8, 9, 12, 13, 17, 19])
    own = config(kind, taps=(1, 2), markov_head_type="vanilla")
    tensors = weights_of(own, shared=True) | {"head.weight": torch.randn(10, 8), "draft_to_target": ids}
    there = torch.zeros(20, dtype=torch.bool)
    there[ids] = True
    named = {name: one for name, one in tensors.items() if name not in ("head.weight", "draft_to_target")}
    named |= {"lm_head.weight": tensors["head.weight"], "d2t": ids - torch.arange(10), "t2d": there}
    more = {} if kind == "dflash" else {
        "speculators_model_type": "dspark", "markov_rank": 3, "markov_head_type": "vanilla", "sample_from_anchor": True,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    names = [*BODY, *(HEADS if kind == "dspark" else []), "lm_head.weight", "d2t", "t2d"]
    folder = published(tmp_path / "a", SPECULATORS | more, names, named)
    found, read = read_head(folder, INFO, dtype=torch.float32)
    assert (found.method, found.taps, found.block_size, found.draft_vocab_size) == (kind, (1, 2), 8, 10)
    assert found.drafts_of_block == (7 if kind == "dflash" else 8)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)
    form = writer("speculators", kind)
    again = write_folder(tmp_path / "b", *form.written(found, read, HeadTarget("org/target", "LlamaForCausalLM")))
    assert read_head(again, INFO)[0] == replace(found, layer={k: v for k, v in found.layer.items() if v is not None})
    assert load_file(again / "model.safetensors").keys() == named.keys()
    stored = json.loads((again / "config.json").read_text())
    assert stored["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == found.drafts_of_block
    left_out = {**SPECULATORS["transformer_layer_config"]}  # type: ignore[dict-item]
    left_out.pop("rms_norm_eps")
    (folder / "config.json").write_text(json.dumps(SPECULATORS | more | {"transformer_layer_config": left_out}))
    assert read_head(folder, INFO)[0].layer["rms_norm_eps"] == 1e-6


def test_what_a_format_has_no_place_for_is_named() -> None:
    reduced, spark = config("dflash"), config("dspark")
    whole = config("dflash", draft_vocab_size=20, sample_from_anchor=True)
    cases = [
        (reduced, "dflash", "'dflash' has no place for a reduced vocabulary, or an embedding or a head of its own"),
        (whole, "dflash", "'dflash' has no place for drafts from the block's first row"),
        (spark, "deepspec", "'deepspec' has no place for a reduced vocabulary"),
        (config("dflash", causal=True), "speculators", "has no place for blocks whose rows do not see those behind"),
    ]
    for own, to, match in cases:
        weights = weights_of(own, shared=True)
        weights |= {"draft_to_target": torch.arange(10)} if own.draft_vocab_size < 20 else {}
        with pytest.raises(ConfigError, match=match):
            writer(to, own.method).written(own, weights, HeadTarget("", ""))
    for to, method in (("dflash", "dspark"), ("deepspec", "dflash"), ("eagle", "dflash")):
        with pytest.raises(ConfigError, match=f"a head of method '{method}' has no form in the format '{to}'"):
            writer(to, method)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_size", 1, "block_size must be an integer in 2..64, got 1"),
        ("block_size", 65, "block_size must be an integer in 2..64, got 65"),
        ("mask_token_id", None, "mask_token_id must be an integer of 0 or more"),
        ("markov_rank", 3, "markov_rank must be left out for method 'dflash'"),
        ("enable_confidence_head", True, "enable_confidence_head must be left out for method 'dflash'"),
        ("taps", (), "taps must name the layers whose states are read"),
        ("causal", 1, "causal must be true or false"),
    ],
)
def test_a_network_that_cannot_be_is_named(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config("dflash", **{key: value})


def test_more_that_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="markov_rank must be 1 or more with confidence_head_with_markov"):
        config("dspark", markov_rank=0)
    with pytest.raises(ConfigError, match="markov_head_type must be one of vanilla, gated, rnn"):
        config("dspark", markov_head_type="lstm")
    with pytest.raises(ConfigError, match="block_size must be left out for method 'eagle'"):
        config("eagle", block_size=4)


def test_a_network_of_ones_own_goes_to_others_and_comes_back(tmp_path: Path) -> None:
    """Converted for the bundled target: the same tensors, with what is the target's filled in where it is wanted."""
    llm = LLM(speculative_config=None, dtype="float32")
    info = llm.runner.info
    layer = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64, "head_dim": 8}
    sizes = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": info.vocab_size}
    for method, formats in {"dflash": ("dflash", "speculators"), "dspark": ("deepspec", "speculators")}.items():
        more = {"markov_rank": 4, "sample_from_anchor": True} if method == "dspark" else {}
        own = HeadConfig(
            method=method, **sizes, taps=(0, 2), layer=layer, block_size=3, mask_token_id=1, num_layers=2, **more
        )  # type: ignore[arg-type]
        weights = {name: one for name, one in head_weights(own).items() if not name.endswith(".bias")}
        folder = write_head(tmp_path / method, own, weights)
        for to in formats:
            there = convert(llm, folder, to, tmp_path / f"{method} {to}")
            found, read = read_head(there, info)
            assert (found.method, found.taps, found.block_size) == (method, (0, 2), 3)
            assert all(torch.equal(read[name], weights[name]) for name in weights)
            assert ("embed.weight" in read) == (to != "dflash")
