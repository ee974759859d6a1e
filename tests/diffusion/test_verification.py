"""Drafting verification: FreeDave, FreeDave++, drafts along one call."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np
import pytest
import torch

from paceline.diffusion import METHODS, Canvas, ConfiguredMethod, Setting, Status, decode, part
from paceline.diffusion.base import Ending, Layout, Step, Stop
from paceline.errors import ConfigError
from tests.diffusion.decoding import Planned, PlannedBlocks, Watched, complete, fill, same
from tests.diffusion.toys import Toy, t4

FreeDave = part("verification", "freedave")

CONFIDENCE = [0.5, 0.9, 0.3, 0.7, 0.6, 0.4, 0.8, 0.2, 0.55, 0.65, 0.35, 0.75]

POLICIES: dict[str, dict[str, Any]] = {
    "none": {"method": "static", "block_length": 6},
    "prefix": {"method": "static", "block_length": 6, "cache": "prefix"},
    "dual": {"method": "static", "block_length": 6, "cache": "dual"},
    "dual, refreshed": {"method": "static", "block_length": 6, "cache": "dual", "refresh_period": 4},
    "recap": {"method": "recap", "block_length": 6},
    "window": {"method": "window_diffusion", "active_slots": 4, "window_slots": 8, "refresh_period": 5},
    "two a round": {"method": "static", "block_length": 6, "denoising_steps": 3},
    "threshold": {"method": "threshold", "block_length": 6, "confidence_threshold": 0.4, "cache": "dual"},
    "random order": {"method": "random", "block_length": 6},
    "sampled": {"method": "static", "block_length": 6, "temperature": 1.0},
}

BLOCKS: dict[str, dict[str, Any]] = {
    "none": {"method": "static"},
    "block": {"method": "static", "cache": "block"},
    "block, apart": {"method": "static", "cache": "block", "merge_writes": False},
    "sub-blocks": {"method": "static", "cache": "block", "block_length": 2},
}


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_calls_follow_the_formula_where_every_draft_holds(drafts: int, cache: str) -> None:
    toy = Planned(CONFIDENCE, prompt=2)
    base = {"method": "static", "block_length": 6, "cache": cache}
    plain = fill(toy, base, 12, (1, 2))
    ours = fill(toy, {**base, "verification": "freedave", "drafts": drafts}, 12, (1, 2))
    assert same(plain, ours)
    assert ours.trajectory.calls == 2 * (1 + ceil((6 - 1) / drafts))


@pytest.mark.parametrize("drafts", [1, 2, 5])
@pytest.mark.parametrize("config", BLOCKS.values(), ids=BLOCKS)
def test_calls_follow_the_formula_in_blocks(drafts: int, config) -> None:
    toy = PlannedBlocks(CONFIDENCE)
    outcome = fill(toy, {**config, "verification": "freedave", "drafts": drafts}, 12, ())
    n = config.get("block_length", 4)
    stored = 2 if config.get("merge_writes") is False else 0
    assert outcome.trajectory.calls == 12 // n * (1 + ceil((n - 1) / drafts)) + stored


@pytest.mark.parametrize("drafts", [1, 3, 4])
def test_drafts_across_blocks_make_the_text_one_block(drafts: int) -> None:
    toy = Planned(CONFIDENCE)
    plain = fill(toy, {"method": "static", "block_length": 4}, 12, ())
    ours = fill(toy, {"method": "freedave", "block_length": 4, "drafts": drafts, "blocks_ahead": 1}, 12, ())
    assert same(plain, ours)
    assert ours.trajectory.calls == 1 + ceil((12 - 1) / drafts)


@pytest.mark.parametrize("layout", ["batch", "tree"])
@pytest.mark.parametrize("kind", ["full", "shifted"])
@pytest.mark.parametrize("config", POLICIES.values(), ids=POLICIES)
def test_canvas_and_order_are_those_of_the_plain_method(config, kind, layout: str) -> None:
    toy = t4(kind)
    plain = fill(toy, config)
    ours = fill(toy, {**config, "verification": "freedave", "layout": layout, "drafts": 3})
    assert same(plain, ours)
    assert np.allclose(plain.canvas.confidence, ours.canvas.confidence, rtol=1e-9, equal_nan=True)
    assert ours.trajectory.calls <= plain.trajectory.calls


@pytest.mark.parametrize("layout", ["batch", "tree"])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("config", BLOCKS.values(), ids=BLOCKS)
def test_canvas_and_order_are_those_of_the_plain_method_in_blocks(config, ahead: int, layout: str) -> None:
    toy = t4("block")
    plain = fill(toy, config, 13)
    ours = fill(toy, {**config, "verification": "freedave", "layout": layout, "blocks_ahead": ahead}, 13)
    assert same(plain, ours)
    two_slots = (
        config.get("block_length") == 2 and not ahead
    )  # 1 + ceil((2 - 1) / drafts) is what the plain method takes
    assert ours.trajectory.calls < plain.trajectory.calls + two_slots


@pytest.mark.parametrize("drafts", [2, 5, 12])
def test_any_number_of_drafts_over_several_models_saves_passes(drafts: int) -> None:
    saved = 0
    for seed in range(6):
        toy = t4(seed=seed)
        plain, ours = fill(toy, "static"), fill(toy, {"method": "freedave", "drafts": drafts})
        assert same(plain, ours)
        saved += plain.trajectory.calls - ours.trajectory.calls
    assert saved > 0


def test_one_draft_is_the_plain_method() -> None:
    toy = t4()
    plain, ours = fill(toy, POLICIES["dual"]), fill(toy, {**POLICIES["dual"], "verification": "freedave", "drafts": 1})
    assert same(plain, ours)
    assert (ours.trajectory.calls, ours.trajectory.slots_computed) == (
        plain.trajectory.calls,
        plain.trajectory.slots_computed,
    )


@pytest.mark.parametrize("config", [POLICIES["none"], POLICIES["dual"]], ids=["none", "dual"])
def test_single_precision_changes_nothing_in_the_batch_layout(config) -> None:
    for seed in range(4):
        toy = t4(seed=seed, dtype=torch.float32)
        plain, ours = fill(toy, config), fill(toy, {**config, "verification": "freedave"})
        assert same(plain, ours)
        assert np.array_equal(plain.canvas.confidence, ours.canvas.confidence, equal_nan=True)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("config", BLOCKS.values(), ids=BLOCKS)
def test_single_precision_changes_nothing_in_blocks(config, ahead: int) -> None:
    toy = t4("block", dtype=torch.float32)
    plain, ours = fill(toy, config, 13), fill(toy, {**config, "verification": "freedave", "blocks_ahead": ahead}, 13)
    assert same(plain, ours)
    assert np.array_equal(plain.canvas.confidence, ours.canvas.confidence, equal_nan=True)


class Turning(Toy):
    """The surest slot is the last masked one, then the first, and so on: what comes second now never comes next."""

    def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
        turn = (ids != self.mask_token_id).sum() % 2
        rows = np.zeros((slots.size, self.vocab_size))
        rows[:, 1] = 1 + slots * (0.1 if turn == 0 else -0.1)
        return rows


def test_a_model_that_changes_its_mind_costs_what_the_plain_method_does() -> None:
    plain, ours = fill(Turning(4), "static", 8, ()), fill(Turning(4), "freedave", 8, ())
    assert same(plain, ours)
    assert plain.trajectory.order.tolist() == [7, 0, 6, 1, 5, 2, 4, 3]
    assert ours.trajectory.calls == plain.trajectory.calls == 8


class Credulous(FreeDave):
    """Takes every draft: what verification keeps from happening."""

    def choose(self, drafts, predictions) -> int:
        return len(predictions) - 1


class Stale(FreeDave):
    """Computes drafts under the plan of the first one, as a policy with a memory would if it were not asked."""

    def drafts(self, canvas, predictions):
        drafts = super().drafts(canvas, predictions)
        plan = self.cache.between(drafts[0], self.transition.schedule.block(drafts[0]))
        self.cache.ahead = lambda canvas, block: plan
        return drafts


def with_verification(toy, config, verification: type[FreeDave], seed: int):
    canvas = Canvas.of((3, 4, 5), 12, mask_token_id=toy.mask_token_id)
    parts = ConfiguredMethod({**config, "verification": "freedave"}).parts(toy, canvas, seed=seed)
    parts.verification.__class__ = verification
    parts.verification.cache = parts.cache
    [outcome] = decode([canvas], toy, [parts])
    return outcome


def test_taking_every_draft_would_be_noticed() -> None:
    toys = [t4(seed=seed) for seed in range(4)]
    assert any(
        not same(fill(toy, "static"), with_verification(toy, {"method": "static"}, Credulous, 0)) for toy in toys
    )


def test_computing_drafts_by_another_plan_would_be_noticed() -> None:
    toys = [t4(seed=seed) for seed in range(12)]
    config = POLICIES["window"]
    assert any(not same(fill(toy, config), with_verification(toy, config, Stale, 0)) for toy in toys)


@pytest.mark.parametrize("layout", ["batch", "tree"])
def test_sampled_text_is_that_of_the_plain_method_for_every_seed(layout: str) -> None:
    toy = t4()
    config = {"method": "static", "block_length": 6, "temperature": 1.0}
    runs = [
        (fill(toy, config, seed=s), fill(toy, {**config, "verification": "freedave", "layout": layout}, seed=s))
        for s in range(5)
    ]
    assert all(same(plain, ours) for plain, ours in runs)
    assert len({tuple(plain.canvas.tokens) for plain, _ in runs}) > 1
    assert sum(plain.trajectory.calls - ours.trajectory.calls for plain, ours in runs) > 0


def test_drafts_of_sampled_text_use_the_noise_of_their_own_round() -> None:
    # On independent slots every draft holds, at any temperature, since it is drawn as the plain method will draw it.
    toy = Planned(CONFIDENCE)
    outcome = fill(toy, {"method": "freedave", "score": "leftmost", "drafts": 4, "temperature": 1.0}, 12, ())
    assert outcome.trajectory.calls == 1 + ceil(11 / 4)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("layout", ["batch", "tree"])
def test_several_regions_are_filled_in_one_canvas(cache: str, layout: str) -> None:
    toy = t4()
    template = [3, 4, 23, 23, 6, 7, 23, 8, 23, 23, 23, 9]
    config = {"method": "static", "cache": cache, "block_length": 5}
    runs = []
    for more in ({}, {"verification": "freedave", "layout": layout}):
        runs.append(complete(toy, Canvas.infill(template, mask_token_id=23), {**config, **more}))
    plain, ours = runs
    assert same(plain, ours)
    assert ours.canvas.tokens[[0, 1, 4, 5, 7, 11]].tolist() == [3, 4, 6, 7, 8, 9]
    assert (ours.canvas.status[[4, 5, 7, 11]] == Status.PRIOR).all()


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_calls_of_several_regions_follow_the_formula(cache: str) -> None:
    toy = Planned(CONFIDENCE)
    canvas = Canvas.infill([3, 4, 7, 7, 5, 6, 7, 6, 7, 7, 7, 5], mask_token_id=7)
    outcome = complete(toy, canvas, {"method": "freedave", "cache": cache, "block_length": 5, "drafts": 2})
    assert outcome.trajectory.calls == 2 * (1 + ceil((3 - 1) / 2))
    assert outcome.trajectory.order.tolist() == [6, 3, 2, 9, 8, 10]


def test_company_changes_nothing() -> None:
    toy = t4(dtype=torch.float32)
    method = ConfiguredMethod({"method": "freedave", "cache": "dual", "block_length": 4})
    canvases = [Canvas.of(range(1, 1 + n), 8, mask_token_id=23) for n in (2, 5, 3)]
    together = decode(canvases, toy, [method.parts(toy, canvas) for canvas in canvases])
    for canvas, outcome in zip(canvases, together, strict=True):
        [alone] = decode([canvas], toy, [method.parts(toy, canvas)])
        assert same(outcome, alone)
        assert outcome.trajectory.calls == alone.trajectory.calls


def test_a_pass_over_drafts_is_one_call_of_all_their_slots() -> None:
    toy = Watched(Planned(CONFIDENCE, prompt=2))
    outcome = fill(toy, {"method": "freedave", "drafts": 3, "block_length": 4, "cache": "dual"}, 12, (1, 2))
    assert outcome.trajectory.calls == len(toy.passes) == 3 * 2
    assert outcome.trajectory.slots_computed == 3 * 14 + 3 * (3 * 4)
    assert [len(calls) for calls in toy.computed] == [1, 3] * 3


class FillFrom(Stop):
    """Writes the rest from the third round on."""

    def ending(self, step: Step, chosen: np.ndarray) -> Ending | None:
        return Ending(fill=True) if step.canvas.round >= 2 else None


@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_a_stop_rule_that_speaks_in_a_draft_ends_nothing(drafts: int) -> None:
    outcomes = []
    for verification in ("none", "freedave"):
        canvas = Canvas.of((1, 2), 12, mask_token_id=7)
        options = {"drafts": drafts} if verification == "freedave" else {}
        parts = ConfiguredMethod({"method": "static", "verification": verification, **options}).parts(
            toy := Planned(CONFIDENCE, prompt=2), canvas
        )
        parts.transition.stop = FillFrom(Setting(canvas, toy))
        outcomes += decode([canvas], toy, [parts])
    plain, ours = outcomes
    assert same(plain, ours)
    assert [r.slots.size for r in ours.trajectory.rounds] == [1, 1, 10]
    assert ours.trajectory.calls == 1 + ceil(2 / drafts)


def test_rules_with_a_memory_are_rejected_by_name(monkeypatch) -> None:
    monkeypatch.setattr("paceline.diffusion.commit.quotas.QuotaCommit.stateless", False)
    with pytest.raises(ConfigError, match="QuotaCommit has one"):
        fill(t4(), "freedave")


SINGLE = [name for name, method in METHODS.items() if method.verification == "none"]


@pytest.mark.parametrize("cache", ["none", "dual"])
@pytest.mark.parametrize("name", SINGLE)
def test_every_method_without_memory_is_reproduced(name: str, cache: str) -> None:
    toy = t4(eos_token_ids=(22,))
    try:
        plain = fill(toy, {"method": name, "cache": cache}, 8)
    except ConfigError as error:
        pytest.skip(f"needs more than a model: {error}")
    config = {"method": name, "cache": cache, "verification": "freedave"}
    parts = ConfiguredMethod({**config, "verification": "none"}).parts(toy, Canvas.of((3, 4, 5), 8, mask_token_id=23))
    if not parts.transition.stateless:
        with pytest.raises(ConfigError, match="has one"):
            fill(toy, config, 8)
        return
    ours = fill(toy, config, 8)
    assert same(plain, ours)
    assert ours.trajectory.calls <= plain.trajectory.calls


DUAL = {"method": "static", "block_length": 6, "cache": "dual"}


@pytest.mark.parametrize("seed", range(3))
def test_plus_is_freedave_where_one_slot_is_written_a_round(seed: int) -> None:
    toy = t4(seed=seed)
    plain, plus = fill(toy, DUAL), fill(toy, {**DUAL, "verification": "freedave++"})
    assert same(plain, plus)
    unsure = fill(toy, {"method": "freedave++", "confidence_threshold": 1.1, "block_length": 6, "cache": "dual"})
    assert same(plain, unsure)


def test_plus_keeps_drafts_that_the_rule_would_have_written_and_more() -> None:
    # The first pass shows 4 sure slots of 8; then all are sure: a target of all holds every draft, and the furthest is
    # kept.
    class Growing(Toy):
        def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
            rows = np.zeros((slots.size, self.vocab_size))
            rows[:, 1] = np.where((slots < 4) | (ids != self.mask_token_id).any(), 9.0, 2.0 - 0.1 * slots)
            return rows

    toy = Growing(4)
    config = {"confidence_threshold": 0.9}
    outcome = fill(toy, {"method": "freedave++", "drafts": 4, **config}, 8, ())
    assert [r.slots.size for r in outcome.trajectory.rounds] == [4, 1, 1, 1, 1]
    assert outcome.trajectory.calls == 2
    exact = fill(toy, {"method": "threshold", "verification": "freedave", **config}, 8, ())
    assert same(exact, fill(toy, {"method": "threshold", **config}, 8, ()))


def test_plus_takes_the_furthest_draft_that_the_rule_would_have_written() -> None:
    # A canvas of 5 written slots changes the model's mind about slot 6; one of 4 does not, and 8 are all it would have
    # written.
    class Doubting(Toy):
        def rows(self, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
            written = (ids != self.mask_token_id).sum()
            rows = np.zeros((slots.size, self.vocab_size))
            rows[:, 1] = 9.0 if written else np.where(slots < 4, 9.0, 2.0 - 0.1 * slots)
            rows[slots == 5, 2] = 20.0 if written == 5 else 0.0
            return rows

    outcome = fill(Doubting(4), {"method": "freedave++", "drafts": 4, "confidence_threshold": 0.9}, 8, ())
    assert outcome.trajectory.calls == 2
    assert outcome.canvas.tokens.tolist() == [1] * 8


def test_plus_is_not_lossless() -> None:
    config = {"confidence_threshold": 0.3, "block_length": 6}
    runs = [
        (fill(t4(seed=s), {"method": "threshold", **config}), fill(t4(seed=s), {"method": "freedave++", **config}))
        for s in range(6)
    ]
    assert any(not same(plain, plus) for plain, plus in runs)


def test_the_tree_lays_copies_along_one_call_and_shares_what_is_read() -> None:
    toy = Watched(t4())
    fill(toy, {"method": "freedave", "drafts": 3, "block_length": 6, "cache": "dual", "layout": "tree"})
    [call] = toy.passes[1][0]
    assert call.slots.tolist() == list(range(3, 9)) * 3
    assert call.read.tolist() == [0, 1, 2, *range(9, 15)]
    assert call.mask[:, :9].all()
    assert (call.mask[:, 9:] == np.kron(np.eye(3), np.ones((6, 6))).astype(bool)).all()


def test_a_layout_without_drafts_to_share_is_the_plain_one() -> None:
    toy = t4()
    canvas = Canvas.of((3,), 4, mask_token_id=23)
    parts = ConfiguredMethod({"method": "freedave", "layout": "tree"}).parts(toy, canvas)
    [plan] = parts.cache.plans(canvas, range(1, 5))
    [tree], [plain] = parts.layout.calls([canvas], [plan], None), Layout().calls([canvas], [plan], None)
    assert tree.mask is None
    assert np.array_equal(tree.slots, plain.slots)
