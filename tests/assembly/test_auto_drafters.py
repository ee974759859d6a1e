"""`auto` with every drafter that costs passes of a model, by name: the same text, drafts where they pay, rest where
they do not.

Time is made up: a pass of the target takes as long as its rows say, a drafter's level what the world says. Nothing is
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.worlds import BATCHES, PROMPT, VOCAB, target
from drafters.test_contract import EAGLE
from engine.harness import run, tokens
from tools.gtest import ERROR, g_test
from toy_models import ToyModels, letters
from toys import ToyRunner

from paceline.assembly import build_parts, controller_setup
from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.controllers.auto import AutoController, store
from paceline.engine import DrafterSet, Engine, drafter_set, loop, probe, step_clock
from paceline.models import PassResult
from paceline.models.runners import FeatureHead

PASS, ROW = 1e-2, 1e-5
CHEAP, DEAR = 1e-4, 3e-2
"""Seconds: of a pass and of each further row, of a drafted level where drafts pay and where they never can."""

DRAFTERS: dict[str, dict[str, Any]] = {
    "layer_skip": {"exit_layer": 3},
    "swift": {},
    "del": {},
    "quantized_copy": {},
    "specmquant": {"model": "toy", "min_draft_length": 1},
    "s2d": {"model": "toy", "draft_exit_thresholds": 0.5},
    "easyspec": {"model": "toy"},
    "pard": {"model": "toy"},
    "diffuspec": {"model": "toy"},
    "deer": {"model": "toy"},
    "tli": {"model": "other"},
    "slem": {"model": "other"},
    "draft_model": {"model": "toy"},
    "eagle": {"model": EAGLE},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)


@dataclass
class World:
    """The seconds that have passed, and what a level of a draft takes."""

    level: float
    now: float = 0.0
    drafted: int = 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    """Every engine is on a machine of its own, where nothing was measured before."""
    made, machines = World(CHEAP), count()
    for module in (store, controller_setup):
        monkeypatch.setattr(module, "user_cache", lambda part: tmp_path / str(next(machines)))
    score, propose = ToyRunner.score, DrafterSet.propose_one

    def scored(self: ToyRunner, caches: Any, roots: Any, trees: Any, **more: Any) -> Any:
        if self.info.fingerprint == target().info.fingerprint and not self.noise:
            made.now += PASS + ROW * sum(len(tree) for tree in trees)
        return score(self, caches, roots, trees, **more)

    def proposed(self: DrafterSet, index: int, *rest: Any) -> Any:
        trees = propose(self, index, *rest)
        if self.drafters[index].name != "ngram":
            made.drafted += sum(len(tree) for tree in trees)
            made.now += made.level * (1 + max((tree.max_depth for tree in trees), default=0))
        return trees

    monkeypatch.setattr(FeatureHead, "step", knowing(FeatureHead.step))
    monkeypatch.setattr(ToyRunner, "score", scored)
    monkeypatch.setattr(DrafterSet, "propose_one", proposed)
    monkeypatch.setattr(AutoController, "clock", staticmethod(lambda: made.now))
    for module in (loop, step_clock, drafter_set, probe):
        monkeypatch.setattr(module, "perf_counter", lambda: made.now)
    return made


def knowing(step: Any) -> Any:
    """A head that knows the target's next states; texts are told by their states, which follow from two tokens."""
    toy = target()
    last, texts = toy.info.num_layers, [*((a,) for a in range(VOCAB)), *product(range(VOCAB), repeat=2)]
    named = {toy.hidden(last, text).numpy().tobytes(): text for text in texts}

    def known(head: FeatureHead, *args: Any, tokens: Any, states: Any, picked: Any) -> PassResult:
        result = step(head, *args, tokens=tokens, states=states, picked=picked)
        found = [(*named[row.numpy().tobytes()], token) for row, token in zip(states, tokens, strict=True)]
        made = torch.stack([toy.hidden(last, text) for text in found])
        logits = torch.stack([toy.logits(found[row]) for row in picked]) if len(picked) else result.logits
        return PassResult(logits, made)

    return known


