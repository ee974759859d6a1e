"""Measures and draws: numbers keyed by seed, round and slot."""

import numpy as np
import torch

from paceline.diffusion.canvas import Canvas
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.scores import Random
from paceline.diffusion.setting import Setting
from paceline.diffusion.time_grid import uniform
from tests.diffusion.toys import Independent

LARGE = 2**63 + 12345


def drawn(seed: int, round_: int) -> tuple[float, ...]:
    toy, canvas = Independent([0.5] * 4), Canvas.of((), 4, mask_token_id=7)
    canvas.round = round_
    predictions = Predictions.of(torch.zeros(4, 8), np.arange(4))
    return tuple(Random(Setting(canvas, toy, seed)).score(predictions, canvas))


def test_random_scores_differ_by_round_and_seed() -> None:
    keys = [(seed, round_) for seed in (0, 1, LARGE, LARGE + 1) for round_ in range(3)]
    assert len({drawn(*key) for key in keys}) == len(keys)
    assert drawn(1, 2) == drawn(1, 2)


def test_uniform_draws_differ_by_round_seed_and_purpose() -> None:
    keys = [(s, r, p) for s in (0, LARGE, LARGE + 1) for r in range(3) for p in (2, 3, 5)]
    assert len({tuple(uniform(s, r, 4, p)) for s, r, p in keys}) == len(keys)


def test_sampled_tokens_differ_by_large_seeds() -> None:
    logits = torch.zeros(16, 64)
    texts = [tuple(Predictions.of(logits, np.arange(16), temperature=1.0, seed=LARGE + i).tokens) for i in range(3)]
    assert len(set(texts)) == 3
