"""Who is trusted, and what learning may cost; what is worth scoring."""

from __future__ import annotations

import itertools

import pytest

from paceline.controllers.auto.choice import Beside, Forecast, choose, worth_scoring
from paceline.controllers.auto.trust import Ledger, State, Trust


def tried(saved: float, steps: int = 8) -> Trust:
    trust = Trust()
    for _ in range(steps):
        trust.record(saved, 1)
    return trust


def test_a_try_decides() -> None:
    assert tried(0.5).state is State.ON
    assert tried(0.5, 7).state is State.TRIED
    assert tried(-0.8, 5).state is State.TRIED, "a few drafts in vain are chance"
    assert tried(-0.8).state is State.OFF
    assert tried(-0.1, 31).state is State.TRIED
    assert tried(-0.1, 32).state is State.OFF


def test_who_begins_to_lose_is_off_soon_and_tried_again_at_growing_intervals() -> None:
    trust = tried(0.5)
    for _ in range(40):
        trust.record(-0.5, 1)
    assert trust.state is State.OFF
    waits = []
    for _ in range(3):
        waits.append(trust.wait)
        trust.skip(trust.wait)
        assert trust.state is State.TRIED
        for _ in range(12):
            trust.record(-0.5, 1)
    assert waits == sorted(set(waits))


def test_a_small_loss_that_goes_on_ends_trust_and_noise_around_a_gain_does_not() -> None:
    losing, gaining = tried(0.5), tried(0.5)
    for step in range(400):
        losing.record(-0.07, 1)
        gaining.record(0.9 if step % 2 else -0.8, 1)
    assert losing.state is State.OFF
    assert gaining.state is State.ON


def test_one_slow_step_does_not_end_trust() -> None:
    trust = tried(0.5)
    trust.record(-50.0, 1)
    assert trust.state is State.ON


def test_who_is_not_asked_for_long_must_be_tried_anew_unless_it_was_heard() -> None:
    forgotten, heard = tried(0.5), tried(0.5)
    for _ in range(100):
        forgotten.skip(1)
        heard.skip(1, known=True)
    assert heard.state is State.ON
    assert forgotten.state is not State.ON


def test_the_ledger_lends_little_and_earns_a_share() -> None:
    ledger = Ledger()
    assert not ledger.affords(0.001)
    ledger.earn(0.01, 0.01)
    assert ledger.affords(0.04)
    ledger.spend(0.04)
    assert not ledger.affords(0.01)
    for _ in range(100):
        ledger.earn(0.01, 0.01)
    assert ledger.affords(0.015)
    assert not ledger.affords(0.025)


def test_a_surprise_ends_learning_for_a_while_and_not_for_ever() -> None:
    ledger = Ledger()
    ledger.earn(0.01, 0.01)
    ledger.spend(12.0)  # a first use that compiled
    assert not ledger.affords(0.001)
    for _ in range(1000):
        ledger.earn(0.01, 0.01)
    assert ledger.affords(0.02)
    assert ledger.spent == 12.0


TABLE = [0.010 + 0.0005 * max(row - 1, 0) for row in range(64)]


NOTHING_BESIDE = Beside()


def forecast(
    drafter: int, chance: float, *, level: float, finds: float = 1.0, rival: float = 0.1, left: Beside = NOTHING_BESIDE
) -> Forecast:
    gains = [sum(chance**i for i in range(1, n + 1)) for n in range(9)]
    beside = [rival * g for g in gains]
    return Forecast(drafter, gains, beside, [0.0, *(level * n for n in range(1, 9))], finds, 1.0, left)


@pytest.mark.parametrize(("chance", "level"), [(0.9, 1e-4), (0.6, 1e-3), (0.3, 1e-3), (0.05, 5e-3)])
def test_one_drafter_gets_the_length_with_the_best_rate(chance: float, level: float) -> None:
    one = forecast(0, chance, level=level)
    found = choose([one], TABLE, 1)
    rates = [(1 + one.gains[n]) / (TABLE[1 + n] + one.seconds[n]) for n in range(9)]
    assert found.rate == pytest.approx(max(rates))
    assert (found.picks[0].levels if found.picks else 0) == rates.index(max(rates))


def test_a_dear_drafter_is_used_behind_a_table_that_leaves_it_enough() -> None:
    table = forecast(0, 0.9, level=0.0, finds=0.5)

    def chosen(left: Beside) -> list[int]:
        return [pick.drafter for pick in choose([table, forecast(1, 0.8, level=5e-4, left=left)], TABLE, 1).picks]

    assert chosen(Beside(asked=0.5, alone=0.5)) == [0, 1]
    assert chosen(Beside(asked=1.0, alone=0.0, failing=0.1)) == [0]
    assert [pick.drafter for pick in choose([forecast(1, 0.8, level=5e-4)], TABLE, 1).picks] == [1]


def test_what_others_leave_follows_the_steps() -> None:
    left = Beside()
    for covered, asked in ((None, True), (0.25, True), (0.9, False), (0.9, False)) * 200:
        left = left.moved(covered, 0.02, asked=asked)
    assert (left.asked, left.alone, left.failing) == pytest.approx((0.5, 0.25, 0.75 * 0.25), abs=0.02)


def test_the_nodes_worth_scoring_are_the_best_of_all_subsets() -> None:
    reaches, rate, table = [[0.9, 0.5, 0.2], [0.6, 0.05]], 100.0, [0.01 + 0.002 * row for row in range(16)]
    kept = worth_scoring(reaches, table, 2, rate, 8)

    def worth(nodes: list[tuple[int, int]]) -> float:
        return sum(reaches[t][n] for t, n in nodes) - rate * (table[2 + len(nodes)] - table[2])

    every = [(t, n) for t, row in enumerate(reaches) for n in range(len(row))]
    subsets = itertools.chain.from_iterable(itertools.combinations(every, k) for k in range(6))
    best = max(worth(list(subset)) for subset in subsets)
    assert worth([(t, n) for t, nodes in enumerate(kept) for n in nodes]) == pytest.approx(best)
    assert worth_scoring(reaches, table, 2, rate, 1) == [[0], [0]]
    assert worth_scoring(reaches, table, 2, 1e6, 8) == [[], []]
