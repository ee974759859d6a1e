"""FastDraft's recipe: a draft of a given shape is pre-trained, trained on, and aligned in one command, each stage
brings something and says what, and one that has ended is not gone through again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import LLM, ConfigError, SamplingParams
from paceline.bench import bundled_prompts
from paceline.checkpoints import Tokenizer, read_config
from paceline.errors import PromptError
from paceline.training import Fitting, Trained, train, training_config
from paceline.training.answers import TrainingText
from paceline.training.batches import pieces
from paceline.training.draft_model import DraftModelTrainer
from paceline.training.judging import chain_length

SHAPE = {"hidden_size": 24, "num_layers": 1, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 40}
FITTING = Fitting(
    steps=4, batch_rows=2, row_tokens=64, eval_steps=4, warmup_steps=2, bf16=False, learning_rate=2e-2, patience=99
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the kind that the target writes."""
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one.prompt}) + "\n" for one in bundled_prompts()))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": one.prompt[:60]}) + "\n" for one in bundled_prompts()))
    return path


@pytest.fixture(scope="module")
def said(llm: LLM, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the target said to the prompts, for all runs."""
    folder = tmp_path_factory.mktemp("said")
    config = config_of(prompts, fitting=replace(FITTING, steps=1))
    train(llm, config, folder / "draft", speed_prompts=0)
    return folder / "draft" / "run" / "answers.jsonl"


def config_of(prompts: Path, **changes: Any) -> Any:
    shared = {"data": (prompts,), "max_tokens": 32, "draft_vocab_size": 6144, "depths": 3, "fitting": FITTING}
    return training_config("draft_model", **shared | SHAPE | {"held_out_share": 0.2} | changes)


def staged(llm: LLM, prompts: Path, texts: Path, said: Path, folder: Path, **changes: Any) -> Trained:
    if not folder.exists():
        (folder / "run").mkdir(parents=True)
        copyfile(said, folder / "run" / "answers.jsonl")
    rates = {"pretrain_steps": 40, "pretrain_learning_rate": 5e-3, "continue_steps": 4}
    stages = {"pretrain_data": (texts,), "continue_data": (texts,), **rates}
    return train(llm, config_of(prompts, **stages | changes), folder, speed_prompts=0)


def test_each_stage_brings_something_and_is_reported(
    llm: LLM, prompts: Path, texts: Path, said: Path, tmp_path: Path
) -> None:
    """Of the same texts of the target, which no stage learns. Negative control: pre-training on what the target does
    not write brings nothing.
    """
    fitting = replace(FITTING, steps=40, batch_rows=4, eval_steps=20, learning_rate=5e-3)
    wider = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128, "draft_vocab_size": 1024}
    found = staged(llm, prompts, texts, said, tmp_path / "draft", **wider, fitting=fitting)
    assert [name for name, _ in found.stages] == ["pre-training", "continued training", "alignment"]
    after = [curve.tests[1].acceptance[0] for _, curve in found.stages]
    assert found.before.acceptance[0] + 0.04 < after[0]
    assert after[0] + 0.01 < after[2]
    assert found.test.acceptance[0] == after[2]
    report = json.loads((tmp_path / "draft" / "report.json").read_text())
    assert [one["name"] for one in report["stages"]] == [name for name, _ in found.stages]
    assert [one["acceptance"][0] for one in report["stages"]] == after
    assert "<h2>Stages</h2>" in (tmp_path / "draft" / "report.html").read_text()
    assert report["mbsu"] == pytest.approx(found.test.length / (3 * report["relative_size"] + 1))
    assert report["provenance"]["data"]["files"] == ["prompts.jsonl", "texts.jsonl", "texts.jsonl"]
    noise = tmp_path / "noise.jsonl"
    rows = torch.randint(300, 6000, (24, 60), generator=torch.Generator().manual_seed(0)).tolist()
    noise.write_text("".join(json.dumps({"text": llm.tokenizer.decode(row)}) + "\n" for row in rows))
    vain = staged(
        llm,
        prompts,
        noise,
        said,
        tmp_path / "vain",
        **wider,
        fitting=replace(FITTING, batch_rows=4),
        continue_data=None,
    )
    assert vain.stages[0][1].tests[1].acceptance[0] < after[0] - 0.04


def test_a_stage_that_has_ended_is_not_gone_through_again(
    llm: LLM, prompts: Path, texts: Path, said: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut off in the alignment ends in the weights of one that was not."""
    loss, calls = DraftModelTrainer.loss, list[bool]()
    left = {"at": 10**9}

    def watched(self: DraftModelTrainer, batch: Any, generator: Any) -> Any:
        calls.append(batch.final.shape[-1] > 0)
        if len(calls) > left["at"]:
            raise KeyboardInterrupt
        return loss(self, batch, generator)

    monkeypatch.setattr(DraftModelTrainer, "loss", watched)
    short = {"pretrain_steps": 4, "continue_data": None, "fitting": replace(FITTING, eval_steps=2)}
    calm = staged(llm, prompts, texts, said, tmp_path / "calm", **short)
    assert calls == [False] * 4 + [True] * 4
    whole = load_file(calm.folder / "model.safetensors")
    calls.clear()
    left["at"] = 6
    with pytest.raises(KeyboardInterrupt):
        staged(llm, prompts, texts, said, tmp_path / "cut", **short)
    calls.clear()
    left["at"] = 10**9
    staged(llm, prompts, texts, said, tmp_path / "cut", **short)
    assert calls == [True] * len(calls), "the pre-training had ended"
    assert 0 < len(calls) < 4, "a part of the alignment was kept"
    again = load_file(tmp_path / "cut" / "model.safetensors")
    assert all(torch.equal(one, again[name]) for name, one in whole.items())
    with pytest.raises(ConfigError, match="another pretrain_steps"):
        staged(llm, prompts, texts, said, tmp_path / "calm", **short | {"pretrain_steps": 5})


def test_a_draft_has_the_shape_that_was_asked_for_and_an_embedding_of_its_own(
    llm: LLM, prompts: Path, tmp_path: Path
) -> None:
    found = train(llm, config_of(prompts, own_embedding=True), tmp_path / "own", speed_prompts=0)
    stored = read_config(tmp_path / "own")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    assert [stored[name] for name in names] == [24, 1, 3, 1, 40]
    assert stored["tie_word_embeddings"] is True
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (6144, 24)
    assert "lm_head.weight" not in tensors
    drafting = llm.with_speculative_config({**found.speculative_config, "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (out,) = drafting.generate("def add(a, b):", params)
    assert out.metrics.num_draft_tokens > 0
    mine, theirs = Tokenizer.load(tmp_path / "own"), llm.tokenizer
    text = "def add(a, b):\n    return a + b  # two of them"
    assert mine.encode(text) == theirs.encode(text)
    assert mine.decode(mine.encode(text)) == theirs.decode(theirs.encode(text))


def losses(llm: LLM, **changes: Any) -> tuple[float, float, float]:
    """Of one batch: as it is trained, the cross-entropy of its tokens, and that of the target's distributions."""
    torch.manual_seed(0)
    config = config_of(Path("x"), **changes)
    made, view = DraftModelTrainer.init(llm, config, torch.arange(6144))
    documents = pieces([TrainingText("a", [], list(range(5, 45)))], 48)
    batch = view.batch([documents], 48)
    tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
    with torch.no_grad():
        said = (made.states(batch).flatten(0, 1)[tokens - 1] @ made.head_rows().T).log_softmax(-1)
        chances = (batch.final.flatten(0, 1)[tokens - 1] @ view.rows.T).softmax(-1)
        plain = -said.gather(1, batch.columns.flatten()[tokens][:, None]).mean()
        soft = -(chances * said).sum(-1).mean()
        return made.loss(batch, torch.Generator()).item(), plain.item(), soft.item()


def test_the_last_stage_distils_sequences_or_tokens(llm: LLM) -> None:
    loss, plain, soft = losses(llm)
    assert abs(plain - soft) > 0.01
    assert loss == pytest.approx(soft, rel=1e-4)
    assert losses(llm, own_embedding=True)[0] == pytest.approx(losses(llm, own_embedding=True)[2], rel=1e-4)
    loss, plain, soft = losses(llm, token_distillation=False)
    assert loss == pytest.approx(plain, rel=1e-4)


def test_all_of_a_long_text_is_learned_in_pieces() -> None:
    text = TrainingText("a", [], list(range(100)))
    found = pieces([text, TrainingText("b", [1], [2])], 32)
    assert [len(one.tokens) for one in found] == [32, 32, 32, 4]
    assert [token for one in found for token in one.tokens] == list(range(100))


def test_tokens_a_pass_are_the_sum_of_products_of_acceptance() -> None:
    """Block efficiency with three drafts. Negative control: the mean acceptance in place of each."""
    b = [0.8, 0.5, 0.9]
    assert chain_length(b) == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.9)
    assert chain_length([sum(b) / 3] * 3) != pytest.approx(chain_length(b), abs=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide the width 24 into heads of an even size, got 5"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_kv_heads must divide 3 heads, got 2"),
        ({"num_heads": None}, "hidden_size must be a multiple of 64 without num_heads, got 24"),
        ({"hidden_size": None}, "num_heads must come with hidden_size"),
        ({"pretrain_data": ()}, "pretrain_data must name at least one file"),
        ({"pretrain_learning_rate": 2.0}, "pretrain_learning_rate"),
    ],
)
def test_shapes_and_stages_that_cannot_be_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(Path("x"), **changes)


def test_texts_of_a_stage_that_cannot_be_read_are_named(llm: LLM, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="nowhere"):
        train(llm, config_of(prompts, pretrain_data=(tmp_path / "nowhere.jsonl",)), tmp_path / "draft")
    assert not (tmp_path / "draft" / "run").exists()
