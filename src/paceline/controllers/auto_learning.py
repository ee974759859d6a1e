"""What `auto` learns from the steps since its last plan, all at once.

In: an AutoController whose cruise has counted steps. Out: costs, acceptance, rates and guards that know of them. Not here: how the
steps were counted (`controllers.outcomes`), what follows from what is learned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.controllers.buckets import batch_bucket

if TYPE_CHECKING:
    from paceline.controllers.auto import AutoController
    from paceline.controllers.counts import Counts


def learn(auto: AutoController) -> None:
    """Learn what the steps since the last plan brought."""
    if not auto.cruise.counts.steps:
        return
    found, size = auto.cruise.take(auto.acceptance), auto._size
    gate = auto._gates[batch_bucket(size)]
    gate.passed(found.steps)
    if not auto.cost.disturbed:
        drafted, table, gain = bool(found.asked), auto.now.table, auto.gain
        gate.record(size, found.tokens, found.seconds, admitted=True, asked=drafted, table=table, steps=found.steps, gain=gain)
    usual, levels = found.usual()
    auto._rested.beside = size, usual.rows, usual.score
    auto.cost.observe(size, auto._context, usual, auto.names, levels, always=True, steps=found.steps)
    auto.cost.observe_beside(size, auto._context, found.scoring, usual.rows)
    auto._rates.count(size, found.tokens, found.seconds, auto.now.table, found.steps)
    for one in auto.batch:
        for watch in one.watches:
            watch.passed(found.steps)
    _judge(auto, found)
    for drafter in range(len(auto.names)):
        asked, proposed = found.found(drafter)
        if asked:
            auto._yields[drafter] += (1.0 - 0.95**asked) * (proposed / asked - auto._yields[drafter])


def _judge(auto: AutoController, found: Counts) -> None:
    """Have every asked drafter's guard told what it brought."""
    trials, auto.cruise.trials, price = auto.cruise.trials, set(), auto._price()
    for (sequence, drafter), worth in found.worths(price, auto.now.table, auto._size).items():
        one = auto.batch[sequence]
        watch = auto._latest[drafter, one.greedy] = one.watches[drafter]
        if (sequence, drafter) in trials:
            watch.after_trial(worth.mean, worth.times)
        elif not watch.asleep:
            watch.record_many(worth.mean, worth.variance, worth.times)
