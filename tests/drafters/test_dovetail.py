"""Dovetail: the gate is that of the paper, and a head on another device drafts the same from states alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagle_reference as reference
import pytest
import torch
from torch.nn import functional as F

from benchmarks.stand_ins import written_head
from paceline import LLM
from paceline.assembly import draft_models
from paceline.controllers.auto.choice import worth_scoring
from paceline.errors import ConfigError
from paceline.models import load_runner
from paceline.models.runners import FeatureHead
from paceline.tree import EMPTY_TREE
from tests.drafters.head_worlds import GREEDY, HeadWorld, close, head_config, outputs
from tests.drafters.test_eagle import World

OTHER = torch.device("cpu", 1)
"""A second device, of which tensors say that it is the CPU."""
TWO = {"num_layers": 2}


def head_of(target: Any, **more: Any) -> str:
    """Folder of a head of two layers with random weights."""
    return written_head(head_config("dovetail", target.info, **(TWO | more)))


@pytest.mark.parametrize("size", ["folder", "wide"])
def test_logits_are_those_of_a_plain_forward_pass(size: str, request: pytest.FixtureRequest) -> None:
    """Drawn rows of a tree, in rounds with some and none of it accepted."""
    world = World(request.getfixturevalue(size), "dovetail", tree_policy="rsd_c", tree_width=[2, 2])
    state = world.begin(temperature=1.0)
    for accepted in (1, 0):
        tree = world.propose(state, 6, 3)
        assert len(tree) >= 3
        for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
            path = tuple(int(tree.tokens[i]) for i in tree.path(parent)) if parent >= 0 else ()
            for trial in tree.trials_of(parent):
                assert close(trial.row, world.row(path).softmax(0))
        world.commit(state, tree, tree.path(tree.leaves()[-1])[:accepted], own=11)


def test_the_comparison_catches_a_gate_that_is_turned_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(folder, "dovetail", tree_policy="rsd_c", tree_width=[1])
    state = world.begin(temperature=1.0)
    (trial,) = world.propose(state, 1).trials_of(-1)
    assert close(trial.row, world.row().softmax(0))

    def turned(weights: Any, embedded: torch.Tensor, states: torch.Tensor, eps: float) -> torch.Tensor:
        h1 = states @ weights["fusion.state.weight"].T
        h2 = F.silu(reference.norm(embedded, weights["fusion.norm.weight"], eps) @ weights["fusion.token.weight"].T)
        z = torch.sigmoid(torch.cat((h1, h2), 1) @ weights["fusion.gate.weight"].T)
        return z * h2 + (1 - z) * h1

    monkeypatch.setattr(reference, "fused", turned)
    assert not close(trial.row, world.row().softmax(0))


def test_a_gate_that_keeps_the_state_alone_ignores_tokens(folder: Path) -> None:
    """W1 = I and z = 1, by a gate that sees a large state whatever the token is."""

    def logits(world: HeadWorld[Any], token: int) -> torch.Tensor:
        head: FeatureHead = world.drafter.head
        cache = head.open()
        state = torch.ones(1, world.target.info.hidden_size)
        row = head.step([cache], [EMPTY_TREE], [0], tokens=[token], states=head.joined(state), picked=[0]).logits[0]
        head.release(cache)
        return row

    ordinary, kept = World(folder, "dovetail"), World(folder, "dovetail")
    size = kept.target.info.hidden_size
    kept.weights["fusion.state.weight"] = torch.eye(size)
    kept.weights["fusion.gate.weight"] = torch.cat((100.0 * torch.eye(size), torch.zeros(size, size)), 1)
    kept.start(type(kept.drafter)(kept.args, model=written_head(kept.config, kept.weights)), kept.prompt)
    assert torch.equal(logits(kept, 5), logits(kept, 9))
    assert not close(logits(ordinary, 5), logits(ordinary, 9))


@pytest.mark.parametrize(("size", "vocab"), [("folder", 300), ("wide", None)])
def test_on_another_device_states_alone_go_over(size: str, vocab: int | None, request: pytest.FixtureRequest) -> None:
    """Every state once, nothing else; and the drafts are those of the same head on the target's own device."""
    target = load_runner(str(request.getfixturevalue(size)), dtype="float32")
    info = target.info
    folder = head_of(target, draft_vocab_size=vocab or info.vocab_size)
    near, far = (FeatureHead.load(folder, target, ("dovetail",), device=where) for where in (None, OTHER))
    assert far.runner.info.device == OTHER
    states = torch.randn(5, info.hidden_size)
    rows = []
    for head in (near, far):
        cache = head.open()
        for i in range(5):
            result = head.step(
                [cache], [EMPTY_TREE], [0], tokens=[7 + i], states=head.joined(states[i : i + 1]), picked=[0]
            )
            rows.append(result.logits.clone())
            head.commit([cache], [()])
        head.release(cache)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(rows[:5], rows[5:], strict=True))
    assert (near.crossing.tensors, near.crossing.bytes) == (0, 0)
    assert (far.crossing.tensors, far.crossing.bytes) == (5, 5 * info.hidden_size * 4)
    asked: list[Any] = []
    embed, apply = target.embed, target.head
    target.embed = lambda tokens: asked.append(tokens) or embed(tokens)
    target.head = lambda *given, **more: asked.append(given) or apply(*given, **more)
    for asks in (False, True):
        again = FeatureHead.load(folder, target, ("dovetail",), device=None if asks else OTHER)
        asked.clear()
        cache = again.open()
        again.step([cache], [EMPTY_TREE], [0], tokens=[7], states=again.joined(states[:1]), picked=[0])
        assert bool(asked) is asks, "on one device the target embeds"


