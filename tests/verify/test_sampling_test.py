"""The distribution test passes exact sampling and catches a relaxed rule, on the bundled model."""

from __future__ import annotations

import pytest
import torch

from paceline import LLM
from paceline.llm import BUNDLED
from paceline.verify import verify
from paceline.verify.sampling_test import uniform_test

PROMPTS = ["def f(x):\n    return", "SELECT name FROM course WHERE", "Janet has 3 apples. She buys"]
DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft"), "num_speculative_tokens": 4}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=DRAFT, dtype="float32", seed=5)


def greedy_class(llm: LLM) -> str:
    return "bit-equal" if llm.exactness.proven else "bit-equal up to near ties"


def test_exact_sampling_passes(llm: LLM) -> None:
    report = verify(llm, PROMPTS, max_tokens=24, samples=12, seed=3)
    assert report.holds
    assert report.greedy.identical == len(PROMPTS)
    assert report.claimed == (greedy_class(llm), "equal in distribution")
    assert report.distribution is not None
    assert report.distribution.tokens > 400
    assert report.mean_acceptance_length > 1.2


def test_a_relaxed_rule_is_caught(llm: LLM) -> None:
    options = {
        "acceptance_method": "typical_acceptance_sampler",
        "posterior_threshold": 1e-4,
        "draft_sample_method": "greedy",
    }
    relaxed = llm.with_speculative_config(DRAFT | options)
    report = verify(relaxed, PROMPTS, max_tokens=24, samples=12, seed=3)
    assert report.claimed == (greedy_class(relaxed), "approximate")
    assert report.distribution is not None
    assert not report.distribution.holds


def test_uniform_values_pass_and_tilted_ones_fail() -> None:
    values = torch.rand(4000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert uniform_test(values).holds
    assert not uniform_test(values**1.2).holds
