"""Samplers that mask written slots again: ReMDM and Mask-Predict."""

import numpy as np
import pytest
from scipy import stats

from paceline.diffusion import Canvas, ConfiguredMethod, RemaskingChances, decode
from paceline.errors import ConfigError
from tests.diffusion.decoding import fill, same
from tests.diffusion.toys import Independent, permutation
from tests.diffusion.toys_scripted import Scripted

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


@pytest.mark.parametrize("method", ["remdm", "mask_predict", "dream_origin"])
def test_blocks_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="block_length must be that of the whole text"):
        fill(Independent([0.5] * 4), {"method": method, "block_length": 2}, 4, ())


def test_wrong_options_are_one_line() -> None:
    toy = Independent([0.5] * 4)
    for key, value in {
        "remask_eta": 2.0,
        "remask_rate": "all",
        "remask_from": -1.0,
        "remask_by": "age",
        "denoising_steps": 0,
    }.items():
        with pytest.raises(ConfigError, match=f"{key} must"):
            fill(toy, {"method": "remdm", key: value}, 4, ())
