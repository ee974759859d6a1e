"""Drafts by an encoder-decoder target's own decoder layers, on what its encoder has read: trained, exact, shared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoder_decoder as tiny
import tiny_whisper
import torch

from paceline import LLM, SamplingParams
from paceline.errors import CapabilityError, CheckpointError, ConfigError, PromptError
from paceline.llm import BUNDLED
from paceline.models import Inputs
from paceline.models.runners import EncoderDecoderRunner, SourceDraftRunner
from paceline.speech import Thresholds
from paceline.training import Fitting, Trained, answered, documents_of, train, trainer, training_config

VOCABULARY = json.loads((BUNDLED / "target" / "config.json").read_text())["vocab_size"]
WORDS = ("the", "ship", "came", "back", "from", "a", "long", "way", "over", "sea", "and", "nobody", "knew", "why", "it")
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
ONE_STEP = Fitting(steps=1, batch_rows=2, row_tokens=96, eval_steps=1, learning_rate=1e-12, bf16=False)
QUICK = Fitting(steps=40, batch_rows=2, row_tokens=96, eval_steps=20, warmup_steps=5, bf16=False, learning_rate=2e-3)
TREES: list[dict[str, Any]] = [
    {}, {"tree_width": 3}, {"tree_policy": "eagle2", "tree_width": 4}, {"quantization": "int8"},
]  # fmt: skip


def made(name: str, folder: Path, **more: Any) -> Path:
    """A checkpoint with a tokenizer."""
    sizes = {"vocab_size": VOCABULARY, "eos_token_id": 1, "forced_eos_token_id": None} | more
    if name == "marian":
        sizes["decoder_vocab_size"] = VOCABULARY
    tiny.make(name, folder, **sizes)
    for file in (BUNDLED / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def lines(folder: Path, count: int = 60) -> Path:
    """A file of sources, one a line."""
    random, path = np.random.default_rng(0), folder / "sources.txt"
    path.write_text("\n".join(" ".join(random.choice(WORDS, 8)) for _ in range(count)))
    return path


def prompts(count: int) -> list[dict[str, str]]:
    """Sources that were not learned."""
    random = np.random.default_rng(1)
    return [{"encoder_prompt": " ".join(random.choice(WORDS, 6 + i))} for i in range(count)]


def trained(llm: LLM, folder: Path, fitting: Fitting, **more: Any) -> Trained:
    settings = {"max_tokens": 24, "draft_vocab_size": 512, "depths": 3, "held_out_share": 0.15} | more
    data = settings.pop("data", None) or (lines(folder.parent),)
    return train(llm, training_config("encdec_draft", data=data, fitting=fitting, **settings), folder, speed_prompts=0)


def texts(outputs: list[Any]) -> list[list[list[int]]]:
    assert not any(output.metrics.dropped_drafters for output in outputs)
    return [[one.token_ids for one in output.outputs] for output in outputs]


def passes(outputs: list[Any]) -> int:
    return sum(output.metrics.num_steps for output in outputs)


def with_draft(llm: LLM, draft: Path, **more: Any) -> LLM:
    return llm.with_speculative_config(
        {"method": "encdec_draft", "model": str(draft), "num_speculative_tokens": 4, "controller": "fixed", **more}
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(made("marian", tmp_path_factory.mktemp("marian")), dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def learned(target: LLM, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(target, tmp_path_factory.mktemp("learned") / "draft", QUICK)


@pytest.fixture(scope="module")
def unlearned(target: LLM, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The control: the layers as they are in the target."""
    return trained(target, tmp_path_factory.mktemp("unlearned") / "draft", ONE_STEP)


# ------------------------------------------------------------------------------------------------ training


def test_what_was_trained_is_right_more_often(target: LLM, learned: Trained, unlearned: Trained) -> None:
    """By the report, and while it drafts for sources that it has not learned, beside the control."""
    assert learned.test.length > learned.before.length + 0.5
    assert unlearned.test.length == pytest.approx(learned.before.length)
    judged = learned.curve.judged
    assert judged[-1].loss < judged[1].loss
    steps = [passes(with_draft(target, one.folder).generate(prompts(6), GREEDY)) for one in (learned, unlearned)]
    assert steps[0] < 0.8 * steps[1]
    assert json.loads((learned.folder / "report.json").read_text())["tokens_per_pass"] == learned.test.length


def test_t5_learns_too(tmp_path: Path) -> None:
    """Whose scores depend on distances; in bfloat16, as on machines where that is faster."""
    llm = LLM(made("t5 with gates", tmp_path / "target"), dtype="float32", speculative_config=None)
    found = trained(llm, tmp_path / "draft", replace(QUICK, steps=60, eval_steps=30, bf16=True), layers=(0,))
    losses = [judgement.loss for judgement in found.curve.judged[1:]]
    assert losses[-1] < 0.8 * losses[0]
    assert found.test.length >= found.before.length
    drafted = with_draft(llm, found.folder).generate(prompts(3), GREEDY)
    assert texts(drafted) == texts(llm.generate(prompts(3), GREEDY))


