"""SWIFT: the right sub-layers are found, matchness is what it says, the search is bounded, and the text stays the
target's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from toy_layers import ToyLayers, direction
from toys import ToyCache, ToyRunner

from paceline import LLM, SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.self import SwiftDrafter, swift
from paceline.drafters.self.layer_skip import LayerSkipDrafter
from paceline.drafters.self.skip_replay import has_room, replayed
from paceline.drafters.self.skip_sets import SubLayers, first_set, plan_of, random_set
from paceline.drafters.self.swift import SearchRules, SkipSearch, branched, upper_bounds
from paceline.errors import CapabilityError, ConfigError
from paceline.models import ALL_LAYERS, LayerPlan
from paceline.models.runners import NativeRunner
from paceline.models.runners.layer_drafts import LayerDrafts
from paceline.tree import EMPTY_TREE, Budget, TokenTree

PROMPTS = ["What is 2 + 3?", "def area(width, height):", "Name the first three months of the year, please."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
EARLY = {"context_window": 6, "bayes_every": 4, "stop_score": 1.0}
LAYERS = 6


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


def fast(plain: LLM, **options: Any) -> tuple[LLM, SwiftDrafter]:
    llm = plain.with_speculative_config({"method": "swift", "num_speculative_tokens": 6, **options})
    (drafter,) = llm.engine.parts.drafter_set.drafters
    assert isinstance(drafter, SwiftDrafter)
    return llm, drafter


def decoded(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    found = llm.generate(prompts, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


@pytest.mark.parametrize(
    "options", [EARLY, {**EARLY, "draft_stop_threshold": 0.0, "skip_ratio": 0.8, "num_speculative_tokens": 3}], ids=str
)
def test_the_text_is_the_targets_while_it_searches(plain: LLM, options: dict[str, Any]) -> None:
    llm, drafter = fast(plain, **options)
    assert decoded(llm, PROMPTS) == decoded(plain, PROMPTS)
    assert decoded(llm, PROMPTS[:1]) == decoded(plain, PROMPTS[:1])
    assert drafter.search_of("").steps > 5
    for params in (
        SamplingParams(temperature=0.8, seed=5, max_tokens=16, n=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=16),
    ):
        assert decoded(llm, PROMPTS[:2], params) == decoded(plain, PROMPTS[:2], params)


def test_a_replay_that_wrote_into_the_texts_own_cache_would_show(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""

    def careless(runner: Any, cache: Any, start: int, tokens: Sequence[int], *, plan: LayerPlan) -> torch.Tensor:
        length = cache.length
        runner.truncate(cache, start)
        found = runner.run_layers([cache], [tokens[0]], [TokenTree.chain(tokens[1:])], plan=plan).states
        cache.length, cache.scratch = length, 0
        states: torch.Tensor = found
        return states

    monkeypatch.setattr(swift, "replayed", careless)
    llm, _ = fast(plain, **EARLY)
    assert decoded(llm, PROMPTS) != decoded(plain, PROMPTS)


def runner_of(plain: LLM) -> Any:
    runner = plain.engine.parts.runner
    assert isinstance(runner, NativeRunner)
    return runner


def test_one_pass_is_what_steps_are(plain: LLM) -> None:
    """The replay against token by token over the same cache; and neither touches it."""
    runner = runner_of(plain)
    text = plain.tokenizer.encode(" ".join(PROMPTS))[:30]
    cache = runner.open()
    runner.extend([cache], [text[:-1]])
    before = runner.score([cache], [text[-1]], [EMPTY_TREE]).logits.clone()
    plan, start, drafts = LayerPlan(skip_attention={1, 3}, skip_mlp={2}), len(text) - 9, LayerDrafts(runner)
    found = drafts.head(replayed(runner, cache, start, text[start:-1], plan=plan))
    own = runner.fork(cache)
    runner.truncate(own, start)
    steps = torch.cat([drafts.step([own], [text[start : start + i + 1]], plan).logits for i in range(8)])
    assert torch.allclose(found, steps, atol=1e-3)
    whole = drafts.head(replayed(runner, cache, start, text[start:-1], plan=ALL_LAYERS))
    assert not torch.allclose(found, whole, atol=1e-1)
    assert torch.equal(runner.score([cache], [text[-1]], [EMPTY_TREE]).logits, before)
    runner.release(own)
    runner.release(cache)


def test_nothing_left_out_matches_everything(plain: LLM) -> None:
    """On greedy text; what the search tries matches less (negative control)."""
    llm, drafter = fast(plain, context_window=20, max_search_steps=12, stop_score=1.0)
    seen: list[tuple[float, float]] = []
    tried = drafter.try_next

    def spy(state: Any) -> None:
        seen.append(
            (drafter.matchness(state, frozenset()), drafter.matchness(state, frozenset({2, 3, 4, 5, 6, 7, 8, 9})))
        )
        tried(state)

    drafter.try_next = spy  # type: ignore[method-assign]
    decoded(llm, PROMPTS)
    assert len(seen) > 5
    assert {one for one, _ in seen} == {1.0}
    assert all(other < 1.0 for _, other in seen)


class Planted(ToyLayers):
    """Layers of which all sub-layers matter but some: each of the others, left out, makes some tokens wrong."""

    def __init__(self, runner: ToyRunner, idle: Collection[int]) -> None:
        super().__init__(runner)
        self.idle, self.rows = frozenset(idle), 0

    def run(self, texts: Sequence[Sequence[int]], plan: LayerPlan) -> list[torch.Tensor]:
        states = super().run(texts, LayerPlan())
        self.rows += len(texts)
        left_out = {2 * i for i in plan.skip_attention} | {2 * i + 1 for i in plan.skip_mlp}
        for row, text in enumerate(texts):
            if any(len(text) % 5 == part % 5 for part in left_out - self.idle):
                logits = self._remembered[direction(states[row])].roll(1)
                states[row] = states[row] + 1.0
                self._remembered[direction(states[row])] = logits
        return states


class PlantedWorld:
    """One text of a planted target, decoded by hand."""

    def __init__(self, idle: Collection[int], layers: int = 6, **options: Any) -> None:
        self.runner = ToyRunner(11, seed=3, num_layers=layers)
        self.layers = self.runner.layers = Planted(self.runner, idle)
        args = DrafterArgs(vocab_size=11, index=0, max_context=4096, target=self.runner)
        self.drafter = SwiftDrafter(args, **{"draft_stop_threshold": 0.0, **options})

    def text(self, request: str = "r", tenant: str = "") -> Any:
        tokens = [1, 2, 3, 4]
        (state,) = self.drafter.begin([Context(request, tokens, 4, tenant=tenant, cache=lambda: ToyCache(tokens[:-1]))])
        return state

    def say(self, state: Any, count: int) -> None:
        state.context.tokens.extend(self.runner.greedy(state.context.tokens, count))

    def propose(self, states: Sequence[Any], nodes: int = 1) -> Any:
        return self.drafter.propose(states, [Budget(nodes, nodes)] * len(states), [EMPTY_TREE] * len(states))


def test_the_planted_set_is_found_and_then_drafts_are_right() -> None:
    planted = {5, 6, 9}
    world = PlantedWorld(planted, context_window=20, stop_score=1.0)
    state = world.text()
    world.say(state, 20)
    while not state.search.done:
        world.propose([state])
        world.say(state, 1)
    assert state.search.best == planted
    assert state.search.score == 1.0
    (tree,) = world.propose([state], nodes=6)
    assert tree.tokens.tolist() == world.runner.greedy(state.context.tokens, 6)
    assert world.runner.open_caches == 0


def test_matchness_by_hand() -> None:
    """Window of 10: with one sub-layer that matters left out, every fifth position is wrong; with another, two of
    five.
    """
    world = PlantedWorld(set(), context_window=10)
    state = world.text()
    world.say(state, 13)
    assert world.drafter.matchness(state, frozenset()) == 1.0
    assert world.drafter.matchness(state, frozenset({2})) == 0.8
    assert world.drafter.matchness(state, frozenset({2, 3})) == pytest.approx(0.6)
    assert world.drafter.matchness(state, frozenset({2, 7})) == 0.8
    state.context.tokens[-1] = (state.context.tokens[-1] + 1) % 11
    assert world.drafter.matchness(state, frozenset()) == pytest.approx(0.9)


def test_only_generated_tokens_are_looked_at_and_each_length_once() -> None:
    world = PlantedWorld(set(), context_window=6, stop_score=1.0)
    state = world.text()
    world.say(state, 5)
    world.propose([state])
    assert (state.replays, world.layers.rows) == (0, 1)
    world.say(state, 1)
    world.propose([state])
    world.propose([state])
    assert (state.replays, world.layers.rows) == (1, 1 + 6 + 2)
    world.drafter.propose([state], [Budget(0, 0)], [EMPTY_TREE])
    assert world.layers.rows == 9


def test_the_search_is_bounded_and_amortised() -> None:
    """However long the texts, it replays no more than its steps and one window a text; drafts alone go on."""
    world = PlantedWorld(set(), context_window=6, max_search_steps=9, stop_score=1.0)
    states = [world.text(f"r{i}") for i in range(3)]
    for state in states:
        world.say(state, 6)
    for step in range(40):
        before = sum(state.replays for state in states)
        world.propose(states)
        assert sum(state.replays for state in states) - before <= 1, f"step {step}"
        for state in states:
            world.say(state, 1)
    assert states[0].search.steps == 9
    assert [state.replays for state in states] == [4, 4, 4]
    assert world.layers.rows == 6 * (9 + 3) + 40 * 3


def test_what_was_found_holds_for_a_tenants_next_text_and_for_no_other_tenant() -> None:
    world = PlantedWorld({5, 6, 9}, context_window=20, stop_score=1.0)
    state = world.text()
    world.say(state, 20)
    while not state.search.done:
        world.propose([state])
        world.say(state, 1)
    mine, other = world.text("next"), world.text("other", "other")
    assert mine.search.best == state.search.best != other.search.best
    for _ in range(3):
        world.say(mine, 20)
        world.propose([mine])
    assert (mine.replays, mine.search.searches) == (1, 1)
    assert world.drafter.draft_plan(mine).plan is world.drafter.draft_plan(state).plan
    world.layers.idle = frozenset()
    third = world.text("another kind")
    world.say(third, 20)
    world.propose([third])
    assert (third.search.searches, third.search.done) == (2, False)


def test_no_copy_is_made_where_memory_is_short() -> None:
    class Memory:
        def blocks_for(self, tokens: int) -> int:
            return -(-tokens // 16)

        def spare(self) -> int:
            return 5

    world = PlantedWorld(set(), context_window=6)
    world.runner.memory = Memory()  # type: ignore[attr-defined]
    assert has_room(world.runner, 16)
    assert not has_room(world.runner, 17)
    state = world.text()
    world.say(state, 16)
    world.propose([state])
    assert state.replays == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"skip_ratio": 0.0}, "skip_ratio must be above 0 and at most 1, got 0"),
        ({"skip_ratio": 0.1}, r"skip_ratio must be at least 0\.125, one of 8 sub-layers, got 0\.1"),
        ({"draft_stop_threshold": 2}, r"draft_stop_threshold must be in 0\.\.1, got 2"),
        ({"context_window": 0}, "context_window must be an integer of 1 or more, got 0"),
        ({"stop_score": -1}, r"stop_score must be in 0\.\.1, got -1"),
        ({"bayes_every": 0}, "bayes_every must be an integer of 1 or more, got 0"),
        ({"skip_layers": 3}, "skip_layers"),
    ],
    ids=str,
)
def test_bad_options_are_rejected_in_one_line(plain: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        fast(plain, **options)
    assert "\n" not in str(caught.value)


def test_a_target_of_two_layers_is_rejected() -> None:
    with pytest.raises(CapabilityError, match="between the first and the last layer, but toy has 2 layers"):
        PlantedWorld(set(), layers=2)


@pytest.mark.parametrize("speedup", [1.0, 2.0, 3.0])
def test_unified_layers_draft_and_the_text_is_the_targets(plain: LLM, speedup: float) -> None:
    llm = plain.with_speculative_config(
        {"method": "layer_skip", "target_speedup": speedup, "num_speculative_tokens": 3}
    )
    found = llm.generate(PROMPTS, GREEDY)
    assert [[one.token_ids for one in out.outputs] for out in found] == decoded(plain, PROMPTS)
    rates = [out.metrics.num_accepted_tokens / out.metrics.num_draft_tokens for out in found]
    assert (min(rates) > 0.9) == (speedup == 1.0)


def test_unified_layers_beside_an_exit_and_beyond_the_model_are_rejected(plain: LLM) -> None:
    for options, words in (
        ({"target_speedup": 3.5}, r"target_speedup must be in 1\.\.3, got 3\.5"),
        ({"target_speedup": 2, "exit_layer": 2}, "exit_layer and target_speedup are two ways"),
    ):
        with pytest.raises(ConfigError, match=words):
            plain.with_speculative_config({"method": "layer_skip", **options})
    (drafter,) = plain.with_speculative_config(
        {"method": "layer_skip", "target_speedup": 2}
    ).engine.parts.drafter_set.drafters
    assert isinstance(drafter, LayerSkipDrafter)
    assert plan_of(frozenset({2, 3, 4, 5, 8, 9})) == drafter.draft_plan(drafter.begin([Context("t", [1], 1)])[0]).plan


SEARCH_LAYERS, COUNT = 10, 6
PLANTED = random_set(SEARCH_LAYERS, COUNT, np.random.default_rng(5))
"""One of 8008."""
NEVER = 10**6


def overlap(skipped: SubLayers) -> float:
    """Share of the planted set that was hit: 1 for it alone."""
    return len(skipped & PLANTED) / COUNT


def searched(rules: SearchRules, score: Callable[[SubLayers], float] = overlap, seed: int = 0) -> SkipSearch:
    search = SkipSearch(SEARCH_LAYERS, COUNT, rules, seed)
    search.measured(score(search.best))
    while not search.done:
        skipped = search.next()
        search.tell(skipped, score(skipped))
    return search


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_planted_set_is_found_by_the_process_and_not_by_chance(seed: int) -> None:
    """With as many tries, random sets alone do not (negative control)."""
    found = searched(SearchRules(stop_score=1.0, max_steps=80, bayes_every=2), seed=seed)
    assert found.best == PLANTED
    assert found.score == 1.0
    assert found.steps < 80
    chance = searched(SearchRules(stop_score=1.0, max_steps=80, bayes_every=NEVER), seed=seed)
    assert chance.best != PLANTED
    assert chance.steps == 80


def test_every_set_is_tried_once_where_there_are_few() -> None:
    search = SkipSearch(5, 2, SearchRules(stop_score=1.0, bayes_every=3), 0)
    tried = [search.best]
    search.measured(0.0)
    while not search.done:
        tried.append(search.next())
        search.tell(tried[-1], 0.0)
    assert len(set(tried)) == 15
    assert len(tried) <= 16


def test_it_ends_by_score_by_patience_and_by_steps() -> None:
    first = overlap(first_set(SEARCH_LAYERS, COUNT))
    assert searched(SearchRules(stop_score=first)).steps == 0
    flat = searched(SearchRules(max_steps=50, patience=7, bayes_every=3), lambda skipped: 0.5)
    assert (flat.steps, flat.idle) == (7, 7)
    assert flat.best == first_set(SEARCH_LAYERS, COUNT)
    assert searched(SearchRules(stop_score=1.0, max_steps=5, patience=50)).steps == 5


def test_a_better_set_is_kept_and_begins_the_patience_anew() -> None:
    search = SkipSearch(SEARCH_LAYERS, COUNT, SearchRules(patience=3))
    search.measured(0.4)
    one, two, three = search.next(), search.next(), search.next()
    search.tell(one, 0.3)
    search.tell(two, 0.5)
    assert (search.best, search.score, search.idle) == (two, 0.5, 0)
    search.tell(three, 0.5)
    assert (search.best, search.idle, search.steps) == (two, 1, 3)


def test_another_kind_of_text_begins_the_search_again() -> None:
    search = searched(SearchRules(stop_score=1.0, max_steps=80, bayes_every=2))
    search.measured(0.95)
    assert search.searches == 1
    assert not search.done
    search.measured(0.5)
    assert (search.searches, search.steps, search.best, search.score) == (2, 0, PLANTED, 0.5)


def test_bounds_are_those_of_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the textbook's formulas with an inverse; with another noise they differ (negative control)."""
    monkeypatch.setattr(swift, "LENGTHS", (2.0,))
    rng = np.random.default_rng(1)
    known, candidates = (rng.integers(0, 2, (n, 9)).astype(float) for n in (12, 5))
    scores = rng.random(12)

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x = np.sqrt(5.0) * np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)) / 2.0
        found: np.ndarray = (1 + x + x**2 / 3) * np.exp(-x)
        return found

    inverse = np.linalg.inv(kernel(known, known) + 0.01 * np.eye(12))
    across, y = kernel(candidates, known), (scores - scores.mean()) / scores.std()
    mean = across @ inverse @ y
    deviation = np.sqrt(1 - np.einsum("ij,jk,ik->i", across, inverse, across))
    expected = scores.mean() + scores.std() * (mean + 2.5 * deviation)
    assert np.allclose(upper_bounds(known, scores, candidates), expected)
    assert not np.allclose(upper_bounds(known, scores, candidates, noise=0.5), expected)


