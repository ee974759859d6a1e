"""`paceline train` on a model of two layers: interrupted, gone on with, and what it says of how much it knows."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline import LLM, registry
from paceline.cli.train import drafter_words
from paceline.errors import PacelineError
from paceline.training import TrainConfig, Trainer
from paceline.training.batches import Batch, TargetView
from paceline.training.judging import Evaluated
from paceline.training.loop import LearningCurve
from paceline.training.next_token import NextTokenTrainer
from paceline.training.trained import Trained

FEW = "(6 prompts or more are needed for an interval)"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    rows = ({"text": f"There are {i} of these, and {i + 1} more of those here."} for i in range(12))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def raise_in_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A signal of the list is raised in the fourth step."""
    signals: list[int] = []
    forward = Trainer.forward

    def watched(self: Trainer, batch: Any, generator: Any) -> Any:
        if signals and generator.initial_seed() == 3:
            number = signals.pop()
            assert callable(signal.getsignal(number)), "it would end this process"
            signal.raise_signal(number)
        return forward(self, batch, generator)

    monkeypatch.setattr(Trainer, "forward", watched)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signals
    signal.signal(signal.SIGINT, before)


def quick(method: str, tiny: Path, texts: Path, out: Path, *more: str) -> list[str]:
    named = ["train", method, "--model", str(tiny), "--data", str(texts), "--texts", "-o", str(out)]
    return [*named, "--steps", "6", "--row-tokens", "32", "--batch-rows", "2", "--dtype", "float32", *more]


@pytest.mark.parametrize(("number", "code", "words"), [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"),
])  # fmt: skip
def test_a_signal_keeps_the_state_and_the_same_command_goes_on(
    run: Command, raise_in_step: list[int], tiny: Path, texts: Path, tmp_path: Path,
    number: signal.Signals, code: int, words: str,
) -> None:  # fmt: skip
    out = tmp_path / "head"
    raise_in_step.append(number)
    found = run(*quick("medusa", tiny, texts, out, "--speed-prompts", "1", "--depths", "2"))
    assert (found.code, found.line, found.out) == (code, words, "")
    assert f"kept in {out}: step 4; the same command goes on" in " ".join(found.err.split())
    with safe_open(out / "run" / "state.safetensors", "pt") as file:
        assert file.metadata()["step"] == "4"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for refused in (
        run("generate", "-m", str(tiny), "x", "-s", json.dumps({"method": "medusa", "model": str(out)})),
        run("generate", "-m", str(out), "x"),
    ):
        assert refused.code == 2
        assert refused.line.startswith(f"the training of {out} has not finished; go on with `paceline train medusa ")
    settings = out / "run" / "training.json"  # as of an earlier version, with settings of other methods
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rank": 16, "sites": ["mlp"]}))
    found = run(*quick("medusa", tiny, texts, out, "--speed-prompts", "1", "--depths", "2"))
    said = " ".join(found.out.split())
    assert found.code == 0
    assert "of 12 texts 10 are learned, 1 choose the best state and 1 test it" in " ".join(found.err.split())
    assert re.search(r"On 1 test text \(\d+ tokens\) a chain of 2 drafts now gives \d\.\d\d tokens a pass", said)
    assert f"tokens a pass {FEW}; 1." in said
    assert f"Timed on 1 test prompt {FEW}: " in said
    assert "95 %" not in said + (out / "report.html").read_text()
    config = json.dumps({"method": "medusa", "model": str(out)})
    assert f"Use it: paceline generate -m {tiny} --chat -s '{config}'" in said
    report = json.loads((out / "report.json").read_text())
    assert report["texts"]["test"]["texts"] == report["test_texts"] == report["speed"]["auto"]["over_plain"]["n"] == 1
    assert "low" not in report["speed"]["auto"]["over_plain"]


