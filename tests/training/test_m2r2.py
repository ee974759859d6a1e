"""M2R2 in training: the stream is the one that drafts, and comes nearer to the target's states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch

from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.self.m2r2 import M2R2Drafter
from paceline.errors import ConfigError
from paceline.training import Document, m2r2, trainer, training_config
from paceline.training.m2r2 import M2R2Trainer
from paceline.tree import EMPTY_TREE, Budget

TEXTS = [Document(tuple(range(5, 27)), 4), Document(tuple(range(90, 60, -2)), 3)]
LENGTH = 40


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("target"), num_hidden_layers=5)
    return LLM(str(folder), speculative_config=None, dtype="float32")


def begun(llm: LLM, **changes: Any) -> tuple[M2R2Trainer, Any, Any]:
    """A trainer, its view, and a row of both texts."""
    config = training_config("m2r2", data=(Path("x"),), **{"stream_rate": 2, "adapter_rank": 8} | changes)
    M2R2Trainer.check(llm.runner.info, config)
    torch.manual_seed(0)
    made, view = M2R2Trainer.init(llm, config, torch.arange(100))
    return made, view, view.batch([TEXTS], LENGTH)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [False, True])
def test_the_stream_is_the_one_that_drafts(
    llm: LLM, tmp_path: Path, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each place of both texts. Control: rows of the stream that see its own keys of the text."""
    made, view, batch = begun(llm)
    for step in made.steps:
        torch.nn.init.normal_(step["up"].weight, std=0.3)  # type: ignore[index, arg-type]
    made.write(tmp_path, llm, view, {"target": {}})
    if wrong:
        monkeypatch.setattr(m2r2, "seen", alone)
    rows = made.logits(made.states(batch).flatten(0, 1))
    runner: Any = llm.runner
    args = DrafterArgs(vocab_size=runner.info.vocab_size, index=0, max_context=128, target=runner)
    drafter = M2R2Drafter(args, model=str(tmp_path))
    start, differs = 0, False
    for text in TEXTS:
        for place in range(1, len(text.tokens), 3):
            cache = runner.open()
            runner.extend([cache], [text.tokens[:place]])
            context = Context("r", list(text.tokens[: place + 1]), 1, 1.0, cache=lambda cache=cache: cache)
            (tree,) = drafter.propose(drafter.begin([context]), [Budget(1, 1)], [EMPTY_TREE])
            (trial,) = tree.trials_of(-1)
            differs |= not torch.allclose(rows[start + place].softmax(0), trial.row, atol=1e-4, rtol=1e-3)
            runner.release(cache)
        start += len(text.tokens)
    assert differs is wrong


def alone(batch: Any) -> torch.Tensor:
    """Wrong: rows of the stream see each other, and no states of the target."""
    visible = batch.visible()
    none = torch.zeros_like(visible)
    return torch.cat((torch.cat((visible, none), -1), torch.cat((none, visible), -1)), 1)


def nearness(made: M2R2Trainer, batch: Any) -> torch.Tensor:
    """(steps,) mean cosine of the stream's states and the target's."""
    here, true = batch.documents >= 0, batch.taps.chunk(len(made.steps), -1)
    with torch.no_grad():
        *behind, _ = made.streamed(batch)
    pairs = zip(behind, true, strict=True)
    return torch.stack([torch.cosine_similarity(ours[here], its[here], dim=-1).mean() for ours, its in pairs])


@torch.no_grad()
def distance(made: M2R2Trainer, batch: Any) -> float:
    """What alignment makes less, on average over the steps."""
    return float(made.distances(batch, made.streamed(batch)[:-1]).mean())


@pytest.mark.parametrize("learns", [True, False])
def test_training_aligns_the_stream_early(llm: LLM, learns: bool) -> None:
    """At every step. Control: without the adapters nothing changes."""
    made, _, batch = begun(llm)
    before, generator = nearness(made, batch), torch.Generator()
    optimizer = torch.optim.Adam(made.parameters(), 1e-2 if learns else 0.0)
    first = distance(made, batch)
    for _ in range(12):
        optimizer.zero_grad()
        made.loss(batch, generator).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    last = distance(made, batch)
    assert bool((nearness(made, batch) > before + 0.02).all()) is learns
    assert (last < 0.9 * first) is learns


@torch.no_grad()
def test_the_loss_is_of_tokens_and_of_states(llm: LLM) -> None:
    made, _, batch = begun(llm)
    tokens = float(super(M2R2Trainer, made).loss(batch, torch.Generator()))
    apart = distance(made, batch)
    assert apart > 0.1
    assert float(made.loss(batch, torch.Generator())) == pytest.approx(tokens + apart, abs=1e-4)


def test_it_begins_as_the_layers_alone(llm: LLM) -> None:
    """At rate 1 these are the target."""
    for rate, is_target in ((1, True), (2, False)):
        made, _, batch = begun(llm, stream_rate=rate)
        with torch.no_grad():
            states = made.states(batch)
        here = batch.documents >= 0
        assert torch.allclose(states[here], batch.final[here], atol=1e-4) is is_target
        assert len(made.steps) == -(-5 // rate)


def test_a_rate_beyond_the_layers_is_rejected(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r"stream_rate must be an integer in 1\.\.5, got 6"):
        begun(llm, stream_rate=6)
    assert trainer("m2r2") is M2R2Trainer
