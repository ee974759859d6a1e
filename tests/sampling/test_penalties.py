"""Penalties: counts grow, shrink and fork; the arithmetic is float32 of the stated formula."""

import numpy as np
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from paceline.sampling.penalties import Penalties


def penalised(penalties: Penalties, logits: np.ndarray, paths: list) -> np.ndarray:
    rows = torch.from_numpy(logits.copy())
    penalties.apply(rows, paths, ())
    return rows.numpy()


def test_only_touched_tokens_change_and_each_by_the_formula() -> None:
    logits = np.array([[2.0, -2.0, 1.0, -1.0, 0.5]], np.float32)
    penalties = Penalties(0.25, 0.5, 2.0, [0, 1])
    penalties.advance([1, 2, 2])
    expected = [2.0 / 2, -2.0 * 2 - 0.5 - 0.25, 1.0 / 2 - 1.0 - 0.25, -1.0, 0.5]
    assert penalised(penalties, logits, [()])[0].tolist() == expected


def test_each_row_counts_its_own_path() -> None:
    penalties = Penalties(0.0, 1.0, 1.0, [])
    penalties.advance([1])
    rows = penalised(penalties, np.zeros((3, 4), np.float32), [(), (1,), (2, 2)])
    assert (-rows).tolist() == [[0, 1, 0, 0], [0, 2, 0, 0], [0, 1, 2, 0]]


def test_the_prompt_counts_for_repetition_only() -> None:
    logits = np.ones((1, 3), np.float32)
    assert penalised(Penalties(1.0, 1.0, 1.0, [0, 0]), logits, [()]).tolist() == [[1, 1, 1]]
    assert penalised(Penalties(1.0, 1.0, 2.0, [0, 0]), logits, [()]).tolist() == [[0.5, 1, 1]]


def test_repetition_agrees_with_transformers() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    penalties = Penalties(0.0, 0.0, 1.7, [3, 4, 4])
    penalties.advance([9, 3])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 4, 9, 3]]), torch.from_numpy(logits.copy()))
    assert np.array_equal(penalised(penalties, logits, [()]), expected.numpy())


def test_buffers_grow_and_rewind_empties_them() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    tokens = np.random.default_rng(1).integers(0, 1000, 3000).tolist()
    penalties = Penalties(0.1, 0.2, 1.5, [5, 6])
    before = penalised(penalties, logits, [(), (5, 7)])
    penalties.advance(tokens)
    twin = penalties.fork()
    many = penalised(twin, logits, [(), (5, 7)])
    assert not np.array_equal(many, before)
    penalties.rewind(tokens)
    assert np.array_equal(penalised(penalties, logits, [(), (5, 7)]), before)
    assert np.array_equal(penalised(twin, logits, [(), (5, 7)]), many)
