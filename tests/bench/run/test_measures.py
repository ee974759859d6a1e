"""What the steps say, against hand-made steps."""

from __future__ import annotations

import pytest

from paceline.bench.run import quantiles
from paceline.bench.run.measures import StepFigures, StepLog, Totals, histogram
from paceline.engine import TimeSplit
from paceline.tree import EMPTY_TREE, TokenTree, Verdict

CHAIN = TokenTree.chain([5, 6, 7], source=1)


def step(time: float, added: int, tree: TokenTree = EMPTY_TREE, accepted: int = 0, context: int = 10) -> StepFigures:
    verdict = Verdict(tuple(range(accepted)), tuple(int(t) for t in tree.tokens[:accepted]), 9)
    return StepFigures(
        time, ("r/0",), (added,), context, [tree], [verdict], ["a", "b"], (0.0, 0.25), TimeSplit(score=0.5)
    )


def log(*steps: StepFigures) -> StepLog:
    made = StepLog()
    made.steps = list(steps)
    return made


def test_tokens_that_come_together_share_their_time() -> None:
    found = log(step(1.0, 2), step(1.3, 3), step(1.4, 1)).token_latencies()
    assert found == pytest.approx([0.1, 0.1, 0.1, 0.1])


def test_two_requests_have_clocks_of_their_own() -> None:
    def both(time: float, added: tuple[int, int]) -> StepFigures:
        verdict = Verdict((), (), 1)
        return StepFigures(time, ("a/0", "b/0"), added, 4, [EMPTY_TREE] * 2, [verdict] * 2, [], (), TimeSplit())

    assert log(both(1.0, (1, 0)), both(2.0, (1, 1)), both(4.0, (2, 1))).token_latencies() == pytest.approx(
        [1.0, 1.0, 1.0, 2.0]
    )


def test_acceptance_by_depth_and_drafter() -> None:
    totals = Totals()
    steps = log(step(1.0, 3, CHAIN, 2), step(2.0, 1, CHAIN, 0), step(3.0, 1))
    totals.add(steps, wall=2.0, split=TimeSplit(prefill=0.1, score=1.5), weight_bytes=100, cache_bytes=2)
    assert totals.mean_acceptance_length == pytest.approx(1 + 2 / 3)
    assert totals.by_position() == [
        {"position": 1, "offered": 2, "reached": 2, "accepted": 1},
        {"position": 2, "offered": 2, "reached": 1, "accepted": 1},
        {"position": 3, "offered": 2, "reached": 1, "accepted": 0},
    ]
    shares = {share["name"]: share for share in totals.by_drafter()}
    assert (shares["b"]["proposed"], shares["b"]["accepted"], shares["b"]["seconds"]) == (6, 2, 0.75)
    assert shares["a"]["proposed"] == 0
    assert totals.split()["outside"] == pytest.approx(0.4)


def test_the_limit_is_reading_time_over_step_time() -> None:
    totals = Totals()
    totals.add(
        log(step(1.0, 1), step(2.0, 1)), wall=1.0, split=TimeSplit(score=0.4, other=0.1), weight_bytes=80, cache_bytes=2
    )
    found = totals.limit(bandwidth=1000.0)
    assert found["bytes_per_step"] == 100
    assert found["share_of_step"] == pytest.approx(0.2 / 0.5)
    assert found["share_of_score"] == pytest.approx(0.2 / 0.4)
    assert found["floor_tokens_per_second"] == pytest.approx(10.0)
    assert totals.limit(None)["share_of_step"] is None


def test_quantiles_and_histograms() -> None:
    assert quantiles([])["p50"] is None
    assert quantiles([1.0, 2.0, 3.0]) == {
        "p50": 2.0,
        "p90": pytest.approx(2.8),
        "p99": pytest.approx(2.98),
        "mean": 2.0,
        "count": 3,
    }
    found = histogram([0.0011, 0.0012, 0.5, 1e9])
    assert sum(found["counts"]) == 4
    assert len(found["edges"]) == len(found["counts"]) + 1
    assert found["edges"][0] <= 0.0011 < found["edges"][1]
    assert histogram([]) == {"edges": [], "counts": []}
