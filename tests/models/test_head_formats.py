"""Heads in the files of other engines: what is written for them is read again bit for bit, and theirs are read."""

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
from paceline.checkpoints import spec_from_config
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models.heads import HeadConfig, HeadTarget, read_head, write_folder, write_head, writer
from paceline.training import convert
from tests.models.test_heads import INFO, LAYER, TAPPED, config

IDS = torch.tensor([0, 2, 3, 5, 8, 9, 12, 13, 17, 19])


def whole(own: HeadConfig) -> dict[str, torch.Tensor]:
    """All tensors of a head, with ids that are not the first ones."""
    found = head_weights(own, shared=False)
    plain = {name: one for name, one in found.items() if not name.endswith(".bias")}
    return plain | {"draft_to_target": IDS.clone()}


def written(own: HeadConfig, weights: dict[str, torch.Tensor], to: str, folder: Path) -> Path:
    return write_folder(
        folder, *writer(to, own.method).written(own, weights, HeadTarget("org/target", "LlamaForCausalLM"))
    )


@pytest.mark.parametrize(
    ("method", "to"),
    [
        ("eagle3", "speculators"),
        ("p_eagle", "speculators"),
        ("eagle3", "eagle"),
        ("p_eagle", "eagle"),
        ("eagle", "eagle"),
    ],
)
def test_what_is_written_for_others_is_read_again(method: str, to: str, tmp_path: Path) -> None:
    own = config(method, **({"taps": (-1, 2, 3), "norm_before_residual": True} if method in TAPPED else {}))
    weights = whole(own)
    if method == "eagle":
        weights.pop("layers.0.input_layernorm.weight")
    found, read = read_head(written(own, weights, to, tmp_path / "out"), INFO, dtype=torch.float32)
    assert (found.method, found.taps, found.draft_vocab_size) == (own.method, own.taps, 10)
    assert found.norm_before_residual == own.norm_before_residual
    assert (found.num_layers, found.mask_token_id) == (own.num_layers, own.mask_token_id)
    assert dict(found.layer) == dict(own.layer)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert (torch.arange(10) + stored["d2t"]).tolist() == IDS.tolist() == stored["t2d"].nonzero().squeeze(1).tolist()


def test_a_layer_of_qwen3_goes_to_speculators_alone(tmp_path: Path) -> None:
    own = config("eagle3")
    weights = whole(own) | {f"layers.0.self_attn.{name}_norm.weight": torch.randn(4) for name in "qk"}
    folder = written(own, weights, "speculators", tmp_path)
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    assert layer["model_type"] == "qwen3"
    read = read_head(folder, INFO, dtype=torch.float32)[1]
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    with pytest.raises(ConfigError, match="'eagle' has no place for norms of queries and keys"):
        written(own, weights, "eagle", tmp_path / "eagle")


SPECULATORS = {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 7}
VLLM = {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 7, "num_hidden_layers": 2}


@pytest.mark.parametrize(("to", "keys"), [("speculators", SPECULATORS), ("eagle", VLLM)])
def test_parallel_heads_have_the_names_of_others(to: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """Also as some write them: the mask's state with other axes, a norm that later layers do not use."""
    own = config("p_eagle")
    weights = whole(own)
    folder = written(own, weights, to, tmp_path)
    found = json.loads((folder / "config.json").read_text())
    assert {key: found[key] for key in keys} == keys
    tensors = load_file(folder / "model.safetensors")
    assert tensors["mask_hidden"].shape == (1, 1, 24)
    assert {"layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight", "fc.weight", "d2t"} <= tensors.keys()
    more = {"layers.1.hidden_norm.weight": torch.ones(8)} if to == "eagle" else {}
    save_file(tensors | {"mask_hidden": tensors["mask_hidden"][0].clone()} | more, folder / "model.safetensors")
    read = read_head(folder, INFO, dtype=torch.float32)[1]
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)


