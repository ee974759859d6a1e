"""The hierarchy: the chain is the middle model's own, in distribution and greedily, and the target's distribution
stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoint
import torch
from tools.enumerate_draws import Choices, EnumeratingDraws, distance, enumerate_distribution
from tools.one_sequence import begin, enumerated, propose
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toy_models import ToyModels, nested
from toys import ToyRunner

from benchmarks.stand_ins import written_head
from paceline import LLM, SamplingParams
from paceline.assembly.build import ExactJudge
from paceline.bench import bundled_prompts
from paceline.drafters import DrafterArgs
from paceline.drafters.common import draft_rows
from paceline.drafters.draft_model.middle_head import MiddleHead
from paceline.drafters.draft_model.specmquant import SpecMQuantDrafter, reroot
from paceline.errors import ConfigError, DrafterError
from paceline.llm import BUNDLED
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, TokenTree, Trial, Verdict
from paceline.verifiers import RecursiveRejection

VOCAB = 3
DRAFT = {"method": "draft_model", "model": "toy", "tree_width": 2}


class Pair(ToyModels):
    """The middle model is another than the small one."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(ToyRunner(size), ToyRunner(size, order=None, sharpness=1.0, seed=5))
        self.middle = ToyRunner(size, order=None, sharpness=1.0, **options)

    def copy_of_target(self, quantization: str, *, head_rows: Sequence[int] | None = None) -> Any:
        return self.middle


def drafter_of(
    size: int = 11, judge: Any = None, middle: dict[str, Any] | None = None, **options: Any
) -> tuple[SpecMQuantDrafter, Pair]:
    models = Pair(size, **(middle or {}))
    small: Any = models.draft
    args = DrafterArgs(
        vocab_size=size, index=0, max_context=99, models=models, load_runner=lambda name: small,
        nested=lambda config: nested(config, args), judge=judge or ExactJudge(),
        nested_for=lambda config, model: nested(config, replace(args, target=model)),
    )  # fmt: skip
    return SpecMQuantDrafter(args, **options), models


@pytest.mark.parametrize(
    "options", [{"model": "toy"}, {"draft": DRAFT}, {}, {"draft": DRAFT, "draft_nodes": 2, "min_draft_length": 1}]
)
def test_a_greedy_chain_is_what_the_middle_model_says(options: dict[str, Any]) -> None:
    drafter, models = drafter_of(**options)
    state = begin(drafter, [1, 2, 3])
    for step in range(6):
        tree = propose(drafter, state)
        assert tree.is_chain
        assert min(options.get("min_draft_length", 4), 6) <= len(tree) <= 6
        assert tree.tokens.tolist() == models.middle.greedy(state.context.tokens, len(tree))
        state.context.tokens += [*tree.tokens[: step % 4].tolist(), step]


def test_alone_with_length_one_it_is_plain_drafting() -> None:
    drafter, models = drafter_of(min_draft_length=1)
    state = begin(drafter, [1, 2, 3])
    tree = propose(drafter, state)
    assert (len(tree), models.middle.calls, models.draft.calls) == (1, 1, 0)
    assert tree.tokens.tolist() == models.middle.greedy([1, 2, 3], 1)


def test_trees_save_passes_of_the_middle_model() -> None:
    """With a small model that is the middle one, a pass brings a whole tree's depth."""
    calls = []
    for draft in (None, {**DRAFT, "tree_width": 1}):
        drafter, models = drafter_of(draft=draft, min_draft_length=8, draft_depth=7, draft_nodes=7)
        models.draft.seed = models.middle.seed
        tree = propose(drafter, begin(drafter, [1, 2, 3]), 8)
        assert len(tree) == 8
        calls.append(models.middle.calls)
    assert calls == [8, 1]


class EnumeratingJudge:
    """Verifies by enumerated draws."""

    choices: Choices

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], seeds: Sequence[int | None]
    ) -> list[Verdict]:
        draws = [EnumeratingDraws(self.choices)] * len(trees)
        found = RecursiveRejection().verify(trees, rows, draws)
        assert all(isinstance(one, Verdict) for one in found)
        return found  # type: ignore[return-value]


