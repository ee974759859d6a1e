"""What a replay holds agrees with the output, with the target's own probabilities, and with what the controller
granted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.controllers import Controller, Plan, Signal
from paceline.controllers.policies import FixedController
from paceline.engine import drafter_set, step_clock
from paceline.errors import ConfigError
from paceline.explain import Recorder
from paceline.explain import recorder as replay
from paceline.explain.page import summarize_replay
from paceline.explain.recorder import LIKELIEST, places, untried_siblings
from paceline.llm import BUNDLED
from paceline.sampling import Rules
from paceline.tree import Budget, TokenTree, Trial

PROMPT = "One day, a little girl named Lily found a needle"
DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft")}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
STATUSES = {"accepted", "ended", "rejected", "untried", "unreached", "cut", "probe"}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=DRAFT | {"num_speculative_tokens": 4}, dtype="float32", seed=3)


def recorded(llm: LLM, params: SamplingParams = GREEDY, prompt: Any = PROMPT) -> dict[str, Any]:
    recorder = Recorder(llm)
    for _ in recorder.run(prompt, params):
        pass
    return recorder.data()


def path_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [node for node in step["nodes"] if node["status"] in ("accepted", "ended")]


@pytest.mark.parametrize("planning", [5.0, 0.0])
def test_planning_is_part_of_the_steps_and_recording_is_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, planning: float
) -> None:
    now, plan, record = [0.0], FixedController.plan, replay.plain_step

    def planned(controller: FixedController, signals: Any) -> Plan:
        now[0] += planning
        return plan(controller, signals)

    def kept(*arguments: Any) -> Any:
        now[0] += 1.0
        return record(*arguments)

    monkeypatch.setattr(FixedController, "plan", planned)
    monkeypatch.setattr(replay, "plain_step", kept)
    for module in (replay, step_clock, drafter_set):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    data = recorded(llm, replace(GREEDY, max_tokens=6))
    assert data["record_seconds"] == len(data["steps"])
    assert {sum(step["seconds"].values()) for step in data["steps"]} == {planning}
    own = sum(sum(step["seconds"].values()) for step in data["steps"])
    assert summarize_replay(data)["tokens_per_second"] == pytest.approx(len(data["tokens"]) / own if own else 0.0)


CASES = {
    "fixed": (DRAFT | {"num_speculative_tokens": 4}, GREEDY),
    "auto": ({"method": "auto"}, GREEDY),
    "a list": ({"method": ["ngram", DRAFT], "num_speculative_tokens": 6}, GREEDY),
    "trees": (DRAFT | {"num_speculative_tokens": 12, "tree_width": 3}, GREEDY),
    "plain": (None, GREEDY),
    "sampled drafts": (DRAFT | {"num_speculative_tokens": 4}, replace(GREEDY, temperature=0.8, top_p=0.95)),
    "rules": (DRAFT | {"num_speculative_tokens": 4}, replace(GREEDY, temperature=0.7, repetition_penalty=1.3, seed=5)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replay_spells_the_output(llm: LLM, case: str) -> None:
    config, params = CASES[case]
    data = recorded(llm.with_speculative_config(config), params)
    json.dumps(data, allow_nan=False)
    output = data["output"]
    assert [token["token"] for token in data["tokens"]] == output["token_ids"]
    assert "".join(token["text"] for token in data["tokens"]) == output["text"]
    assert len(data["steps"]) == output["metrics"]["num_steps"]
    for index, step in enumerate(data["steps"]):
        own = [token for token in data["tokens"] if token["step"] == index]
        assert len(own) == step["count"]
        assert [token["token"] for token in own] == output["token_ids"][step["start"] : step["start"] + step["count"]]
        ids = {step["root"], *(node["token"] for node in step["nodes"]), *(one["token"] for one in step["top"])}
        assert {str(token) for token in ids} <= data["texts"].keys()
        assert len(step["top"]) == LIKELIEST
        assert len(step["drafters"]) == len(data["drafters"])
        assert step["words"] != ""
        assert step["error"] is None
    scored = [node for step in data["steps"] for node in step["nodes"] if node["status"] != "cut"]
    assert len(scored) == output["metrics"]["num_draft_tokens"]
    assert sum(len(path_of(step)) for step in data["steps"]) == output["metrics"]["num_accepted_tokens"]
    assert {node["status"] for node in scored} <= STATUSES


@pytest.mark.parametrize("case", ["fixed", "trees", "a list"])
def test_every_node_has_the_fate_that_its_place_gives_it(llm: LLM, case: str) -> None:
    data = recorded(llm.with_speculative_config(CASES[case][0]))
    seen = set()
    for step in data["steps"]:
        nodes, at = step["nodes"], step["start"]
        told = [*data["output"]["token_ids"][at:], None, None]
        for node in nodes:
            parent = nodes[node["parent"]] if node["parent"] >= 0 else None
            assert node["depth"] == (1 if parent is None else parent["depth"] + 1)
            seen.add(node["status"])
            if node["status"] == "cut":
                assert case == "a list", "of one drafter everything is scored"
            elif parent is not None and parent["status"] not in ("accepted", "ended"):
                assert node["status"] == "unreached"
            elif at + node["depth"] <= len(data["output"]["token_ids"]):
                assert node["status"] == ("accepted" if told[node["depth"] - 1] == node["token"] else "rejected")
    assert seen >= {"accepted", "rejected", "unreached"}


def test_the_probabilities_are_the_target_s_own(llm: LLM) -> None:
    data = recorded(llm)
    (plain,) = llm.with_speculative_config(None).generate(PROMPT, replace(GREEDY, logprobs=0))
    assert plain.outputs[0].logprobs is not None
    told = [
        math.exp(entry[token].logprob)
        for entry, token in zip(plain.outputs[0].logprobs, plain.outputs[0].token_ids, strict=True)
    ]
    found = [token["p"] for token in data["tokens"]]
    assert found == pytest.approx(told, rel=2e-3)
    assert found[1:] != pytest.approx(told[:-1], rel=2e-3)


def test_the_rows_are_those_that_the_verifier_saw(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step applies the rules twice, for the verifier and then for the replay, which has to take the step's tokens
    back.
    """
    apply, rewind = Rules.apply, Rules.rewind
    rows: list[torch.Tensor] = []

    def spied(self: Rules, logits: torch.Tensor, tree: TokenTree) -> torch.Tensor:
        rows.append(apply(self, logits, tree).clone())
        return rows[-1]

    monkeypatch.setattr(Rules, "apply", spied)
    monkeypatch.setattr(Rules, "by_row", spied)  # what the verifier asks: the same rows, made one by one
    recorded(llm, CASES["rules"][1])
    assert len(rows) > 20
    assert all(torch.equal(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True))
    rows.clear()
    monkeypatch.setattr(Rules, "rewind", lambda self, count: rewind(self, 0))
    recorded(llm, CASES["rules"][1])
    assert not all(torch.equal(a, b) for a, b in zip(rows[::2], rows[1::2], strict=True))


