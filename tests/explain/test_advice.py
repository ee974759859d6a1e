"""Figures of a replay add up, and each sentence is said where its figures say so and nowhere else."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from explain.replays import SECONDS, explained, node, replay, step

from paceline import LLM, SamplingParams
from paceline.explain.page import summarize_replay
from paceline.llm import BUNDLED


def chain(stood: int, rejected: bool = True, cut: int = 0, **more: Any) -> list[dict[str, Any]]:
    """A chain of accepted nodes, perhaps a rejected one, then some that selection cut."""
    kinds = ["accepted"] * stood + ["rejected"] * rejected + ["cut"] * cut
    return [node(2, i - 1, i + 1, kind, **(more if kind == "cut" else {})) for i, kind in enumerate(kinds)]


def advice(*steps: dict[str, Any], drafters: tuple[str, ...] = ("draft",), **more: Any) -> str:
    return " ".join(summarize_replay(replay(list(steps), drafters=drafters) | more)["advice"])


def steps(number: int, *nodes: Any, **more: Any) -> list[dict[str, Any]]:
    return [step([dict(one) for one in nodes], **more) for _ in range(number)]


def test_the_figures_are_those_of_the_run() -> None:
    config = {
        "method": ["ngram", {"method": "draft_model", "model": str(BUNDLED / "draft")}],
        "num_speculative_tokens": 5,
    }
    llm = LLM(dtype="float32", speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    data = explained(llm, "One day, a little girl named Lily found a needle", params).to_dict()
    summary, metrics = data["summary"], data["output"]["metrics"]
    assert (summary["steps"], summary["tokens"]) == (metrics["num_steps"], 40)
    assert sum(summary["nodes"].values()) - summary["nodes"].get("cut", 0) == metrics["num_draft_tokens"]
    assert summary["mean_acceptance_length"] == metrics["mean_acceptance_length"]
    assert summary["drafted"] == sum(one["source"] is not None for one in data["tokens"]) > 5
    assert sum(summary["draft_seconds"]) == pytest.approx(summary["seconds"]["draft"])
    for index, name in enumerate(data["drafters"]):
        counts = summary["acceptance"][index]
        assert (
            sum(stood for _, stood in counts)
            >= metrics["drafters"].get(name, {"num_accepted_tokens": 0})["num_accepted_tokens"]
        )
        assert all(stood <= tried for tried, stood in counts)
        assert [tried for tried, _ in counts] == sorted((tried for tried, _ in counts), reverse=True)


def test_acceptance_counts_steps_not_nodes() -> None:
    siblings = [
        node(2, -1, 1, "accepted"),
        node(3, -1, 1, "rejected"),
        node(4, 0, 2, "rejected"),
        node(5, -1, 1, "cut"),
    ]
    summary = summarize_replay(replay([step(siblings), step(chain(0))]))
    assert summary["acceptance"] == [[[2, 1], [1, 0]]]
    assert summary["nodes"] == {"accepted": 1, "rejected": 3, "cut": 1}


def test_what_was_found_is_counted() -> None:
    found = summarize_replay(replay([step(chain(2)), step(asked=False)]))["found"]
    assert [line.replace("\N{NO-BREAK SPACE}", " ") for line in found] == [
        "4 tokens took 2 passes of the target; 2 of them (50 %) had been drafted. The mean acceptance length is 2.00.",
        "draft was used in 1 of 2 steps; of its 3 scored tokens 2 were accepted, at the first position in 1 of 1 "
        "steps.",
        "The steps took 19.2 ms, 208.3 tokens/s. Not counted are the prompt (2 ms) and recording this page between "
        "the steps (1 ms); `paceline bench` measures speed.",
        "Scoring took 88 % of a usual step's time, drafting 5 %, all else 7 %.",
    ]
    assert summarize_replay(replay([step(asked=False)]))["found"][1] == "draft was never used."


def test_plain_decoding_and_an_even_run() -> None:
    plain = [step(asked=False, drafters=[]) for _ in range(3)]
    assert advice(*plain, drafters=()).startswith("This is plain decoding")
    assert advice(*plain, drafters=(), refused=True).startswith("Drafts are refused")
    assert advice(*steps(9, *chain(2))) == "Nothing stands out: no single change promises much for this text."


@pytest.mark.parametrize(
    ("said", "wrong", "right"),
    [
        (
            "In 6 of 10 drafted steps even the first drafted token was rejected",
            steps(6, *chain(0)) + steps(4, *chain(2)),
            steps(10, *chain(1)),
        ),
        (
            "In 10 of 10 drafted steps every scored token was accepted",
            steps(10, *chain(3, False)),
            steps(10, *chain(3)),
        ),
        ("12 of 20 steps had no drafts", steps(8, *chain(2)) + steps(12, asked=False), steps(20, *chain(2))),
        ("in 12 no drafter was used", steps(8, *chain(2)) + steps(12, asked=False), steps(8, *chain(2)) + steps(12)),
        ("in 12 nothing was found", steps(8, *chain(2)) + steps(12), steps(8, *chain(2)) + steps(12, asked=False)),
        (
            "In 6 steps selection cut drafted tokens",
            steps(6, *chain(1, False, 2, missed=True)),
            steps(6, *chain(1, False, 2)),
        ),
        ("so drafting paid", steps(12, *chain(2)) + steps(9, asked=False), steps(21, *chain(2))),
        (
            "so drafting did not pay",
            steps(12, *chain(0), seconds=SECONDS | {"score": 0.03}) + steps(9, asked=False),
            steps(12, *chain(2)) + steps(9, asked=False),
        ),
        ("Drafting took 52", steps(20, *chain(2), seconds=SECONDS | {"draft": 0.0093}), steps(20, *chain(2))),
        (
            "went into neither drafting nor scoring",
            steps(20, *chain(2), seconds=SECONDS | {"other": 0.004}),
            steps(20, *chain(2)),
        ),
    ],
)
def test_a_sentence_is_said_where_its_figures_are(
    said: str, wrong: list[dict[str, Any]], right: list[dict[str, Any]]
) -> None:
    assert said in advice(*wrong)
    assert said not in advice(*right)


def test_drafting_is_not_said_to_have_paid_where_steps_vary_too_much() -> None:
    """The mean gain is the same; only the scatter of the tokens differs. The even run is the negative control."""
    plain = steps(9, asked=False)
    even = [*steps(12, *chain(1), seconds=SECONDS | {"score": 0.012}), *plain]
    uneven = [
        *steps(11, *chain(0), seconds=SECONDS | {"score": 0.012}),
        *steps(1, *chain(12), seconds=SECONDS | {"score": 0.012}),
        *plain,
    ]
    assert "so drafting paid" in advice(*even)
    assert "which shows neither that drafting paid nor that it did not" in advice(*uneven)


def test_longer_drafts_are_not_advised_where_drafting_did_not_pay() -> None:
    plain = steps(9, asked=False)
    assert "longer drafts may pay" in advice(*steps(12, *chain(2, False)), *plain)
    assert "longer drafts may pay" not in advice(
        *steps(12, *chain(2, False), seconds=SECONDS | {"score": 0.08}), *plain
    )


DEAR = SECONDS | {"draft": 0.2, "score": 0.08, "other": 0.09}
ON_TIME = ("so drafting", "Drafting took", "neither drafting nor scoring")


def test_no_advice_rests_on_the_times_of_a_few_steps() -> None:
    for number, said in ((10, False), (11, True)):
        told = advice(
            *steps(number, *chain(0), seconds=DEAR), *steps(9, asked=False, seconds=SECONDS | {"other": 0.004})
        )
        assert [sentence in told for sentence in ON_TIME] == [said] * 3


def test_one_disturbed_step_says_nothing_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, disturbed = [[*steps(12, *chain(2)), *steps(12, asked=False)] for _ in range(2)]
    disturbed[0]["seconds"] = {"draft": 3.0, "score": 7.0, "verify": 0.5, "commit": 0.1, "other": 2.0}
    disturbed[0]["drafters"][0]["seconds"] = 3.0
    assert advice(*disturbed) == advice(*quiet)
    assert summarize_replay(replay(disturbed))["found"][3] == summarize_replay(replay(quiet))["found"][3]
    monkeypatch.setattr("paceline.explain.page.median", lambda values: fmean(list(values)))
    assert advice(*disturbed) != advice(*quiet)


def test_what_ended_accepted_drafts_is_named() -> None:
    budget = steps(5, *chain(16, False))
    stop = steps(3, *chain(3, False))
    for one in stop:
        one["drafters"][0]["stop"] = 4
    cut = steps(2, *chain(2, False, 1))
    told = advice(*budget, *stop, *cut)
    assert "(the budget ended 5 of them, the controller ended 3 of them, selection ended 2 of them)" in told
    assert "the drafters proposed no more" in advice(*steps(6, *chain(3, False)))


def test_one_long_step_is_named_and_does_not_count_as_overhead() -> None:
    probing = [*steps(9, *chain(2)), *steps(1, *chain(2), seconds=SECONDS | {"other": 0.2})]
    summary = summarize_replay(replay(probing))
    assert "Most of the remaining time was step 10 alone, 200 ms" in " ".join(summary["found"])
    assert "neither drafting" not in " ".join(summary["advice"])
    assert "alone" not in " ".join(summarize_replay(replay(steps(10, *chain(2))))["found"])


def test_a_dropped_drafter_comes_first() -> None:
    data = replay(steps(9, *chain(2)))
    data["output"]["metrics"]["dropped_drafters"] = {"draft": "ValueError: no"}
    assert summarize_replay(data)["advice"][0] == "draft was dropped: ValueError: no. Fix that first."


def test_few_steps_prove_nothing_and_no_step_is_no_error() -> None:
    assert "not even" not in advice(*steps(4, *chain(0)))
    assert summarize_replay(replay([]))["found"] == ["No token was generated."]
