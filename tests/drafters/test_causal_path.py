"""The path search of DiffuSpec: pruning, the beam against every path, ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch

from paceline.drafters.diffusion import NONE, SMALLEST, TrigramCounts, best_path, lattice_of
from paceline.errors import DrafterError

VOCAB, END = 5, 0
TEXT = [1, 2, 3, 4, 1, 2, 3, 1, 4, 2, 2, 3, 0, 1, 2, 3, 4]


def counts(text: Sequence[int] = TEXT) -> TrigramCounts:
    found = TrigramCounts(SMALLEST, VOCAB)
    found.learn(text)
    return found


def weights(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def random_weights(seed: int, slots: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((slots, VOCAB)) * 1.5)


def kept(row: Sequence[float], mass: float, most: int, ends: Sequence[int] = ()) -> list[int]:
    tokens = lattice_of(weights(row), mass=mass, most=most, ends=ends).tokens[0]
    return [int(token) for token in tokens if token != NONE]


def test_a_slot_keeps_its_smallest_set_of_enough_mass() -> None:
    row = [0.05, 0.5, 0.25, 0.15, 0.05]
    assert kept(row, 0.5, 15) == [1]
    assert kept(row, 0.7, 15) == [1, 2]
    assert kept(row, 0.8, 15) == [1, 2, 3]
    assert kept(row, 0.8, 2) == [1, 2]
    assert kept(row, 0.0, 15) == [1]
    assert sorted(kept(row, 1.0, 15)) == [0, 1, 2, 3, 4]


def test_end_tokens_stay_and_nothing_follows_them() -> None:
    assert kept([0.05, 0.5, 0.25, 0.15, 0.05], 0.7, 15, [END]) == [1, 2, END]
    assert kept([0.3, 0.4, 0.2, 0.06, 0.04], 0.95, 15, [END]) == [1, END]
    assert kept([0.3, 0.4, 0.2, 0.06, 0.04], 0.95, 15, [END, 4]) == [1, END, 4]
    assert kept([0.0, 0.6, 0.2, 0.1, 0.1], 0.7, 15, [END]) == [1, 2]  # forbidden by the rules of the request


@pytest.mark.parametrize("seed", range(5))
def test_beam_one_of_one_candidate_is_argmax_drafting(seed: int) -> None:
    rows = random_weights(seed, 7)
    for options in ({"mass": 0.8, "most": 1}, {"mass": 1.0, "most": 15}):
        lattice = lattice_of(rows, **options, ends=())  # type: ignore[arg-type]
        assert best_path(lattice, counts(), TEXT, lam=1.0, beam=1) == rows.argmax(-1).tolist()
    lattice = lattice_of(rows, mass=1.0, most=15, ends=())
    assert best_path(lattice, counts(), TEXT[-2:], lam=0.2, beam=3) != rows.argmax(-1).tolist()


def price(path: Sequence[int], rows: torch.Tensor, model: TrigramCounts, lam: float, ends: Sequence[int]) -> float:
    """Of a path over all slots, end tokens behind an end token; written from the definition."""
    log_p, text, total, over = rows.log_softmax(-1), [*TEXT], 0.0, False
    for slot, token in enumerate(path):
        if over:
            total += lam * float(log_p[slot, list(ends)].max())
            continue
        total += lam * float(log_p[slot, token]) + (1 - lam) * math.log(model.chance(text[-2], text[-1], token))
        text.append(token)
        over = token in ends
    return total


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("ends", [(), (END,)])
def test_a_wide_beam_finds_the_best_of_all_paths(lam: float, ends: tuple[int, ...]) -> None:
    for seed in range(4):
        rows, model = random_weights(seed, 3), counts()
        # under mass 1 and with no ends all tokens are candidates; with ends, those likelier than the end token
        log_p = rows.log_softmax(-1)
        allowed = [[t for t in range(VOCAB) if not ends or log_p[k, t] >= log_p[k, END]] for k in range(3)]
        paths = {tuple(p[: p.index(END) + 1] if ends and END in p else p): p for p in product(*allowed)}
        best = max(paths, key=lambda cut: price((*cut, *[END] * (3 - len(cut))), rows, model, lam, ends))
        found = best_path(lattice_of(rows, mass=1.0, most=15, ends=ends), model, TEXT[-2:], lam=lam, beam=64)
        assert tuple(found) == best


def test_a_narrow_beam_may_miss_it() -> None:
    """Negative control of the test above."""
    missed = 0
    for seed in range(20):
        lattice = lattice_of(random_weights(seed, 4), mass=1.0, most=15, ends=())
        wide, narrow = (best_path(lattice, counts(), TEXT[-2:], lam=0.4, beam=beam) for beam in (64, 1))
        missed += wide != narrow
    assert missed > 0


def test_the_path_stops_at_its_end() -> None:
    rows = weights([0.02, 0.9, 0.04, 0.02, 0.02], [0.9, 0.03, 0.03, 0.02, 0.02], [0.9, 0.05, 0.02, 0.02, 0.01])
    assert best_path(lattice_of(rows, mass=0.8, most=15, ends=[END]), counts([]), [], lam=1.0, beam=3) == [1, END]
    assert best_path(lattice_of(rows, mass=0.8, most=15, ends=[]), counts([]), [], lam=1.0, beam=3) == [1, END, END]


def test_an_end_that_the_denoiser_does_not_see_is_not_taken_for_being_short() -> None:
    rows = weights(*[[0.02, 0.3, 0.3, 0.19, 0.19]] * 12)
    assert len(best_path(lattice_of(rows, mass=0.8, most=15, ends=[END]), counts([]), [], lam=0.5, beam=5)) == 12


def test_rows_without_a_distribution_are_refused() -> None:
    for bad in (float("nan"), float("-inf")):
        rows = weights([0.2] * 5, [0.2] * 5)
        rows[1] = bad
        with pytest.raises(DrafterError, match="NaN"):
            lattice_of(rows, mass=0.8, most=15, ends=[END])