def test_rules_show_in_the_probabilities(llm: LLM) -> None:
    data = recorded(llm, replace(GREEDY, temperature=0.9, top_k=1, max_tokens=12))
    assert {token["p"] for token in data["tokens"]} == {1.0}
    assert {node["p"] for step in data["steps"] for node in step["nodes"]} <= {0.0, 1.0}


class Stubborn(FixedController):
    """Stops every draft before level 3 and keeps one node of a tree."""

    name = "stubborn"

    def plan(self, signals: Sequence[Signal]) -> Plan:
        budgets = [
            [replace(budget, go_on=lambda depth, confidence, features: depth < 3) for budget in row]
            for row in super().plan(signals).budgets
        ]
        return Plan(budgets, steps=3)

    def select(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return [tree if len(tree) < 2 else TokenTree.chain([int(tree.tokens[0])], confidence=[0.5]) for tree in trees]


class Silent(Controller):
    """A controller without words, whose every other plan is plain; each plan holds for three steps."""

    name = "silent"

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, signals: Sequence[Signal]) -> Plan:
        self.plans += 1
        return Plan([[Budget(2, 2)]], 3) if self.plans % 2 else Plan.nothing(1, 3)


@pytest.fixture
def governed(llm: LLM) -> Iterator[Any]:
    """The LLM under a controller of one's choice."""
    before = llm.engine.parts.controller

    def choose(controller: Any) -> LLM:
        llm.engine.use_controller(controller)
        return llm

    yield choose
    llm.engine.use_controller(before)


def test_budgets_stops_and_cuts_are_heard(governed: Any) -> None:
    data = recorded(governed(Stubborn(5)))
    asked = [one for step in data["steps"] for one in step["drafters"] if one is not None]
    assert len(asked) > 10
    assert {one["stop"] for one in asked if one["depth"] > 2} == {3}
    assert {(one["nodes"], one["proposed"], one["scored"]) for one in asked if one["depth"] > 2} == {(5, 2, 1)}
    told = data["output"]["token_ids"]
    missed = 0
    for step in data["steps"]:
        for node in step["nodes"][1:]:
            tokens = [one["token"] for one in step["nodes"][:2]]
            assert node["status"] == "cut"
            assert node.get("missed", False) == (told[step["start"] : step["start"] + 2] == tokens)
            missed += "missed" in node
            assert node["p"] is not None  # its parent was scored
    assert missed > 3


