"""Searches that a reward or a value guides: each collapses to what its card says, and finds what a beam does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import log, sqrt
from typing import Any, ClassVar

import pytest
import torch

from paceline import LLM, SamplingParams, registry
from paceline.engine import RequestOutput
from paceline.errors import ConfigError
from paceline.search.methods.pg_td import program_of
from paceline.search.sandbox.verdicts import available_isolation
from tests.search.letters import (
    LETTERS,
    PROMPT,
    letter_params,
    likelihoods,
    logprobs_of,
    nothing,
    searched,
    texts,
    wanted,
    without_pattern,
)

isolated = pytest.mark.skipif(available_isolation() is None, reason="this machine permits no user namespaces")


@pytest.fixture(scope="module")
def likelihood(llm: LLM) -> dict[str, float]:
    return likelihoods(llm)


# ------------------------------------------------------------------------------------------------ PG-TD


class Watched(registry.load("searches", "pg_td")):  # type: ignore[misc]
    """Remembers the searches that were made."""

    made: ClassVar[list[Any]] = []

    def __init__(
        self,
        reward: Any = None,
        *,
        rollouts: int = 16,
        branching: int = 3,
        sequence_cache: bool = True,
        top_k_cache: bool = True,
    ) -> None:
        super().__init__(
            reward,
            rollouts=rollouts,
            branching=branching,
            sequence_cache=sequence_cache,
            top_k_cache=top_k_cache,
        )
        self.made.append(self)


WATCHED = f"{__name__}:Watched"


def watched(llm: LLM, how: SamplingParams, **search: Any) -> tuple[RequestOutput, list[str]]:
    """What was found, and the texts that the rollouts added to the tree."""
    found = searched(llm, how, method=WATCHED, **search)
    return found, [one.written() for one in Watched.made[-1].tried]


def test_one_rollout_is_greedy_decoding(llm: LLM) -> None:
    for prompt in ("def fib(n):", "Once upon a time", PROMPT):
        how = SamplingParams(temperature=0.0, max_tokens=20)
        (plain,) = llm.generate(prompt, how)
        found = searched(llm, how, prompt, method="pg_td", reward=nothing, rollouts=1)
        assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    (plain,) = llm.generate(PROMPT, letter_params(llm))
    found = searched(
        llm, letter_params(llm), method="pg_td", reward=lambda t: [0.1 + 0.2 * t[0].count("a")], rollouts=60
    )
    assert texts(found) != texts(plain)


def test_without_rewards_visits_follow_the_chances_and_the_answer_is_greedy(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, letter_params(llm))
    found, tried = watched(llm, letter_params(llm), reward=nothing, rollouts=40)
    assert texts(found) == texts(plain)
    chances, visits, expected = logprobs_of(llm, "").exp(), torch.zeros(3), []
    for _ in tried:
        edge = int((chances / (1 + visits)).argmax()) if visits.sum() else int(chances.argmax())
        visits[edge] += 1
        expected.append(LETTERS[edge])
    assert [one[0] for one in tried] == expected
    assert len(set(expected)) > 1
    _, other = watched(
        llm, letter_params(llm), reward=lambda found: [0.9 * one.startswith("a") for one in found], rollouts=40
    )
    assert [one[0] for one in other] != expected


def test_a_rewarded_text_is_found_where_a_beam_misses_it(llm: LLM) -> None:
    beam = texts(searched(llm, letter_params(llm, n=8), method="beam", beam_width=8))
    for target in ("babb", "bcbb", "ccbb"):
        assert target not in beam
        best = searched(llm, letter_params(llm), method="pg_td", reward=wanted(target), rollouts=48).outputs[0]
        assert (best.text, best.score) == (target, 1.0)
        worse = searched(llm, letter_params(llm), method="pg_td", reward=wanted(target), rollouts=4).outputs[0]
        assert worse.score == 0.0


@pytest.mark.parametrize("reward", [nothing, wanted("bcbb"), lambda found: [one.count("a") / 4 for one in found]])
def test_caches_change_nothing_but_the_cost(llm: LLM, reward: Any) -> None:
    costs, found = {}, {}
    for sequence_cache, top_k_cache in product((False, True), repeat=2):
        result, tried = watched(
            llm,
            letter_params(llm, n=20),
            reward=reward,
            rollouts=30,
            sequence_cache=sequence_cache,
            top_k_cache=top_k_cache,
        )
        assert result.search is not None
        costs[sequence_cache, top_k_cache] = result.search.num_tokens
        found[sequence_cache, top_k_cache] = (tried, texts(result), [one.score for one in result.outputs])
    assert all(one == found[False, False] for one in found.values())
    assert costs[True, True] <= min(costs[True, False], costs[False, True]) < costs[False, False]


def test_above_temperature_0_rollouts_are_sampled(llm: LLM) -> None:
    hot = letter_params(llm, temperature=1.5, n=20)
    found, tried = watched(llm, hot, reward=nothing, rollouts=20)
    greedy, _ = watched(llm, letter_params(llm, n=20), reward=nothing, rollouts=20)
    assert len(tried) == 20
    assert set(texts(found)) != set(texts(greedy))
    again, _ = watched(llm, hot, reward=nothing, rollouts=20, sequence_cache=False, top_k_cache=False)
    assert texts(again) == texts(found), "what was sampled once is not what will be sampled again"


def grown(likelihood: dict[str, float], rank: dict[str, int], rollouts: int) -> list[str]:
    """The texts that rollouts add to a tree of two letters at a place, by the paper's formulas."""
    visits, chance, best, count = {"": 1}, dict[str, float](), dict[str, float](), dict[str, int]()

    def after(text: str) -> list[str]:
        return sorted((text + one for one in LETTERS), key=lambda one: -likelihood[one])[:2]

    def promise(child: str) -> float:
        seen = visits[child[:-1]]
        weight = log((seen + 10 + 1) / 10) + 4
        return best.get(child, 0.0) + weight * chance[child] * sqrt(log(seen)) / (1 + count.get(child, 0))

    def expand(text: str) -> None:
        visits[text], parts = 1, torch.tensor([likelihood[one] for one in after(text)]).softmax(0).tolist()
        chance.update(zip(after(text), parts, strict=True))

    expand("")
    tried = []
    for _ in range(rollouts):
        at = ""
        while at in visits and len(at) < 3:
            at = max(after(at), key=promise)
        tried.append(at)
        if len(at) < 3:
            expand(at)
        end = at
        while len(end) < 3:
            end = after(end)[0]
        visits[at] = visits.get(at, 0) + 1
        for size in range(1, len(at) + 1):
            count[at[:size]] = count.get(at[:size], 0) + 1
            visits[at[: size - 1]] += 1
            best[at[:size]] = max(best.get(at[:size], 0.0), rank[end] / 110)
    return tried