def test_states_are_counted_once_each_while_texts_are_drafted_for(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that go over are those of the texts' tokens, and the texts are the target's."""
    monkeypatch.setattr(draft_models, "resolve_device", lambda device, name: torch.device(device))
    entry = {"method": "dovetail", "model": head_of(plain.runner, draft_vocab_size=500)}
    far = plain.with_speculative_config({**entry, "draft_device": "cpu:1", "num_speculative_tokens": 4})
    crossing = far.engine.parts.drafter_set.drafters[0].head.crossing
    found = far.generate([[5, 6, 7, 8]], GREEDY)[0]
    assert found.outputs[0].token_ids == plain.generate([[5, 6, 7, 8]], GREEDY)[0].outputs[0].token_ids
    known = crossing.bytes // (4 * plain.runner.info.hidden_size)
    assert 3 + 24 - 2 <= known <= 3 + 24 + found.metrics.num_steps
    near = plain.with_speculative_config({**entry, "num_speculative_tokens": 4})
    near.generate([[5, 6, 7, 8]], GREEDY)
    assert near.engine.parts.drafter_set.drafters[0].head.crossing.bytes == 0
    assert outputs(far, GREEDY) == outputs(plain, GREEDY)


@pytest.mark.parametrize("fast", ["cpu", "cpu:1"])
def test_a_head_is_placed_where_a_token_takes_least(plain: LLM, fast: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_models, "devices_for", lambda target: ["cpu", "cpu:1"])
    timed: list[str] = []

    def seconds(head: FeatureHead, target: Any) -> float:
        timed.append("cpu:1" if head.runner.info.device == OTHER else "cpu")
        return 1e-3 if timed[-1] == fast else 2e-3

    monkeypatch.setattr(FeatureHead, "level_seconds", seconds)
    config = {"method": "eagle", "model": written_head(head_config("eagle", plain.runner.info)), "draft_device": "auto"}
    llm = plain.with_speculative_config(config)
    head = llm.engine.parts.drafter_set.drafters[0].head
    assert sorted(timed) == ["cpu", "cpu:1"]
    assert (head.runner.info.device == OTHER) is (fast == "cpu:1")


def test_a_level_is_timed_and_leaves_nothing(plain: LLM) -> None:
    target: Any = plain.runner
    head = FeatureHead.load(head_of(target), target, ("dovetail",), device=OTHER)
    assert 0.0 < head.level_seconds(target) < 1.0
    assert (head.crossing.tensors, head.crossing.bytes) == (0, 0)
    assert head.runner.memory.used == 0


def test_wrong_devices_get_one_line(plain: LLM) -> None:
    config = {"method": "dovetail", "model": head_of(plain.runner)}
    for device in ("moon", "cuda:99", 3):
        with pytest.raises(ConfigError, match="draft_device"):
            plain.with_speculative_config({**config, "draft_device": device})


def test_steps_in_the_cost_of_a_pass_choose_the_number_of_nodes() -> None:
    """On a CPU a pass takes as long up to the end of a tile: the nodes fill it, and none begins the next."""
    reaches = [[0.9 * 0.97**node for node in range(60)]]
    flat = [0.05] * 80
    tiles = [0.05 + 0.04 * (max(0, rows - 1) // 16) for rows in range(80)]
    steep = [0.05 * rows for rows in range(80)]
    kept = {name: len(worth_scoring(reaches, table, 1, 200.0, 60)[0]) for name, table in
            (("flat", flat), ("tiles", tiles), ("steep", steep))}  # fmt: skip
    assert kept == {"flat": 60, "tiles": 15, "steep": 0}
