"""Diffusion checkpoints on disk: which are recognised, where the mask token comes from, what is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoints import DENOISER_FAMILIES, Checkpoint, denoiser_spec, is_denoiser, read_config
from paceline.errors import CheckpointError, ConfigError, PacelineError, UnsupportedModelError
from paceline.models import end_tokens, load_denoiser, load_denoiser_weights, mask_token_id
from tests.models.denoiser_reference import VOCAB
from tests.models.denoiser_references import FAMILIES, llada, llada2, llada_moe, sdar
from tests.tiny_checkpoint import edit_json, edit_weights


def test_the_front_door_tells_them_from_other_models() -> None:
    for kind in ("llada", "Dream", "sdar", "sdar_moe", "llada2_moe", "bd3lm", "mdlm"):
        assert is_denoiser({"model_type": kind})
    assert is_denoiser({"model_type": "lladamoe", "num_experts": 64})
    assert not any(is_denoiser({"model_type": kind}) for kind in ("llama", "qwen3", "qwen2", "bert", None))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_a_mask_token_is_rejected(family: str, tmp_path: Path) -> None:
    FAMILIES[family](tmp_path)
    edit_json(tmp_path / "config.json", mask_token_id=None)
    with pytest.raises(UnsupportedModelError, match="without a mask token cannot be decoded by diffusion") as caught:
        load_denoiser(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_mask_token_may_stand_beside_the_tokenizer(tmp_path: Path) -> None:
    sdar(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"mask_token_id": None}
    assert mask_token_id(tmp_path, config) is None
    added = {
        "added_tokens": [
            {"id": 7, "content": "<|MASK|>"},
            {"id": 8, "content": "<gap>"},
            {"id": 9, "content": "<|eot_id|>"},
        ]
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(added))
    assert mask_token_id(tmp_path, config) == 7
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": {"content": "<gap>"}}))
    assert mask_token_id(tmp_path, config) == 8
    (tmp_path / "generation_config.json").write_text(json.dumps({"mask_token_id": 5, "eos_token_id": [3, 4]}))
    assert mask_token_id(tmp_path, config) == 5
    assert end_tokens(tmp_path, config) == (3, 4)
    assert end_tokens(tmp_path, config | {"model_type": "llada"}) == (3, 4, 9)


def test_a_mask_token_outside_the_vocabulary(tmp_path: Path) -> None:
    llada(tmp_path, mask_token_id=VOCAB)
    with pytest.raises(CheckpointError, match="the mask token is 40, but there are 40 tokens"):
        load_denoiser(tmp_path)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llada", {"block_type": "sequential"}, "block_type='sequential' is not implemented"),
    ("llada", {"alibi": True}, "alibi=True is not implemented"),
    ("llada", {"attention_layer_norm": True}, "attention_layer_norm=True"),
    ("llada", {"d_model": "wide"}, "'d_model' must be an integer"),
    ("llada", {"n_layers": None}, "lacks 'n_layers'"),
    ("dream", {"block_size": 32}, "block_size=32 is not implemented"),
    ("sdar", {"block_size": 0}, "'block_size' must be an integer"),
    ("llada2", {"n_group": 3}, "8 experts in 3 groups"),
    ("llada2", {"score_function": "softmax"}, "score_function='softmax'"),
    ("llada2", {"use_qkv_bias": True}, "use_qkv_bias=True"),
    ("llada_moe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias=True"),
    ("llada", {"model_type": "bd3lm"}, "condition on time"),
    ("llada", {"model_type": "llama"}, "no masked diffusion language model"),
]


@pytest.mark.parametrize(("family", "changes", "message"), WRONG, ids=lambda value: str(value)[:30])
def test_what_is_not_implemented_is_rejected_by_name(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    FAMILIES[family](tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(PacelineError, match=message) as caught:
        load_denoiser(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_surplus_and_misshapen_tensors(tmp_path: Path) -> None:
    llada2(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shared, bias = "model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.mlp.gate.expert_bias"

    def but(**changes: torch.Tensor | None) -> Any:
        def change(weights: dict[str, torch.Tensor]) -> None:
            weights.clear()
            weights.update({k: v for k, v in (stored | changes).items() if v is not None})

        return change

    for changes, message in (
        ({shared: None}, "lacks layers.1.mlp.shared_experts.up_proj.weight"),
        ({shared: stored[shared][:-1].clone()}, "has shape"),
        ({"model.layers.1.mlp.surplus.weight": stored[shared].clone()}, "surplus"),
        ({"model.layers.2.attention.dense.weight": None}, "lacks layers.2.self_attn.o_proj.weight"),
    ):
        edit_weights(tmp_path, but(**changes))
        with pytest.raises(CheckpointError, match=message):
            load_denoiser(tmp_path)
    edit_weights(tmp_path, but(**{bias: None}))  # all experts preferred alike
    load_denoiser(tmp_path)


def test_the_bias_of_experts_is_not_rounded(tmp_path: Path) -> None:
    llada2(tmp_path)
    config = read_config(tmp_path)
    spec, names = denoiser_spec(config, mask_token_id=VOCAB - 1), DENOISER_FAMILIES["llada2_moe"].names
    cpu = torch.device("cpu")
    weights = load_denoiser_weights(Checkpoint(tmp_path), spec, names, device=cpu, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.mlp.gate.expert_bias"]
    assert torch.equal(weights["layers.1.router.bias"], stored.float())
    assert not torch.equal(weights["layers.1.router.bias"], stored.bfloat16().float())
    assert weights["layers.1.router.weight"].dtype is torch.bfloat16


def test_block_lengths_and_contexts(tmp_path: Path) -> None:
    sdar(tmp_path / "a", block_size=None)
    assert load_denoiser(tmp_path / "a").block_length == 4
    llada2(tmp_path / "b", block_length=None)
    assert load_denoiser(tmp_path / "b").block_length == 32
    llada(tmp_path / "c")
    assert load_denoiser(tmp_path / "c").max_length == 256


def test_tied_weights_biases_and_factors_of_llada(tmp_path: Path) -> None:
    reference = llada(tmp_path, weight_tying=True, scale_logits=True, input_emb_norm=True)
    edit_weights(tmp_path, lambda weights: weights.pop("model.transformer.ff_out.weight"))
    spec = load_denoiser(tmp_path, dtype="float64").spec.model
    assert spec.tied
    assert spec.logit_multiplier == spec.hidden_size**-0.5
    assert spec.embedding_multiplier == spec.hidden_size**0.5
    assert reference.eps == spec.norm_eps


def test_the_dtype_is_checked(tmp_path: Path) -> None:
    llada_moe(tmp_path)
    with pytest.raises(ConfigError, match="dtype must be auto, float64 or one of"):
        load_denoiser(tmp_path, dtype="int8")
    assert load_denoiser(tmp_path, dtype="bfloat16").dtype is torch.bfloat16