def test_the_tree_grows_by_the_formulas(llm: LLM, likelihood: dict[str, float]) -> None:
    rank = without_pattern(list(likelihood))
    how = letter_params(llm, max_tokens=3)
    _, tried = watched(llm, how, reward=lambda found: [rank[one] / 110 for one in found], rollouts=40, branching=2)
    assert tried == grown(likelihood, rank, 40)
    assert tried != grown(likelihood, dict.fromkeys(rank, 50), 40), "rewards count"
    assert len(set(tried)) > 8


def test_a_search_ends_when_there_is_nothing_better_to_find(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, letter_params(llm))
    _, tried = watched(llm, letter_params(llm), reward=wanted(plain.outputs[0].text), rollouts=30)
    assert len(tried) == 1
    _, tried = watched(llm, letter_params(llm, n=2), reward=wanted(plain.outputs[0].text), rollouts=30)
    assert len(tried) == 30


def test_a_budget_ends_it_with_the_best_so_far(llm: LLM) -> None:
    found = searched(llm, letter_params(llm), method="pg_td", reward=nothing, rollouts=1000, budget_tokens=12)
    assert found.search is not None
    assert found.search.budget_spent
    assert len(found.outputs[0].text) == 4
    short = searched(llm, letter_params(llm), method="pg_td", reward=nothing, rollouts=1000, budget_tokens=2)
    assert short.outputs[0].finish_reason == "abort"


