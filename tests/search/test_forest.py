"""Branches share what they have in common, give theirs back at once, and are computed anew where memory was short."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError
from paceline.sampling import Rules
from paceline.search import Branch, Found, Search, Steps

PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None, enable_prefix_caching=False)


class Greedy(Search):
    """Takes the likeliest token: the example of the docs."""

    name = "my_greedy"

    def steps(self, root: Branch) -> Steps[None]:
        branch = root
        while not branch.ended:
            rows = yield [branch]
            token = int(rows.logprobs[0].argmax())
            branch = branch.child(token, float(rows.logprobs[0, token]))
        self.found = [Found(branch, branch.logprob)]


class Counting(Search):
    """16 branches, of which one goes on after ten tokens; counts blocks after every pass."""

    name = "counting"
    llm: LLM
    used: list[int]

    def steps(self, root: Branch) -> Steps[None]:
        branches = [root] * 16
        while not branches[0].ended:
            rows = yield branches
            Counting.used.append(Counting.llm.runner.memory.used)  # type: ignore[attr-defined]
            drawn = [one.draw(row, i) for i, (one, row) in enumerate(zip(branches, rows.logprobs, strict=True))]
            branches = [one.child(token, 0.0) for one, token in zip(branches, drawn, strict=True)]
            if branches[0].length == 10:
                branches = branches[:1]
        self.found = [Found(branches[0], 0.0)]


class RulesAlive(Search):
    """Takes the likeliest token, and counts the states of rules that live meanwhile."""

    name = "rules_alive"
    alive: WeakSet[Rules]
    counts: list[int]

    def steps(self, root: Branch) -> Steps[None]:
        branch = root
        while not branch.ended:
            rows = yield [branch]
            RulesAlive.counts.append(len(RulesAlive.alive))
            branch = branch.child(int(rows.logprobs[0].argmax()), 0.0)
        self.found = [Found(branch, 0.0)]


class Failing(Search):
    """Ends with an error after three tokens."""

    name = "failing"

    def steps(self, root: Branch) -> Steps[None]:
        branch = root
        while True:
            rows = yield [branch]
            branch = branch.child(int(rows.logprobs[0].argmax()), 0.0)
            if branch.length == 3 and len(root.request.prompt_ids) % 2:
                raise ConfigError("odd prompts are not liked")
            if branch.length == 5 and root.request.prompt_ids[0] == 11:
                raise ZeroDivisionError("a mistake of a user's")
            if branch.ended:
                break
        self.found = [Found(branch, 0.0)]


HERE = "tests.search.test_forest"


def test_a_method_of_ones_own_is_greedy_decoding(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    (found,), (plain,) = llm.generate("One day", greedy, search=f"{HERE}:Greedy"), llm.generate("One day", greedy)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert found.outputs[0].text == plain.outputs[0].text
    assert found.outputs[0].finish_reason == plain.outputs[0].finish_reason


def test_sixteen_branches_cost_one_prompt_and_themselves_and_give_back_at_once(llm: LLM) -> None:
    Counting.llm, Counting.used = llm, []
    memory: Any = llm.runner.memory  # type: ignore[attr-defined]
    prompt = {"prompt_token_ids": [7 + i % 400 for i in range(1000)]}
    before = memory.used
    llm.generate(prompt, PARAMS, search=f"{HERE}:Counting")
    of_prompt, each = memory.blocks_for(1000), memory.blocks_for(1030) - memory.blocks_for(1000) + 1
    wide, narrow = [used - before for used in Counting.used[1:10]], [used - before for used in Counting.used[11:]]
    assert of_prompt + 15 <= max(wide) <= of_prompt + 16 * each
    assert max(narrow) <= of_prompt + each
    assert memory.used == before


def test_a_search_that_fails_harms_no_other(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 6, 7], [5, 6, 7, 8], [9, 6, 7], [11, 6])]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    found = llm.generate(prompts, greedy, search=f"{HERE}:Failing")
    assert [one.outputs[0].error for one in found] == [
        "odd prompts are not liked",
        None,
        "odd prompts are not liked",
        "search method 'failing' failed (ZeroDivisionError: a mistake of a user's)",
    ]
    plain = llm.generate(prompts[1], greedy)
    assert found[1].outputs[0].token_ids == plain[0].outputs[0].token_ids


def test_what_a_text_left_behind_is_not_kept_token_by_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = Rules.fork

    def noted(rules: Rules) -> Rules:
        made = fork(rules)
        RulesAlive.alive.add(made)
        return made

    monkeypatch.setattr(Rules, "fork", noted)
    RulesAlive.counts, RulesAlive.alive = [], WeakSet()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, repetition_penalty=1.2)
    (found,) = llm.generate("One day", params, search=f"{HERE}:RulesAlive")
    assert len(found.outputs[0].token_ids) == len(RulesAlive.counts) == 24
    assert max(RulesAlive.counts[5:]) <= RulesAlive.counts[4] + 1
    RulesAlive.counts = []
    monkeypatch.setattr(Branch, "forget_rules", lambda _: None)
    llm.generate("One day", params, search=f"{HERE}:RulesAlive")
    assert max(RulesAlive.counts) > RulesAlive.counts[4] + 15


def test_more_prompts_than_run_at_once_get_what_each_gets_alone(llm: LLM) -> None:
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(20)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    found = llm.generate(prompts, greedy, search={"method": "beam", "beam_width": 2})
    assert llm.config.max_num_seqs < 20
    for prompt, one in list(zip(prompts, found, strict=True))[::6]:
        (alone,) = llm.generate(prompt, greedy, search={"method": "beam", "beam_width": 2})
        assert one.outputs[0].token_ids == alone.outputs[0].token_ids


BEGINNING = [7 + i % 400 for i in range(200)]
ALIKE = [{"prompt_token_ids": [*BEGINNING, 500 + i, 600 + i]} for i in range(4)]
BEAMS = {"method": "beam", "beam_width": 3}


def test_prompts_that_begin_alike_compute_it_once_and_later_calls_find_it(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    sharing = LLM(dtype="float32", speculative_config=None)
    blocks: Any = sharing.runner.memory  # type: ignore[attr-defined]
    whole = len(BEGINNING) // blocks.block_size * blocks.block_size
    first, again, alone = (one.generate(ALIKE, greedy, search=BEAMS) for one in (sharing, sharing, llm))
    assert [one.num_cached_tokens for one in first] == [0, whole, whole, whole]
    assert [one.num_cached_tokens for one in again] == [whole] * 4
    assert [one.num_cached_tokens or 0 for one in alone] == [0] * 4
    for found in (first, again):
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in alone]
    (decoded,) = sharing.generate(ALIKE[1], greedy)
    assert decoded.num_cached_tokens == whole
    assert sharing.reset_prefix_cache()
    assert blocks.used == 0


def rewards(texts: Sequence[str]) -> list[float]:
    return [(len(text) * 7 % 10) / 10 for text in texts]


def test_short_memory_changes_nothing_but_the_work(llm: LLM) -> None:
    search = {"method": "a_star", "reward": f"{HERE}:rewards", "step_tokens": 5, "branching": 6, "finished": 2}
    prompt = {"prompt_token_ids": [7 + i % 400 for i in range(200)]}
    (roomy,) = llm.generate(prompt, PARAMS, search=search)
    memory: Any = llm.runner.memory  # type: ignore[attr-defined]
    tight = LLM(
        dtype="float32", speculative_config=None, enable_prefix_caching=False,
        kv_cache_memory_bytes=memory.block_bytes * (memory.blocks_for(232) + 20),
    )  # fmt: skip
    (short,) = tight.generate(prompt, PARAMS, search=search)
    assert [one.token_ids for one in short.outputs] == [one.token_ids for one in roomy.outputs]
    (none,) = tight.generate(prompt, PARAMS, search={"method": "self_consistency", "num_samples": 200})
    assert "branches need more memory for keys and values" in str(none.outputs[0].error)
    assert tight.runner.memory.used == 0  # type: ignore[attr-defined]


def test_requests_of_other_threads_go_on_beside_a_search(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (alone,) = llm.generate("One day", greedy)
    (searched,) = llm.generate("Some day", greedy, search={"method": "beam", "beam_width": 3})
    beside: list[Any] = []
    thread = threading.Thread(target=lambda: beside.extend(llm.generate(["One day"] * 3, greedy)))
    thread.start()
    (again,) = llm.generate("Some day", greedy, search={"method": "beam", "beam_width": 3})
    thread.join(60)
    assert again.outputs[0].token_ids == searched.outputs[0].token_ids
    assert [one.outputs[0].token_ids for one in beside] == [alone.outputs[0].token_ids] * 3