@pytest.mark.parametrize("norms", [("input_norm",), ("fc_norm.0", "fc_norm.1", "fc_norm.2")])
@pytest.mark.parametrize("method", TAPPED)
def test_norms_before_fc_go_to_speculators_and_come_back(method: str, norms: tuple[str, ...], tmp_path: Path) -> None:
    own = config(method)
    weights = whole(own) | {f"{name}.weight": torch.rand(24 if len(norms) == 1 else 8) for name in norms}
    folder, key = written(own, weights, "speculators", tmp_path), "norm_before_fc" if len(norms) == 1 else "fc_norm"
    read = read_head(folder, INFO, dtype=torch.float32)[1]
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    with pytest.raises(CheckpointError, match=f"{key}=None does not fit the norms that there are before fc"):
        read_head(with_keys(folder, {key: None}), INFO)
    with pytest.raises(ConfigError, match="'eagle' has no place for norms before fc"):
        written(own, weights, "eagle", tmp_path / "eagle")


@pytest.mark.parametrize(
    ("to", "drop", "change", "match"),
    [
        ("speculators", "mask_hidden", {}, "lacks mask_hidden; write it again"),
        ("speculators", "embed_tokens.weight", {}, r"embed_requires_grad=True, and there is no embed_tokens\.weight"),
        ("speculators", "", {"mask_token_id": None}, "names no mask token"),
        ("eagle", "", {"ptd_token_id": None}, "names no mask token"),
        ("eagle", "", {"ptd_token_id": 20}, r"mask_token_id must be an integer in 0\.\.19, got 20"),
        ("eagle", "", {"ptd_token_id": "7"}, "must be a token id, got '7'"),
        ("speculators", "layers.1.mlp.up_proj.weight", {}, r"lacks layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_a_parallel_head_that_is_not_whole_is_named(
    to: str, drop: str, change: dict[str, Any], match: str, tmp_path: Path
) -> None:
    """Above all nothing random stands in for the state of the mask."""
    own = config("p_eagle")
    folder = with_keys(written(own, whole(own), to, tmp_path), change)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != drop}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=match):
        read_head(folder, INFO)


def test_offsets_are_no_ids(tmp_path: Path) -> None:
    """The control: ids in place of offsets are seen."""
    own = config("eagle3")
    folder = written(own, whole(own), "speculators", tmp_path)
    tensors = load_file(folder / "model.safetensors") | {"d2t": IDS}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="ascending int64 token ids below 20"):
        read_head(folder, INFO)


FULL = {"draft_vocab_size": 20}
SEVERAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Medusa, as its authors": ("medusa", "medusa", FULL),
    "Medusa, as vLLM, a head each": ("medusa", "medusa_vllm", {}),
    "Medusa, as vLLM, one head": ("medusa", "medusa_vllm", {}),
    "Hydra": ("hydra", "hydra", FULL),
    "Hydra++": ("hydra++", "hydra", FULL),
    "accelerator": ("mlp_speculator", "mlp_speculator", FULL | {"num_layers": 1}),
    "tied": ("mlp_speculator", "mlp_speculator", FULL | {"num_layers": 1, "tie_weights": True, "scale_input": True}),
}
"""Method, format and config."""


def several(kind: str) -> tuple[str, HeadConfig, dict[str, torch.Tensor]]:
    """Format, config, and all tensors that have a place in it."""
    method, to, more = SEVERAL[kind]
    own = config(method, **more)
    found = {name: one for name, one in head_weights(own, shared=False).items() if name != "embed.weight"}
    found |= {} if "draft_vocab_size" in more else {"draft_to_target": IDS.clone()}
    if kind.endswith("one head"):
        return to, own, {name: one for name, one in found.items() if not name.endswith(".head.weight")}
    found.pop("head.weight", None)
    return to, own, {name: one for name, one in found.items() if not (name[:7] == "prefix." and name[-5:] == ".bias")}