ADD = "def add(a, b):\n    return"


def cases_of(prompt: str) -> list[str]:
    assert prompt == ADD
    return ["assert add(1, 2) == 3", "assert add(2, 5) == 7"]


@isolated
def test_a_program_that_passes_its_tests_is_found(llm: LLM) -> None:
    how = SamplingParams(temperature=0.0, max_tokens=8)
    (plain,) = llm.generate(ADD, how)
    for tests in (cases_of(ADD), cases_of, f"{__name__}:cases_of"):
        best = searched(llm, how, ADD, method="pg_td", tests=tests, rollouts=12).outputs[0]
        assert best.score == 1.0
        space: dict[str, Any] = {}
        exec(ADD + best.text, space)
        assert space["add"](20, 3) == 23
    assert best.text != plain.outputs[0].text
    half = searched(
        llm, how, ADD, method="pg_td", tests=["assert add(1, 2) == 3", "assert add(1, 2) == 4"], rollouts=12
    )
    assert half.outputs[0].score == 0.5


def test_the_program_is_the_block_of_code_where_there_is_one() -> None:
    assert program_of("def f():", " return 1") == "def f(): return 1"
    assert program_of("Write f.", "Here:\n```python\ndef f(): 1\n```\nor\n```\nx\n```") == "def f(): 1\n"
    assert program_of("Write f.", "```\ndef f(): 1") == "def f(): 1"


def test_programs_are_not_run_without_isolation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.search.sandbox.verdicts.available_isolation", lambda: None)
    how = SamplingParams(temperature=0.0, max_tokens=8)
    with pytest.raises(ConfigError, match="unsafe_execution"):
        searched(llm, how, ADD, method="pg_td", tests=cases_of(ADD))
    best = searched(llm, how, ADD, method="pg_td", tests=cases_of(ADD), rollouts=12, unsafe_execution=True).outputs[0]
    assert best.score == 1.0


# ------------------------------------------------------------------------------------------------ A*-decoding


def half(found: Sequence[str]) -> list[float]:
    return [0.5] * len(found)


def expanded(llm: LLM, reward: Any, **search: Any) -> tuple[list[list[str]], RequestOutput]:
    """The letters sampled behind one text after the other, as the reward was asked of them, and what was found."""
    asked: list[list[str]] = []

    def watching(found: Sequence[str]) -> list[float]:
        asked.append(list(found))
        return [float(one) for one in reward(found)]

    how = letter_params(llm, temperature=1.0, max_tokens=3)
    options = {"method": "a_star", "step_tokens": 1, "branching": 64, "cost": "surprisal", "path": "sum", **search}
    return asked, searched(llm, how, reward=watching, **options)


def replayed(
    asked: Sequence[Sequence[str]], likelihood: dict[str, float], ahead: Any, weight: float = 1.0
) -> list[str]:
    """The texts that are taken from the queue, given what was sampled behind each: the last one has ended."""
    after, queue, taken = {one[0][:-1]: one for one in asked}, [""], list[str]()
    while len(taken) == 0 or len(taken[-1]) < 3:
        best = min(queue, key=lambda text: ahead(text) - weight * likelihood[text])
        queue.remove(best)
        queue += after.get(best, [])
        taken.append(best)
    return taken


def test_a_constant_reward_is_uniform_cost_search_and_without_weight_the_best_is_next(
    llm: LLM, likelihood: dict[str, float]
) -> None:
    asked, found = expanded(llm, half)
    order = [one[0][:-1] for one in asked]
    assert [*order, texts(found)[0]] == replayed(asked, likelihood, lambda _: 0.5)
    costs = [-likelihood[text] for text in order]
    assert costs == sorted(costs)
    assert texts(found) == [max((one for one in likelihood if len(one) == 3), key=likelihood.__getitem__)]
    rank = without_pattern(list(likelihood))

    def reward(found: Sequence[str]) -> list[float]:
        return [rank[one] / 100 for one in found]

    orders = []
    for weight in (0.0, 0.1, 3.0):
        asked, found = expanded(llm, reward, path_weight=weight)
        orders.append([*(one[0][:-1] for one in asked), texts(found)[0]])
        assert orders[-1] == replayed(asked, likelihood, lambda text: 1 - rank[text] / 100, weight)
    assert orders[0] != orders[2], "the cost of the steps counts"


