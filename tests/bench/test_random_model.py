"""Random models: the shape that was asked for, the same weights every time, loadable by both runners."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline import LLM, SamplingParams
from paceline.bench import random_model
from paceline.errors import ConfigError
from paceline.models import load_runner
from paceline.models.runners import NativeRunner

TINY = "llama:hidden=32,layers=2,heads=4,kv_heads=2,mlp=48,vocab=6200,context=64,tie=0"


def test_a_model_has_its_shape_and_distribution(tmp_path: Path) -> None:
    folder = random_model.model_folder(TINY, tmp_path / "a")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (6200, 32)
    assert tensors["model.layers.1.mlp.down_proj.weight"].shape == (32, 48)
    assert "lm_head.weight" in tensors
    assert bool((tensors["model.norm.weight"] == 1).all())
    assert float(tensors["lm_head.weight"].float().std()) == pytest.approx(0.02, rel=0.02)
    again = load_file(random_model.model_folder(f"random:{TINY}", tmp_path / "b") / "model.safetensors")
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    llm = LLM(folder, speculative_config=None)
    assert len(llm.tokenizer.tokens()) == 6200
    assert (llm.runner.info.vocab_size, llm.runner.info.num_layers, llm.runner.info.max_context) == (6200, 2, 64)
    (found,) = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=5))
    assert len(found.outputs[0].token_ids) == 5


@pytest.mark.parametrize("family", random_model.FAMILIES)
def test_every_family_runs_natively(family: str, tmp_path: Path) -> None:
    text = f"{family}:hidden=64,layers=2,heads=4,kv_heads=2,mlp=32,vocab=6200,context=64,experts=4,top_k=2"
    folder = random_model.model_folder(text, tmp_path / "a")
    runner = load_runner(folder)
    assert isinstance(runner, NativeRunner)
    assert runner.info.family in (family, f"{family}_text")
    for name, values in load_file(folder / "model.safetensors").items():
        if name.endswith("norm.weight"):
            assert bool((values == (0 if family.startswith("gemma") else 1)).all()), name
        else:
            assert bool(values.any()) != name.endswith("bias"), name


def test_large_models_are_split_and_load_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_model.model_folder(TINY, tmp_path / "a")
    monkeypatch.setattr(random_model, "SHARD_BYTES", 100_000)
    parts = random_model.model_folder(TINY, tmp_path / "b")
    assert len(list(parts.glob("model-*.safetensors"))) > 2
    assert not list(parts.glob("part-*"))
    params = SamplingParams(temperature=0.0, max_tokens=4)
    texts = [
        LLM(one, speculative_config=None).generate([5, 6, 7], params)[0].outputs[0].token_ids for one in (whole, parts)
    ]
    assert texts[0] == texts[1]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("shutil.copy", fail)
    with pytest.raises(OSError, match="disk full"):
        random_model.model_folder(TINY, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_shapes_by_name() -> None:
    assert random_model.parse_shape("291m") == random_model.parse_shape("random:llama:")
    assert random_model.parse_shape("8B").mlp == 14336
    for text, message in (
        ("gpt:hidden=3", "must be 291m, 1b, 8b or llama"),
        ("llama:hiden=3", "did you mean hidden"),
        ("llama:hidden=x", "must be an integer"),
        ("llama:hidden=100", r"a multiple of 2 \* heads=16"),
        ("llama:kv_heads=3", "a multiple of kv_heads=3"),
        ("mixtral:experts=2,top_k=3", "at most experts=2"),
        ("llama:layers=0", "1 or more|in 1.."),
    ):
        with pytest.raises(ConfigError, match=message):
            random_model.parse_shape(text)
    with pytest.raises(ConfigError, match="at least 6144"):
        random_model.model_folder("llama:vocab=100,hidden=32,layers=1,heads=2,kv_heads=1,mlp=8", Path("nowhere"))
