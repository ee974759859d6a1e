"""Modules for multi-token prediction in training: what is judged is what the written module drafts, and it learns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from models import checkpoints
from mtp_checkpoints import LAYOUTS, add_module

from paceline import LLM
from paceline.models import load_runner
from paceline.models.runners import load_mtp_head
from paceline.training import training_config
from paceline.training.batches import Batch, Document
from paceline.training.mtp import MtpTrainer
from paceline.training.shipped_mtp import ShippedMtpTrainer, seen
from paceline.tree import EMPTY_TREE, TokenTree

TEXTS = [tuple((5 * i + 7 * j) % 90 + 4 for i in range(12 + j)) for j in range(2)]


@pytest.fixture(scope="module", params=["made", "qwen3_5_text", "qwen3_next", "mimo", "deepseek_v3"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A target, a trainer of a new module or of the one in the target's files, and what it reads of the target."""
    case, folder = request.param, tmp_path_factory.mktemp("target")
    checkpoints.write("llama" if case == "made" else case, "old", folder)
    if case != "made":
        add_module(folder, checkpoints.oracle(case), LAYOUTS[case])
    llm = SimpleNamespace(folder=folder, runner=load_runner(str(folder), dtype="float32"))
    config = training_config("mtp", data=(Path("x"),))
    trainer, view = MtpTrainer.init(cast(LLM, llm), config, torch.arange(llm.runner.info.vocab_size))
    assert isinstance(trainer, ShippedMtpTrainer) == (case != "made")
    return llm, trainer, view


def batch_of(view: Any) -> Batch:
    """A row of two texts."""
    return view.batch([[Document(text, 2) for text in TEXTS]], 32)


def drafted(llm: Any, folder: Path, tokens: tuple[int, ...], place: int, depths: int) -> list[int]:
    """The likeliest token of each step behind true tokens, by the written module as it drafts."""
    head, runner = load_mtp_head(folder, llm.runner), llm.runner
    last = runner.info.num_layers
    (states,) = runner.extend([runner.open()], [list(tokens)], taps=(last,)).taps.values()
    cache, found = head.open(), []
    known: dict[str, Any] = {"tokens": list(tokens[1 : place + 2]), "states": states[: place + 1], "picked": [place]}
    result = head.step([cache], [TokenTree.chain([0] * place) if place else EMPTY_TREE], [0], **known)
    for depth in range(depths):
        found.append(int(result.logits.argmax()))
        fed, state = place + 1 + depth, result.states[-1:]
        true = tokens[place + 2 + depth] if place + 2 + depth < len(tokens) else 0
        result = head.step([cache], [TokenTree.chain([0] * fed)], [fed], tokens=[true], states=state, picked=[0])
    return found


def test_what_is_judged_is_what_the_written_module_drafts(world: tuple[Any, Any, Any], tmp_path: Path) -> None:
    llm, trainer, view = world
    trainer.prepare(view, [Document(text, 2) for text in TEXTS], 32, 0)
    facts = {"target": {"name": "target"}}
    trainer.write(tmp_path, llm, view, facts)
    assert trainer.speculative_config(tmp_path) == {"method": "mtp", "model": str(tmp_path)}
    judged = [dict(zip(at.tolist(), best.tolist(), strict=True)) for at, best in trainer.predict(batch_of(view))]
    start = len(TEXTS[0])  # of the second text, which begins behind the first
    want = [[each[start + place] for each in judged] for place in (3, 6, 8)]
    found = [[drafted(llm, tmp_path, TEXTS[1], place + off, len(judged)) for place in (3, 6, 8)] for off in (0, -1)]
    assert found[0] == want
    assert found[1] != want


def test_a_few_steps_make_the_loss_less(world: tuple[Any, Any, Any]) -> None:
    _, trainer, view = world
    batch, generator = batch_of(view), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3)
    before = trainer.loss(batch, generator).item()
    for _ in range(8):
        optimizer.zero_grad()
        trainer.loss(batch, generator).backward()
        optimizer.step()
    assert trainer.loss(batch, generator).item() < 0.97 * before
    assert all(one.grad is not None for one in trainer.parameters())


def test_a_place_sees_the_text_in_step_0_and_of_later_steps_itself_alone() -> None:
    visible = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    whole = seen(visible, 3)[0].view(3, 3, 3, 3)
    assert torch.equal(whole[2, :, 0], visible[0])
    assert torch.equal(whole[2, :, 1], torch.eye(3, dtype=torch.bool))
    assert not whole[1, :, 2].any()
    assert not whole[0, :, 1:].any()