def test_nothing_is_said_for_a_controller_without_words(governed: Any) -> None:
    assert {step["words"] for step in recorded(governed(Silent()))["steps"]} == {""}


def test_a_plan_is_shown_in_each_of_its_steps(governed: Any) -> None:
    controller = Silent()
    steps = recorded(governed(controller))["steps"]
    asked = [step["drafters"][0] is not None for step in steps]
    assert asked[:12] == [True] * 3 + [False] * 3 + [True] * 3 + [False] * 3
    assert [len(step["nodes"]) > 0 for step in steps] == asked
    assert controller.plans == -(-len(steps) // 3)


def test_sampled_drafts_carry_q_and_what_came_after_a_draw_that_stood_was_not_tried(llm: LLM) -> None:
    config = DRAFT | {"num_speculative_tokens": 12, "tree_width": 3, "draft_sample_method": "probabilistic"}
    data = recorded(llm.with_speculative_config(config), replace(GREEDY, temperature=1.0, seed=11))
    nodes = [node for step in data["steps"] for node in step["nodes"]]
    assert any(0 < node["q"] <= 1 for node in nodes if "q" in node)
    assert all("q" not in node for step in recorded(llm)["steps"] for node in step["nodes"])


def test_untried_are_only_later_draws() -> None:
    row = torch.full((9,), 1 / 9)
    trials = {-1: [Trial(0, row), Trial(1, row), Trial(2, row)]}
    tree = TokenTree.build([4, 5, 6], [-1, -1, -1], trials=trials)
    assert untried_siblings(tree, (1,)) == {2}
    assert untried_siblings(tree, (0,)) == {1, 2}
    assert untried_siblings(tree, ()) == set()
    assert untried_siblings(TokenTree.build([4, 5, 6], [-1, -1, -1]), (0,)) == set()


def test_places_follow_tokens_not_numbers() -> None:
    whole = TokenTree.build([4, 5, 6, 6, 7], [-1, -1, 0, 1, 3])
    part = TokenTree.build([5, 6, 7], [-1, 0, 1])
    assert places(whole, part) == [None, 0, None, 1, 2]
    assert places(whole, whole) == [0, 1, 2, 3, 4]


def test_a_stop_string_takes_its_text_away(llm: LLM) -> None:
    text = recorded(llm)["output"]["text"]
    middle = text[20:24]
    data = recorded(llm, replace(GREEDY, stop=middle))
    assert data["output"]["text"] == text[: text.index(middle)]
    assert "".join(token["text"] for token in data["tokens"]) == data["output"]["text"]
    assert data["output"]["stop_reason"] == middle


def test_ending_early_leaves_what_there_is_and_the_engine_as_it_was(llm: LLM) -> None:
    controller, recorder = llm.engine.parts.controller, Recorder(llm)
    with pytest.raises(RuntimeError, match="nothing has been recorded"):
        recorder.data()
    chunks = recorder.run(PROMPT, GREEDY)
    next(chunks)
    next(chunks)
    assert llm.engine.parts.controller is not controller
    chunks.close()
    assert llm.engine.parts.controller is controller
    assert llm.engine.watchers == []
    data = recorder.data()
    assert data["output"]["finish_reason"] == "abort"
    assert len(data["steps"]) == recorder.steps == 2


def test_others_on_the_same_engine_are_not_recorded(llm: LLM) -> None:
    other = llm.stream("Once upon a time", GREEDY)
    next(other)
    data = recorded(llm)
    other.close()
    assert [token["token"] for token in data["tokens"]] == recorded(llm)["output"]["token_ids"]


def test_a_row_that_is_no_distribution_is_told(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    score, calls = llm.runner.score, []

    def spoilt(*arguments: Any, **options: Any) -> Any:
        found = score(*arguments, **options)
        calls.append(1)
        return (
            found if len(calls) < 3 else replace(found, logits=torch.full_like(found.logits, float("nan")), best=None)
        )

    monkeypatch.setattr(llm.runner, "score", spoilt, raising=False)
    data = recorded(llm)
    json.dumps(data, allow_nan=False)
    last = data["steps"][-1]
    assert "NaN" in last["error"]
    assert last["error"] == data["output"]["error"]
    assert {node["status"] for node in last["nodes"]} <= {"unreached"}
    assert (last["count"], last["next"]) == (0, None)


def test_one_output_only(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="n must be 1 in a replay"):
        recorded(llm, replace(GREEDY, n=2, temperature=1.0))