def test_with_the_true_remaining_cost_it_goes_straight_to_the_best_text(llm: LLM, likelihood: dict[str, float]) -> None:
    whole = [one for one in likelihood if len(one) == 3]
    best = max(whole, key=likelihood.__getitem__)

    def remaining(found: Sequence[str]) -> list[float]:
        ends = [max(likelihood[one] for one in whole if one.startswith(text)) for text in found]
        return [
            min(1.0, float(torch.tensor(end - likelihood[text]).exp())) for end, text in zip(ends, found, strict=True)
        ]

    asked, found = expanded(llm, remaining, heuristic="log")
    assert texts(found) == [best]
    assert [one[0][:-1] for one in asked] == ["", best[:1], best[:2]]
    asked, found = expanded(llm, half, heuristic="log")
    assert texts(found) == [best]
    assert len(asked) > 3, "without a guide it looks elsewhere too"
    worst = min(LETTERS, key=likelihood.__getitem__)
    _, found = expanded(llm, lambda found: [1.0 if one.startswith(worst) else 0.001 for one in found], heuristic="log")
    assert texts(found) != [best], "a reward that overestimates what is left of the best text misses it"


def test_the_reward_is_asked_once_of_each_different_step(llm: LLM) -> None:
    asked, found = expanded(llm, half, finished=6)
    every = [text for one in asked for text in one]
    assert len(every) == len(set(every)) > 10
    assert all(len({text[:-1] for text in one}) == 1 for one in asked)
    assert {one[0][:-1] for one in asked[1:]} <= set(every)
    assert set(texts(found)) <= set(every)


def test_texts_that_wait_in_the_queue_keep_their_own_rules(llm: LLM) -> None:
    """The search comes back to texts left behind: each goes on under the penalties of its own tokens."""
    how = letter_params(llm, temperature=1.0, max_tokens=3, frequency_penalty=1.5, n=6)
    search = {"method": "a_star", "step_tokens": 1, "branching": 16, "reward": half, "cost": "surprisal"}
    found = searched(llm, how, **search)
    plain = likelihoods(llm)
    assert len(found.outputs) == 6
    for one in found.outputs:
        total = 0.0
        for place, letter in enumerate(one.text):
            before = one.text[:place]
            row = logprobs_of(llm, before) - 1.5 * torch.tensor([before.count(letter) for letter in LETTERS])
            total += float(row.log_softmax(-1)[LETTERS.index(letter)])
        assert one.cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert any(abs(one.cumulative_logprob - plain[one.text]) > 0.1 for one in found.outputs)


# ------------------------------------------------------------------------------------------------ VED


def count_b(found: Sequence[str]) -> list[float]:
    return [float(one.count("b")) for one in found]


def test_without_budget_for_more_it_is_the_beam(llm: LLM) -> None:
    for width in (1, 2, 3):
        how = letter_params(llm, max_tokens=3, n=width)
        beam = searched(llm, how, method="beam", beam_width=width)
        found = searched(llm, how, method="ved", value=count_b, beam_width=width, budget_multiplier=1.0)
        assert sorted(texts(found)[:width]) == sorted(texts(beam))
    more = searched(llm, how, method="ved", value=count_b, beam_width=3, budget_multiplier=3.0)
    assert sorted(texts(more)) != sorted(texts(beam))


def added(llm: LLM, value: Any, **search: Any) -> list[str]:
    """The texts that are added to the tree after its beam of two, in order."""
    asked: list[list[str]] = []

    def watched_value(found: Sequence[str]) -> list[float]:
        asked.append(list(found))
        return [float(one) for one in value(found)]

    searched(llm, letter_params(llm, max_tokens=3), method="ved", value=watched_value, beam_width=2, **search)
    return [one[0] for one in asked[4:]]


