"""dParallel and CD4LM: the model's own answers, both runs for a few steps, interrupted, written and loaded."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from lab.diffusion import split_of
from paceline import training
from paceline.checkpoints import Tokenizer
from paceline.models import load_denoiser
from recipes.bundled_diffusion import cd4lm, distillation, dparallel, model, write
from recipes.common.options import BUNDLED
from tests.recipes.test_denoisers import net_of


def test_a_teacher_is_asked_about_what_it_sees_only_if_it_copies() -> None:
    choose = cd4lm.choose_visible
    assert [choose("auto", share) for share in (1.0, 0.8)] == ["teacher", "data"]
    assert choose("skip", 1.0) == "skip"


def tiny_state(folder: Path) -> Path:
    """A training state with the whole vocabulary and next to nothing else."""
    net, path = (
        net_of("plain", width=8, layers=1, vocab_size=model.VOCAB_SIZE),
        folder / "start.safetensors",
    )
    training.keep(path, net, torch.optim.AdamW(net.parameters()), training.Progress())
    return path


SMALL = ["--batch", "4", "--count", "1", "--rate", "0.01", "--lengths", "8"]


def test_answers_are_kept_with_whether_they_are_right(tmp_path: Path) -> None:
    """A run that was cut short goes on behind what is whole; none of the prompts is held out."""
    out = tmp_path / "answers.jsonl"
    asking = ["answers", "--out", str(out), "--tasks", "copy", "reverse", "--length", "16", "--batch", "2"]
    dparallel.main([*asking, "--count", "1"])
    once = out.read_text()
    out.write_text(once + once[: len(once) // 3])  # the kill came in the middle of a line
    dparallel.main([*asking, "--count", "2"])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["task"] for row in rows] == ["copy", "reverse"] * 2
    assert out.read_text().startswith(once)
    tokenizer = Tokenizer.load(BUNDLED / "diffusion")
    prompts = [tokenizer.decode(row["prompt"]) for row in rows]
    assert len(set(prompts)) == 4
    assert all(split_of(prompt) == "train" for prompt in prompts)
    assert all(row["right"] for row in rows)  # the bundled model copies and reverses
    out.write_text("".join(json.dumps(row | {"right": row["task"] == "copy"}) + "\n" for row in rows))
    assert [one.prompt for one in distillation.read_answers(out)] == [rows[0]["prompt"], rows[2]["prompt"]]
    out.write_text(json.dumps(rows[0] | {"right": False}))
    with pytest.raises(
        SystemExit, match=r"no right answers in .* run `python -m recipes\.bundled_diffusion\.dparallel answers"
    ):
        distillation.read_answers(out)


@pytest.mark.parametrize("name", ["dparallel", "cd4lm"])
def test_a_run_goes_on_and_its_model_loads(tmp_path: Path, name: str) -> None:
    (tmp_path / "answers.jsonl").write_text(
        json.dumps({"prompt": [900, 901], "answer": [902, 903], "right": True}) + "\n"
    )
    out, start = tmp_path / "out", tiny_state(tmp_path)
    given_ = ["--model", str(start), "--out", str(out), *SMALL]
    own = {"dparallel": ["--answers", str(tmp_path / "answers.jsonl")], "cd4lm": ["--tasks", "copy", "--items", "12"]}[
        name
    ]
    main = {"dparallel": lambda more: dparallel.main(["train", *more]), "cd4lm": cd4lm.main}[name]
    main([*given_, *own, "--most-steps", "2"])
    first = model.read_state(out / "state.safetensors")
    main([*given_, *own, "--most-steps", "5"])
    history = json.loads((out / "history.json").read_text())
    assert [line["step"] for line in history] == [0, 2, 5]
    assert 1 <= history[-1]["threshold 0.5"]["calls"] <= 8
    nets = [model.read_state(start), first, model.read_state(out / "state.safetensors")]
    assert all(not torch.equal(a.head.weight, b.head.weight) for a, b in pairwise(nets))
    write.main([str(out / "state.safetensors"), str(tmp_path / "model")])
    assert load_denoiser(tmp_path / "model", dtype="float32").attention == "full"
