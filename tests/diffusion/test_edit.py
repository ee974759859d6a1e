"""Edit rules: remasking samplers, token editing and its repetition guard."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.diffusion import Canvas, ConfiguredMethod, Predictions, Status, decode, part
from tests.diffusion.decoding import complete, fill, same
from tests.diffusion.toys import Copier, Independent, Oscillator, Scripted, permutation, t4

RemaskingChances = part("commit", "remasking")

STEPS, LENGTH = 6, 30


def masked_after(config: dict[str, object], runs: int = 20) -> np.ndarray:
    """How many slots are masked after each round, summed over runs."""
    toy = Independent([0.5] * LENGTH)
    counts = np.zeros(STEPS, int)
    for seed in range(runs):
        canvas = Canvas.of((), LENGTH, mask_token_id=toy.mask_token_id)
        parts = ConfiguredMethod({**config, "denoising_steps": STEPS}).parts(toy, canvas, seed=seed)
        seen: list[int] = []
        decode([canvas], toy, [parts], lambda _, after, seen=seen: seen.append(after.masked().size))
        counts += seen
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {"remask_eta": 0.0},
        {"remask_eta": 0.2},
        {"remask_eta": 1.0},
        {"remask_eta": 0.5, "remask_rate": "rescale"},
        {"remask_eta": 0.3, "remask_from": 0.5},
        {"remask_eta": 0.3, "remask_by": "confidence"},
    ],
)
def test_the_share_of_masked_slots_does_not_depend_on_remasking(options: dict[str, object]) -> None:
    counts = masked_after({"method": "remdm", **options})
    for i, count in enumerate(counts[:-1]):
        assert stats.binomtest(int(count), 20 * LENGTH, 1 - (i + 1) / STEPS).pvalue > 1e-3
    assert counts[-1] == 0


def test_remasking_without_the_compensation_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemaskingChances, "write", lambda self, round_: 1 / (STEPS - round_))
    counts = masked_after({"method": "remdm", "remask_eta": 0.3})
    assert (
        min(stats.binomtest(int(count), 20 * LENGTH, 1 - (i + 1) / STEPS).pvalue for i, count in enumerate(counts[:-1]))
        < 1e-6
    )


def test_rates_are_those_of_the_paper() -> None:
    """sigma_max = min(1, (1 - a_s) / a_t); a masked slot is written with (a_s - (1 - sigma) a_t) / (1 - a_t)."""
    toy = Independent([0.5] * 8)
    parts = ConfiguredMethod({"method": "remdm", "remask_eta": 0.3}).parts(toy, Canvas.of((), 8, mask_token_id=7))
    rates = parts.transition.commit
    assert isinstance(rates, RemaskingChances)
    assert [rates.sigma(i) for i in range(8)] == pytest.approx([0, 0.3, 0.3, 0.3, 0.3, 0.3, 1 / 6, 0])
    assert rates.write(4) == pytest.approx((5 / 8 - 0.7 * 4 / 8) / (1 - 4 / 8))
    assert rates.write(7) == 1


def test_more_rounds_repair_what_parallel_writing_broke() -> None:
    toy, runs = permutation(3), 100

    def valid(config: dict[str, object]) -> int:
        texts = [fill(toy, {**config, "temperature": 1.0}, 3, (), seed).canvas.output for seed in range(runs)]
        return sum(len(set(text)) == 3 for text in texts)

    plain = valid({"method": "remdm", "denoising_steps": 3, "remask_eta": 0.0})
    more = valid({"method": "remdm", "denoising_steps": 12, "remask_eta": 1.0})
    assert stats.fisher_exact([[more, runs - more], [plain, runs - plain]], "greater").pvalue < 1e-3


@pytest.mark.parametrize("steps", [1, 2, 5, 9])
def test_remasking_takes_exactly_its_rounds(steps: int) -> None:
    outcome = fill(Independent([0.5] * 8), {"method": "remdm", "denoising_steps": steps, "remask_eta": 0.5}, 8, ())
    assert outcome.trajectory.calls == steps
    assert not outcome.canvas.masked().size


def test_unsure_slots_are_masked_again_more_often() -> None:
    toy = Independent([0.95] * 10 + [0.2] * 10)
    config = {"method": "remdm_conf", "denoising_steps": 8, "remask_eta": 1.0}
    again = np.zeros(2)
    for seed in range(40):
        for round_ in fill(toy, config, 20, (), seed).trajectory.rounds:
            again += [(round_.remasked < 10).sum(), (round_.remasked >= 10).sum()]
    assert stats.binomtest(int(again[1]), int(again.sum())).pvalue < 1e-3
    assert again[1] > again[0]


def test_company_changes_nothing() -> None:
    toy, method = (
        permutation(3),
        ConfiguredMethod({"method": "remdm", "denoising_steps": 5, "remask_eta": 0.5, "temperature": 1.0}),
    )
    canvases = [Canvas.of((), 3, mask_token_id=3) for _ in range(4)]
    together = decode(canvases, toy, [method.parts(toy, c, seed=i) for i, c in enumerate(canvases)])
    for i, outcome in enumerate(together):
        [alone] = decode(canvases[:1], toy, [method.parts(toy, canvases[0], seed=i)])
        assert same(outcome, alone)


@pytest.mark.parametrize(("steps", "left"), [(1, []), (2, [4]), (4, [6, 4, 2]), (8, [7, 6, 5, 4, 3, 2, 1])])
def test_mask_predict_masks_fewer_each_round(steps: int, left: list[int]) -> None:
    toy = Independent(np.linspace(0.3, 0.9, 8))
    canvas = Canvas.of((), 8, mask_token_id=7)
    seen: list[list[int]] = []
    parts = ConfiguredMethod({"method": "mask_predict", "denoising_steps": steps}).parts(toy, canvas)
    [outcome] = decode([canvas], toy, [parts], lambda _, after: seen.append(after.masked().tolist()))
    assert [len(slots) for slots in seen] == [*left, 0]
    assert all(slots == list(range(len(slots))) for slots in seen)
    assert outcome.trajectory.calls == steps


def test_mask_predict_judges_by_when_a_slot_was_written() -> None:
    """Slot 2 is sure at first and not later; it stays. Slot 0 is rewritten, surely, and gives way to slot 1."""

    def script(filled: int, slot: int) -> tuple[int, float]:
        return (1, [0.3, 0.5, 0.9, 0.8][slot]) if filled == 0 else (2, [0.95, 0.9, 0.1, 0.1][slot])

    outcome = fill(Scripted(script), {"method": "mask_predict", "denoising_steps": 2}, 4, ())
    assert outcome.canvas.output == [2, 2, 1, 1]


def test_more_rounds_than_slots_end() -> None:
    assert fill(Independent([0.5] * 3), {"method": "mask_predict", "denoising_steps": 48}, 3, ()).trajectory.calls <= 48


MODES = ["llada2.1_s", "llada2.1_q"]


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("block", [4, 6, 12])
def test_without_editing_it_is_the_threshold_rule(threshold: float, block: int) -> None:
    options = {"confidence_threshold": threshold, "block_length": block}
    ours = fill(t4(), {"method": "llada2.1_s", "edit_threshold": 1.0, **options})
    theirs = fill(t4(), {"method": "threshold", **options})
    assert same(ours, theirs)
    assert ours.trajectory.calls == theirs.trajectory.calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_a_model_that_copies_stops_a_round_after_the_last_mask(mode: str, blocks: int) -> None:
    c = np.linspace(0.2, 0.95, 8).tolist()
    outcome = fill(Copier(c), {"method": mode, "block_length": 8 // blocks}, 8, ())
    threshold = 0.5 if mode == "llada2.1_s" else 0.7
    plain = fill(
        Copier(c), {"method": "threshold", "confidence_threshold": threshold, "block_length": 8 // blocks}, 8, ()
    )
    assert (outcome.canvas.tokens == plain.canvas.tokens).all()
    assert not any(r.edited.size for r in outcome.trajectory.rounds)
    assert outcome.trajectory.calls == plain.trajectory.calls + blocks


@pytest.mark.parametrize("most", [1, 3, 16])
def test_an_oscillator_stops_when_its_rounds_are_spent(most: int) -> None:
    outcome = fill(Oscillator(), {"method": "llada2.1_s", "max_post_edit_steps": most}, 2, ())
    edits = [r for r in outcome.trajectory.rounds if r.edited.size]
    assert len(edits) == most
    assert outcome.trajectory.calls == 1 + most


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_calls_are_bounded(mode: str, seed: int) -> None:
    outcome = fill(t4(seed=seed), {"method": mode, "block_length": 4})
    assert outcome.trajectory.calls <= 3 * (4 + 16)
    assert not outcome.canvas.masked().size


def changing(filled: int, slot: int) -> tuple[int, float]:
    """Slot 0 is written as 1; once two slots are filled the model would rather have 2 there, with a probability of
    0.6.
    """
    if slot == 0:
        return (1, 0.95) if filled < 2 else (2, 0.6)
    return 3, 0.9 - 0.3 * slot


def test_a_written_token_is_replaced_when_the_model_is_sure_enough() -> None:
    edited = fill(Scripted(changing), {"method": "llada2.1_q", "edit_threshold": 0.5}, 3, ())
    assert edited.canvas.tokens[0] == 2
    assert edited.canvas.confidence[0] == pytest.approx(0.6)
    assert sum(r.edited.size for r in edited.trajectory.rounds) == 1
    kept = fill(Scripted(changing), {"method": "llada2.1_q", "edit_threshold": 0.7}, 3, ())
    assert kept.canvas.tokens[0] == 1


def test_an_edit_asks_for_more_than_its_threshold() -> None:
    """Once it is full, the only other token of slot 0 has a probability of exactly one half."""
    toy = Scripted(lambda filled, slot: (0, 0.5) if slot == 0 and filled == 2 else (1, 0.9), vocab_size=3)
    config = {"method": "llada2.1_s", "max_post_edit_steps": 1}
    assert fill(toy, {**config, "edit_threshold": 0.5}, 2, ()).canvas.output == [1, 1]
    assert fill(toy, {**config, "edit_threshold": 0.49}, 2, ()).canvas.output == [0, 1]


def test_calls_of_blocks_are_bounded_with_the_pass_that_stores() -> None:
    """A block takes at most B + 16 rounds and one pass more for its keys; every rewritten block is stored anew."""
    edits = 0
    for mode in MODES:
        toy = t4("block", seed=1)
        plain, cached = (fill(toy, {"method": mode, "cache": cache}, 13) for cache in ("none", "block"))
        assert same(plain, cached)
        assert cached.trajectory.calls <= 4 * (4 + 16 + 1)
        edits += sum(r.edited.size for r in cached.trajectory.rounds)
    assert edits > 0


def test_earlier_blocks_are_edited_only_if_the_scope_says_so() -> None:
    def script(filled: int, slot: int) -> tuple[int, float]:
        return (1 if filled < 3 else 2, 0.9) if slot == 0 else (3, 0.9)

    config = {"method": "llada2.1_s", "block_length": 2}
    assert fill(Scripted(script), config, 4, ()).canvas.tokens[0] == 1
    assert fill(Scripted(script), {**config, "edit_scope": "text"}, 4, ()).canvas.tokens[0] == 2


def test_prompt_and_priors_are_never_edited() -> None:
    toy = Scripted(lambda filled, slot: (2, 0.9))
    canvas = Canvas.of([5, 5], 4, mask_token_id=toy.mask_token_id, priors={1: 4})
    outcome = complete(toy, canvas, {"method": "llada2.1_s", "edit_scope": "text"})
    assert outcome.canvas.tokens.tolist() == [5, 5, 2, 4, 2, 2]
    assert outcome.canvas.status[3] == Status.PRIOR


def test_the_guard_lowers_the_left_neighbours_token() -> None:
    toy = Independent([0.5] * 4, tokens=[1, 1, 1, 1])
    canvas = Canvas.of([1], 4, mask_token_id=7)
    parts = ConfiguredMethod({"method": "static", "correction": "repetition_guard", "penalty_lambda": 3.0}).parts(
        toy, canvas
    )
    assert parts.transition.correction is not None
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 8)))
    logits[:, 7] = -torch.inf
    before = Predictions.of(logits, np.arange(5))
    after = parts.transition.correction.correct(before, canvas)
    expected = logits.clone()
    expected[1, 1] -= 3.0
    assert torch.equal(after.logits, expected)
    assert torch.equal(before.logits, logits)


def test_the_guard_ends_a_stutter() -> None:
    toy = Independent([0.6] * 5, tokens=[1] * 5)
    assert fill(toy, {"method": "leftmost"}, 5, ()).canvas.output == [1] * 5
    guarded = fill(
        toy, {"method": "leftmost", "correction": "repetition_guard", "penalty_lambda": 9.0}, 5, ()
    ).canvas.output
    assert all(a != b for a, b in pairwise(guarded))