def test_without_bonuses_it_is_greedy_by_value(llm: LLM, likelihood: dict[str, float]) -> None:
    rank = without_pattern(list(likelihood))
    value = lambda found: [rank[one] for one in found]  # noqa: E731
    setting = {"entropy_weight": 0.0, "exploration": 0.0, "gated": False, "budget_multiplier": 10.0}
    order = added(llm, value, **setting)
    tree = {text for text in likelihood if text not in order}
    for text in order:
        at = ""
        while True:
            here = [
                one for one in tree if len(one) == len(at) + 1 <= 2 and one.startswith(at) and open_below(tree, one)
            ]
            choices = here + ([at] if sum(one[:-1] == at for one in tree if one) < 3 else [])
            best = max(choices, key=rank.__getitem__)
            if best == at:
                break
            at = best
        assert text[:-1] == at
        missing = [at + letter for letter in LETTERS if at + letter not in tree]
        assert text == max(missing, key=likelihood.__getitem__)
        tree.add(text)
    assert len(order) > 20
    assert added(llm, value, **setting | {"exploration": 500.0}) != order


def open_below(tree: set[str], text: str) -> bool:
    """Whether something is missing below a text of one or two letters."""
    below = [one for one in tree if one.startswith(text) and len(one) < 3]
    return any(one + letter not in tree for one in below for letter in LETTERS)


def ved_by_hand(
    likelihood: dict[str, float], value: dict[str, float], count: int, weight: float, exploration: float, gated: bool
) -> list[str]:
    """The texts that are added behind a beam of two, by the paper's formulas: down by U = G + beta sqrt(ln(N_root + 1)
    / (N + 1)) with G = V + lambda H, to a place whose G is no less than the mean of its depth.
    """
    chances = {text: torch.tensor([likelihood[text + one] - likelihood[text] for one in LETTERS]).exp()
               for text in likelihood if len(text) < 3}  # fmt: skip
    worth = {text: value[text] + weight * float(-(p * p.log()).sum()) for text, p in chances.items()}
    tree, level = [""], [""]
    while len(level[0]) < 3:
        level = sorted((text + one for text in level for one in LETTERS), key=lambda one: -likelihood[one])[:2]
        tree += level
    visits, order = dict.fromkeys(likelihood, 0), list[str]()

    def below(text: str) -> list[str]:
        return [one for one in tree if one[:-1] == text and one]

    def expandable(text: str) -> bool:
        same = [worth[one] for one in tree if len(one) == len(text)]
        return len(below(text)) < 3 and (not gated or worth[text] >= sum(same) / len(same) - 1e-9)

    def reach(text: str) -> bool:
        return len(text) < 3 and (expandable(text) or any(map(reach, below(text))))

    while len(order) < count and reach(""):
        path = [""]
        while True:
            choices = [one for one in below(path[-1]) if reach(one)] + [path[-1]] * expandable(path[-1])
            best = max(
                choices, key=lambda one: worth[one] + exploration * sqrt(log(visits[""] + 1) / (visits[one] + 1))
            )
            if best == path[-1]:
                break
            path.append(best)
        order.append(max((best + one for one in LETTERS if best + one not in tree), key=likelihood.__getitem__))
        tree.append(order[-1])
        for one in [*path, order[-1]]:
            visits[one] += 1
    return order


VED = {"weight": 0.6, "exploration": 0.4, "gated": True}


def test_the_tree_of_values_grows_by_the_formulas(llm: LLM, likelihood: dict[str, float]) -> None:
    value = {text: rank / 100 for text, rank in without_pattern(list(likelihood)).items()}
    orders = []
    for change in ({}, {"weight": 0.0}, {"exploration": 0.0}, {"gated": False}, {"weight": -0.6}):
        setting = VED | change
        order = ved_by_hand(likelihood, value, 12, **setting)  # type: ignore[arg-type]
        orders.append(order)
        if setting["weight"] >= 0.0:
            found = added(
                llm, lambda texts: [value[one] for one in texts], entropy_weight=setting["weight"],
                exploration=setting["exploration"], gated=setting["gated"], budget_multiplier=10.0,
            )  # fmt: skip
            assert found[:12] == order
    assert len({tuple(one) for one in orders}) == len(orders), "each part of the formulas counts"


