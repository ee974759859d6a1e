"""Scoring that goes on behind the layers that drafted: the same bits as a whole pass, wherever it is used.

Negative controls: states of other inputs, and keys and values that were lost when a cache moved, give other scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models.layer_chains import layer_chains

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.models import LayerPlan
from paceline.models.runners import layer_drafts_of, resuming_pays
from paceline.tree import EMPTY_TREE, TokenTree

PROMPTS = ["What is 2 + 3?", "def area(width, height):", "Name the first three months of the year, please."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
RESUMING: dict[str, Any] = {"controller": "fixed", "resume_verification": True}
SKIP = {"method": "layer_skip", "exit_layer": 3, "num_speculative_tokens": 6} | RESUMING


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def plain(request: pytest.FixtureRequest) -> LLM:
    return LLM(speculative_config=None, dtype=request.param, seed=1)


class Drafted:
    """Caches with texts of their own, and what greedy chains by the first layers left."""

    def __init__(self, llm: LLM, plan: LayerPlan, steps: Sequence[int], *, first: int = 0) -> None:
        self.runner: Any = llm.runner
        self.drafts: Any = layer_drafts_of(self.runner, "layer_skip")
        self.caches = [self.runner.open() for _ in steps]
        for i, cache in enumerate(self.caches):
            self.runner.extend([cache], [[(7 * k + i + first) % 6000 for k in range(20 + 13 * i)]])
        self.roots, self.plan = [5 + i for i in range(len(steps))], plan
        self.tokens, self.states = layer_chains(self.drafts, self.caches, self.roots, steps, plan)

    def trees(self, nodes: Sequence[int]) -> list[TokenTree]:
        return [TokenTree.chain(tokens[:n]) if n else EMPTY_TREE for tokens, n in zip(self.tokens, nodes, strict=True)]

    def resumed(self, nodes: Sequence[int], known: Sequence[torch.Tensor]) -> torch.Tensor:
        scores = self.drafts.score(self.caches, self.roots, self.trees(nodes), known, self.plan)
        assert scores.rows == tuple(sum(1 + n for n in nodes[:i]) for i in range(len(nodes) + 1))
        if scores.best is not None:
            assert list(scores.best) == scores.logits.argmax(-1).tolist()
        return scores.logits.clone()

    def whole(self, nodes: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.runner.score(self.caches, self.roots, self.trees(nodes)).logits
        return logits.clone()


@pytest.mark.parametrize("nodes", [(4, 5, 2), (2, 0, 2), (1, 5, 0)])
def test_the_bits_are_those_of_a_whole_pass(plain: LLM, nodes: tuple[int, ...]) -> None:
    made = Drafted(plain, LayerPlan(stop=2), (4, 5, 2))
    assert [len(tokens) for tokens in made.tokens] == [4, 5, 2]
    assert all(len(own) >= len(tokens) for own, tokens in zip(made.states, made.tokens, strict=True))
    known = [own[: 1 + n] for own, n in zip(made.states, nodes, strict=True)]
    assert torch.equal(made.resumed(nodes, known), made.whole(nodes))


def test_of_more_rows_than_one_pass_takes_all_best_tokens_are_told(plain: LLM) -> None:
    """`resumed` compares them with the logits."""
    made = Drafted(plain, LayerPlan(stop=2), (30, 30, 30))
    assert torch.equal(made.resumed((30, 30, 30), [own[:30] for own in made.states]), made.whole((30, 30, 30)))


def test_states_of_other_inputs_give_other_scores(plain: LLM) -> None:
    made = Drafted(plain, LayerPlan(stop=2), (4,))
    wrong = made.states[0][:4].roll(1, 0)
    assert not torch.equal(made.resumed((4,), [wrong]), made.whole((4,)))


@pytest.mark.parametrize("careful", [True, False])
def test_a_cache_that_moves_takes_the_drafts_along(plain: LLM, careful: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without them the scores are others."""
    runner: Any = plain.runner
    made = Drafted(
        plain, LayerPlan(stop=2), (40,), first=100 * careful
    )  # so that neither finds the other's in freed slots
    (cache,) = made.caches
    before = list(cache.blocks)
    if not careful:
        monkeypatch.setattr("paceline.models.state.cache.blocks_for", lambda tokens: -(-(cache.length) // 16))
    blocker = runner.open()
    cache.relocate(len(before) + 1, len(before))  # by itself it moves only where others hold what is behind
    cache.locate()
    monkeypatch.undo()
    assert cache.blocks[0] != before[0]
    scores = made.resumed((39,), [made.states[0][:39]])
    assert torch.equal(scores, made.whole((39,))) == careful
    runner.release(blocker)


def decoded(llm: LLM, params: SamplingParams) -> list[Any]:
    found = llm.generate(PROMPTS, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


def spied(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the inputs that were not computed again, pass by pass."""
    drafts, saved = llm.engine.parts.drafter_set.drafters[0].drafts, list[int]()  # type: ignore[attr-defined]  # a self-drafter
    score = drafts.score

    def spy(caches: Any, roots: Any, trees: Any, known: Any, plan: Any) -> Any:
        saved.append(sum(map(len, known)))
        return score(caches, roots, trees, known, plan)

    monkeypatch.setattr(drafts, "score", spy)
    return saved


@pytest.mark.parametrize(
    "config", [SKIP, RESUMING | {"method": "del", "exit_layers": [3], "num_speculative_tokens": 5}]
)
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, seed=5, max_tokens=16, n=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=16),
    ],
    ids=["greedy", "seeded", "penalty"],
)
def test_the_text_is_the_targets_and_scoring_did_go_on(
    plain: LLM, config: dict[str, Any], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.drafters.self.base.MIN_RESUMED", 1)
    fast = plain.with_speculative_config(config)
    saved = spied(fast, monkeypatch)
    assert decoded(fast, params) == decoded(plain, params)
    assert sum(saved) > 10


def test_drawn_drafts_are_the_same_with_and_without(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24)
    drawn = SKIP | {"draft_sample_method": "probabilistic"}
    resumed = plain.with_speculative_config(drawn)
    saved = spied(resumed, monkeypatch)
    whole = plain.with_speculative_config(drawn | {"resume_verification": False})
    assert decoded(resumed, params) == decoded(whole, params)
    assert sum(saved) > 20


TWO = [
    {"method": "layer_skip", "exit_layer": 3, "num_speculative_tokens": 4, "resume_verification": True},
    {"method": "layer_skip", "exit_layer": 2},
]


@pytest.mark.parametrize(
    "config",
    [
        SKIP | {"resume_verification": False},
        {"method": TWO, "controller": "fixed", "num_speculative_tokens": 6},
        {"method": "layer_skip", "target_speedup": 2.0, "num_speculative_tokens": 6, "controller": "fixed"},
    ],
    ids=["off", "two", "skipped layers"],
)
def test_where_scratch_holds_something_else_all_is_scored(
    plain: LLM, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    llm = plain.with_speculative_config(config)
    saved = spied(llm, monkeypatch)
    assert decoded(llm, GREEDY) == decoded(plain, GREEDY)
    assert not saved


@pytest.mark.parametrize("pays", [True, False])
def test_by_default_a_measurement_decides(plain: LLM, pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("paceline.drafters.self.base.resuming_pays", lambda *given: calls.append(given) or pays)
    llm = plain.with_speculative_config({name: value for name, value in SKIP.items() if name != "resume_verification"})
    saved = spied(llm, monkeypatch)
    assert decoded(llm, GREEDY) == decoded(plain, GREEDY)
    assert len(calls) == 1
    assert bool(saved) == pays


def test_the_measurement_runs_and_leaves_nothing(plain: LLM) -> None:
    runner: Any = plain.runner
    free = runner.memory.left()
    assert resuming_pays(runner, layer_drafts_of(runner, "layer_skip"), LayerPlan(stop=2)) in {True, False}
    assert runner.memory.left() == free


@pytest.mark.parametrize("method", ["layer_skip", "del"])
def test_a_context_too_short_to_measure_is_decoded_all_the_same(method: str) -> None:
    plain = LLM(speculative_config=None, max_model_len=5)
    fast = plain.with_speculative_config({"method": method, "controller": "fixed", "num_speculative_tokens": 3})
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    found = fast.generate([[5], [5, 6, 7, 8]], params)
    assert not any(out.metrics.dropped_drafters for out in found)
    wanted = plain.generate([[5], [5, 6, 7, 8]], params)
    assert [out.outputs[0].token_ids for out in found] == [out.outputs[0].token_ids for out in wanted]


def test_nothing_is_measured_where_nothing_was_drafted(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that scores no draft must not fail for a measurement's sake."""
    monkeypatch.setattr("paceline.drafters.self.base.resuming_pays", lambda *given: 1 // 0)
    llm = plain.with_speculative_config({"method": "layer_skip", "num_speculative_tokens": 0, "controller": "fixed"})
    assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].finish_reason == "length"


def test_where_it_fails_all_is_scored_and_the_drafter_is_dropped(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = plain.with_speculative_config(SKIP)

    def broken(*given: Any) -> Any:
        raise RuntimeError("no states")

    monkeypatch.setattr(llm.engine.parts.drafter_set.drafters[0], "resume", broken)
    found = llm.generate(PROMPTS, GREEDY)
    assert [[one.token_ids for one in out.outputs] for out in found] == decoded(plain, GREEDY)
    assert all("no states" in out.metrics.dropped_drafters["layer_skip"] for out in found)


def test_it_is_rejected_where_layers_are_left_out(plain: LLM) -> None:
    with pytest.raises(ConfigError, match="leave out resume_verification or target_speedup"):
        plain.with_speculative_config({"method": "layer_skip", "target_speedup": 2.0, "resume_verification": True})
    with pytest.raises(ConfigError, match="resume_verification must be True or False"):
        plain.with_speculative_config({"method": "del", "resume_verification": 1})