@pytest.mark.parametrize("kind", SEVERAL)
def test_heads_that_guess_several_tokens_go_and_come_back(kind: str, tmp_path: Path) -> None:
    to, own, weights = several(kind)
    found, read = read_head(written(own, weights, to, tmp_path / "out"), INFO, dtype=torch.float32)
    assert found == own
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in read)
    again = written(found, read, to, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "out" / "model.safetensors").read_bytes()


def test_names_are_those_of_the_others(tmp_path: Path) -> None:
    """Some of each, as their code has them."""
    names = {}
    for kind in SEVERAL:
        to, own, weights = several(kind)
        names[kind] = load_file(written(own, weights, to, tmp_path / kind) / "model.safetensors").keys()
    assert {"0.0.linear.weight", "2.1.linear.bias", "1.2.weight"} <= names["Medusa, as its authors"]
    assert {"blocks.1.layers.0.bias", "lm_heads.0.weight", "token_map"} <= names["Medusa, as vLLM, a head each"]
    assert {"hydra_mlp.0.0.res_connection.weight", "hydra_mlp.2.1.linear.bias", "hydra_lm_head.1.bias"} <= names[
        "Hydra"
    ]
    assert {
        "hydra_mlp.0.1.res_connection.weight",
        "hydra_mlp.2.3.linear.weight",
        "hydra_lm_head.1.1.bias",
        "prefix_embeding_layer.layers.0.mlp.up_proj.weight",
        "prefix_embeding_layer.norm.weight",
    } <= names["Hydra++"]
    assert names["tied"] == {
        *(f"speculator.{part}.0.weight" for part in ("emb", "proj", "ln", "head")),
        *("speculator.ln.0.bias", "speculator.proj.1.weight"),
    }


def test_tokens_in_any_order_are_sorted_with_their_rows(tmp_path: Path) -> None:
    own = config("medusa")
    weights = {name: one for name, one in whole(own).items() if name not in ("head.weight", "embed.weight")}
    folder = written(own, weights, "medusa_vllm", tmp_path)
    tensors, turned = load_file(folder / "model.safetensors"), torch.randperm(10)
    mixed = {name: one[turned] if name.startswith(("lm_heads", "token_map")) else one for name, one in tensors.items()}
    save_file(mixed, folder / "model.safetensors")
    read = read_head(folder, INFO, dtype=torch.float32)[1]
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    save_file(mixed | {"token_map": tensors["token_map"]}, folder / "model.safetensors")
    other = read_head(folder, INFO, dtype=torch.float32)[1]
    assert not torch.equal(other["heads.0.head.weight"], weights["heads.0.head.weight"])


def test_an_older_layout_of_vllm_is_read(tmp_path: Path) -> None:
    own = config("eagle")
    weights = whole(own)
    folder = written(own, weights, "eagle", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    nested = {name if name.startswith("fc") else f"model.{name}": one for name, one in tensors.items()}
    save_file(nested, folder / "model.safetensors")
    llama = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "eagle", "model": llama}))
    found, read = read_head(folder, INFO, dtype=torch.float32)
    assert found.method == "eagle"
    assert all(torch.equal(read[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("method", "to", "config_change", "drop", "match"),
    [
        ("medusa", "medusa", {"medusa_num_layers": 9}, (), r"no key '0\.9\.weight'"),
        ("medusa", "medusa", {"medusa_num_heads": 4}, (), r"lacks heads\.3\.blocks\.0\.weight"),
        ("medusa", "medusa", {}, ("1.0.linear.weight",), r"lacks heads\.1\.blocks\.0\.weight"),
        ("hydra", "hydra", {"hydra_head_arch": "eagle-attn"}, (), "hydra_head_arch must be mlp or prefix-mlp"),
        ("hydra++", "hydra", {"num_attention_heads": None}, (), "layer must have num_attention_heads"),
        ("hydra++", "hydra", {"hidden_state_offset": 1}, (), "and no hidden_state_offset"),
        ("mlp_speculator", "mlp_speculator", {"n_predict": None}, (), "num_heads must be"),
        ("mlp_speculator", "mlp_speculator", {"inner_dim": 7}, (), r"heads\.0\.\S+ must have shape"),
        ("mlp_speculator", "mlp_speculator", {"vocab_size": 21}, (), "vocab_size 21, but target has 20"),
    ],
)
def test_damage_is_named(
    method: Any, to: str, config_change: dict[str, Any], drop: tuple[str, ...], match: str, tmp_path: Path
) -> None:
    own = config(method, draft_vocab_size=20)
    weights = head_weights(own) | ({"prefix.norm.weight": torch.ones(8)} if method == "hydra++" else {})
    weights |= {} if method == "mlp_speculator" else {"head.weight": torch.randn(20, 8)}
    folder = written(own, weights, to, tmp_path)
    found = json.loads((folder / "config.json").read_text()) | config_change
    (folder / "config.json").write_text(json.dumps(found))
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name not in drop}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=match) as caught:
        read_head(folder, INFO)
    assert "\n" not in str(caught.value)