def test_with_likelihood_as_its_value_and_no_limit_it_ranks_everything(llm: LLM, likelihood: dict[str, float]) -> None:
    whole = sorted((one for one in likelihood if len(one) == 3), key=lambda one: -likelihood[one])
    search = {"method": "ved", "value": lambda found: [likelihood[one] for one in found], "budget_multiplier": 100.0}
    found = searched(llm, letter_params(llm, max_tokens=3, n=27), gated=False, beam_width=2, **search)
    assert texts(found) == whole
    assert [one.score for one in found.outputs] == pytest.approx([one.cumulative_logprob for one in found.outputs])
    gated = searched(llm, letter_params(llm, max_tokens=3, n=27), gated=True, beam_width=2, **search)
    assert len(gated.outputs) < 27


def test_the_budget_is_so_many_times_what_the_beam_may_cost(llm: LLM) -> None:
    """1 + 2 * 2 rows, of which the beam of two takes all; each text that is added to its tree costs one more."""
    for multiplier in (1.0, 2.0, 3.0, 3.5):
        assert len(added(llm, count_b, budget_multiplier=multiplier, gated=False)) == int(5 * multiplier) - 5


def test_above_temperature_0_what_is_added_is_sampled(llm: LLM) -> None:
    setting: dict[str, Any] = {"method": "ved", "value": count_b, "beam_width": 1, "budget_multiplier": 3.0}
    for temperature in (0.0, 1.5):
        made = set()
        for seed in range(6):
            how = letter_params(llm, max_tokens=3, n=20, temperature=temperature, seed=seed)
            made.add(frozenset(texts(searched(llm, how, **setting))))
        assert (len(made) > 1) == (temperature > 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("multiplier", [1.0, 1.5, 2.0, 4.0])
def test_the_budget_is_never_exceeded(llm: LLM, multiplier: float, temperature: float) -> None:
    how = letter_params(llm, max_tokens=4, n=40, temperature=temperature)
    found = searched(llm, how, method="ved", value=count_b, beam_width=3, budget_multiplier=multiplier)
    assert found.search is not None
    assert found.search.num_tokens <= int(multiplier * (1 + 3 * 3))
    assert (len(found.outputs) > 3) == (multiplier > 1)
    assert len(set(texts(found))) == len(found.outputs)


def test_rules_say_what_may_follow(llm: LLM) -> None:
    colours = ["red", "green", "blue", "black"]
    how = SamplingParams(temperature=0.0, max_tokens=8, n=4, structured_outputs={"choice": colours})
    value = lambda found: [float(one == "black") for one in found]  # noqa: E731
    found = searched(llm, how, method="ved", value=value, beam_width=1, budget_multiplier=6.0)
    assert found.outputs[0].text == "black"
    assert {one.text for one in found.outputs if one.finish_reason == "stop"} <= set(colours)
    (plain,) = llm.generate(PROMPT, how)
    assert plain.outputs[0].text != "black"


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"method": "pg_td"}, "needs a reward or tests"),
        ({"method": "pg_td", "reward": nothing, "tests": ["assert f()"]}, "needs a reward or tests"),
        ({"method": "pg_td", "reward": lambda found: [2.0]}, "reward must give a number in 0..1"),
        ({"method": "pg_td", "tests": [], "unsafe_execution": True}, "tests must be one or more"),
        ({"method": "pg_td", "tests": [1], "unsafe_execution": True}, "tests must be a string or a list"),
        ({"method": "pg_td", "tests": "assert f()"}, "tests must be a list of tests, a function, or"),
        ({"method": "pg_td", "tests": ["x"], "test_seconds": 0}, "test_seconds must be above 0"),
        ({"method": "pg_td", "reward": nothing, "rollouts": 0}, "rollouts must be an integer"),
        ({"method": "ved"}, "value must be a function"),
        ({"method": "ved", "value": lambda found: [float("nan")] * len(found)}, "value must give a finite number"),
        ({"method": "ved", "value": count_b, "budget_multiplier": 0.5}, "budget_multiplier must be in 1..1000000"),
    ],
)
def test_bad_options_get_one_line(llm: LLM, search: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        searched(llm, letter_params(llm), **search)
