"""What verify tests for which claim, what it says of it, and that it catches verifiers that break the claim."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from credulous import believe_chains

from paceline import LLM
from paceline.assembly import Exactness
from paceline.controllers import Controller
from paceline.llm import BUNDLED
from paceline.sampling import KeyedDraws
from paceline.tree import Scores
from paceline.verifiers import GreedyVerifier
from paceline.verify import (
    APPROXIMATE,
    IN_DISTRIBUTION,
    UP_TO_NEAR_TIES,
    Agreement,
    Difference,
    SamplingTest,
    VerifyReport,
    claimed_class,
    verify,
)
from paceline.verify.proof import drafting
from paceline.verify.tokens import BIT_EQUAL

NGRAM = {"method": "ngram", "num_speculative_tokens": 6}
PROMPTS = ["def f(x):\n    return", "SELECT name FROM course WHERE"]
DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft"), "num_speculative_tokens": 4}
LOOPING = ["one two three one two three one two", "a b a b a b a b a", "SELECT a FROM b; SELECT a FROM"]
TIE, WRONG = Difference(1, 5, 6, 1e-5, 1e-3, True), Difference(3, 5, 7, 1.0, 1e-3, False)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=NGRAM, dtype="float32", seed=5)


def test_points_are_compared_seed_by_seed(llm: LLM) -> None:
    report = verify(llm, LOOPING, max_tokens=16, samples=3)
    assert report.claimed[1] == BIT_EQUAL
    assert report.exactness == "strict, proven by self-test"
    assert report.seeded is not None
    assert (report.seeded.outputs, report.seeded.identical) == (9, 9)
    assert report.holds
    assert report.conclusion.endswith("for equal seeds at temperature 1 and in distribution at temperature 1")


@pytest.mark.parametrize("samples", [0, 2])
@pytest.mark.parametrize("config", [None, NGRAM | {"num_speculative_tokens": 0}], ids=["plain", "no drafts"])
def test_plain_decoding_compared_with_itself_is_no_proof(llm: LLM, config: dict[str, Any] | None, samples: int) -> None:
    report = verify(llm.with_speculative_config(config), LOOPING, max_tokens=8, samples=samples)
    assert report.greedy.identical == report.greedy.outputs == len(LOOPING)
    assert report.drafted_tokens == 0
    assert not report.holds
    assert report.conclusion.startswith("NOTHING WAS DRAFTED, so plain decoding was compared with itself")
    assert verify(llm, LOOPING, max_tokens=8, samples=samples).holds


class Resting(Controller):
    """Drafts nothing."""

    name = "resting"

    def __init__(self, disable_by_batch_size: int | None = None) -> None: ...


RESTING = {"method": "ngram", "controller": f"{__name__}:Resting"}


def test_a_controller_that_rests_does_not_keep_guesses_from_the_test(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    resting = llm.with_speculative_config(RESTING)
    report = verify(resting, LOOPING, max_tokens=16, samples=2)
    assert report.holds
    assert report.mean_acceptance_length == 1.0
    assert report.drafted is not None
    assert report.drafted.outputs == report.greedy.outputs == len(LOOPING)
    assert report.drafted_tokens > len(LOOPING)
    assert drafting(llm) is None  # the user fixed the number
    assert drafting(llm.with_speculative_config(None)) is None
    believe_chains(monkeypatch)
    wrong = verify(resting, LOOPING, max_tokens=16, samples=0)
    assert not wrong.greedy.differences
    assert not wrong.greedy_holds
    assert wrong.conclusion == "THE CLAIM DOES NOT HOLD at temperature 0"


def test_where_a_profile_says_off_guesses_are_tested_all_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    off = llm.with_speculative_config(None)
    monkeypatch.setattr(off, "profile", object())
    busy = drafting(off)
    assert busy is not None
    assert busy.speculative is not None
    assert (busy.speculative.method, busy.speculative.num_speculative_tokens) == ("auto", 5)
    report = verify(off, LOOPING, max_tokens=16, samples=2)
    assert report.claimed == claimed_class(busy)
    assert report.drafted_tokens > 0
    assert report.holds


def test_other_noise_for_drafts_is_caught(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that forgets the depth in its keys follows the distribution at every step, but not the seed."""
    gumbel = KeyedDraws.gumbel

    def forgetful(self: KeyedDraws, depth: int, weights_v: torch.Tensor) -> int:
        return gumbel(self, depth + 1000 if depth else 0, weights_v)

    monkeypatch.setattr(KeyedDraws, "gumbel", forgetful)
    fixed = llm.with_speculative_config(NGRAM | {"controller": "fixed"})
    report = verify(fixed, LOOPING, max_tokens=24, samples=4, temperature=0.3)
    assert report.greedy_holds
    assert not report.seeded_holds
    assert not report.holds
    assert "DOES NOT HOLD for equal seeds" in report.conclusion


