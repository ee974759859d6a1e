"""The whole engine against the target's distribution: G-tests of short outputs with a declared error, for drawn, point
and merged drafts.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from engine.harness import engine, run
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline import registry
from paceline.config import SamplingParams
from paceline.drafters import DrafterArgs
from paceline.verifiers import recursive_rejection
from paceline.verifiers.typical import TypicalAcceptance

VOCAB, LENGTH, TEMPERATURE = 6, 3, 0.9
PROMPT = [1, 2, 1, 2, 3, 1, 2]


def target_distribution(runner: ToyRunner) -> dict[tuple[int, ...], float]:
    """Probability of every output of LENGTH tokens."""
    distribution = {}
    for output in product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(output):
            p = (runner.logits([*PROMPT, *output[:i]]).double() / TEMPERATURE).softmax(-1)
            chance *= float(p[token])
        distribution[output] = chance
    return distribution


def p_value(drafters: list[Any], tokens: int, *, sampled: Any = None, outputs: int = 896) -> float:
    target = ToyRunner(VOCAB, order=2, sharpness=1.0)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, n=64, ignore_eos=True)
    built = [make(target, index) for index, make in enumerate(drafters)]
    live = engine(target, built, tokens, sampled=sampled)
    requests = run(live, [PROMPT] * (outputs // 64), params, seed=1000)
    assert not any(request.metrics.dropped_drafters for request in requests)
    counts = Counter(tuple(o.token_ids) for request in requests for o in request.outputs)
    distribution = target_distribution(target)
    accepted = sum(request.metrics.num_accepted_tokens for request in requests)
    assert not drafters or accepted > outputs / 10
    return g_test([counts[k] for k in distribution], list(distribution.values()))


def draft(**options: Any) -> Any:
    def make(target: ToyRunner, index: int) -> Any:
        runner = ToyRunner(VOCAB, order=2, sharpness=1.0, noise=0.8)
        args = DrafterArgs(
            vocab_size=VOCAB, index=index, max_context=4096, target=target, load_runner=lambda name: runner
        )
        return registry.load("drafters", "draft_model")(args, model="toy", **options)

    return make


def ngram(target: ToyRunner, index: int) -> Any:
    args = DrafterArgs(vocab_size=VOCAB, index=index, max_context=4096, target=target)
    return registry.load("drafters", "ngram")(args, prompt_lookup_min=1, prompt_lookup_max=2)


CREWS: dict[str, tuple[list[Any], int]] = {
    "plain": ([], 0),
    "drawn chain": ([draft()], 2),
    "drawn tree": ([draft(tree_width=3)], 7),
    "point tree": ([draft(tree_width=3, draft_sample_method="greedy")], 7),
    "ngram": ([ngram], 2),
    "merged: points first": ([ngram, draft(tree_width=2)], 6),
    "merged: drawn first": ([draft(tree_width=2), ngram], 6),
}


@pytest.mark.parametrize("drafter_set", CREWS)
def test_outputs_follow_the_target(drafter_set: str) -> None:
    assert p_value(*CREWS[drafter_set]) > ERROR


def test_the_check_catches_a_relaxed_rule() -> None:
    relaxed = TypicalAcceptance(posterior_threshold=0.05, posterior_alpha=0.3)
    assert p_value([draft()], 2, sampled=relaxed) < ERROR


def test_the_check_catches_a_forgotten_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recursive_rejection, "residual", lambda r, *_: r)
    assert p_value([draft()], 2) < ERROR


def test_the_check_catches_a_draft_that_lies_about_its_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recursive_rejection, "proposal", lambda trial, *rest, **more: torch.full((VOCAB,), 1 / VOCAB))
    assert p_value([draft()], 2) < ERROR
