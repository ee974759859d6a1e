"""States that are kept on disk change nothing but time, stay within their cap, and a torn shard is not used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch

from paceline import LLM
from paceline.training import Document, Fitting, TrainConfig, train, trainer, training_config
from paceline.training.loop import fit
from paceline.training.splits import TextSplit
from paceline.training.state_shards import StateShards

KB = 1 << 10
CAP = 150 * KB
TEXTS = [Document(tuple((7 * i + j) % 500 + 4 for j in range(20 + i % 5)), 4) for i in range(24)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(tiny_checkpoint.write(tmp_path_factory.mktemp("target"))), speculative_config=None, dtype="float32")


class Counting:
    """A runner that counts the documents whose states it computes."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.computed = runner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def extend(self, caches: Any, tokens: Any, **more: Any) -> Any:
        self.computed += len(tokens)
        return self.runner.extend(caches, tokens, **more)


def losses(llm: LLM, folder: Path, limit: int, seed: int = 0) -> tuple[list[float], int]:
    """Of every step, and how many documents were computed; memory keeps none."""
    how = Fitting(steps=12, batch_rows=2, row_tokens=32, eval_steps=1, bf16=False, patience=99, seed=seed)
    config = TrainConfig(method="eagle3", data=(Path("x"),), feature_cache_bytes=0, fitting=how)
    torch.manual_seed(0)
    head, view = trainer("eagle3").init(llm, config, torch.arange(300))
    view.runner = counting = Counting(view.runner)  # type: ignore[assignment]
    view.shards = StateShards(folder / "states", limit, view.layers) if limit else None
    folder.mkdir(exist_ok=True)
    curve = fit(head, view, TextSplit(TEXTS[:18], TEXTS[18:22], TEXTS[22:]), how, folder)
    return [one.loss for one in curve.judged[1:]], counting.computed


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_losses_are_the_same_and_the_cap_holds(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.state_shards.SHARD", 40 * KB)
    plain, all_computed = losses(llm, tmp_path / "plain", 0)
    kept, computed = losses(llm, tmp_path / "kept", CAP)
    whole, computed_once = losses(llm, tmp_path / "whole", 1 << 30)
    assert plain == kept == whole
    assert plain != losses(llm, tmp_path / "other", 0, seed=1)[0]
    assert computed_once == len(TEXTS) < computed < all_computed
    assert CAP / 2 < size(tmp_path / "kept" / "states") <= CAP
    assert len(list((tmp_path / "kept" / "states").iterdir())) > 1


def test_shards_of_a_killed_run_are_used_and_a_torn_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.state_shards.SHARD", 20 * KB)
    made = {one.tokens: (torch.randn(len(one.tokens), 60), torch.randn(len(one.tokens), 20)) for one in TEXTS}
    first = StateShards(tmp_path / "states", 1 << 30, (1, 2, 3))
    for tokens, states in made.items():
        first.put(tokens, states)
    (tmp_path / "states" / "states-00099.new").write_bytes(b"half of a shard")
    again = StateShards(tmp_path / "states", 1 << 30, (1, 2, 3))
    found = {tokens: states for tokens in made if (states := again.get(tokens)) is not None}
    assert len(found) > len(made) // 2
    assert all(torch.equal(a, b) for tokens, states in found.items() for a, b in zip(states, made[tokens], strict=True))
    assert not list((tmp_path / "states").glob("*.new"))
    again.remove()
    assert not (tmp_path / "states").exists()


def test_states_are_computed_before_training_and_serve_other_heads(llm: LLM, tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": (Path("x"),), "feature_cache_bytes": 0}
    (_, three), (_, last), (_, none) = (
        trainer(method).init(llm, training_config(method, texts=True, **given), torch.arange(300))
        for method in ("eagle3", "medusa", "lora")
    )
    computed = []
    for view in (three, last, none):
        view.runner = counting = Counting(view.runner)  # type: ignore[assignment]
        view.shards = StateShards(tmp_path / "states", 1 << 30, view.layers)
        view.keep(TEXTS, view.shards)
        batch = view.batch([[one] for one in TEXTS], 32)
        computed.append(counting.computed)
    assert computed == [len(TEXTS), 0, 0]
    assert batch.final.shape[-1] == batch.taps.shape[-1] == 0
    alone = trainer("medusa").init(llm, training_config("medusa", **given), torch.arange(300))[1]
    row = [[TEXTS[3]]]
    assert torch.equal(last.batch(row, 32).final, alone.batch(row, 32).final)
    assert not torch.equal(last.batch([[TEXTS[4]]], 32).final, alone.batch(row, 32).final)
    assert torch.equal(three.batch(row, 32).final, alone.batch(row, 32).final)


def test_models_of_one_shape_share_no_states(llm: LLM, tmp_path: Path) -> None:
    other = LLM(str(tiny_checkpoint.write(tmp_path / "other", seed=5)), speculative_config=None, dtype="float32")
    assert other.runner.info.fingerprint == llm.runner.info.fingerprint
    data = tmp_path / "texts.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"Some {i} words and {i + 1} more of them."}) + "\n" for i in range(12))
    )
    fitting = Fitting(steps=1, batch_rows=1, row_tokens=32, bf16=False)
    for model, name in ((llm, "first"), (other, "second"), (llm, "third")):
        config = TrainConfig(
            method="medusa", data=(data,), texts=True, held_out_share=0.3, fitting=fitting,
            feature_disk_bytes=1 << 30, feature_folder=tmp_path / "states",
        )  # fmt: skip
        train(model, config, tmp_path / name, speed_prompts=0)
    assert len(list((tmp_path / "states").iterdir())) == 2
    assert not list(tmp_path.glob("*/run/states"))
