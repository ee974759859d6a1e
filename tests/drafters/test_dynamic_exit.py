"""DEL: what it learns of the exits is right, its choice is the objective's, and the text stays the target's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.drafters.self.dynamic_exit import DelState, DynamicExitDrafter, ExitRecord, best_exit
from paceline.errors import ConfigError
from paceline.models import LayerPlan
from paceline.tree import Scores, Verdict

PROMPTS = ["What is 2 + 3?", "def area(width, height):", "Name the first three months of the year, please."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
LAYERS = 6


def fast(plain: LLM, **options: Any) -> tuple[LLM, DynamicExitDrafter]:
    llm = plain.with_speculative_config({"method": "del", **options})
    (drafter,) = llm.engine.parts.drafter_set.drafters
    assert isinstance(drafter, DynamicExitDrafter)
    return llm, drafter


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


def decoded(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    found = llm.generate(prompts, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


@pytest.mark.parametrize("options", [{}, {"shadow_every": 1}, {"dynamic_draft_exit": False}], ids=str)
def test_the_text_is_the_targets(plain: LLM, options: dict[str, Any]) -> None:
    llm, _ = fast(plain, num_speculative_tokens=4, **options)
    assert decoded(llm, PROMPTS) == decoded(plain, PROMPTS)
    assert decoded(llm, PROMPTS[:1]) == decoded(plain, PROMPTS[:1])
    drawn = SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2)
    assert decoded(llm, PROMPTS[:2], drawn) == decoded(plain, PROMPTS[:2], drawn)


def test_sampled_requests_learn_from_overlaps(plain: LLM) -> None:
    llm, drafter = fast(plain, num_speculative_tokens=4)
    llm.generate(PROMPTS, SamplingParams(temperature=1.0, max_tokens=16))
    rates, *_ = drafter.known[""]
    assert all(0.0 < rate < 1.0 for rate in rates)
    assert rates[0] < rates[-1]


def with_last_layer(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, list[Any]]:
    """DEL that may also exit behind the last layer, and what it saw: state, shadows, verdict, rows of the target."""
    llm, drafter = fast(plain, num_speculative_tokens=3, exit_layers=[1, 3, 5], shadow_every=1)
    drafter.exits, drafter.plans = [1, 3, LAYERS], [LayerPlan(stop=stop) for stop in (1, 3, LAYERS)]
    seen: list[Any] = []
    shadows, look = drafter.shadows, drafter.learn
    drawn: list[Any] = []

    def looking(state: DelState, verdict: Verdict, scores: Scores, index: int, own: Any) -> None:
        before, used = state.record.matched.copy(), state.exit
        look(state, verdict, scores, index, own)
        first = scores.rows[index]
        target = scores.logits[[first, *(first + 1 + node for node in verdict.path)]].argmax(-1).tolist()
        seen.append((used, own, drawn[-1], verdict, target, state.record.matched - before * drafter.decay))

    def spy(states: torch.Tensor) -> Any:
        drawn.append(shadows(states))
        return drawn[-1]

    monkeypatch.setattr(drafter, "shadows", spy)
    monkeypatch.setattr(drafter, "learn", looking)
    decoded(llm, PROMPTS)
    return llm, seen


def test_the_last_layers_shadow_tokens_are_the_targets(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every valid position, so that its acceptance is 1; the first layer's are not (negative control)."""
    _, seen = with_last_layer(plain, monkeypatch)
    assert len(seen) > 5
    for _, _, shadows, verdict, target, found in seen:
        assert shadows[-1].tolist() == target
        assert found[-1] == pytest.approx(len(verdict.path) + 1)
    assert any(found[0] < len(verdict.path) + 1 for _, _, _, verdict, _, found in seen)