def engine(config: dict[str, Any] | None) -> Engine:
    runner, draft = target(), ToyRunner(VOCAB, seed=3, sharpness=1.5, noise=0.4)
    models = ToyModels(runner, draft)
    parsed = None if config is None else SpeculativeConfig.parse(config)
    _, parts = build_parts(runner, parsed, load=lambda name: draft, tokenizer=letters(), models=models)
    return Engine(parts, EngineConfig(max_num_seqs=64), tokenizer=letters(), eos_ids=(0,))


def listed(name: str) -> dict[str, Any]:
    return {"method": ["ngram", {"method": name, **DRAFTERS[name]}]}


def text(live: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    found = run(live, prompts, params)
    assert not any(request.metrics.dropped_drafters for request in found)
    return tokens(found)


def seconds(world: World, config: dict[str, Any] | None, params: SamplingParams = GREEDY) -> float:
    """Of decoding the prompt, once warmed up."""
    live = engine(config)
    text(live, [PROMPT], params)
    world.drafted, before = 0, world.now
    text(live, [PROMPT[2:] + PROMPT[:2]], params)
    return world.now - before


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(world: World, name: str) -> None:
    """At temperature 0, and at 0.8 with a seed, where drafters that draw propose points; three sequences of different
    lengths.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for params in (greedy, SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)):
        live = engine(listed(name))
        assert text(live, BATCHES["together"], params) == text(engine(None), BATCHES["together"], params)
    assert world.drafted > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_drafts_where_that_pays_and_rests_where_it_cannot(world: World, name: str) -> None:
    alone = {"method": [{"method": name, **DRAFTERS[name]}], "controller": "auto"}
    plain = seconds(world, None)
    assert seconds(world, alone) < 0.9 * plain
    assert world.drafted > 40
    world.level = DEAR
    assert seconds(world, alone) < 1.1 * plain
    assert world.drafted < 10


def test_drafting_all_the_time_fails_that_check(world: World) -> None:
    world.level = DEAR
    always = {"method": "draft_model", "model": "toy", "num_speculative_tokens": 4}
    assert seconds(world, always) > 1.5 * seconds(world, None)


TEMPERATURE, BINS = 0.9, 12
RULES: dict[str, dict[str, Any]] = {
    "rejection_sampler": {"tree_policy": "rsd_s", "tree_width": 2},
    "block_verification": {},
    "k_seq": {"tree_policy": "spectr", "tree_width": 2},
    "greedy_draft_sampling": {"tree_policy": "greedy_draft", "tree_width": 2},
    "typical_acceptance_sampler": {"tree_policy": "rsd_c", "tree_width": [2, 1]},
}


def p_value(rule: str) -> float:
    """Of every token under `auto`, given the text before it, against the target's distribution: their places in it must
    be uniform.

    Tokens are put in the order of their chances, which a rule that leans towards the likely ones must disturb.
    """
    given = {"method": [{"method": "draft_model", "model": "toy", **RULES[rule]}], "acceptance_method": rule}
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=160, ignore_eos=True)
    found, runner, rng = run(engine(given), [PROMPT] * 8, params, 100), target(), np.random.default_rng(0)
    assert sum(request.metrics.num_accepted_tokens for request in found) > 300
    counts = [0] * BINS
    for written in (request.outputs[0].token_ids for request in found):
        for i, token in enumerate(written):
            p = (runner.logits([*PROMPT, *written[:i]]).double() / TEMPERATURE).softmax(-1).numpy()
            position = p[p > p[token]].sum() + rng.random() * p[token]
            counts[min(int(position * BINS), BINS - 1)] += 1
    return g_test(counts, [1 / BINS] * BINS)


@pytest.mark.parametrize("rule", [rule for rule in RULES if "typical" not in rule])
def test_every_exact_rule_keeps_the_distribution_under_auto(world: World, rule: str) -> None:
    assert p_value(rule) > ERROR


def test_the_distribution_check_catches_the_relaxed_rule(world: World) -> None:
    assert p_value("typical_acceptance_sampler") < ERROR