def test_what_a_format_has_no_place_for_is_named() -> None:
    medusa, hydra, plus = config("medusa"), config("hydra", **FULL), config("hydra++", **FULL)
    cases = [
        (medusa, whole(medusa), "medusa", "'medusa' has no place for a reduced vocabulary"),
        (hydra, whole(hydra), "hydra", "'hydra' has no place for a reduced vocabulary"),
        (hydra, head_weights(hydra, shared=False), "hydra", "'hydra' has no place for an embedding"),
        (plus, head_weights(plus), "hydra", "'hydra' has no place for a prefix layer without a norm"),
    ]
    for own, weights, to, match in cases:
        with pytest.raises(ConfigError, match=match):
            writer(to, own.method).written(own, weights, HeadTarget("", ""))
    with pytest.raises(ConfigError, match="'speculators', which holds eagle3 and p_eagle and dflash and dspark; write"):
        writer("speculators", "hydra")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"speculators_model_type": "mtp"}, "type 'mtp' are not supported"),
        ({"norm_output": True}, "norm_output=True is not supported"),
        ({"target_hidden_size": 9}, "target_hidden_size must be hidden_size=8, got 9"),
        ({"draft_vocab_size": 11}, "must have shape"),
        ({"transformer_layer_config": {"logit_scale": 2}}, "transformer_layer_config: logit_scale=2 is not supported"),
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


def with_keys(folder: Path, more: dict[str, Any]) -> Path:
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(found | more))
    return folder


