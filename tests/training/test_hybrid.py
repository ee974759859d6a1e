"""A Llama becomes a hybrid: mixers learn what attention gives, and what is written drafts and decodes as any model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import engine, run, tokens
from transformers import AutoModelForCausalLM

from paceline import LLM, SamplingParams, registry
from paceline.bench import BUNDLED_TARGET, bundled_prompts
from paceline.checkpoints import Checkpoint, load_weights, read_config, spec_from_config
from paceline.drafters import DrafterArgs
from paceline.errors import CapabilityError, ConfigError
from paceline.models.runners import RecurrentRunner
from paceline.training import Fitting, TrainConfig, Trained, documents_of, texts_of, train, trainer, training_config
from paceline.training import hybrid as trainer_module
from paceline.training.batches import Batch, TargetView, packed
from paceline.training.hybrid import HybridTrainer
from paceline.training.mamba2_mixer import TrainableMamba2

ROW = 96
KEPT = (1, 4)
QUICK = Fitting(steps=16, batch_rows=2, row_tokens=ROW, eval_steps=16, warmup_steps=3, bf16=False, learning_rate=3e-4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one.prompt[:300]}) + "\n" for one in bundled_prompts()[:48]))
    return path


def config(data: Path, **changes: Any) -> TrainConfig:
    own = {"attention_layers": KEPT, "matching_share": 0.5, "held_out_share": 0.1, "fitting": QUICK}
    return training_config(**{"method": "hybrid", "data": (data,), "texts": True, **own, **changes})


def begun(llm: LLM, data: Path, **changes: Any) -> tuple[HybridTrainer, TargetView]:
    made, view = HybridTrainer.init(llm, config(data, **changes), torch.arange(llm.runner.info.vocab_size))
    return made, view


def batches(llm: LLM, data: Path, view: TargetView) -> tuple[list[Batch], Batch]:
    """To learn, and one that is held out."""
    rows = packed(documents_of(texts_of(llm, [data], most=None), ROW), ROW)
    made = [view.batch(rows[start : start + 4], ROW) for start in range(0, len(rows) - 3, 4)]
    return made[:-1], made[-1]


def misfit(trainer: HybridTrainer, batch: Batch) -> float:
    with torch.no_grad():
        return float(trainer.misfit(batch))


# ------------------------------------------------------------------------------------------------ a mixer


def test_documents_of_a_row_do_not_see_each_other() -> None:
    mixer = TrainableMamba2(16, 2, taps=4, eps=1e-5)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, sizes = torch.randn(1, 150, 16), [70, 2, 78]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    alone = [mixer(part, torch.arange(part.shape[1])[None]) for part in x.split(sizes, 1)]
    assert torch.allclose(mixer(x, positions), torch.cat(alone, 1), atol=1e-5)
    assert not torch.allclose(mixer(x, torch.arange(150)[None]), torch.cat(alone, 1), atol=1e-2)


def test_a_mixer_begins_as_attention_without_its_softmax() -> None:
    torch.manual_seed(0)
    hidden, heads = 32, 2
    mixer, norm = TrainableMamba2(hidden, heads, taps=4, eps=1e-8), torch.ones(hidden)
    (q, k), (v, o) = torch.rand(2, hidden, hidden) / hidden, torch.randn(2, hidden, hidden) / hidden**0.5
    o.view(hidden, heads, 16)[:, :, -1] = 0.0  # nothing is lost with the value that makes room
    mixer.begin_as((q, k, v, o), norm)
    with torch.no_grad():
        mixer.A_log.fill_(-50.0)  # nothing decays
    x = torch.rand(1, 40, hidden)  # so that all weights are positive
    read, written = (torch.nn.functional.silu(x @ w.T * 16**-0.25).view(40, heads, 16) for w in (q, k))
    weights = torch.einsum("qhn,khn->hqk", read, written).tril()
    averages = torch.einsum("hqk,khn->qhn", weights / weights.sum(-1, keepdim=True), (x @ v.T).view(40, heads, 16))
    expected, found = averages.flatten(1) @ o.T, mixer(x, torch.arange(40)[None])[0]
    likeness = torch.nn.functional.cosine_similarity(found, expected)
    assert likeness[8:].mean() > 0.9
    others = torch.einsum("hqk,khn->qhn", weights, (x @ v.roll(1, 0).T).view(40, heads, 16)).flatten(1) @ o.T
    assert torch.nn.functional.cosine_similarity(found, others)[8:].mean() < 0.6


# ------------------------------------------------------------------------------------------------ training


def fitted(trainer: HybridTrainer, learned: list[Batch]) -> None:
    optimizer = torch.optim.Adam(trainer.parameters(), lr=7e-4)
    for batch in learned * 2:
        trainer.misfit(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_mixers_learn_what_attention_gives_to_texts_that_they_do_not_see(
    llm: LLM, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, view = begun(llm, data)
    learned, held_out = batches(llm, data, view)
    before = misfit(made, held_out)
    fitted(made, learned)
    after = misfit(made, held_out)
    assert after < 0.8 * before, (before, after)
    shuffled, _ = begun(llm, data)
    honest = trainer_module.distance
    with monkeypatch.context() as patched:
        patched.setattr(trainer_module, "distance", lambda mixed, wanted, real: honest(mixed, wanted.roll(1, 0), real))
        fitted(shuffled, learned)
    assert misfit(shuffled, held_out) > before, before


def test_the_map_behind_a_mixer_begins_nearest_to_attention(llm: LLM, data: Path) -> None:
    made, view = begun(llm, data)
    _, held_out = batches(llm, data, view)
    documents = documents_of(texts_of(llm, [data], most=36), ROW)
    before = misfit(made, held_out)
    made.prepare(view, documents, ROW, 0)
    after = misfit(made, held_out)
    assert after < 0.8 * before, (before, after)
    with torch.no_grad():
        for mixer in made.mixers.values():
            mixer.out_proj.weight.copy_(mixer.out_proj.weight.roll(1, 0))
    assert misfit(made, held_out) > before


# ------------------------------------------------------------------------------------------------ what is written


LOSSES: list[str] = []
"""Which losses the steps of `trained` had."""


class Watched(HybridTrainer):
    """Says which loss is asked for."""

    def misfit(self, batch: Batch) -> torch.Tensor:
        LOSSES.append("misfit")
        return super().misfit(batch)

    def cross_entropy(self, batch: Batch) -> torch.Tensor:
        LOSSES.append("cross-entropy")
        return super().cross_entropy(batch)


@pytest.fixture(scope="module")
def trained(llm: LLM, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(llm, config(data, method=f"{__name__}:Watched"), tmp_path_factory.mktemp("hybrid"))


def test_mixers_are_matched_first_and_then_all_learn_what_the_model_says(trained: Trained) -> None:
    assert LOSSES == ["misfit"] * 8 + ["cross-entropy"] * 8


def test_training_finds_more_of_the_models_tokens(trained: Trained) -> None:
    assert trained.model == trained.folder
    assert trained.test.acceptance[0] > trained.before.acceptance[0], (trained.before, trained.test)


def test_what_is_kept_is_the_models_own(trained: Trained) -> None:
    own, written = Checkpoint(BUNDLED_TARGET), Checkpoint(trained.folder)
    for index in range(6):
        assert (f"model.layers.{index}.self_attn.q_proj.weight" in written.entries) == (index in KEPT)
    kept = [name for name in own.entries if name in written.entries]
    assert len(kept) == 2 + 6 * 2 + len(KEPT) * 4
    assert all(torch.equal(own.tensor(name), written.tensor(name).to(torch.bfloat16)) for name in kept)


def read(folder: Path) -> RecurrentRunner:
    spec = spec_from_config(read_config(folder))
    weights = load_weights(Checkpoint(folder), spec, device=torch.device("cpu"), dtype=torch.float32)
    return RecurrentRunner(
        spec, weights, name="hybrid", device=torch.device("cpu"), dtype=torch.float32, compiled=False
    )


def test_the_checkpoint_says_what_was_trained(llm: LLM, data: Path, trained: Trained, tmp_path: Path) -> None:
    made, view = begun(llm, data)
    made.write(tmp_path, llm, view, {})
    _, batch = batches(llm, data, view)
    size = int((batch.documents[0] == 0).sum())
    ids = batch.tokens[0, :size]
    expected = (made.states(batch)[0, :size] @ view.rows.T).detach()

    def said(folder: Path) -> torch.Tensor:
        runner = read(folder)
        return runner.extend([runner.open()], [ids.tolist()], all_logits=True).logits

    assert torch.allclose(said(tmp_path), expected, atol=1e-2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(ids[None]).logits[0]
    assert torch.allclose(theirs, expected, atol=1e-2)
    assert not torch.allclose(said(trained.folder), expected, atol=1.0)


def test_drafts_in_trees_write_what_plain_decoding_does(llm: LLM, trained: Trained) -> None:
    greedy, runner = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), read(trained.folder)
    prompts = [llm.tokenizer.encode(one.prompt)[:60] for one in bundled_prompts()[:3]]
    args = DrafterArgs(
        vocab_size=runner.info.vocab_size, index=0, max_context=runner.info.max_context, target=runner,
        load_runner=lambda name: llm.runner,
    )  # fmt: skip
    drafter = registry.load("drafters", "draft_model")(args, model="draft", tree_policy="eagle2", tree_width=3)
    found = run(engine(runner, [drafter], 8), prompts, greedy)
    assert tokens(found) == tokens(run(engine(read(trained.folder)), prompts, greedy))
    assert tokens(found) != tokens(run(engine(llm.runner), prompts, greedy))
    accepted = [request.metrics.num_accepted_tokens for request in found]
    assert all(0 < count < 24 for count in accepted), accepted
    assert all(one.metrics.num_draft_tokens > 2 * one.metrics.num_accepted_tokens for one in found)


def test_what_is_no_llama_is_rejected(llm: LLM, data: Path) -> None:
    spec = llm.runner.spec  # type: ignore[attr-defined]
    for other in (replace(spec, family="qwen2"), replace(spec, qkv_bias=True), replace(spec, head_dim=32)):
        with pytest.raises(CapabilityError, match="made of a Llama"):
            HybridTrainer(BUNDLED_TARGET, other, KEPT, torch.zeros(1, 1), matching_share=0.5)
    for layers, why in (((1, 6), "below 6"), (tuple(range(6)), "leave a layer")):
        with pytest.raises(ConfigError, match=why):
            trainer("hybrid").check(llm.runner.info, config(data, attention_layers=layers))
