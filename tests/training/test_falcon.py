"""Falcon in training: rows say what they say when they draft, learn what is a unit ahead, and are shown what was
wrong.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama

from paceline.drafters import Context
from paceline.drafters.heads.semi_autoregressive import SemiAutoregressiveDrafts, UnitState
from paceline.drafters.heads.tapped_states import TappedStates
from paceline.errors import ConfigError
from paceline.models.layers import gated
from paceline.models.runners import FeatureHead
from paceline.training import TargetView, falcon, training_config
from paceline.training.batches import Batch
from paceline.training.falcon import FalconTrainer, in_units
from tests.training.test_pard import PACKED

LENGTH = 48
VOCABULARY = torch.arange(0, 62, 2)
LAYER = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}


class World:
    """A trainer of a tiny head, rows of texts for it, and the head as it drafts."""

    def __init__(self, folder: Path, k: int) -> None:
        self.k, self.runner = k, runner_of(tiny_llama())
        own = FalconTrainer.config_of(self.runner.info, LAYER, len(VOCABULARY), 4)
        view = TargetView(self.runner, (), VOCABULARY, keep_bytes=0)
        torch.manual_seed(0)
        self.trainer = FalconTrainer(dataclasses.replace(own, block_size=k), view.rows)
        self.batch = view.batch(PACKED, LENGTH)
        llm: Any = SimpleNamespace(runner=self.runner)
        self.trainer.write(folder, llm, view, {"target": {}})
        self.drafts = SemiAutoregressiveDrafts(FeatureHead.load(folder, self.runner, ("falcon",)), 64, 0)

    def drafted(self, text: list[int], root: int) -> torch.Tensor:
        """(2 k, n) logits of the tokens behind text[: root + 1], as they are drafted where the first k are right."""
        last = self.runner.info.num_layers
        known = TappedStates(0, self.runner.extend([self.runner.open()], [text[:root]], taps=(last,)).taps[last])
        state = UnitState(Context("r", text[: root + 1], root), self.drafts.head.open(), known, self.k)
        first = self.drafts.first_units([state])
        path = tuple(text[root + 1 : root + 1 + self.k])
        draft: Any = SimpleNamespace(state=state, fed={-1: root - 1}, parents=[-1, *range(self.k - 1)])
        draft.path_of = lambda node: path[: node + 1]
        second = self.drafts.feed([(draft, self.k - 1)], [first.states[0]])
        return torch.cat((first.logits[0], second.logits[0]))


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    return World(tmp_path, request.param)


def causal(batch: Batch, unit: int, first: int) -> torch.Tensor:
    """Wrong: rows see none behind them."""
    return batch.visible()


@torch.no_grad()
def test_a_row_of_training_says_what_it_says_when_it_drafts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind every token, in two units. Negative controls: rows that see no others of their unit, and other gates."""

    def differs() -> bool:
        wrong, seen = False, 0
        depths = list(zip(world.trainer.predict(world.batch), range(2 * world.k), strict=True))
        for (places, columns), depth in depths:
            for place, column in list(zip(places.tolist(), columns.tolist(), strict=True))[::9]:
                row, at = divmod(place, LENGTH)
                first = len(PACKED[row][0].tokens)
                document, start = (PACKED[row][0], 0) if at < first else (PACKED[row][1], first)
                if world.k - 1 <= at - start < len(document.tokens) - 1 - world.k:
                    wrong |= column != int(world.drafted(list(document.tokens), at - start + 1)[depth].argmax())
                    seen += 1
        assert seen > 8
        return wrong

    assert not differs()
    for name, wrong in (("in_units", causal), ("gated", lambda gates: gated(gates.roll(gates.shape[-1] // 3, -1)))):
        with monkeypatch.context() as patched:
            patched.setattr(falcon, name, wrong)
            assert differs()


def test_units_are_seen_as_the_paper_has_it(world: World) -> None:
    """In a text's four first places. Negative control: a first unit that is shorter."""
    k = world.k
    wanted = torch.tensor([[j // k <= i // k for j in range(4)] for i in range(4)])
    assert torch.equal(in_units(world.batch, k, 0)[0, :4, :4], wanted)
    assert not torch.equal(in_units(world.batch, k, 1)[0, :4, :4], wanted)
    both = len(PACKED[0][0].tokens)
    assert not in_units(world.batch, k, 0)[0, both, :both].any(), "of another text"


def test_a_row_learns_what_is_a_unit_ahead(world: World) -> None:
    """The least loss there is have states that are the target's so far ahead, and by them its words."""
    final, generator = world.batch.final, torch.Generator().manual_seed(0)

    def loss_of(ahead: int) -> float:
        world.trainer.states = lambda *given: falcon.shifted(final, ahead)  # type: ignore[method-assign]
        return world.trainer.loss(world.batch, generator).item()

    best = loss_of(world.k)
    assert best < min(loss_of(world.k - 1), loss_of(world.k + 1)) - 0.1
    rows = world.batch.learned(world.k + 1)[0]
    target = falcon.shifted(final, world.k).flatten(0, 1)[rows]
    places = rows + world.k + 1
    columns = world.batch.columns.flatten()[places]
    known = columns >= 0
    logits = world.trainer.logits(target[known])
    q = (logits / falcon.TEMPERATURE).log_softmax(-1)
    soft = -(0.9 * q.exp() * q).sum(-1) - 0.1 * q.gather(1, columns[known][:, None])[:, 0]
    assert best == pytest.approx(0.1 * float(soft.mean()), rel=1e-4), "states are right, words of the text are not sure"


def shown_by(world: World, done: float, wrong: int, seed: int = 0) -> torch.Tensor:
    world.trainer.done = done
    return world.trainer.shown(world.batch, wrong, 0, torch.Generator().manual_seed(seed))


def test_as_many_rows_are_shown_as_a_share_of_what_was_wrong(world: World) -> None:
    """Runs from the beginning of units, never to their ends; fewer as training goes on."""
    k, early = world.k, [shown_by(world, 0.0, 20, seed) for seed in range(8)]
    learned = torch.zeros(world.batch.tokens.numel(), dtype=torch.bool)
    learned[world.batch.learned(k + 1)[0]] = True
    for shown in early:
        assert 9 - 2 * (k > 2) <= int(shown.sum()) <= 9
        assert bool(learned[shown.flatten()].all())
        place = world.batch.positions % k
        assert not shown[place == k - 1].any()
        behind = shown[:, 1:] & (place[:, 1:] > 0)
        assert bool(shown[:, :-1][behind].all()), "no row is shown in the middle alone"
    assert len({tuple(shown.flatten().tolist()) for shown in early}) > 4
    assert 1 <= int(shown_by(world, 1.0, 20).sum()) <= 2
    assert not shown_by(world, 0.0, 0).any()
    alone = World.__new__(World)
    alone.trainer, alone.batch = world.trainer, world.batch
    world.trainer.unit = 1
    assert not shown_by(alone, 0.0, 20).any(), "a unit of one row has none to learn from it"


@torch.no_grad()
def test_what_is_shown_is_what_the_row_predicts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the state and the token that are a unit ahead, and rows of its unit see it; rows before do not."""
    k, batch, trainer = world.k, world.batch, world.trainer
    shown = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    shown[0, 2 * k] = True
    read = list[tuple[torch.Tensor, torch.Tensor]]()
    fused = trainer.fused
    monkeypatch.setattr(trainer, "fused", lambda *given: (read.append(given), fused(*given))[1])
    before, after = (trainer.states(batch, batch.final, 0, one)[0] for one in (None, shown))
    (embedded, state), (embedded_now, state_now) = read
    assert torch.equal(state_now[0, 2 * k], batch.final[0, 3 * k])
    assert torch.equal(embedded_now[0, 2 * k], batch.embedded[0, 3 * k + 1])
    changed = (embedded != embedded_now).any(-1) | (state != state_now).any(-1)
    assert changed.nonzero().tolist() == [[0, 2 * k]]
    differs = (before - after).abs().amax(-1) > 1e-6
    assert not differs[: 2 * k].any()
    assert bool(differs[2 * k : 3 * k].all())


def test_rows_that_are_shown_learn_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss does not depend on what they say. Negative control: on the others it does."""
    k, shown = world.k, torch.zeros(world.batch.tokens.shape, dtype=torch.bool)
    shown.view(-1)[world.batch.learned(k + 1)[0][3:6]] = True
    monkeypatch.setattr(world.trainer, "shown", lambda *given: shown)
    states = world.trainer.states

    def loss_of(change: torch.Tensor) -> float:
        monkeypatch.setattr(world.trainer, "states", lambda *given: states(*given) + change[..., None])
        return world.trainer.loss(world.batch, torch.Generator().manual_seed(0)).item()

    before = loss_of(torch.zeros(shown.shape))
    assert loss_of(shown.float()) == pytest.approx(before, abs=1e-6)
    assert abs(loss_of((~shown).float()) - before) > 1e-2


def test_all_of_it_learns_and_other_states_are_refused(world: World) -> None:
    world.trainer.loss(world.batch, torch.Generator().manual_seed(0)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in world.trainer.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.any()), name
    with pytest.raises(ConfigError, match="taps must be left out for falcon"):
        FalconTrainer.check(world.runner.info, training_config("falcon", data=(Path("x"),), taps=(1,)))
