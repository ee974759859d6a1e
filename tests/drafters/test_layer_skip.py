"""LayerSkip on the bundled model: a fixed exit drafts, and the text stays the target's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lacking import without
from tools.gtest import ERROR, independence
from toys import ToyCache, ToyRunner

from paceline import LLM, SamplingParams
from paceline.assembly import build_parts
from paceline.config import SpeculativeConfig
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.self.layer_skip import LayerSkipDrafter
from paceline.errors import CapabilityError, ConfigError, DrafterError
from paceline.models import LayerPlan
from paceline.models.runners import layer_drafts_of
from paceline.tree import EMPTY_TREE, Budget

PROMPTS = ["What is 2 + 3?", "def area(width, height):", "Name the first three months of the year, please."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


def decoded(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    found = llm.generate(prompts, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


@pytest.mark.parametrize("exit_layer", [1, 3, 5])
def test_the_text_is_the_targets_at_every_exit(plain: LLM, exit_layer: int) -> None:
    fast = plain.with_speculative_config(
        {"method": "layer_skip", "exit_layer": exit_layer, "num_speculative_tokens": 3}
    )
    assert decoded(fast, PROMPTS, GREEDY) == decoded(plain, PROMPTS, GREEDY)
    for params in (
        SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=12),
    ):
        assert decoded(fast, PROMPTS[:2], params) == decoded(plain, PROMPTS[:2], params)


def test_deeper_exits_are_right_more_often(plain: LLM) -> None:
    rates = []
    for exit_layer in (1, 3, 5):
        fast = plain.with_speculative_config(
            {"method": "layer_skip", "exit_layer": exit_layer, "num_speculative_tokens": 2}
        )
        found = fast.generate(PROMPTS, GREEDY)
        rates.append(sum(o.metrics.num_accepted_tokens for o in found) / sum(o.metrics.num_draft_tokens for o in found))
    assert rates[0] < rates[1] < rates[2]


def test_up_to_the_end_of_the_context(plain: LLM) -> None:
    fast = plain.with_speculative_config({"method": "layer_skip", "exit_layer": 5, "num_speculative_tokens": 8})
    long = {"prompt_token_ids": [(7 * i) % 6000 + 4 for i in range(2048 - 14)]}
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    mine = decoded(fast, [long], params)
    assert mine == decoded(plain, [long], params)
    assert len(mine[0][0]) == 14


def test_aliases_and_bad_layers(plain: LLM) -> None:
    def exit_of(**options: Any) -> int:
        drafter = plain.with_speculative_config({"method": "layer_skip", **options}).engine.parts.drafter_set.drafters[
            0
        ]
        assert isinstance(drafter, LayerSkipDrafter)
        return drafter.exit_layer

    assert exit_of() == 1
    assert (
        exit_of(assistant_early_exit=4) == exit_of(exit_layer=4) == exit_of(exit_layer=4, assistant_early_exit=4) == 4
    )
    for options, words in (
        ({"exit_layer": 6}, r"exit_layer must be an integer in 1\.\.5, got 6"),
        ({"assistant_early_exit": 0}, r"assistant_early_exit must be an integer in 1\.\.5, got 0"),
        ({"exit_layer": 1, "assistant_early_exit": 2}, "are the same option"),
        ({"exit_layer": 1, "draft_sample_method": "best"}, "draft_sample_method"),
    ):
        with pytest.raises(ConfigError, match=words):
            exit_of(**options)


def test_a_runner_without_the_capability_is_rejected_by_name() -> None:
    runner = without(ToyRunner(11), "run_layers")
    with pytest.raises(
        CapabilityError, match=r"method 'layer_skip' needs a model that can run its first layers alone; toy is not one"
    ):
        build_parts(runner, SpeculativeConfig(method="layer_skip"), load=lambda name: runner)


def drafter_over(target: ToyRunner, **options: Any) -> LayerSkipDrafter:
    return LayerSkipDrafter(DrafterArgs(vocab_size=11, index=0, max_context=64, target=target), **options)


def context(text: list[int], cache: Callable[[], Any] | None, **more: Any) -> Context:
    return Context("r", text, len(text), cache=cache, **more)


def test_an_engine_without_caches_is_told_so() -> None:
    drafter = drafter_over(ToyRunner(11, max_context=64))
    (state,) = drafter.begin([context([1, 2], None)])
    with pytest.raises(DrafterError, match="needs the target's cache"):
        drafter.propose([state], [Budget(2, 2)], [EMPTY_TREE])


def drawn_counts(drafter: LayerSkipDrafter, text: list[int], draws: int) -> Counter[int]:
    """First tokens that the drafter draws, over seeds."""
    contexts = [context(text, lambda: ToyCache(text[:-1]), temperature=0.9, seed=seed) for seed in range(draws)]
    trees = drafter.propose(drafter.begin(contexts), [Budget(1, 1)] * draws, [EMPTY_TREE] * draws)
    assert all(tree.trials_of(-1)[0].drawn for tree in trees)
    return Counter(int(tree.tokens[0]) for tree in trees)


def test_draws_come_from_the_early_exits_distribution() -> None:
    """And not from the target's: the negative control is the same count against its distribution."""
    target, text = ToyRunner(11, seed=3, sharpness=1.5, max_context=64), [1, 2, 3]
    drafter, draws = drafter_over(target, exit_layer=1), 1500
    counts = drawn_counts(drafter, text, draws)
    (early,) = layer_drafts_of(target, "layer_skip").step([ToyCache(text[:-1])], [[3]], LayerPlan(stop=1)).logits
    values = {}
    for name, logits in (("early", early), ("target", target.logits(text))):
        distribution = torch.softmax(logits.float() / 0.9, -1).numpy()
        rng = np.random.default_rng(0)
        other = Counter(rng.choice(11, draws, p=distribution / distribution.sum()).tolist())
        rows = np.array([[c[token] for token in range(11)] for c in (counts, other)])
        values[name] = independence(rows[:, rows.sum(0) >= 20])
    assert values["early"] > ERROR > values["target"]