WINDOW = {"layer_types": ["sliding_attention"]}
NESTED = "eagle_aux_hidden_state_layer_ids"
NVIDIA = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
          "use_mtp_layernorm": False, "parallel_draft_step": 1, "norm_before_fc": None}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "to", "more", "named"),
    [
        ("eagle3", "eagle", {"norm_output": True}, "norm_output=True is not supported"),
        ("eagle3", "eagle", {"norm_before_fc": True}, "norm_before_fc=True is not supported"),
        ("eagle3", "eagle", {"fc_norm": True}, "fc_norm=True is not supported"),
        ("eagle3", "eagle", {"eagle_config": {"norm_before_fc": True}}, "eagle_config: norm_before_fc=True is not"),
        ("eagle3", "eagle", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False is not"),
        ("eagle3", "eagle", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4 is not supported"),
        ("eagle3", "eagle", {"eagle_config": [1]}, "eagle_config must be an object"),
        ("eagle3", "eagle", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        ("eagle3", "eagle", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("eagle3", "eagle", WINDOW, "layers with a sliding window are not supported"),
        ("eagle3", "eagle", {"sliding_window": 512}, "sliding_window=512 is not supported"),
        ("eagle3", "speculators", {"fc_norm": True}, "fc_norm=True does not fit the norms that there are before fc"),
        ("eagle", "eagle", {"add_para_norm": True}, "add_para_norm=True is not supported"),
        ("eagle", "eagle", {"skip_output_norm": False}, "skip_output_norm=False is not supported"),
        ("eagle", "eagle", {"truncated_vocab_size": 7}, "token_map is not supported"),
        ("medusa", "medusa", {"medusa_residual": "gated"}, "medusa_residual='gated' is not supported"),
        ("medusa", "medusa_vllm", {"logit_scale": 3}, "logit_scale=3 is not supported"),
        ("hydra", "hydra", {"state_norm": True}, "state_norm=True is not supported"),
        ("mlp_speculator", "mlp_speculator", {"method": "x", "proj_dim": 4}, "proj_dim=4 is not supported"),
    ],
)
def test_what_nobody_reads_is_refused_by_name(
    method: Any, to: str, more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """The control: the same key switched off, or with the value that changes nothing, is no obstacle."""
    own = config(method, draft_vocab_size=20)
    weights = head_weights(own) | ({} if method == "mlp_speculator" else {"head.weight": torch.randn(20, 8)})
    folder = written(own, weights, to, tmp_path)
    plain, read = (folder / "config.json").read_text(), read_head(folder, INFO)[0]
    with pytest.raises(CheckpointError, match=named) as caught:
        read_head(with_keys(folder, more), INFO)
    assert "\n" not in str(caught.value)
    (folder / "config.json").write_text(plain)
    off = dict.fromkeys(more) | {"skip_prenorm": True, "logit_scale": 1.0, "partial_rotary_factor": 1}
    assert read_head(with_keys(folder, off), INFO)[0] == read


@pytest.mark.parametrize(
    ("nested", "count", "taps"),
    [
        ([1, 17, 32], 36, (1, 17, 32)),  # what layers give: the usual ones, which read what those before them give
        ([2, 18, 33], 36, (1, 17, 32)),  # the same by what layers read
        ([24, 30, 36], 36, (23, 29, 35)),  # there is no layer 36 to give anything: what is read there is the last state
        ([], 36, (1, 17, 32)),
        ([1, 21, 40], 43, None),  # may be either
        ([1, 2, 3], 36, None),
    ],
)
def test_layer_ids_in_eagle_config(nested: list[int], count: int, taps: tuple[int, ...] | None, tmp_path: Path) -> None:
    own, target = config("eagle3", taps=(1, 17, 32)), replace(INFO, num_layers=count)
    folder = written(own, whole(own), "eagle", tmp_path)
    top = json.loads((folder / "config.json").read_text()).pop(NESTED)
    with_keys(folder, {NESTED: None, "eagle_config": {**NVIDIA, NESTED: nested}})
    if taps is None:
        with pytest.raises(CheckpointError, match=rf"\[{nested[0]}, .*write {NESTED} at the top of config.json"):
            read_head(folder, target)
    else:
        assert read_head(folder, target)[0].taps == taps
    assert top == [2, 18, 33]
    assert read_head(with_keys(folder, {NESTED: [3, 4, 5]}), target)[0].taps == (2, 3, 4)


def test_a_share_of_rotated_dimensions_reaches_the_layer(tmp_path: Path) -> None:
    own = config("eagle3")
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    for given, dims in ({"rope_parameters": rope}, 2), ({}, 4):
        folder = with_keys(written(own, whole(own), "eagle", tmp_path / str(dims)), given)
        sizes = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 20}
        assert spec_from_config(sizes | dict(read_head(folder, INFO)[0].layer)).ropes["default"].dims == dims


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
    assert (made / "model.safetensors").stat().st_mode == (made / "config.json").stat().st_mode
    with pytest.raises(ConfigError, match=r"own' holds config\.json; name another output"):
        convert(llm, made, "paceline", tmp_path / "own")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert theirs.keys() - mine.keys() == {"head.weight", "embed.weight"}
    for folder in (tmp_path / "own", made):
        drafting = {"method": "eagle3", "model": str(folder), "controller": "fixed", "num_speculative_tokens": 2}
        (found,) = llm.with_speculative_config(drafting).generate("a b c")
        assert found.metrics.num_draft_tokens > 0
    with pytest.raises(ConfigError, match="no form in the format 'speculators'"):
        writer("speculators", "eagle")
