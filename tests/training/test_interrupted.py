"""A run that a signal or a kill ends keeps its state, and goes on from it to the same weights."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline import LLM
from paceline.engine import Engine
from paceline.errors import ConfigError
from paceline.training import Document, Fitting, answered, trainer, training_config
from paceline.training.loop import fit
from paceline.training.splits import TextSplit
from paceline.utils import replacing

TEXTS = [Document(tuple((7 * i + j * (i + 3)) % 500 + 4 for j in range(18 + i % 5)), 4) for i in range(20)]
PARTS = TextSplit(TEXTS[:14], TEXTS[14:17], TEXTS[17:])
HOW = Fitting(steps=11, batch_rows=2, row_tokens=32, eval_steps=5, bf16=False, warmup_steps=2, learning_rate=1e-2)

Weights = dict[str, torch.Tensor]


class KilledError(Exception):
    """Stands for a kill: nothing is done about it."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(str(tiny_checkpoint.write(tmp_path_factory.mktemp("target"))), speculative_config=None, dtype="float32")


@pytest.fixture(scope="module")
def calm(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Weights, Any]:
    """Of a run of eagle3 that nothing disturbs."""
    return fitted(llm, tmp_path_factory.mktemp("runs") / "calm")


@pytest.fixture(autouse=True)
def signals_raise() -> Iterator[None]:
    """Should one not be deferred, the test fails, and does not end the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handler(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    for number in before:
        signal.signal(number, handler)
    yield
    for number, old in before.items():
        signal.signal(number, old)


def fitted(
    llm: LLM, folder: Path, *, in_step: dict[int, Callable[[], Any]] | None = None, method: str = "eagle3"
) -> tuple[Weights, Any]:
    """Weights and curve; `in_step` is called in the middle of steps."""
    own: dict[str, Any] = {"codebook_size": 8, "codes": 2} if method == "codebooks" else {}
    config = training_config(method, data=(Path("x"),), texts=True, depths=2, fitting=HOW, **own)
    torch.manual_seed(0)
    head, view = trainer(method).init(llm, config, torch.arange(300))
    left, loss = dict(in_step or {}), head.loss

    def watched(batch: Any, generator: torch.Generator) -> torch.Tensor:
        number = generator.initial_seed()  # of the step, where the run's seed is 0
        if (act := left.pop(number, None)) is not None:
            act()
        return loss(batch, generator)

    head.loss = watched  # type: ignore[method-assign]
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    head.prepare(view, PARTS.training, HOW.row_tokens, 0)
    curve = fit(head, view, PARTS, HOW, folder)
    return {name: one.detach().clone() for name, one in head.named_parameters()}, curve


def kept_step(folder: Path) -> int:
    with safe_open(folder / "state.safetensors", "pt") as file:
        return int(file.metadata()["step"])


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("method", ["eagle3", "medusa2", "lora", "codebooks"])
def test_a_signal_ends_a_step_and_keeps_it(llm: LLM, tmp_path: Path, method: str) -> None:
    calm, curve = fitted(llm, tmp_path / "calm", method=method)
    cut = tmp_path / "cut"
    for step, number in ((3, signal.SIGINT), (7, signal.SIGTERM)):
        with pytest.raises(KeyboardInterrupt, match=str(int(number))):
            fitted(llm, cut, in_step={step: lambda number=number: signal.raise_signal(number)}, method=method)
        assert kept_step(cut) == step + 1
    shifted = tmp_path / "shifted"
    shifted.mkdir()
    for path in cut.iterdir():
        (shifted / path.name).write_bytes(path.read_bytes())
    weights, again = fitted(llm, cut, method=method)
    assert same(weights, calm)
    assert again.judged == curve.judged
    with safe_open(shifted / "state.safetensors", "pt") as file:
        facts = file.metadata() | {"step": "9"}
    save_file(load_file(shifted / "state.safetensors"), shifted / "state.safetensors", facts)
    assert not same(fitted(llm, shifted, method=method)[0], calm)


def kill() -> None:
    raise KilledError


def test_the_state_is_kept_every_minute(
    llm: LLM, calm: tuple[Weights, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KilledError):
        fitted(llm, tmp_path / "judged alone", in_step={9: kill})
    assert kept_step(tmp_path / "judged alone") == 5
    monkeypatch.setattr("paceline.training.loop.SAVED", 0.0)
    monkeypatch.setattr("paceline.training.loop.SAVING", 1e9)
    with pytest.raises(KilledError):
        fitted(llm, tmp_path / "often", in_step={9: kill})
    assert kept_step(tmp_path / "often") == 9
    assert same(fitted(llm, tmp_path / "often")[0], calm[0])


@pytest.mark.parametrize("name", ["state.safetensors", "best.safetensors", "curve.json"])
def test_a_kill_at_a_save_harms_nothing(
    llm: LLM, calm: tuple[Weights, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of step 10, behind which all three files are written, one is not."""
    move = Path.replace

    def cut(self: Path, target: Path) -> Path:
        if target.name == name and armed:
            raise KilledError
        return move(self, target)

    armed: list[bool] = []
    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KilledError):
        fitted(llm, tmp_path / "cut", in_step={9: lambda: armed.append(True)})
    armed.clear()
    assert kept_step(tmp_path / "cut") == (5 if name == "state.safetensors" else 10)
    weights, again = fitted(llm, tmp_path / "cut")
    assert same(weights, calm[0])
    assert again.judged == calm[1].judged


def test_what_cannot_be_written_leaves_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(error: Exception) -> None:
        with replacing(path) as fresh:
            fresh.write_text("half")
            raise error

    with pytest.raises(KilledError):
        write(KilledError())
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left .*; make room and run the same command"):
        write(OSError(28, os.strerror(28)))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with replacing(path) as fresh:
        fresh.write_text("new")
        assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "new"


def test_a_second_signal_does_not_wait(llm: LLM, tmp_path: Path) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fitted(llm, tmp_path / "run", in_step={3: twice})
    assert kept_step(tmp_path / "run") == 0


def test_answers_that_are_whole_are_kept(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = LLM(llm.folder, speculative_config=None, dtype="float32", max_num_seqs=1)
    asked = {f"{i:064}": [5 + i, 6, 7] for i in range(4)}
    whole = answered(alone, asked, tmp_path / "calm.jsonl", max_tokens=5)
    step, steps = Engine.step, []

    def interrupted(self: Engine) -> Any:
        steps.append(0)
        if len(steps) == 13:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    file = tmp_path / "cut.jsonl"
    with pytest.raises(KeyboardInterrupt):
        answered(alone, asked, file, max_tokens=5)
    kept = len(file.read_text().splitlines())
    assert 0 < kept < 4
    steps.clear()
    steps.extend([0] * 99)
    assert answered(alone, asked, file, max_tokens=5) == whole
    assert file.read_text().splitlines() == (tmp_path / "calm.jsonl").read_text().splitlines()


def test_off_a_terminal_there_are_lines(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted(llm, tmp_path / "quick")
    assert "training:" not in capsys.readouterr().err  # ten seconds are not over
    monkeypatch.setattr("paceline.training.shown.EVERY", 0.0)
    fitted(llm, tmp_path / "heads")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == HOW.steps
    assert lines[6].startswith("training: 64%, step 7, loss ")
    assert lines[6].endswith(" s left")
    assert "tokens a pass" in lines[6]
    fitted(llm, tmp_path / "adapter", method="lora")
    assert "tokens a pass" not in capsys.readouterr().err
