"""The loop on toys with closed-form traces: order, distribution, budgets, company."""

from __future__ import annotations

from collections import Counter
from math import factorial
from typing import Any

import numpy as np
import pytest
from scipy import stats

from paceline.diffusion import METHODS, Canvas, ConfiguredMethod, FinishedCanvas, Status, decode
from paceline.diffusion.base import CanvasPass, Transition
from paceline.errors import ConfigError
from tests.diffusion.decoding import Watched, fill, same
from tests.diffusion.test_methods import END, config_of
from tests.diffusion.toys import Independent, Joint, permutation, t4


def run(toy, length: int, config, prompt=(), seed: int = 0) -> FinishedCanvas:
    canvas = Canvas.of(prompt, length, mask_token_id=toy.mask_token_id)
    [outcome] = decode([canvas], toy, [ConfiguredMethod(config).parts(toy, canvas, seed=seed)])
    assert outcome.error is None
    return outcome


def test_one_slot_a_round_goes_by_confidence() -> None:
    c = [0.5, 0.9, 0.3, 0.7]
    outcome = run(Independent(c), 4, "static")
    assert list(outcome.trajectory.order) == list(np.argsort([-x for x in c]))
    assert outcome.trajectory.calls == 4
    assert outcome.trajectory.slots_computed == 16


def test_blocks_are_filled_from_left_to_right() -> None:
    outcome = run(Independent([0.1, 0.2, 0.9, 0.8]), 4, {"method": "static", "block_length": 2})
    assert list(outcome.trajectory.order) == [1, 0, 2, 3]


def test_the_quota_is_shared_evenly_first_rounds_first() -> None:
    outcome = run(Independent(np.linspace(0.3, 0.9, 8)), 8, {"method": "static", "denoising_steps": 3})
    assert [r.slots.size for r in outcome.trajectory.rounds] == [3, 3, 2]


def test_the_factor_rule_commits_three_of_the_card() -> None:
    outcome = run(Independent([0.99, 0.97, 0.9, 0.3]), 4, "factor")
    assert outcome.trajectory.rounds[0].slots.size == 3


@pytest.mark.parametrize(
    "config", [{"method": "threshold", "confidence_threshold": 1.1}, {"method": "factor", "factor": 0.0}]
)
def test_degenerate_settings_are_the_static_baseline(config) -> None:
    toy = permutation(4)
    ours, static = run(toy, 4, config), run(toy, 4, "static")
    assert (ours.canvas.tokens == static.canvas.tokens).all()
    assert list(ours.trajectory.order) == list(static.trajectory.order)


def counts(toy, length: int, config, samples: int) -> Counter:
    return Counter(tuple(run(toy, length, config, seed=seed).canvas.tokens) for seed in range(samples))


def deviation(seen: Counter, weights: np.ndarray, samples: int) -> float:
    """p-value of the distribution of `weights`."""
    cells = [index for index in np.ndindex(weights.shape) if weights[index] > 0]
    if set(seen) - set(cells):
        return 0.0
    observed = [seen[cell] for cell in cells]
    return float(stats.chisquare(observed, [samples * weights[cell] for cell in cells]).pvalue)


@pytest.mark.parametrize("method", ["random", "leftmost"])
def test_one_sampled_slot_a_round_reproduces_the_joint(method: str) -> None:
    weights = np.random.default_rng(1).random((2, 2, 2))
    weights /= weights.sum()
    seen = counts(Joint(weights), 3, {"method": method, "temperature": 1.0}, 300)
    assert deviation(seen, weights, 300) > 1e-3


def test_all_slots_at_once_do_not() -> None:
    weights = np.zeros((2, 2, 2))
    weights[0, 0, 0] = weights[1, 1, 1] = 0.5
    seen = counts(Joint(weights), 3, {"method": "static", "denoising_steps": 1, "temperature": 1.0}, 200)
    assert deviation(seen, weights, 200) < 1e-6


def test_a_permutation_in_one_round_is_valid_as_often_as_the_formula_says() -> None:
    n, samples = 3, 600
    seen = counts(permutation(n), n, {"method": "static", "denoising_steps": 1, "temperature": 1.0}, samples)
    valid = sum(number for text, number in seen.items() if len(set(text)) == n)
    expected = factorial(n) / n**n
    assert stats.binomtest(valid, samples, expected).pvalue > 1e-3
    assert stats.binomtest(valid, samples, 1.5 * expected).pvalue < 1e-3


def test_company_changes_nothing() -> None:
    toy = permutation(4)
    method = ConfiguredMethod({"method": "random", "temperature": 1.0})
    canvases = [Canvas.of((), 4, mask_token_id=toy.mask_token_id) for _ in range(3)]
    together = decode(canvases, toy, [method.parts(toy, c, seed=i) for i, c in enumerate(canvases)])
    for i, outcome in enumerate(together):
        assert (
            outcome.canvas.tokens == run(toy, 4, {"method": "random", "temperature": 1.0}, seed=i).canvas.tokens
        ).all()