def test_a_wrong_token_at_temperature_0_is_caught(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def second_best(self: GreedyVerifier, trees: Any, scores: Scores) -> Any:
        logits = scores.logits
        if any(len(tree) for tree in trees):
            logits = logits.scatter(1, logits.argmax(1, keepdim=True), -math.inf)
        return self.verify_stacked(trees, logits, scores.rows)

    monkeypatch.setattr(GreedyVerifier, "verify_scores", second_best)
    report = verify(llm, LOOPING, max_tokens=16, samples=0)
    assert report.greedy.wrong > 0
    assert not report.holds
    assert report.conclusion.startswith("THE CLAIM DOES NOT HOLD at temperature 0")


def test_draws_claim_the_distribution_only_and_seeds_are_looked_at_all_the_same(llm: LLM) -> None:
    report = verify(llm.with_speculative_config(DRAFT), PROMPTS, max_tokens=12, samples=2)
    assert report.claimed[1] == IN_DISTRIBUTION
    assert report.seeded is not None
    assert (report.seeded.outputs, report.seeded.identical) == (2, 2)
    drawn = DRAFT | {"draft_sample_method": "probabilistic"}
    report = verify(llm.with_speculative_config(drawn), PROMPTS, max_tokens=12, samples=2)
    assert report.seeded is not None
    assert report.seeded.wrong == 2
    assert report.holds
    assert "seed" not in report.conclusion


@pytest.mark.parametrize(("exactness", "greedy"), [(Exactness(), BIT_EQUAL), (Exactness("why"), UP_TO_NEAR_TIES)])
def test_claims_are_the_weakest_part_s_and_near_ties_end_where_bits_are_proven(
    llm: LLM, exactness: Exactness, greedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "exactness", exactness)

    def claimed(config: dict[str, Any]) -> tuple[str, str]:
        return claimed_class(llm.with_speculative_config(config))

    assert claimed(NGRAM) == (greedy, greedy)
    assert claimed({"method": ["ngram", "draft_model"], "model": DRAFT["model"]}) == (greedy, IN_DISTRIBUTION)
    assert claimed(NGRAM | {"acceptance_method": "typical_acceptance_sampler"}) == (greedy, APPROXIMATE)


@pytest.mark.parametrize("options", [{"samples": 0}, {"temperature": 0.0}, {"temperature": 1e-6}])
def test_the_conclusion_names_only_what_was_tested(llm: LLM, options: dict[str, Any]) -> None:
    report = verify(llm, LOOPING[:1], max_tokens=8, **options)
    assert report.conclusion == "the claim holds at temperature 0; nothing was tested above temperature 0"
    found = report.to_dict()
    assert found["tested"] == {"temperature_0": True, "equal_seeds": False, "distribution": False}
    assert (found["conclusion"], found["holds"], found["distribution"]) == (report.conclusion, True, None)


def agreement(*found: Difference) -> Agreement:
    made = Agreement()
    made.add([1, 2, 3, 4], list(found))
    return made


GOOD, BAD = SamplingTest(400, 20.0, 0.4), SamplingTest(400, 90.0, 1e-9)


@pytest.mark.parametrize(
    ("change", "holds", "conclusion"),
    [
        ({"greedy": agreement(TIE, TIE)}, True, "the claim holds at temperature 0, for equal seeds"),
        ({"drafted_tokens": 0}, False, "NOTHING WAS DRAFTED"),
        ({"drafted_tokens": 0, "greedy": agreement(WRONG)}, False, "THE CLAIM DOES NOT HOLD at temperature 0"),
        ({"greedy": agreement(TIE, WRONG)}, False, "THE CLAIM DOES NOT HOLD at temperature 0"),
        ({"seeded": agreement(TIE)}, True, "the claim holds"),
        (
            {"seeded": agreement(WRONG), "distribution": BAD},
            False,
            "THE CLAIM DOES NOT HOLD for equal seeds at temperature 1 and in distribution",
        ),
        (
            {"claimed": ("bit-equal", "bit-equal"), "seeded": agreement(TIE)},
            False,
            "THE CLAIM DOES NOT HOLD for equal seeds",
        ),
        (
            {"claimed": (UP_TO_NEAR_TIES, IN_DISTRIBUTION), "seeded": agreement(WRONG)},
            True,
            "the claim holds at temperature 0 and in distribution",
        ),
        (
            {"claimed": (UP_TO_NEAR_TIES, APPROXIMATE), "seeded": None, "distribution": BAD},
            True,
            "the claim holds at temperature 0; nothing",
        ),
        (
            {"claimed": (APPROXIMATE, APPROXIMATE), "distribution": BAD},
            True,
            "nothing exact is claimed at temperature 0; nothing exact",
        ),
    ],
)
def test_conclusions(change: dict[str, Any], holds: bool, conclusion: str) -> None:
    claimed = (UP_TO_NEAR_TIES, UP_TO_NEAR_TIES)
    base = VerifyReport(
        "m",
        claimed,
        "float32",
        1,
        agreement(),
        drafted_tokens=9,
        temperature=1.0,
        seeded=agreement(),
        distribution=GOOD,
    )
    report = replace(base, **change)
    assert report.holds is holds
    assert report.conclusion.startswith(conclusion)
