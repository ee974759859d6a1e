"""What all policies share: limits, forgetting, words, and the output they leave alone."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import pytest
from controllers.steps import granted, plan, planned, step
from engine.harness import engine, run, tokens
from tools.gtest import ERROR, g_test
from toys import ToyRunner

from paceline import ConfigError, registry
from paceline.config import SamplingParams
from paceline.controllers.auto.choice import cut
from paceline.controllers.policies.base import LengthController
from paceline.drafters import DrafterArgs
from paceline.tree import NO_BUDGET, TokenTree, merge

POLICIES = [
    name
    for name, entry in registry.CONTROLLERS.items()
    if issubclass(registry.load("controllers", name), LengthController)
]
SURE = [0.97] * 40
VOCAB, LENGTH, TEMPERATURE, PROMPT = 6, 3, 0.9, [1, 2, 1, 2, 3, 1, 2]


def made(name: str, **options: Any) -> Any:
    return registry.load("controllers", name)(**options)


def test_there_are_the_published_ones() -> None:
    assert set(POLICIES) == {"heuristic", "specdec_pp", "online_acceptance", "kangaroo", "swift", "diffuspec"}


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_at_the_end_nothing_at_large_batches_nothing_at_zero(name: str) -> None:
    assert granted(made(name), remaining=1) is NO_BUDGET
    assert granted(made(name), remaining=3).depth == 2
    controller = made(name, disable_by_batch_size=4)
    assert granted(controller, 2, size=3).nodes > 0
    assert not planned(controller, size=4).drafts
    assert "disable_by_batch_size is 4" in controller.explain(0)
    assert not planned(made(name, num_speculative_tokens=0)).drafts


@pytest.mark.parametrize("name", POLICIES)
def test_the_number_of_nodes_is_a_limit_of_the_merged_tree(name: str) -> None:
    controller = made(name, num_speculative_tokens=4)
    for _ in range(5):
        assert step(controller, SURE, 40) <= 4
    controller.drafters = 2
    first, second = planned(controller).budgets[0]
    assert first.nodes == second.nodes == 4
    ours = TokenTree.chain([1, 1, 1, 1], confidence=[0.95, 0.9, 0.9, 0.9])
    theirs = TokenTree.chain([2, 2, 2, 2], confidence=[0.05, 0.9, 0.9, 0.9], source=1)
    (kept,) = controller.select([merge([ours, theirs])])
    assert kept.tokens.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_sequences_are_forgotten(name: str) -> None:
    controller = made(name)
    for key in range(50):
        step(controller, SURE, 3, key=key)
        controller.forget(key)
    assert not controller.states


@pytest.mark.parametrize("name", POLICIES)
def test_decisions_in_words(name: str) -> None:
    controller = made(name)
    assert controller.explain().startswith(f"{name}: ")
    step(controller, SURE, 3)
    assert controller.explain(0).endswith(".")
    step(controller, [], 0)
    assert "Nothing was found to propose" in controller.explain(0)
    plan(controller, remaining=1)
    assert controller.explain(0) == "Nothing is drafted: this is the last token."


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("wrong", [-1, 1.5, "many", math.nan, True])
def test_a_wrong_number_is_rejected(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens must be an integer in"):
        made(name, num_speculative_tokens=wrong)


# The output is the target's, whatever a policy decides


def drafts(target: ToyRunner, **options: Any) -> Any:
    runner = ToyRunner(VOCAB, order=2, sharpness=1.0, noise=0.8)
    args = DrafterArgs(vocab_size=VOCAB, index=0, max_context=4096, target=target, load_runner=lambda name: runner)
    return registry.load("drafters", "draft_model")(args, model="toy", **options)


def p_value(controller: Any, outputs: int = 768, **options: Any) -> float:
    """Of drawn drafts under a policy, against the target's distribution."""
    target = ToyRunner(VOCAB, order=2, sharpness=1.0)
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=LENGTH, n=64, ignore_eos=True)
    requests = run(
        engine(target, [drafts(target, **options)], controller=controller), [PROMPT] * (outputs // 64), params, seed=1
    )
    assert not any(request.metrics.dropped_drafters for request in requests)
    assert sum(request.metrics.num_accepted_tokens for request in requests) > outputs / 10
    counts = Counter(tuple(output.token_ids) for request in requests for output in request.outputs)
    distribution = {}
    for output in product(range(VOCAB), repeat=LENGTH):
        rows = [(target.logits([*PROMPT, *output[:i]]).double() / TEMPERATURE).softmax(-1) for i in range(LENGTH)]
        distribution[output] = math.prod(float(row[token]) for row, token in zip(rows, output, strict=True))
    return g_test([counts[k] for k in distribution], list(distribution.values()))


@pytest.mark.parametrize("name", POLICIES)
def test_drawn_drafts_keep_the_distribution(name: str) -> None:
    assert p_value(made(name)) > ERROR


def test_drawn_trees_keep_the_distribution() -> None:
    assert p_value(made("swift"), tree_width=3) > ERROR


class Cutting(registry.load("controllers", "kangaroo")):  # type: ignore[misc]
    """Wrong: takes doubtful drawn tokens out of the draft, after they were drawn."""

    def select(self, trees: Any) -> Any:
        whole = [int((tree.confidence >= 0.4).cumprod().sum()) for tree in trees]
        kept = [cut(tree, range(number)) for tree, number in zip(trees, whole, strict=True)]
        return [tree.replace(trials={p: t for p, t in tree.trials.items() if p < len(tree) - 1}) for tree in kept]


def test_the_check_catches_a_policy_that_cuts_by_what_was_drawn() -> None:
    assert p_value(Cutting(threshold=0.0)) < ERROR


@pytest.mark.parametrize("name", POLICIES)
def test_greedy_text_is_the_targets(name: str) -> None:
    target = ToyRunner(VOCAB, order=2, sharpness=1.0)
    live = engine(target, [drafts(target)], controller=made(name))
    requests = run(live, [PROMPT, [1, 5, 2]], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert tokens(requests) == [[target.greedy(PROMPT, 40)], [target.greedy([1, 5, 2], 40)]]
    assert all(request.metrics.num_accepted_tokens for request in requests)