FAMILIES = ("t5", "t5 with gates", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100")


@pytest.mark.parametrize("name", FAMILIES)
def test_all_layers_are_the_target_itself(name: str, tmp_path: Path) -> None:
    """Nothing is left to learn, and every draft is right; without the last layer (the control) there is."""
    llm = LLM(made(name, tmp_path / "target"), dtype="float32", speculative_config=None)
    left = [to_learn(llm, layers, tmp_path) for layers in ((0, 1, 2), (0, 1))]
    assert left[0] < 1e-3
    assert left[1] > 1e-2
    settings = {"layers": (0, 1, 2), "data": (lines(tmp_path, 12),)}
    outputs = llm.generate(prompts(4), GREEDY)
    for vocabulary in (10**6, 512) if name in ("t5", "marian") else (10**6,):
        draft = trained(llm, tmp_path / f"draft-{vocabulary}", ONE_STEP, draft_vocab_size=vocabulary, **settings).folder
        drafted = with_draft(llm, draft).generate(prompts(4), GREEDY)
        assert texts(drafted) == texts(outputs)
        assert passes(drafted) == 4 * 5 or vocabulary == 512


def to_learn(llm: LLM, layers: tuple[int, ...], folder: Path) -> float:
    """Nats a token by which these layers' distributions, untrained, are not the target's."""
    config = training_config("encdec_draft", data=(lines(folder, 8),), layers=layers)
    kind = trainer("encdec_draft")
    answers = answered(llm, kind.prompts(llm, config), folder / "answers.jsonl", max_tokens=20)
    documents = documents_of(answers, 96)
    head, view = kind.init(llm, config, torch.arange(VOCABULARY))
    batch = view.batch([documents[:3], documents[3:5]], 96)
    with torch.no_grad():
        chances = head.soft_targets(batch).chances.double()
        return float(head.loss(batch, torch.Generator()) - torch.special.entr(chances).sum(-1).mean())


def test_speech_is_learned_from_a_folder(tmp_path: Path) -> None:
    """Whisper writes down what is in it, and a draft for it leaves transcripts as they are."""
    sounds = tmp_path / "sounds"
    sounds.mkdir()
    for seed in range(6):
        (sounds / f"{seed}.wav").write_bytes(tiny_whisper.wav(tiny_whisper.sound(1.5 + seed, seed)))
    (sounds / "notes.txt").write_text("not speech")
    llm = LLM(tiny_whisper.write(tmp_path / "whisper", seed=1), dtype="float32", speculative_config=None)
    found = trained(llm, tmp_path / "draft", ONE_STEP, data=(sounds,), layers=(0, 1), draft_vocab_size=10**6)
    answers = [json.loads(line) for line in (tmp_path / "draft" / "run" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 6
    assert len({tuple(answer["answer"]) for answer in answers}) > 1
    audio = [tiny_whisper.sound(3.0, 20), tiny_whisper.sound(40.0, 21)]
    params = {
        "language": "en", "thresholds": Thresholds(compression_ratio=None, avg_logprob=None, no_speech_prob=None),
    }  # fmt: skip
    drafting = with_draft(llm, found.folder)
    heard = [one.transcribe(audio, **params) for one in (llm, drafting)]
    assert [each.text for each in heard[0]] == [each.text for each in heard[1]]
    drafts = drafting.engine.parts.drafter_set.drafters[0]
    assert drafts.runner.sources_copied > 0


# ------------------------------------------------------------------------------------------------ drafting


@pytest.mark.parametrize("tree", TREES)
def test_texts_are_those_without_drafts(tree: dict[str, Any], target: LLM, learned: Trained) -> None:
    """Several sources in one batch, chains and trees, greedy and with a seed; n outputs share one copy of a source."""
    drafting = with_draft(target, learned.folder, **tree)
    drawn = SamplingParams(max_tokens=20, temperature=1.0, top_k=8, n=3, seed=7, ignore_eos=True)
    draft = drafting.engine.parts.drafter_set.drafters[0].runner
    assert isinstance(draft, SourceDraftRunner)
    for params in (GREEDY, drawn):
        before = draft.sources_copied
        assert texts(drafting.generate(prompts(4), params)) == texts(target.generate(prompts(4), params))
        assert draft.sources_copied == before + 4


def test_draws_are_accepted_without_a_seed(target: LLM, learned: Trained) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True)
    outputs = with_draft(target, learned.folder, draft_sample_method="probabilistic").generate(prompts(4), params)
    assert all(len(one.outputs[0].token_ids) == 24 for one in outputs)
    assert sum(one.metrics.num_accepted_tokens for one in outputs) > 0


def test_the_draft_reads_its_own_source(
    target: LLM, unlearned: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another source in its place (the control) fewer drafts are right, and the texts are the same."""
    whole = trained(target, tmp_path / "whole", ONE_STEP, layers=(0, 1, 2), draft_vocab_size=10**6)
    plain = texts(target.generate(prompts(4), GREEDY))
    steps = []
    memory_of = EncoderDecoderRunner.memory_of
    for own in (True, False):
        if not own:
            monkeypatch.setattr(EncoderDecoderRunner, "memory_of", lambda self, inputs: memory_of(self, Inputs()))
        outputs = with_draft(target, whole.folder).generate(prompts(4), GREEDY)
        assert texts(outputs) == plain
        steps.append(passes(outputs))
    assert steps[0] == 4 * 5 < steps[1]


@pytest.mark.parametrize("broken", ["encode", "extend"])
def test_a_draft_that_fails_leaves_plain_decoding(
    broken: str, target: LLM, learned: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = with_draft(target, learned.folder)
    runner = drafting.engine.parts.drafter_set.drafters[0].runner

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(runner, broken, fail)
    outputs = drafting.generate(prompts(3), GREEDY)
    plain = texts(target.generate(prompts(3), GREEDY))
    assert [[one.token_ids for one in output.outputs] for output in outputs] == plain
    assert all(output.metrics.dropped_drafters for output in outputs)


def test_auto_chooses_among_it_and_tables(target: LLM, learned: Trained) -> None:
    """Beside tables, under the controller that drafts where that pays."""
    config = {"method": ["ngram", "prediction", {"method": "encdec_draft", "model": str(learned.folder)}]}
    named = {"method": "auto", "model": str(learned.folder)}
    for one in ({**config, "controller": "auto"}, named):
        drafting = target.with_speculative_config(one)
        assert "encdec_draft" in drafting.drafter_methods
        assert texts(drafting.generate(prompts(4), GREEDY)) == texts(target.generate(prompts(4), GREEDY))


# ------------------------------------------------------------------------------------------------ what is wrong


def other_target(tmp_path: Path) -> LLM:
    return LLM(made("marian", tmp_path / "other", decoder_ffn_dim=40), dtype="float32", speculative_config=None)


def without_a_tensor(folder: Path, tmp_path: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "cut")
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.o.weight"] = tensors["layers.0.o.weight"][:, :-4].contiguous()
    save_file(tensors, tmp_path / "cut" / "model.safetensors")
    return tmp_path / "cut"


def test_wrong_drafts_are_refused_in_one_line(target: LLM, learned: Trained, tmp_path: Path) -> None:
    wrong: list[tuple[Callable[[], LLM], type[Exception], str]] = [
        (lambda: with_draft(LLM(dtype="float32"), learned.folder), CapabilityError, "has no encoder"),
        (lambda: with_draft(other_target(tmp_path), learned.folder), CheckpointError, "is for shape"),
        (lambda: with_draft(target, BUNDLED / "draft"), CheckpointError, "paceline train encdec_draft"),
        (lambda: with_draft(target, tmp_path / "nowhere"), CheckpointError, "nowhere"),
        (lambda: with_draft(target, without_a_tensor(learned.folder, tmp_path)), CheckpointError, "must have shape"),
        (lambda: target.with_speculative_config({"method": "encdec_draft"}), ConfigError, "folder or hub id"),
        (lambda: with_draft(target, learned.folder, quantization="int3"), ConfigError, "one of none, int8"),
    ]
    for build, error, words in wrong:
        with pytest.raises(error, match=words) as raised:
            build()
        assert "\n" not in str(raised.value)


def test_wrong_training_is_refused_in_one_line(target: LLM, tmp_path: Path) -> None:
    sounds = tmp_path / "empty"
    sounds.mkdir()
    plain = LLM(dtype="float32", speculative_config=None)
    whisper = LLM(tiny_whisper.write(tmp_path / "whisper"), dtype="float32", speculative_config=None)
    wrong: list[tuple[LLM, dict[str, Any], type[Exception], str]] = [
        (plain, {}, CapabilityError, "has no encoder"),
        (target, {"layers": (0, 3)}, ConfigError, "be below 3"),
        (target, {"texts": True}, ConfigError, "learns what the model writes"),
        (target, {"feature_disk_bytes": 2**30}, ConfigError, "feature_disk_bytes must be 0"),
        (whisper, {"data": (sounds,)}, PromptError, "holds no speech"),
        (whisper, {"data": (sounds,), "language": "klingon"}, ConfigError, "language"),
    ]
    for llm, settings, error, words in wrong:
        with pytest.raises(error, match=words):
            trained(llm, tmp_path / "draft", ONE_STEP, **settings)
        assert not (tmp_path / "draft" / "run").exists()


def test_heads_are_not_trained_for_what_reads_sources(target: LLM, tmp_path: Path) -> None:
    config = training_config("eagle", data=(lines(tmp_path),), fitting=ONE_STEP)
    with pytest.raises(CapabilityError, match="train encdec_draft"):
        train(target, config, tmp_path / "head", speed_prompts=0)