def test_equal_scores_and_one_score_are_no_trouble() -> None:
    rows = np.eye(4)
    assert np.isfinite(upper_bounds(rows, np.full(4, 0.3), 1 - rows)).all()
    assert np.isfinite(upper_bounds(rows[:1], np.array([0.3]), rows)).all()


def fast_with_branches(plain: LLM, **options: Any) -> tuple[LLM, SwiftDrafter]:
    llm = plain.with_speculative_config({"method": "swift", **options})
    (drafter,) = llm.engine.parts.drafter_set.drafters
    assert isinstance(drafter, SwiftDrafter)
    return llm, drafter


def decoded_with_branches(llm: LLM, prompts: list[Any]) -> list[Any]:
    found = llm.generate(prompts, GREEDY)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


def test_the_likeliest_branches_get_the_room_that_is_left() -> None:
    levels = [([3, 4, 5], [0.5, 0.3, 0.0]), ([6, 7, 8], [0.8, 0.1, 0.05])]
    tree = branched(levels, 4, source=2)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([3, 6, 4, 7], [-1, 0, -1, 0])
    assert tree.sources.tolist() == [2] * 4
    assert len(branched(levels, 2, source=0)) == 2
    assert len(branched(levels, 9, source=0)) == 5, "a token without any chance is no candidate"


