"""Commit rules with a memory: averaged predictions, agreement with the round before; each canvas has its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.diffusion.commit.history import entropy
from paceline.errors import ConfigError
from tests.diffusion.decoding import complete, fill, same
from tests.diffusion.toys import Independent, Joint, Scripted, t4, with_ends

CONFIDENCE = np.random.default_rng(7).uniform(0.3, 0.95, 10).tolist()


def divergence(p: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence from the mean."""
    return float(np.mean([(row * np.log(row / p.mean(0))).sum() for row in p]))


def test_the_entropy_of_the_mean_is_mean_entropy_and_divergence() -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(7), 3)
    rows = torch.from_numpy(p)
    averaged = float(entropy(rows.mean(0, keepdim=True))[0])
    assert averaged == pytest.approx(float(entropy(rows).mean()) + divergence(p), abs=1e-12)
    assert averaged != pytest.approx(float(entropy(rows).mean()), abs=1e-3)
    assert divergence(np.repeat(p[:1], 3, 0)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("history", [1, 2, 3])
def test_where_context_changes_nothing_the_ranking_stays(history: int) -> None:
    toy = Independent(CONFIDENCE)
    ours = fill(toy, {"method": "ccd", "history_length": history}, 10, ())
    assert same(ours, fill(toy, "entropy", 10, ()))


def test_one_context_is_the_plain_ranking_on_any_model() -> None:
    toy = t4()
    assert same(fill(toy, {"method": "ccd", "history_length": 1}), fill(toy, "entropy"))
    assert not same(fill(toy, {"method": "ccd", "history_length": 3}), fill(toy, "entropy"))


def moving(filled: int, slot: int) -> tuple[int, float]:
    """Slot 0 is surest from the second round on, but changes its mind; the others stay."""
    if slot == 0:
        return filled % 2, 0.5 if filled == 0 else 0.9
    return 2, [0, 0.85, 0.82, 0.8][slot]


def test_a_slot_whose_prediction_moves_is_delayed() -> None:
    toy = Scripted(moving)
    assert fill(toy, "entropy", 4, ()).trajectory.order.tolist() == [1, 0, 2, 3]
    assert fill(toy, {"method": "ccd", "history_length": 2}, 4, ()).trajectory.order.tolist() == [1, 2, 3, 0]


def test_the_adaptive_rule_writes_all_that_is_coherent() -> None:
    toy = Independent(CONFIDENCE)
    outcome = fill(toy, {"method": "ccd_ds", "history_length": 2, "history_slots": 3}, 10, ())
    sizes = [r.slots.size for r in outcome.trajectory.rounds]
    assert sizes[:3] == [1, 2, 1]
    assert sum(sizes) == 10
    assert len(sizes) < 10


def test_the_adaptive_rule_leaves_a_moving_slot() -> None:
    outcome = fill(Scripted(moving), {"method": "ccd_ds", "history_length": 2, "history_slots": 4}, 4, ())
    assert outcome.trajectory.rounds[1].slots.tolist() == [2, 3]


@pytest.mark.parametrize("method", ["ccd", "ccd_ds", "ccd_agreement"])
@pytest.mark.parametrize("seed", range(3))
def test_never_more_rounds_than_the_baseline(method: str, seed: int) -> None:
    toy = Joint(np.random.default_rng(seed).dirichlet(np.full(64, 0.2)).reshape((2,) * 6))
    assert fill(toy, method, 6, ()).trajectory.calls <= 6


def test_histories_do_not_cross_a_cut() -> None:
    """The first round writes an end, which cuts the text: the second knows nothing of the first and writes one slot."""
    confidence = [0.6, 0.9, 0.85, 0.8, 0.7, 0.65, 0.95, 0.4]
    config = {"method": "ccd_ds", "history_length": 2, "history_slots": 4, "stop": "end_of_text"}
    cut, whole = (
        fill(with_ends(confidence, [0] * 6 + [token, 0], 6), config, 8, ()).trajectory.rounds for token in (6, 0)
    )
    assert [r.slots.size for r in cut][:3] == [1, 1, 3]
    assert [r.slots.size for r in whole][:2] == [1, 3]


def test_agreement_never_writes_a_flipping_slot_beyond_the_quota() -> None:
    def script(filled: int, slot: int) -> tuple[int, float]:
        return (filled % 7 if slot == 3 else 2), 0.9 - 0.05 * slot

    config = {"method": "ccd_agreement", "warmup_rounds": 1}
    rounds = [r.slots.tolist() for r in fill(Scripted(script), config, 8, ()).trajectory.rounds]
    assert any(len(slots) > 1 for slots in rounds)
    assert not any(3 in slots and len(slots) > 1 for slots in rounds)
    still = [
        r.slots.tolist() for r in fill(Scripted(lambda f, s: (2, 0.9 - 0.05 * s)), config, 8, ()).trajectory.rounds
    ]
    assert any(3 in slots and len(slots) > 1 for slots in still)


def test_the_list_of_agreement_grows_by_a_slot_a_round() -> None:
    """From one up to 1 + int(4.0 x 1); where nothing changes, a round writes the whole list."""
    toy = Independent(np.linspace(0.95, 0.3, 26))
    rounds = fill(toy, {"method": "ccd_agreement", "warmup_rounds": 1}, 26, ()).trajectory.rounds
    assert [r.slots.size for r in rounds] == [1, 1, 2, 3, 4, 5, 5, 5]
    rounds = fill(toy, {"method": "ccd_agreement", "list_growth": 1.0}, 26, ()).trajectory.rounds
    assert [r.slots.size for r in rounds][:9] == [1] * 5 + [1, 2, 2, 2]


def test_agreement_waits_where_another_slot_comes_first() -> None:
    """Slot 4, which was not next in line, becomes the surest: it alone is written, though slots 2 and 3 agree."""

    def script(jumps: bool) -> Scripted:
        return Scripted(lambda filled, slot: (2, 0.99 if jumps and filled == 2 and slot == 4 else 0.9 - 0.1 * slot))

    config = {"method": "ccd_agreement", "warmup_rounds": 1}
    jumping, still = (fill(script(jumps), config, 6, ()).trajectory.rounds for jumps in (True, False))
    assert jumping[2].slots.tolist() == [4]
    assert still[2].slots.tolist() == [2, 3]


def test_agreement_does_not_cross_a_cut() -> None:
    """The second round writes an end, which cuts the text: the third finds no list."""
    confidence = [0.6, 0.95, 0.85, 0.8, 0.7, 0.65, 0.9, 0.4]
    config = {"method": "ccd_agreement", "warmup_rounds": 1, "stop": "end_of_text"}
    cut, whole = (
        fill(with_ends(confidence, [0] * 6 + [token, 0], 6), config, 8, ()).trajectory.rounds for token in (6, 0)
    )
    assert [r.slots.size for r in cut][:3] == [1, 1, 1]
    assert [r.slots.size for r in whole][:3] == [1, 1, 2]


def test_agreement_may_keep_to_the_quota() -> None:
    toy = Independent(CONFIDENCE)
    rounds = fill(toy, {"method": "ccd_agreement", "warmup_rounds": 1, "adaptive": False}, 10, ()).trajectory.rounds
    assert [r.slots.size for r in rounds] == [1] * 10
    assert fill(toy, {"method": "ccd_agreement", "warmup_rounds": 1}, 10, ()).trajectory.calls < 10


CONFIGS: list[dict[str, Any]] = [
    {"method": "ccd", "history_length": 3},
    {"method": "ccd_ds", "history_length": 2},
    {"method": "ccd_agreement", "warmup_rounds": 2},
    {"method": "llada2.1_s", "block_length": 4},
    {"method": "bacd", "confidence_low": 0.3, "confidence_high": 0.5, "block_length": 4},
    {"method": "remdm", "remask_eta": 0.5, "temperature": 1.0},
]


def canvases(mask_token_id: int) -> list[Canvas]:
    prompts = [((3, 4, 5), 12), ((9, 1), 8), ((7, 7, 2, 8), 12)]
    return [Canvas.of(prompt, length, mask_token_id=mask_token_id) for prompt, length in prompts]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["method"])
