"""min-p, top-k, top-p: which tokens stay, ties, exactness, and both implementations."""

import math

import numpy as np
import pytest
import torch
from sampling.slow_rules import random_logits, slow_kept
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from paceline.sampling import filters
from paceline.sampling.filters import filter_rows

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def kept(logits: torch.Tensor, **options: float) -> list[list[int]]:
    rows = logits.clone()
    filter_rows(rows, **(OFF | options))
    assert torch.equal(rows[rows > -math.inf], logits[rows > -math.inf])
    return [(row > -math.inf).nonzero()[:, 0].tolist() for row in rows]


def both(logits: torch.Tensor, options: dict) -> tuple[torch.Tensor, torch.Tensor]:
    host, device = logits.clone(), logits.clone()
    filter_rows(host, **options)
    filters.filter_on_device(device, options["top_k"], options["top_p"], options["min_p"])
    return host, device


MIXES = [
    OFF | {"top_p": 0.9},
    OFF | {"top_k": 7},
    OFF | {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 2000, "top_p": 0.3, "min_p": 0.0},
]


@pytest.mark.parametrize("options", MIXES)
@pytest.mark.parametrize("vocab", [2, 11, 300, 5003])
@pytest.mark.parametrize("ties", [False, True])
def test_host_and_device_forms_agree(options: dict, vocab: int, ties: bool) -> None:
    host, device = both(torch.from_numpy(random_logits(3, 6, ties=ties, vocab=vocab)), options)
    assert torch.equal(host, device)


@pytest.mark.parametrize("options", MIXES)
def test_batches_equal_rows_and_the_order_of_tokens_does_not_matter(options: dict) -> None:
    logits = torch.from_numpy(random_logits(5, 7, ties=True, vocab=1001))
    order = torch.from_numpy(np.random.default_rng(0).permutation(1001))
    for form in (0, 1):
        whole = both(logits, options)[form]
        singles = torch.cat([both(row[None], options)[form] for row in logits])
        assert torch.equal(whole, singles)
        assert torch.equal(both(logits[:, order].contiguous(), options)[form], whole[:, order])


def test_a_nucleus_by_sorting_alone_depends_on_the_order_of_tied_tokens() -> None:
    """The control of the test above: cutting a stable sort at the mass keeps the first of the tied tokens, wherever
    they are.
    """

    def naive(row: np.ndarray) -> set[int]:
        order = np.argsort(-row, kind="stable")
        weights = np.exp(row[order])
        return set(order[: int(np.searchsorted(np.cumsum(weights), 0.5 * weights.sum())) + 1].tolist())

    row = np.zeros(6)
    moved = np.roll(np.arange(6), 1)
    assert {int(moved[t]) for t in naive(row[moved])} != naive(row)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"top_p": 0.7}, TopPLogitsWarper(0.7)),
        ({"top_p": 0.05}, TopPLogitsWarper(0.05)),
        ({"top_k": 6}, TopKLogitsWarper(6)),
        ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
    ],
)
def test_the_kept_tokens_are_those_of_transformers(ours: dict, theirs: object) -> None:
    logits = torch.from_numpy(random_logits(11, 30, ties=False, vocab=400))
    expected = theirs(None, logits.clone())
    assert kept(logits, **ours) == [(row > -math.inf).nonzero()[:, 0].tolist() for row in expected]


def test_ties_stay_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    assert kept(logits, top_k=3) == [[0, 1, 2, 3, 4]]
    assert kept(torch.zeros(1, 4), top_p=0.3) == [[0, 1, 2, 3]]
    assert kept(logits, min_p=math.exp(-1.5)) == [[1, 3]]


def test_top_p_keeps_the_token_that_reaches_the_mass_and_none_after() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert kept(logits, top_p=0.49) == [[0]]
    assert kept(logits, top_p=0.51) == [[0, 1]]
    assert kept(logits, top_p=0.76) == [[0, 1, 2, 3]]
    assert kept(logits, top_p=1e-9) == [[0]]


def test_forbidden_tokens_never_come_back() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5]])
    for options in ({"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-6}, {"top_k": 3, "top_p": 0.99, "min_p": 1e-6}):
        assert kept(logits, **options) == [[1, 3]]


@pytest.mark.parametrize("fill", [-math.inf, math.nan, math.inf])
def test_rows_without_a_distribution_pass_through(fill: float) -> None:
    logits = torch.tensor([[0.0, fill, -1.0], [fill, fill, fill]]) if fill != -math.inf else torch.full((2, 3), fill)
    for form in both(logits, {"top_k": 1, "top_p": 0.5, "min_p": 0.5}):
        assert torch.equal(form.nan_to_num(7.0), logits.nan_to_num(7.0))


@pytest.mark.parametrize("vocab", [3000, 40_000])
def test_the_mass_is_right_in_a_large_flat_vocabulary(vocab: int) -> None:
    """Many small probabilities, where float32 sums drift: the kept mass must bracket top_p in float64."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, (2, vocab)).astype(np.float32))
    chances = torch.softmax(logits.double(), -1)
    for row, chance in zip(kept(logits, top_p=0.9), chances, strict=True):
        mass, least = float(chance[row].sum()), float(chance[row].min())
        assert mass >= 0.9 - 1e-7
        assert mass - least < 0.9 + 1e-7


def test_small_vocabularies_agree_with_the_slow_reference() -> None:
    for seed in range(200):
        logits = random_logits(seed, 1, ties=False, vocab=12)
        options = {"top_k": seed % 6, "top_p": (0.3, 0.8, 1.0)[seed % 3], "min_p": (0.0, 0.07)[seed % 2]}
        assert kept(torch.from_numpy(logits), **options) == [sorted(slow_kept(logits[0].astype(float), **options))]