def test_side_branches_hang_off_the_chain_and_help(plain: LLM) -> None:
    """Fewer steps than the chain alone takes, for the same text; only the chain goes on."""
    options = {"draft_stop_threshold": 0.0, "max_search_steps": 0, "controller": "swift"}
    steps = {}
    for width in (1, 10):
        llm, _ = fast_with_branches(plain, tree_width=width, draft_max_length=3, **options)
        assert decoded_with_branches(llm, PROMPTS) == decoded_with_branches(plain, PROMPTS)
        steps[width] = sum(out.metrics.num_steps for out in llm.generate(PROMPTS, GREEDY))
    assert steps[10] < steps[1]
    _, drafter = fast_with_branches(plain, tree_width=4, **options)
    text, runner = [4, 5, 6], plain.runner
    cache = runner.open()
    runner.extend([cache], [text[:-1]])
    (state,) = drafter.begin([Context("r", text, 3, cache=lambda: cache)])
    (tree,) = drafter.propose([state], [Budget(12, 3)], [EMPTY_TREE])
    assert tree.parents.tolist()[:3] == [-1, 0, 1]
    assert len(tree) == 12
    assert set(tree.parents.tolist()) <= {-1, 0, 1}
    (short,) = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
    assert short.parents.tolist() == [-1] * 3, "one level where there is room for no more"
    assert short.tokens[0] == tree.tokens[0]
    for node in range(3, 12):
        assert tree.confidence[node] <= tree.confidence[tree.parents[node] + 1]
    runner.release(cache)


def test_a_runner_of_chains_rejects_side_branches() -> None:
    with pytest.raises(
        CapabilityError, match=r"tree_width must be 1, since the runner of toy scores chains only, got 3"
    ):
        SwiftDrafter(
            DrafterArgs(vocab_size=11, index=0, max_context=64, target=ToyRunner(11, trees=False)), tree_width=3
        )
