"""EasySpec: groups of one layer are the plain draft, calibrated caches are its caches, q is the fuzzy distribution,
tokens stay.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import tiny_checkpoint
import torch
from tiny_llama import CPU, runner_of, spec_of, tiny_llama, tokens, weights_of
from tools.enumerate_draws import Choices
from tools.one_sequence import begin, program, propose, recorded_with
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toy_models import ToyModels
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_TARGET, bundled_prompts
from paceline.drafters import DrafterArgs
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.draft_model.easyspec import EasySpecDrafter, GroupedState
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.models.runners import GroupedRunner
from paceline.tree import TokenTree


class Tiny(ToyModels):
    """Opens a tiny model of six layers."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(64), ToyRunner(64))
        self.model = tiny_llama(num_hidden_layers=6)

    def open(self, model: str, *, group_size: Any = None, **more: Any) -> Any:
        spec, weights = spec_of(self.model.config), weights_of(self.model)
        return GroupedRunner(spec, weights, group_size, name=model, device=CPU, dtype=torch.float32)


def drafter_of(models: ToyModels, size: int = 64, **options: Any) -> EasySpecDrafter:
    args = DrafterArgs(vocab_size=size, index=0, max_context=512, models=models)
    return EasySpecDrafter(args, model="toy", **options)


@pytest.mark.parametrize("options", [{}, {"tree_width": 2}, {"tree_policy": "dyspec"}])
def test_groups_of_one_layer_are_the_plain_draft(options: dict[str, Any]) -> None:
    """Negative control: groups of four are not."""
    models = Tiny()
    plain = DraftModelDrafter(
        DrafterArgs(vocab_size=64, index=0, max_context=512, load_runner=lambda name: runner_of(models.model)),
        model="x",
        **options,
    )
    same = []
    for size in (1, 4):
        drafter = drafter_of(models, layer_group_size=size, **options)
        states, equal = [begin(one, tokens(30)) for one in (plain, drafter)], True
        for step in range(4):
            a, b = (propose(one, state, 9) for one, state in zip((plain, drafter), states, strict=True))
            equal &= a.tokens.tolist() == b.tokens.tolist() and a.confidence.tolist() == b.confidence.tolist()
            for state in states:
                state.context.tokens += [int(a.tokens[0]), step]
        same.append(equal)
    assert same == [True, False]


def kept(state: Any, layer: int) -> torch.Tensor:
    """Keys and values of the text in a draft's cache."""
    cache = state.cache
    slots = torch.from_numpy(cache.slot_index(0, cache.length))
    return cache.arena.layers[layer][slots]


@pytest.mark.parametrize("width", [1, 3])
def test_after_calibration_the_cache_is_the_plain_drafts(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, whatever was accepted. Negative control: fuzzy keys and values that are kept."""

    def differs() -> bool:
        models = Tiny()
        drafter, plain = drafter_of(models, tree_width=width), runner_of(models.model)
        state, wrong = begin(drafter, tokens(30)), False
        for accepted in (4, 0, 2, 4, 1):
            tree = propose(drafter, state, 4)
            path = tree.path(tree.leaves()[0])[:accepted]
            state.context.tokens += [*(int(tree.tokens[i]) for i in path), accepted]
            state.confirm(drafter.runner)
            text = state.context.tokens[: state.cache.length]
            assert len(text) >= len(state.context.tokens) - 2 - accepted
            fresh: Any = GroupedState(state.context, plain.open())
            plain.extend([fresh.cache], [text])
            wrong |= any(not torch.equal(kept(state, i), kept(fresh, i)) for i in range(6))
        return wrong

    assert not differs()
    monkeypatch.setattr(GroupedState, "exact", property(lambda self: None, lambda self, value: None))
    assert differs()


def test_the_text_takes_one_exact_pass_and_levels_behind_it_fuzzy_ones() -> None:
    models = ToyModels(ToyRunner(11), ToyRunner(11, order=None))
    drafter = drafter_of(models, 11)
    state = begin(drafter)
    tree = propose(drafter, state, 4)
    assert models.groups.passes == [False, True, True, True]
    state.context.tokens += [*tree.tokens.tolist(), 5]
    fed = models.groups.fed
    propose(drafter, state, 4)
    assert models.groups.passes[4:] == [False, True, True, True]
    assert models.groups.fed - fed == 5 + 3, "the accepted tokens and the target's own were fed once more, in one pass"


def test_the_output_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(ToyModels(ToyRunner(4), ToyRunner(4, order=None)), 4)
    draws = program(monkeypatch, drafter)
    assert distribution_error(draws, random_target(1, 4, zeros=0.0), 4) < 1e-6, "float32 rows"


def test_the_distribution_check_catches_the_q_of_an_exact_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ToyModels(ToyRunner(4), ToyRunner(4, order=None))
    draws = program(monkeypatch, drafter_of(models, 4))

    def lying(choices: Choices) -> TokenTree:
        return recorded_with(draws(choices), models.groups.logits)

    assert distribution_error(lying, random_target(1, 4, zeros=0.0), 4) > WRONG


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def prompts(bundled: LLM) -> list[Any]:
    return [
        {"prompt_token_ids": bundled.chat_ids([{"role": "user", "content": p.prompt}])}
        for p in bundled_prompts()[::6][:4]
    ]


def test_larger_groups_are_accepted_less_and_change_no_token(bundled: LLM, prompts: list[Any]) -> None:
    """The target as its own draft, alone and in a ragged batch."""
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8)
    shares = []
    for size in (1, 2, 4):
        options = {"layer_group_size": size, "num_speculative_tokens": 4}
        fast = bundled.with_speculative_config({"method": "easyspec", "model": str(BUNDLED_TARGET), **options})
        for params, some in ((greedy, prompts), (greedy, prompts[:1]), (seeded, prompts)):
            found, want = fast.generate(some, params), bundled.generate(some, params)
            assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in want]
            assert not any(out.metrics.dropped_drafters for out in found)
            if len(some) > 1 and params is greedy:
                drafted = sum(out.metrics.num_draft_tokens for out in found)
                shares.append(sum(out.metrics.num_accepted_tokens for out in found) / drafted)
    assert shares[0] == 1.0
    assert shares[0] > shares[1] > shares[2] > 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer_group_size": 0}, "layer_group_size must be an integer in"),
        ({"model": None}, "folder or hub id for method 'easyspec'"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EasySpecDrafter(
            DrafterArgs(vocab_size=11, index=0, max_context=64, models=ToyModels(ToyRunner(11), ToyRunner(11))),
            **{"model": "toy"} | options,
        )


def test_models_whose_layers_cannot_run_apart_are_rejected(
    bundled: LLM, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"method": "easyspec", "model": str(tiny_checkpoint.write(tmp_path / "two"))}
    with pytest.raises(ConfigError, match=r"must have 4 layers or more, .* has 2"):
        bundled.with_speculative_config(two)
    from paceline.models import load

    monkeypatch.setattr(load, "spec_from_config", Mock(side_effect=UnsupportedModelError("of no family")))
    with pytest.raises(UnsupportedModelError, match="layers that run in groups need the native runner"):
        bundled.with_speculative_config(two)
