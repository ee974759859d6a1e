"""Owners of requests take turns, and each gets its share of the time; their tokens are what they would be alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from engine.harness import engine, tokens
from engine.test_scheduler import request
from toys import ToyRunner

from paceline.engine import Engine, FairQueue, Request, StepRecord, watching
from paceline.engine.fairness import Decoded, Shares
from paceline.engine.scheduler import Scheduler


def owned(owner: str, count: int, most: int = 6, **params: Any) -> list[Request]:
    found = [request(f"{owner}{i}", [1 + i % 5, 2, 3], most, **params) for i in range(count)]
    for one in found:
        one.owner = owner
    return found


def begun(live: Engine, requests: Sequence[Request]) -> list[str]:
    """Decode all; ids in the order in which they began."""
    order: dict[str, None] = {}

    def look(record: StepRecord) -> None:
        order.update(dict.fromkeys(sequence.request.id for sequence in record.sequences))

    for one in requests:
        live.add(one)
    with watching(live, look):
        while live.has_work:
            live.step()
    assert all(one.finished for one in requests)
    return list(order)


def alone(requests: Sequence[Request]) -> list[list[list[int]]]:
    found = []
    for one in requests:
        again = request(one.id, one.prompt_ids, one.max_tokens, n=one.params.n)
        begun(engine(ToyRunner(16, order=2), max_num_seqs=64), [again])
        found += tokens([again])
    return found


def test_a_queue_gives_owners_turns() -> None:
    queue = FairQueue[int]()
    for owner, item in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        queue.append(owner, item)
    queue.remove("a", 2)
    queue.remove("d", 2)
    assert sorted(queue) == [1, 3, 4, 5, 6]
    order = []
    while queue:
        assert len(queue) == 5 - len(order)
        order.append(queue.pop(queue.owners[0]))
    assert order == [1, 4, 5, 3, 6]


def test_a_queue_has_the_lowest_priority_number_of_an_owner_first() -> None:
    queue = FairQueue[str]()
    for owner, item, priority in (
        ("a", "a5", 5),
        ("a", "a0", 0),
        ("a", "a5 again", 5),
        ("b", "b9", 9),
        ("a", "a-1", -1),
    ):
        queue.append(owner, item, priority)
    order = []
    while queue:
        order.append(queue.pop(queue.owners[0]))
    assert order == ["a-1", "b9", "a0", "a5", "a5 again"], "owners take turns all the same"


def test_requests_of_an_owner_begin_by_priority() -> None:
    requests = [*owned("a", 5), *owned("b", 2)]
    for one, priority in zip(requests, (0, 3, -2, 3, 0, 9, 1), strict=True):
        one.priority = priority
    order = begun(engine(ToyRunner(16, order=2), max_num_seqs=1), requests)
    assert order == ["a2", "b1", "a0", "b0", "a4", "a1", "a3"]
    assert tokens(requests) == alone(requests)


@pytest.mark.parametrize(("most", "widest"), [(2, 2), (None, 8)])
def test_so_many_outputs_of_an_owner_take_part_in_a_step(most: int | None, widest: int) -> None:
    """And the others after them, all with the tokens that they have alone."""
    live, flood, other = engine(ToyRunner(16, order=2), max_num_seqs=16), owned("a", 2, 8, n=4), owned("b", 1, 8, n=4)
    for one in flood:
        one.max_running = most
    found: list[int] = []
    others: list[int] = []

    def look(record: StepRecord) -> None:
        owners = [sequence.request.owner for sequence in record.sequences]
        found.append(owners.count("a"))
        others.append(owners.count("b"))

    with watching(live, look):
        for one in (*flood, *other):
            live.add(one)
        while live.has_work:
            live.step()
    assert (max(found), max(others)) == (widest, 4)
    assert tokens([*flood, *other]) == alone([*flood, *other])


def test_requests_begin_in_turn() -> None:
    first, second = owned("a", 6), owned("b", 3)
    order = begun(engine(ToyRunner(16, order=2), max_num_seqs=1), [*first, *second])
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "a3", "a4", "a5"]
    assert tokens([*first, *second]) == alone([*first, *second])
    nobody = [*owned("a", 6), *owned("b", 3)]
    for one in nobody:
        one.owner = ""
    order = begun(engine(ToyRunner(16, order=2), max_num_seqs=1), nobody)
    assert order == [one.id for one in nobody], "the control, without owners: first come, first served"


@pytest.mark.parametrize("n", [1, 4])
def test_a_flood_makes_way_for_who_has_less(n: int) -> None:
    """Its outputs go on later, and no token changes."""
    live, flood = engine(ToyRunner(16, order=2), max_num_seqs=4), owned("a", 8, 40, n=n)
    small = owned("b", 1, 4)
    for one in flood:
        live.add(one)
    for _ in range(3):
        live.step()
    live.add(small[0])
    steps = 0
    while not small[0].finished:
        live.step()
        steps += 1
    assert steps < 20
    assert not any(one.finished for one in flood)
    while live.has_work:
        live.step()
    assert tokens([*flood, *small]) == alone([*flood, *small])


def test_who_has_less_takes_part_in_every_step_of_a_flood() -> None:
    """And has some for itself."""
    live, flood, small = engine(ToyRunner(16, order=2), max_num_seqs=8), owned("a", 8, 60), owned("b", 1, 30)
    steps: list[set[str]] = []

    def look(record: StepRecord) -> None:
        if small[0].outputs and not small[0].finished:
            steps.append({sequence.request.owner for sequence in record.sequences})

    with watching(live, look):
        for one in flood:
            live.add(one)
        live.step()
        live.add(small[0])
        while live.has_work:
            live.step()
    assert steps[0] == {"b"}, "its first token is not waited for"
    assert {"a"} not in steps


def test_owners_with_as_much_as_each_other_do_not_displace_each_other() -> None:
    paused: list[str] = []

    class Watched(Scheduler):
        def pause(self, sequence: Any) -> None:
            paused.append(sequence.request.owner)
            super().pause(sequence)

    live = engine(ToyRunner(16, order=2), max_num_seqs=4)
    live.scheduler.__class__ = Watched
    for one in owned("a", 6, 12):
        live.add(one)
    live.step()
    for one in owned("b", 6, 12):
        live.add(one)
    live.step()
    assert paused == ["a", "a"], "two places each"
    while live.has_work:
        live.step()
    assert paused == ["a", "a"]


def test_a_request_of_more_outputs_than_a_share_waits_and_gets_its_turn() -> None:
    live, flood = engine(ToyRunner(16, order=2), max_num_seqs=4), owned("a", 12, 5)
    wide = owned("b", 1, 5, n=4)
    order = begun(live, [*flood, *wide])
    assert order.index("b0") <= 4, "only what had begun is before it"
    assert tokens([*flood, *wide]) == alone([*flood, *wide])


def seconds_per_step(
    alone_a: float, alone_b: float, both: float, turns: Callable[[Shares, dict[str, int]], Any]
) -> Any:
    """Milliseconds that each of two owners, with 16 sequences and with one, has for each of its steps."""
    shares, clock, made = Shares(), 0.0, {"a": 0, "b": 0}
    times = {("a",): alone_a, ("b",): alone_b, ("a", "b"): both}
    sizes = {"a": 16, "b": 1}
    for _ in range(20):  # the first is alone for a while
        shares.turn({"a": sizes["a"]})
        shares.count({}, 0.0, {"a": Decoded(16, 16)}, 1e-3 * alone_a)
    for _ in range(30_000):
        due = sorted(turns(shares, sizes))
        took = times[tuple(due)]
        clock += took
        shares.count({}, 0.0, {owner: Decoded(sizes[owner], sizes[owner]) for owner in due}, 1e-3 * took)
        for owner in due:
            made[owner] += 1
    return clock / made["a"], clock / made["b"]


@pytest.mark.parametrize("both", [1.1, 3.6, 12.0])
def test_nobody_takes_twice_as_long_as_alone_but_a_flood(both: float) -> None:
    each = seconds_per_step(0.97 * both, 1.0, both, lambda shares, sizes: shares.turn(sizes))
    assert each[0] < 4.4 * 0.97 * both
    assert each[1] < 1.45


def test_without_turns_one_takes_as_long_as_the_flood() -> None:
    def everybody(shares: Shares, sizes: dict[str, int]) -> Any:
        shares.turn(sizes)
        return sizes

    assert seconds_per_step(11.6, 1.0, 12.0, everybody)[1] == pytest.approx(12.0)


def test_prompts_of_a_flood_leave_others_their_turns() -> None:
    """Long prompts of one owner, steps of another, who has fewer sequences."""
    shares, made, clock = Shares(), 0, 0.0
    shares.turn({"a": 16})
    shares.count({"a": 512}, 0.4, {}, 0.0)
    for _ in range(20_000):
        due = shares.turn({"a": 16, "b": 1})
        reading, decoding = (0.4 if "a" in due else 0.0), (0.01 if "b" in due else 0.0)
        clock += reading + decoding
        made += "b" in due
        shares.count({"a": 256} if reading else {}, reading, {"b": Decoded(1, 1)} if decoding else {}, decoding)
    assert clock / made < 0.0145


def test_who_is_new_goes_on_alone_until_its_first_token_and_pays_later() -> None:
    shares, flood = Shares(), {"a": Decoded(16, 16)}
    shares.turn({"a": 16})
    shares.count({}, 0.0, flood, 0.02)
    alone = 0
    while list(shares.turn({"a": 16, "b": 1})) == ["b"]:
        shares.count({"b": 32}, 0.1, {}, 0.0)
        alone += 1
    assert 5 < alone < 20, "as much as it is owed, and a loan"
    assert list(shares.turn({"a": 16, "b": 1})) == ["a"]
    shares = Shares()
    shares.turn({"a": 16})
    for decoded in ({}, {"b": Decoded(1, 1)}):
        shares.turn({"a": 16, "b": 1})
        shares.count({}, 0.0, decoded, 1.0)
    assert "a" in shares.turn({"a": 16, "b": 1}), "b has its first token"


def test_who_comes_again_and_again_takes_no_more_than_a_share() -> None:
    shares, clock, flood, pieces = Shares(), 0.0, 0.0, 2
    for step in range(10_000):
        here = {"a": 16} if step % 7 == 0 else {"a": 16, "b": 1}
        pieces = 2 if step % 7 == 0 else pieces
        due = shares.turn(here)
        read = {"b": 32} if "b" in due and pieces else {}
        decoded = {one: Decoded(here[one], here[one]) for one in due if one == "a" or not read}
        pieces -= len(read)
        seconds = 0.04 * len(read), 0.02 * len(decoded)
        shares.count(read, seconds[0], decoded, seconds[1])
        clock, flood = clock + sum(seconds), flood + 0.02 * ("a" in due)
    assert flood / clock > 0.2


def test_long_prompts_are_read_in_short_pieces_while_another_waits_or_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("paceline.engine.fairness.perf_counter", lambda: now)
    for seconds, several, first in ((1e-4, 100, 256), (5e-4, 20, 100), (1e-2, 16, 16)):
        shares = Shares()
        shares.turn({"a": 1})
        shares.count({"a": 512}, 512 * seconds, {}, 0.0)
        assert shares.prefill_quota(512) == 512, "nobody waits"
        shares.turn({"a": 1, "b": 1})
        assert shares.prefill_quota(512) == first, "of b, which waits for its first token"
        shares.count({}, 0.0, {"b": Decoded(1, 1)}, 0.1)
        shares.turn({"a": 1, "b": 1})
        assert shares.prefill_quota(512) == several
        assert shares.prefill_quota(4) <= 4
        shares.turn({"a": 1})
        now += 50.0
        assert shares.prefill_quota(512) == several
        now += 20.0
        assert shares.prefill_quota(512) == 512


@pytest.mark.parametrize(("step", "token", "quota"), [(3e-4, 5e-5, 24), (8e-3, 5e-5, 200), (3e-4, 2e-3, 16)])
def test_a_piece_of_a_prompt_takes_no_more_than_a_few_decoding_steps(step: float, token: float, quota: int) -> None:
    """Of a small model, whose others wait for it; a larger one reads as much as before (the control)."""
    shares = Shares()
    shares.turn({"a": 16})
    shares.count({"a": 512}, 512 * token, {}, 0.0)
    for _ in range(2):  # the second finds that b has its first token
        shares.turn({"a": 16, "b": 1})
        shares.count({}, 0.0, {"b": Decoded(1, 1)}, step)
    shares.turn({"a": 16, "b": 1})
    assert shares.prefill_quota(512) == pytest.approx(quota, abs=1)
    shares.turn({"a": 16})
    assert shares.prefill_quota(512) == pytest.approx(quota, abs=1), "b may come again"
