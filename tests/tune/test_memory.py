"""Tuning within a budget of memory: what is predicted is held, and the fastest of what fits is chosen, not the largest
tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from tiny_checkpoint import write
from tiny_llama import runner_of, tiny_llama, weights_of

from paceline import LLM, ConfigError, SamplingParams
from paceline.assembly import MemoryMeter, controller_setup, limited, memory_use
from paceline.controllers.policies import FixedController
from paceline.engine import watching
from paceline.llm import BUNDLED
from paceline.tune import tune
from paceline.tune.candidates import Arm, Candidates
from paceline.tune.memory import MemoryBudget
from paceline.tune.search import RejectedError
from paceline.utils import Turn

DRAFT = {"method": "draft_model", "model": str(BUNDLED / "draft")}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    return LLM(str(folder), speculative_config=None, dtype="float32", threads=1, enable_prefix_caching=False)


def prompts(batch: int, length: int) -> list[Any]:
    return [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 10 for j in range(length)]} for i in range(batch)]


def test_weights_are_those_that_are_held() -> None:
    """A tied head is packed beside its embedding in compiled passes."""
    for tied in (False, True):
        model = tiny_llama(hidden_size=64, intermediate_size=64, head_dim=32, tie_word_embeddings=tied)
        size = sum(weight.nbytes for weight in weights_of(model).values())
        embedding = weights_of(model)["embed.weight"].nbytes
        assert runner_of(model, compiled=False).held_bytes == size
        assert runner_of(model, compiled=True).held_bytes == size + tied * embedding


@pytest.mark.parametrize("nodes", [0, 2, 6])
@pytest.mark.parametrize(("batch", "length"), [(1, 120), (3, 200)])
def test_what_is_predicted_is_held(llm: LLM, nodes: int, batch: int, length: int) -> None:
    """Within a block of each sequence. Negative control: a prediction of a text half as long is far off."""
    config = {**DRAFT, "num_speculative_tokens": nodes} if nodes else None
    budget = MemoryBudget(10**8, [length + 24] * batch)
    made = budget.fit(llm, config, "one")
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with budget.measured("one"):
        made.generate(prompts(batch, length), params)
    meter, drafters = budget.settings["one"].meter, made.engine.parts.drafter_set.drafters
    assert meter.nodes == nodes
    found = memory_use(made.runner, drafters, [length + 24] * batch, nodes)
    slack = 2 * batch * memory_use(made.runner, (), [1], 0).caches  # a block that was begun, for text and tree
    assert abs(found.caches + found.speculation - meter.peak) <= slack + 0.05 * found.speculation
    half = memory_use(made.runner, drafters, [length // 2] * batch, nodes)
    assert half.caches + half.speculation < meter.peak - slack
    assert nodes or found.speculation == 0
    plain = llm.with_speculative_config(None)
    assert [one.outputs[0].token_ids for one in made.generate(prompts(batch, length), params)] == [
        one.outputs[0].token_ids for one in plain.generate(prompts(batch, length), params)
    ]


def test_a_setting_that_does_not_fit_is_rejected_and_one_that_does_keeps_within(llm: LLM) -> None:
    plain = memory_use(llm.runner, (), [64], 0)
    config = {**DRAFT, "num_speculative_tokens": 8}
    with pytest.raises(RejectedError, match=r"needs [0-9]+ bytes of memory for one drafted token"):
        MemoryBudget(plain.total + 10**5, [64]).fit(llm, config, "one")
    with pytest.raises(ConfigError, match=r"--memory must be at least [0-9]+ bytes, which plain decoding takes"):
        MemoryBudget(plain.total - 1, [64]).check_plain(llm)
    free = llm.with_speculative_config(config)
    least = memory_use(llm.runner, free.engine.parts.drafter_set.drafters, [64], 1)
    size = least.total + 2 * least.caches + 20_000
    budget = MemoryBudget(size, [64])
    made = budget.fit(llm, config, "one")
    with budget.measured("one"):
        made.generate(prompts(1, 40), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    one = budget.settings["one"]
    assert 0 < one.meter.nodes < 8
    assert one.held <= size
    wide = MemoryMeter(free.runner, free.engine.parts.drafter_set.drafters)
    with watching(free.engine, wide):
        free.generate(prompts(1, 40), SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert one.fixed + wide.peak > size, "the control: without a budget it is passed"


def test_a_prediction_changes_nothing_of_what_is_timed_later(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft models take single blocks under a limit alone: doctor predicts, and then measures."""
    saved: list[Any] = []
    monkeypatch.setattr(controller_setup, "save_memory", saved.append)
    drafters = llm.with_speculative_config(DRAFT).engine.parts.drafter_set.drafters
    memory_use(llm.runner, drafters, [64], 8)
    assert not saved
    limited(FixedController(3), llm.runner, drafters, 10**9)
    assert saved == [drafters[0].runners()[0]], "the control"


def test_the_fastest_within_the_budget_is_chosen_and_not_the_largest_tree(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock by which a drafted token takes two passes, one draft wins although twelve fit; with one by which it
    takes nothing the same search takes twelve.
    """
    always_right = {"method": "draft_model", "model": str(llm.folder)}
    arms = [Arm({**always_right, "num_speculative_tokens": number}, 1) for number in (1, 12)]
    monkeypatch.setattr("paceline.tune.search.MAX_PAIRS", 6)
    for level, best in ((2.0, 0), (0.0, 1)):

        def clocked(runs: Any, items: Any, repeats: int, level: float = level, **_: Any) -> Iterator[Turn[Any]]:
            outputs = {name: run(items[0], 0) for name, run in runs.items()}
            taken = {
                name: sum(one.metrics.num_steps + level * one.metrics.num_draft_tokens for one in made)
                for name, made in outputs.items()
            }
            yield Turn(0, items[0], outputs, taken)

        monkeypatch.setattr("paceline.tune.tuning.in_turn", clocked)
        found = tune(
            llm, llm.folder, prompts(2, 30), tried=Candidates(arms, {}), budget=5.0, max_tokens=26, memory=10**8,
            clock=count(0.0, 0.2).__next__,
        )  # fmt: skip
        assert found.best == arms[best]
        assert found.memory is not None
        assert found.memory["settings"].keys() == {one.words(1) for one in arms}
        assert found.memory["plain"]["total"] < found.memory["budget"]
