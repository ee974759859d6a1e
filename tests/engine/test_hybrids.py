"""Hybrid models behind the engine: the proof of `benchmarks/hybrid_exactness.py` on few prompts, with its controls."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from benchmark_scripts import imported

with imported("hybrid_exactness") as (proof,):
    CHECKS = proof.CHECKS
GIVEN = Namespace(tokens=16, prompts=4, requests=100, sequences=32, operators=True)
SLOW = ("qwen3_5_text", "sampled")
"""Transformers takes long for it; the other family passes through the same sampler."""

CASES = [(name, check) for name in ("lfm2", "qwen3_5_text") for check in CHECKS if (name, check) != SLOW]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Opens a family by name, once."""
    return cache(lambda name: proof.Family(name, tmp_path_factory.mktemp(name), GIVEN))


@pytest.mark.parametrize(("name", "check"), CASES)
def test_the_proof_holds(family: Callable[[str], Any], name: str, check: str) -> None:
    opened = family(name)
    assert opened.llm.runner.info.passes == "operators"
    found = CHECKS[check].run(opened, GIVEN)
    assert not CHECKS[check].wrong(found), found