def test_the_exit_in_use_has_the_drafted_tokens_as_shadows(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    _, seen = with_last_layer(plain, monkeypatch)
    compared = 0
    for used, own, shadows, verdict, _, _ in seen:
        drafted = own.tokens.tolist()[: len(verdict.path) + 1]
        assert shadows[used].tolist()[: len(drafted)] == drafted
        compared += len(drafted)
    assert compared > 5
    others = [(own, shadows[other]) for used, own, shadows, *_ in seen for other in range(3) if other != used]
    assert any(shadow.tolist()[:1] != own.tokens.tolist()[:1] for own, shadow in others), "exits do not differ"


def test_one_exit_and_one_token_is_layer_skip(plain: LLM) -> None:
    skip = plain.with_speculative_config({"method": "layer_skip", "exit_layer": 3, "num_speculative_tokens": 1})
    llm, _ = fast(plain, exit_layers=[3], num_speculative_tokens=1)
    (mine,), (theirs,) = llm.generate(PROMPTS[:1], GREEDY), skip.generate(PROMPTS[:1], GREEDY)
    assert mine.metrics.num_draft_tokens == theirs.metrics.num_draft_tokens
    assert mine.metrics.num_accepted_tokens == theirs.metrics.num_accepted_tokens > 0


def chosen(rates: list[float]) -> tuple[int, int]:
    return best_exit(np.array(rates), np.arange(1, LAYERS), LAYERS, 8)


def objective(rate: float, layer: int, length: int) -> float:
    """Tokens per layer, as the paper writes it."""
    tokens = sum(rate**i for i in range(length + 1))
    return tokens / (length * layer + LAYERS)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_the_grid(seed: int) -> None:
    rates = np.sort(np.random.default_rng(seed).uniform(0, 1, 5)).tolist()
    grid = {(i, d): objective(rate, i + 1, d) for i, rate in enumerate(rates) for d in range(1, 9)}
    assert grid[chosen(rates)] == pytest.approx(max(grid.values()))


def test_equal_acceptance_chooses_the_smallest_exit() -> None:
    for rate in (0.0, 0.3, 0.8, 1.0):
        assert chosen([rate] * 5)[0] == 0
    assert chosen([1.0] * 5) == (0, 8), "acceptance 1 is no division by 0"
    assert chosen([0.1, 0.95, 0.96, 0.97, 0.98])[0] == 1


def test_recent_rounds_count_more() -> None:
    record = ExitRecord(np.full(2, 0.5), 2.0, 0.9)
    for _ in range(40):
        record.add_all(np.array([1.0, 0.0]), 1)
    before = record.rates.copy()
    for _ in range(10):
        record.add_all(np.array([0.0, 1.0]), 1)
    assert before[0] > 0.85
    assert record.rates[0] < 0.5
    assert record.rates[1] > 0.5 > before[1]
    record.add(0, [(1, 1), (2, 2)])
    assert record.valid[0] > record.valid[1]


def test_the_threshold_lies_between_right_and_wrong_tokens() -> None:
    record = ExitRecord(np.full(2, 0.5), 2.0, 0.9)
    assert record.threshold(0) == 0.0
    for _ in range(6):
        record.note_confidences(0, [0.9, 0.8], [0.3])
    assert 0.3 < record.threshold(0) < 0.8
    assert record.threshold(1) == 0.0, "another exit's tokens say nothing"


@pytest.mark.parametrize(("every", "resumes"), [(None, False), (1, False), (None, True)])
def test_states_are_asked_for_only_when_all_exits_are_looked_at(
    plain: LLM, monkeypatch: pytest.MonkeyPatch, every: int | None, resumes: bool
) -> None:
    """In growing distances, or in every step where that is asked for."""
    options = {
        "num_speculative_tokens": 2,
        "controller": "fixed",
        "resume_verification": resumes,
        "shadow_every": every,
    }
    llm, drafter = fast(plain, **options)
    tapped: list[bool] = []
    score = type(llm.runner).score

    def spy(self: Any, caches: Any, roots: Any, trees: Any, *, taps: Any = (), **more: Any) -> Scores:
        tapped.append(bool(taps))
        return score(self, caches, roots, trees, taps=taps, **more)

    monkeypatch.setattr(type(llm.runner), "score", spy)
    decoded(llm, PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True))
    looks = [i for i, taps in enumerate(tapped) if taps]
    if every == 1:
        assert looks == list(range(len(tapped) - 1)), "nothing is drafted in a text's last step"
        return
    assert looks == [0, 2, 10]
    assert drafter.score_taps == ()
    decoded(llm, PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True))
    looks = [i for i, taps in enumerate(tapped) if taps]
    assert looks == [0, 2, 10, 43], "distances go on from text to text, whose last steps have no draft"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exit_layers": [0]}, r"each of exit_layers must be an integer in 1\.\.5, got 0"),
        ({"exit_layers": [2, 6]}, r"each of exit_layers must be an integer in 1\.\.5, got 6"),
        ({"exit_layers": []}, "exit_layers"),
        ({"cost": "layers"}, "cost"),
        ({"decay": 1.5}, "decay must be in 0"),
        ({"shadow_every": 0}, "shadow_every must be an integer of 1 or more"),
        ({"dynamic_draft_exit": 1}, "dynamic_draft_exit must be True or False"),
    ],
)
def test_bad_options_are_one_line(plain: LLM, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fast(plain, **options)