@pytest.mark.parametrize(("ratio", "told"), [(0.8, True), (1.3, False), (None, False)])
def test_a_drafter_that_is_slower_than_plain_decoding_is_called_so(ratio: float | None, told: bool) -> None:
    found = Evaluated(1, 40, [0.1], [40])
    over = None if ratio is None else {"value": ratio, "n": 1, "no_interval": FEW}
    speed = {"prompts": 1, "drafts": 1, "chain": {"over_plain": over}, "auto": {"over_plain": over}}
    trained = Trained(Path("head"), found, found, LearningCurve(), {}, {"method": "medusa"}, None, speed)
    lines = list(drafter_words(trained, "paceline generate"))
    assert lines[-1] == "Use it: paceline generate"
    assert any("not faster than plain decoding" in line for line in lines) is told


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.jsonl", '{"instruction": "a", "output": "b"}', "the keys instruction, output); give each row 'prompt' (a"),
        (
            "a.jsonl",
            '{"prompt": "a"}\n{"question": "b"}',
            "row 2 is not in the format jsonl (its keys are question; it",
        ),
        ("a.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5}', "holds lengths of prompts and no texts"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        (None, "", "cannot read the workload"),
    ],
)
def test_data_that_cannot_be_learned_is_rejected_before_a_model_is_loaded(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, content: str, line: str
) -> None:
    file = tmp_path / (name or "nowhere.jsonl")
    if name is not None:
        file.write_text(content)
    monkeypatch.setattr("paceline.cli.train.open_llm", lambda _: pytest.fail("a model was loaded"))
    found = run("train", "medusa", "--data", str(file), "-o", str(tmp_path / "head"))
    assert found.code == 2
    assert line in found.line


def test_flags_of_a_method_are_those_of_its_config(run: Command, tiny: Path, texts: Path, tmp_path: Path) -> None:
    shown = run("train", "lora", "--help").out
    assert "--rank" in shown
    assert "--exit-layer" not in shown
    assert all(name in run("train", "--help").out for name in registry.TRAINERS)
    for words, line in {
        ("medusa", "--rank", "2"): "No such option: --rank",
        ("lora", "--rank", "0"): "rank must be an integer in 1..1024, got 0",
        ("lora", "--feature-cache-gib", "inf"): "--feature-cache-gib must be a number, got 'inf'",
        ("draft_model", "--layers", "0,x"): "--layers must be numbers with commas between, such as 0,4,9, got '0,x'",
        ("lora", "--no-texts"): "texts must be true for lora, which learns texts as they are, got False",
        ("lora", "--lora", "x"): "lora learns of the model alone, got --lora x too; leave it out",
        ("medsa",): "unknown trainer 'medsa'; did you mean medusa",
    }.items():
        found = run("train", *words, "--model", str(tiny), "--data", str(texts), "-o", str(tmp_path / "out"))
        assert found.code == 2
        assert line in found.line


def test_an_adapter_drafts_nothing_and_six_texts_have_an_interval(
    run: Command, tiny: Path, texts: Path, tmp_path: Path
) -> None:
    rows = [json.dumps({"text": f"{i} and {i} are {2 * i}, and again {i}."}) + "\n" for i in range(48)]
    texts.write_text("".join(rows))
    found = run(*quick("lora", tiny, texts, tmp_path / "adapter", "--rank", "2"))
    said = " ".join(found.out.split())
    assert found.code == 0
    assert re.search(
        r"Of the tokens of 6 test texts \(\d+ tokens\), [\d.]+% are now the likeliest ones \(95 % interval ", said
    )
    assert f"Use it: paceline generate -m {tiny} --lora {tmp_path / 'adapter'}" in said
    page = (tmp_path / "adapter" / "report.html").read_text()
    assert "on 6 validation texts" in page
    assert "95 % interval" in page
    assert "a pass" not in said + page


class ShiftTrainer(NextTokenTrainer):
    """What is added to the last state;
    neither a head nor an adapter.

    Attributes:
        shift: for programmers.
    """

    name = "shift"
    drafts = False

    def __init__(self, rows: Tensor) -> None:
        super().__init__(rows, 1)
        self.shift = nn.Parameter(torch.zeros(rows.shape[1]))

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[Trainer, TargetView]:
        view = TargetView(llm.runner, (), vocabulary, keep_bytes=config.feature_cache_bytes)
        return cls(view.rows), view

    def states(self, batch: Batch) -> Tensor:
        return batch.final + self.shift

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        save_file({"shift": self.shift.detach()}, folder / "shift.safetensors")


