"""LoRA adapters merged at load: equal to checkpoints merged by hand and by PEFT, in every precision and for GGUF files,
and what is not plain LoRA.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import SIZES, perturb
from models.test_gguf import TEXT, write
from safetensors.torch import save_file

from paceline import LLM, SamplingParams
from paceline.checkpoints import BUNDLED_FOLDER
from paceline.cli.main import main
from paceline.errors import CheckpointError, ConfigError, UnsupportedModelError
from paceline.models import load_runner

Tensors = dict[str, torch.Tensor]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"
SHAPES = {Q: (64, 64), DOWN: (64, 96)}


@cache
def base(tied: bool = False) -> Any:
    """A Llama in float32, with biases in its attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=tied, attention_bias=True)
    return perturb(AutoModelForCausalLM.from_config(config).float().eval())


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def factors(rank: int = 4) -> Tensors:
    """Factors for the two matrices, as PEFT names them."""
    found = {}
    for module, (outputs, inputs) in SHAPES.items():
        found[f"base_model.model.{module}.lora_A.weight"] = noise(rank, inputs) * 0.3
        found[f"base_model.model.{module}.lora_B.weight"] = noise(outputs, rank) * 0.3
    return found


def adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A folder as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(given | config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def saved(folder: Path, changed: Tensors | None = None, *, tied: bool = False) -> Path:
    """The base model with some tensors changed."""
    model = base(tied)
    state = {name: value.clone() for name, value in model.state_dict().items()} | (changed or {})
    if tied:
        state.pop("lm_head.weight", None)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors")
    return folder


def merged(scale: float, tensors: Tensors | None = None) -> Tensors:
    """The adapted matrices, merged by hand."""
    tensors, state, found = tensors or factors(), base().state_dict(), {}
    for module in SHAPES:
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        found[f"{module}.weight"] = state[f"{module}.weight"] + b @ a * scale
    return found


def logits(folder: Path, **options: Any) -> torch.Tensor:
    runner = load_runner(folder, **{"dtype": "float32"} | options)
    return runner.extend([runner.open()], [TEXT], all_logits=True).logits


BIAS = {f"{Q}.bias": noise(64)}
CASES: dict[str, tuple[dict[str, Any], Tensors, float]] = {
    "plain": ({}, {}, 2.0),
    "rslora": ({"use_rslora": True}, {}, 4.0),
    "a bias": ({"bias": "lora_only"}, BIAS, 2.0),
    "a whole head": ({"modules_to_save": ["lm_head"]}, {"lm_head.weight": noise(128, 64)}, 2.0),
    "Linear layers are never stored transposed": ({"fan_in_fan_out": True}, {}, 2.0),
    "all that PEFT writes": ({
        "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
        "base_model_name_or_path": "org/base", "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
        "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
        "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
        "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None, "megatron_core": "megatron.core",
        "modules_to_save": None, "peft_version": "0.18.0", "qalora_group_size": 16, "rank_pattern": {},
        "revision": None, "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None,
        "use_dora": False, "use_qalora": False, "use_rslora": False}, {}, 2.0),
    "a regular expression": ({"target_modules": ".*q_proj|.*down_proj"}, {}, 2.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_is_merged(tmp_path: Path, name: str) -> None:
    """Equal to the checkpoint merged by hand, and unlike the base and another scale."""
    config, more, scale = CASES[name]
    folder = saved(tmp_path / "base")
    tensors = factors() | {f"base_model.model.{key}": value for key, value in more.items()}
    found = logits(folder, lora=adapter(tmp_path / "adapter", tensors, **config))
    assert torch.equal(found, logits(saved(tmp_path / "merged", merged(scale) | more)))
    assert (found - logits(folder)).abs().max() > 0.1
    assert (found - logits(saved(tmp_path / "other", merged(1.1 * scale) | more))).abs().max() > 0.01


def test_a_module_may_have_a_scale_and_a_rank_of_its_own(tmp_path: Path) -> None:
    tensors = factors()
    down = f"base_model.model.{DOWN}.lora_"
    tensors |= {f"{down}A.weight": noise(2, 96) * 0.3, f"{down}B.weight": noise(64, 2) * 0.3}
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 6, "layers.1.self_attn.q_proj": 99}}
    found = logits(saved(tmp_path / "base"), lora=adapter(tmp_path / "adapter", tensors, **patterns))
    wanted = merged(2.0, tensors) | {f"{DOWN}.weight": merged(3.0, tensors)[f"{DOWN}.weight"]}
    assert torch.equal(found, logits(saved(tmp_path / "merged", wanted)))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_weights_are_rounded_after_merging(tmp_path: Path, options: dict[str, Any]) -> None:
    folder, own = saved(tmp_path / "base"), adapter(tmp_path / "adapter", factors())
    found = logits(folder, lora=own, **options)
    assert torch.equal(found, logits(saved(tmp_path / "merged", merged(2.0)), **options))
    assert not torch.equal(found, logits(folder, **options))


def test_adapters_of_gguf_files(tmp_path: Path) -> None:
    """The adapter knows nothing of the order in which GGUF stores rows of heads."""
    from models.test_gguf import oracle

    path = write(tmp_path / "model.gguf", "llama", oracle("llama"))
    own = adapter(tmp_path / "adapter", factors())
    state, folder = dict(oracle("llama").state_dict()), tmp_path / "merged"
    folder.mkdir()
    for module in SHAPES:
        a, b = (factors()[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        state[f"{module}.weight"] = state[f"{module}.weight"] + b @ a * 2.0
    oracle("llama").config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    found = logits(path, lora=own, quantization="none")
    assert (found - logits(folder)).abs().max() < 1e-4
    assert (found - logits(path, quantization="none")).abs().max() > 0.1


def test_equal_to_what_peft_merges(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import copy

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "embed_tokens"], use_rslora=True,
                             alpha_pattern={"down_proj": 3}, modules_to_save=["lm_head"], bias="lora_only")  # fmt: skip
    model = peft.get_peft_model(copy.deepcopy(base()), config)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(noise(*value.shape) * 0.3)
    model.save_pretrained(tmp_path / "adapter")
    whole = model.merge_and_unload()
    whole.save_pretrained(tmp_path / "merged")
    folder = saved(tmp_path / "base")
    found = logits(folder, lora=tmp_path / "adapter")
    assert (found - logits(tmp_path / "merged")).abs().max() < 1e-4
    assert (found - logits(folder)).abs().max() > 0.1


WRONG: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "DoRA": ({"use_dora": True}, {}, "with DoRA, which is not supported"),
    "a bias of lora_B": ({"lora_bias": True}, {}, "with a bias beside lora_B"),
    "replicated layers": ({"layer_replication": [[0, 2]]}, {}, "with replicated layers"),
    "another start": ({"init_lora_weights": "pissa"}, {}, "init_lora_weights='pissa'"),
    "another type": ({"peft_type": "IA3"}, {}, "adapter of type 'IA3'"),
    "a magnitude": ({}, {f"{Q}.lora_magnitude_vector": noise(64)}, "belongs to a variant of LoRA"),
    "a key of tomorrow": ({"lora_turbo": 3}, {}, "with lora_turbo=3, which is not supported"),
    "a module of another model": ({}, {"model.layers.7.mlp.up_proj.lora_A.weight": noise(4, 64),
                                       "model.layers.7.mlp.up_proj.lora_B.weight": noise(96, 4)}, "does not hold"),
    "one factor": ({}, {"model.layers.1.mlp.up_proj.lora_A.weight": noise(4, 64)}, "one factor only of"),
    "another shape": ({}, {f"{Q}.lora_A.weight": noise(4, 32)}, r"of shape \(64, 32\).* holds \(64, 64\)"),
    "other ranks": ({}, {f"{Q}.lora_A.weight": noise(3, 64)}, r"shapes \(3, 64\) and \(64, 4\)"),
    "a broken pattern": ({"alpha_pattern": {"(": 3}}, {}, "is no pattern"),
    "a module without factors": ({"target_modules": ["q_proj", "down_proj", "up_proj"]}, {}, "no factors for up_proj"),
    "no scale": ({"lora_alpha": "much"}, {}, "'lora_alpha' must be a number above 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_plain_lora_is_one_line(tmp_path: Path, name: str) -> None:
    config, more, words = WRONG[name]
    tensors = factors() | {f"base_model.model.{key}": value for key, value in more.items()}
    with pytest.raises(CheckpointError, match=words) as caught:
        logits(saved(tmp_path / "base"), lora=adapter(tmp_path / "adapter", tensors, **config))
    assert "\n" not in str(caught.value)


def test_an_embedding_that_is_the_head_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "base", tied=True)
    tensors = factors() | {"base_model.model.model.embed_tokens.lora_embedding_A": noise(4, 128),
                           "base_model.model.model.embed_tokens.lora_embedding_B": noise(64, 4)}  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="uses one tensor for both"):
        logits(folder, lora=adapter(tmp_path / "adapter", tensors))


def test_files_that_are_missing(tmp_path: Path) -> None:
    folder, own = saved(tmp_path / "base"), adapter(tmp_path / "adapter", factors())
    with pytest.raises(CheckpointError, match=r"no LoRA adapter in .*adapter_config.json is missing"):
        logits(folder, lora=tmp_path)
    with pytest.raises(CheckpointError, match="no folder 'org/name'; adapters are not downloaded"):
        logits(folder, lora="org/name")
    (own / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickled adapters are not read"):
        logits(folder, lora=own)
    with pytest.raises(UnsupportedModelError, match="LoRA adapters are merged for models of the native runner only"):
        load_runner(folder, native=False, lora=own)
    with pytest.raises(ConfigError, match="lora must be a folder, got 3"):
        LLM(folder, lora=3)  # type: ignore[arg-type]


def test_texts_under_an_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model writes another text with an adapter, the same under drafts, and on the command line."""
    target = BUNDLED_FOLDER / "target"
    hidden = json.loads((target / "config.json").read_text())["hidden_size"]
    tensors = {"base_model.model.model.layers.0.mlp.down_proj.lora_B.weight": noise(hidden, 4)}
    inner = json.loads((target / "config.json").read_text())["intermediate_size"]
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"] = noise(4, inner)
    own = adapter(tmp_path / "adapter", tensors, target_modules=["down_proj"])
    greedy = SamplingParams(temperature=0, max_tokens=24)
    text = {}
    for name, options in {
        "base": {"speculative_config": None},
        "plain": {"speculative_config": None, "lora": own},
        "draft": {"speculative_config": {"method": "draft_model", "model": "bundled/draft"}, "lora": own},
        "copy": {"speculative_config": {"method": "quantized_copy", "quantization": "int4"}, "lora": own},
    }.items():
        (out,) = LLM("bundled/target", **options).generate("Once upon a time", greedy)
        text[name] = out.outputs[0].text
    assert text["plain"] == text["draft"] == text["copy"] != text["base"]
    command = ["generate", "Once upon a time", "-m", "bundled/target", "--lora", str(own), "--max-tokens", "24"]
    assert main(command) == 0
    assert text["plain"].strip() in capsys.readouterr().out