def test_texts_decoded_together_are_those_decoded_alone(config: dict[str, Any]) -> None:
    toy, method = t4(), ConfiguredMethod(config)
    texts = canvases(toy.mask_token_id)
    together = decode(texts, toy, [method.parts(toy, canvas, seed=i) for i, canvas in enumerate(texts)])
    for i, (canvas, outcome) in enumerate(zip(texts, together, strict=True)):
        assert same(outcome, complete(toy, canvas, config, seed=i))


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config["method"])
def test_a_shared_memory_would_show(config: dict[str, Any]) -> None:
    toy, method = t4(), ConfiguredMethod(config)
    texts = [canvas for canvas in canvases(toy.mask_token_id) if canvas.length != 10]
    parts = [method.parts(toy, canvas, seed=i) for i, canvas in enumerate(texts)]
    parts[1].transition.commit = parts[0].transition.commit
    together = decode(texts, toy, parts)
    alone = [complete(toy, canvas, config, seed=i) for i, canvas in enumerate(texts)]
    assert not all(same(ours, theirs) for ours, theirs in zip(together, alone, strict=True))


def test_rules_with_a_memory_cannot_be_verified_by_drafts() -> None:
    toy = t4()
    [canvas] = canvases(toy.mask_token_id)[:1]
    with pytest.raises(ConfigError):
        ConfiguredMethod({"method": "ccd", "verification": "freedave"}).parts(toy, canvas)