def test_a_training_is_finished_whatever_files_it_writes(run: Command, tiny: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "shift"
    assert run(*quick(f"{__name__}:ShiftTrainer", tiny, texts, out)).code == 0
    assert (out / "shift.safetensors").is_file()
    used = ("generate", "-m", str(tiny), "--lora", str(out), "x")
    assert run(*used).line.startswith("no LoRA adapter in")
    (out / "run" / "finished").unlink()  # as of a run that was stopped
    assert "has not finished" in run(*used).line


def test_help_of_a_trainer_without_a_paper_is_its_first_paragraph(run: Command) -> None:
    shown = " ".join(run("train", f"{__name__}:ShiftTrainer", "--help").out.split())
    assert "What is added to the last state; neither a head nor an adapter." in shown
    assert "for programmers" not in shown
    assert "Train as in LoRA (arXiv:2106.09685)." in " ".join(run("train", "lora", "--help").out.split())


class CommandTrainer(ShiftTrainer):
    """The same, with a command that uses it."""

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        return f"shifted {folder} of {model}"


def test_only_a_trainer_knows_how_its_files_are_used(run: Command, tiny: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(*quick(f"{__name__}:ShiftTrainer", tiny, texts, out / "shift"))
    assert "are now the likeliest ones" in " ".join(found.out.split())
    assert "Use it" not in found.out
    found = run(*quick(f"{__name__}:CommandTrainer", tiny, texts, out / "command"))
    assert f"Use it: shifted {out / 'command'} of {tiny}" in " ".join(found.out.split())


def test_what_is_not_finished_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    (begun / "run").mkdir(parents=True)
    settings = begun / "run" / "training.json"
    settings.write_text(json.dumps({"command": "paceline train lora -o begun"}))
    more: dict[str, Any] = {"dtype": "float32"}
    named = {"model": str(begun)}
    ways: list[dict[str, Any]] = [
        {"speculative_config": {"method": "eagle3", **named}},
        {"speculative_config": {"method": "medusa", "model": str(begun / "head")}},
        {"speculative_config": {"method": "kangaroo", "exit_layer": 1, **named}},
        {"speculative_config": {"method": "draft_model", **named}},
        {"lora": begun},
    ]
    for way in ways:
        with pytest.raises(PacelineError, match="has not finished; go on with `paceline train lora -o begun`, or name"):
            LLM(str(tiny), **way, **more)
    settings.write_text("{}")
    with pytest.raises(PacelineError, match="has not finished; start it again, with the same settings"):
        LLM(str(tiny), lora=begun, **more)
    (begun / "adapter_config.json").write_text("{}")
    with pytest.raises(PacelineError, match=r"holds no adapter_model\.safetensors"):
        LLM(str(tiny), lora=begun, **more)
    with pytest.raises(PacelineError, match="and not a hub id"):
        LLM(str(tiny), speculative_config={"method": "medusa", "model": str(begun / "head")}, **more)


def test_an_acceptance_head_is_used_as_its_command_says(run: Command, tiny: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    words = quick("specdec_pp", tiny, texts, out)
    assert "draft_model must be the folder or hub id of a draft model for specdec_pp" in run(*words).line
    words += ["--draft-model", str(tiny), "--num-blocks", "2"]
    assert "must be 0 for specdec_pp, which reads mixed texts" in run(*words, "--feature-disk-gib", "1").line
    found = run(*words)
    said = " ".join(found.out.split())
    assert found.code == 0, found.err
    assert re.search(r"of 1 test text \(\d+ tokens\), [\d.]+% are accepted or rejected as foretold", said)
    config = json.dumps({"method": "draft_model", "model": str(tiny), "acceptance_head": str(out)})
    assert f"Use it: paceline generate -m {tiny} -s '{config}' --chat" in said
    used = [
        "generate",
        "-m",
        str(tiny),
        "-s",
        config,
        "--dtype",
        "float32",
        "--max-tokens",
        "6",
        "--json",
        "some words",
    ]
    metrics = json.loads(run(*used).out)["metrics"]
    assert metrics["num_draft_tokens"] > 0
    stored = json.loads((out / "config.json").read_text())
    assert (stored["num_layers"], stored["paceline_acceptance_head"]["draft"]["name"]) == (2, str(tiny))