def program(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The drafter's chain as a program whose draws, and the judge's, go through `Choices`."""
    judge = EnumeratingJudge()
    drafter, models = drafter_of(VOCAB, judge, **options)

    def draws(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "draw_tokens", enumerated(choices))
        judge.choices = choices
        state = begin(drafter, [1, 2], temperature=1.0)
        tree = propose(drafter, state, 3)
        drafter.end([state])
        return tree

    return draws, models


CASES: list[dict[str, Any]] = [
    {"draft": DRAFT, "draft_nodes": 2, "draft_depth": 1, "min_draft_length": 2},
    {"draft": {**DRAFT, "tree_width": 1}, "draft_nodes": 2, "min_draft_length": 1},
    {"min_draft_length": 3},
]


@pytest.mark.parametrize("options", CASES)
def test_the_target_keeps_its_distribution(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    draws, _ = program(monkeypatch, **options)
    assert distribution_error(draws, random_target(2, VOCAB, zeros=0.0), 3) < 1e-6, "float32 rows"


@pytest.mark.parametrize("options", CASES[:2])
def test_the_chain_has_the_middle_models_distribution(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    draws, models = program(monkeypatch, **options)
    found = enumerate_distribution(lambda choices: tuple(draws(choices).tokens[:1].tolist()))
    row = models.middle.logits([1, 2]).double().softmax(0)
    assert distance(found, {(i,): float(row[i]) for i in range(VOCAB)}) < 1e-6


def test_the_distribution_check_catches_a_chain_that_declares_the_small_models_distribution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws, models = program(monkeypatch, **CASES[2])

    def lying(choices: Choices) -> TokenTree:
        tree: TokenTree = draws(choices)
        rows = {
            p: models.draft.logits([1, 2, *(int(tree.tokens[i]) for i in tree.path(p))]).softmax(0) for p in tree.trials
        }
        return tree.replace(trials={p: (Trial(each[0].node, rows[p]),) for p, each in tree.trials.items()})

    assert distribution_error(lying, random_target(2, VOCAB, zeros=0.0), 3) > WRONG


def test_no_two_rounds_share_their_noise() -> None:
    drafter, _ = drafter_of(model="toy", min_draft_length=3)
    state, seeds = begin(drafter, [1, 2, 3], temperature=1.0, seed=4), list[int]()
    verify = ExactJudge().verify

    def heard(trees: Any, rows: Any, given: Sequence[int]) -> Any:
        seeds.extend(given)
        return verify(trees, rows, given)

    drafter.judge = type("Listening", (), {"verify": staticmethod(heard)})()
    for step in range(8):
        tree = propose(drafter, state)
        state.context.tokens += [*tree.tokens[: step % 3].tolist(), 1]
    assert len(seeds) == len(set(seeds)) > 8


def test_both_models_are_fed_only_what_is_new() -> None:
    drafter, models = drafter_of(draft={**DRAFT, "tree_width": 1}, min_draft_length=4, draft_depth=3, draft_nodes=3)
    models.draft.seed = models.middle.seed
    state = begin(drafter, list(range(1, 10)))
    tree = propose(drafter, state, 5)
    state.context.tokens += [*tree.tokens.tolist(), 7]
    before = models.middle.fed, models.draft.fed
    propose(drafter, state, 5)
    assert models.middle.fed - before[0] == 2 + 3, "the text's last two tokens and a tree of three"
    assert models.draft.fed - before[1] <= 3 + 2, "what it lacks of the text, and two levels"


def test_trees_behind_several_tokens() -> None:
    tree = TokenTree.build([7, 8, 9], [-1, -1, 1])
    moved = reroot([4, 5, 6], tree)
    assert (moved.tokens.tolist(), moved.parents.tolist(), moved.depths.tolist()) == (
        [5, 6, 7, 8, 9],
        [-1, 0, 1, 1, 3],
        [1, 2, 3, 3, 4],
    )
    assert reroot([4], tree) is tree
    assert np.array_equal(reroot([4, 5], EMPTY_TREE).tokens, [5])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_draft_length": 0}, "min_draft_length must be an integer"),
        ({"model": "toy", "draft": DRAFT}, "draft must be left out where model is given"),
        ({"quantization": "fp8"}, "must be one of int8"),
        ({"quantization": "int8", "intermediate_model": "toy"}, "quantization must be left out"),
        ({"draft": 3}, "draft must be a dict"),
        ({"draft_sample_method": "best"}, "draft_sample_method"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drafter_of(**options)


def test_drafts_that_cannot_go_back_are_rejected() -> None:
    for method in ({"method": "ngram"}, {"method": "specmquant"}, {"method": "tli", "model": "other"}):
        with pytest.raises(DrafterError, match="which cannot go back"):
            drafter_of(draft=method)
    with pytest.raises(ConfigError, match="inside method 'specmquant' must be a dict with one method"):
        LLM(speculative_config={"method": "specmquant", "draft": {"method": ["ngram", "suffix"]}})
    with pytest.raises(DrafterError, match="got 'ngram', which cannot go back"):
        LLM(speculative_config={"method": "specmquant", "draft": "ngram"})


def test_the_bundled_pair_with_an_int4_copy_between() -> None:
    plain = LLM(speculative_config=None, dtype="float32", seed=1)
    prompts = [
        {"prompt_token_ids": plain.chat_ids([{"role": "user", "content": p.prompt}])}
        for p in bundled_prompts()[::6][:4]
    ]
    fast = plain.with_speculative_config(
        {"method": "specmquant", "model": str(BUNDLED / "draft"), "num_speculative_tokens": 6}
    )
    for params in (
        SamplingParams(temperature=0.0, max_tokens=32),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24),
    ):
        want, found = plain.generate(prompts, params), fast.generate(prompts, params)
        assert not any(out.metrics.dropped_drafters for out in found)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]
        drafted = sum(o.metrics.num_draft_tokens for o in found)
        assert params.temperature > 0 or sum(o.metrics.num_accepted_tokens for o in found) > 0.6 * drafted


def head_of(size: int, method: Any = "eagle", **more: Any) -> str:
    """The folder of a random head for toys of so many tokens."""
    layer = {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 64}
    own = HeadConfig(method=method, hidden_size=8, vocab_size=size, draft_vocab_size=size, layer=layer, **more)
    return written_head(own, shared=False)


HEADS: list[tuple[str, dict[str, Any]]] = [
    ("eagle2", {}), ("eagle", {}), ("eagle3", {"method": "eagle3", "taps": (0, 1, 3)}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "more"), HEADS)
def test_a_head_of_the_middle_model_drafts_as_a_fresh_one_whatever_the_target_kept(
    method: str, more: dict[str, Any]
) -> None:
    """Chains are what the middle model says, and trees those of a head that was told the whole text at once. Negative
    control: a head that is told other states of what the target kept of a chain.
    """
    config = {"method": method, "model": head_of(11, **more)}
    drafter, models = drafter_of(draft=config, draft_nodes=6, draft_depth=3)
    inner = drafter.inner
    assert isinstance(inner, MiddleHead)
    grown: list[list[int]] = []
    trees_of = inner.propose

    def watched(*args: Any) -> Any:
        trees = trees_of(*args)
        grown.extend(tree.tokens.tolist() for tree in trees)
        return trees

    inner.propose = watched  # type: ignore[method-assign]

    def drafted(state: Any) -> tuple[list[int], list[list[int]]]:
        grown.clear()
        tree = propose(drafter, state)
        return tree.tokens.tolist(), list(grown)

    state = begin(drafter, [1, 2, 3])
    for step in range(7):
        found = drafted(state)
        fresh = begin(drafter, state.context.tokens)
        assert found == drafted(fresh)
        assert any(found[1]), "the head drafts"
        assert found[0] == models.middle.greedy(state.context.tokens, len(found[0]))
        assert drafted(state) == found, "a second call in a step"
        drafter.end([fresh])
        kept = min((0, 2, 1, 9, 0, 9, 1)[step], len(found[0]))
        state.context.tokens += [*found[0][:kept], (step * 3) % 11]
    state.inner.rows = -3 * state.inner.rows  # the control
    assert drafted(state) != drafted(begin(drafter, state.context.tokens))
    drafter.end([state])


def test_the_middle_models_head_saves_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the head is right. Negative control: one that never is saves none."""

    def passes(*, right: bool) -> int:
        drafter, models = drafter_of(draft={"method": "eagle2", "model": head_of(11)}, min_draft_length=6)
        inner = drafter.inner
        assert isinstance(inner, MiddleHead)

        def told(states: Sequence[Any], budgets: Sequence[Any], so_far: Sequence[TokenTree]) -> list[TokenTree]:
            said = models.middle.greedy(states[0].extended.tokens, max(budgets[0].depth, 1))
            tokens = said if right else [(token + 1) % 11 for token in said]
            return [TokenTree.chain(tokens[: budgets[0].depth])]

        monkeypatch.setattr(inner, "propose", told)
        state = begin(drafter, [1, 2, 3])
        before = models.middle.calls
        assert len(propose(drafter, state, 6)) == 6
        return models.middle.calls - before

    assert passes(right=True) == 2, "the prompt, and one tree"
    assert passes(right=False) == 7


def test_with_a_head_the_output_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = {"method": "eagle", "model": head_of(VOCAB), "tree_width": 2}
    draws, _ = program(monkeypatch, draft=draft, min_draft_length=2, draft_nodes=2, draft_depth=1)
    assert distribution_error(draws, random_target(1, VOCAB, zeros=0.0), 3) < 1e-6, "float32 rows"


def test_a_real_model_with_a_head_for_its_copy_says_the_same(tmp_path: Path) -> None:
    folder = tiny_checkpoint.write(tmp_path / "target")
    plain = LLM(folder, speculative_config=None, dtype="float32")
    info = plain.runner.info
    layer = {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128}
    own = HeadConfig(
        method="eagle", hidden_size=info.hidden_size, vocab_size=info.vocab_size, draft_vocab_size=info.vocab_size,
        layer=layer,
    )  # fmt: skip
    draft = {"method": "eagle2", "model": written_head(own, shared=False)}
    fast = plain.with_speculative_config(
        {"method": "specmquant", "draft": draft, "quantization": "int8", "num_speculative_tokens": 4}
    )
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + 3 * i for i in range(n)]} for n in (3, 20)]
    found = fast.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    assert not any(o.metrics.dropped_drafters for o in found)
    assert sum(o.metrics.num_accepted_tokens for o in found) > 0