def test_priors_and_prompt_never_change() -> None:
    toy = Independent([0.9] * 4, prompt=2)
    canvas = Canvas.of([5, 6], 4, mask_token_id=toy.mask_token_id, priors={1: 4})
    [outcome] = decode([canvas], toy, [ConfiguredMethod("static").parts(toy, canvas)])
    assert list(outcome.canvas.tokens[[0, 1, 3]]) == [5, 6, 4]
    assert outcome.canvas.status[3] == Status.PRIOR
    assert outcome.trajectory.calls == 3


def test_regions_of_a_template_are_filled() -> None:
    toy = Independent([0.9] * 6)
    canvas = Canvas.infill([5, 7, 7, 5, 7, 5], mask_token_id=7)
    [outcome] = decode([canvas], toy, [ConfiguredMethod("threshold").parts(toy, canvas)])
    assert list(outcome.canvas.tokens[[0, 3, 5]]) == [5, 5, 5]
    assert not outcome.canvas.masked().size


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "treshold"}, "did you mean threshold"),
        ({"method": "static", "confidence_treshold": 1}, "no option 'confidence_treshold'"),
        ({"method": "static", "block_length": 3}, "divide the 4 slots"),
        ({"method": "static", "block_length": 4, "denoising_steps": 5}, "slots of a block"),
        ({"method": "static", "cache": "nine"}, "unknown cache 'nine'"),
    ],
)
def test_wrong_use_is_one_clear_line(config, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(Independent([0.5] * 4), 4, config)


class Blind:
    """A cache policy that never computes what may be written."""

    exact = True

    def plans(self, canvas: Canvas, block: range) -> list[CanvasPass]:
        return [CanvasPass(np.arange(block.start))]


def test_a_method_that_stands_still_is_ended_and_harms_no_other() -> None:
    toy = Independent([0.9] * 4, prompt=1)
    canvases = [Canvas.of([5], 4, mask_token_id=toy.mask_token_id) for _ in range(2)]
    parts = [ConfiguredMethod("static").parts(toy, canvas) for canvas in canvases]
    parts[0].cache = Blind()
    stuck, fine = decode(canvases, toy, parts)
    assert "nothing can be written" in str(stuck.error)
    assert fine.error is None
    assert not fine.canvas.masked().size


PROMPT = (3, 4, 6, 7)

SPAN = {"method": "prophet", "monitor": "span", "answer_length": 4, "gap_thresholds": (1.5, 0.6, 0.3)}

READERS = {
    "learn2pd": {
        "method": "learn2pd",
        "block_length": 8,
        "filter": lambda step: 4 - 8 * confidences(step),
        "filter_threshold": 0.5,
    },
    "prophet": SPAN,
}


def confidences(step: Any) -> Any:
    """The mean of the block, its written slots included."""
    known = [slot for slot in step.block if step.predictions.known(np.array([slot]))[0]]
    return np.full(len(step.block), step.predictions.confidence[step.predictions.rows(np.array(known))].mean())


def decoded(config: Any, kind: Any = "full", seed: int = 2) -> tuple[FinishedCanvas, Watched]:
    toy = Watched(t4(kind, eos_token_ids=(END,), seed=seed))
    return fill(toy, config, 8, PROMPT), toy


def rows(toy: Watched) -> list[int]:
    """Slots with logits, over all passes."""
    return [int(slot) for calls, _ in toy.passes for call in calls for slot in call.slots[call.wanted]]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cfg_dllm"])
def test_what_is_written_is_what_all_logits_would_write(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(method, temperature=0.7)
    few, watched = decoded(config)
    monkeypatch.setattr(Transition, "reads_written", True)
    every, control = decoded(config)
    assert same(few, every)
    assert few.trajectory.calls == every.trajectory.calls
    assert len(rows(watched)) <= len(rows(control))
    assert min(rows(control)) >= len(PROMPT), "never the prompt"
    for calls, outputs in watched.passes:
        assert [len(call.wanted) for call in calls] == [len(logits) for logits in outputs]


@pytest.mark.parametrize("kind", ["full", "shifted", "block", "shifted block"])
@pytest.mark.parametrize("more", [{}, {"cache": "block"}, {"method": "freedave", "layout": "tree"}])
def test_only_masked_slots_get_logits(kind: str, more: dict[str, Any]) -> None:
    if more.get("cache") and "block" not in kind:
        more = {"cache": "prefix"}
    _, toy = decoded({"method": "static", "block_length": 4, **more}, kind)
    for calls, _ in toy.passes:
        for call in calls:
            assert (call.ids[call.wanted] == toy.mask_token_id).all()
            assert not call.write or len(call.slots) > len(call.wanted)


@pytest.mark.parametrize("name", READERS)
def test_rules_that_look_at_written_slots_get_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [decoded(READERS[name], seed=seed)[0] for seed in range(6)]
    monkeypatch.setattr(Transition, "reads_written", True)
    assert all(same(one, decoded(READERS[name], seed=seed)[0]) for seed, one in enumerate(whole))
    monkeypatch.setattr(Transition, "reads_written", False)
    assert not all(same(one, decoded(READERS[name], seed=seed)[0]) for seed, one in enumerate(whole))
