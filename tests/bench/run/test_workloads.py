"""Limits keep every task, names stay unique, synthetic prompts have the wanted distribution."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.run import load_workloads
from paceline.bench.run.workloads import load_workload, synthetic_prompts, token_distribution
from paceline.errors import ConfigError
from paceline.utils import Conversation, Workload


def test_a_limit_takes_the_tasks_in_turn() -> None:
    tasks = ["a"] * 5 + ["b"] * 2 + ["c"]
    whole = Workload(
        name="w",
        format="jsonl",
        source="w",
        conversations=tuple(Conversation(id=str(i), task=t) for i, t in enumerate(tasks)),
    )
    assert whole.limited(4).tasks == {"a": 2, "b": 1, "c": 1}
    assert [c.id for c in whole.limited(3).conversations] == ["0", "5", "7"]
    assert whole.limited(None) is whole


def test_no_workload_is_the_bundled_one_and_names_are_unique() -> None:
    (bundled,) = load_workloads([], vocab_size=100)
    assert len(bundled.conversations) == 24
    assert {"maths", "code", "repetition"} <= set(bundled.tasks)
    assert bundled.to_dict()["turns"] == 24
    texts = ["synthetic:prompt=4", "synthetic:prompt=8", "bundled"]
    assert [w.name for w in load_workloads(texts, vocab_size=100, limit=2)] == [
        "synthetic",
        "synthetic#2",
        "bundled",
    ]


@pytest.mark.parametrize("entropy", [0.0, 2.0, 7.5, np.log2(512)])
def test_synthetic_tokens_have_the_entropy(entropy: float) -> None:
    p = token_distribution(entropy, 512)
    kept = p[p > 0]
    assert p.sum() == pytest.approx(1.0)
    assert -(kept * np.log2(kept)).sum() == pytest.approx(entropy, abs=1e-5)


def test_synthetic_prompts_follow_the_distribution_and_the_seed() -> None:
    tokens = synthetic_prompts(3, 20_000, 3.0, 512, seed=1)
    for row in tokens:
        counts = np.bincount(row, minlength=512) / len(row)
        found = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum()
        assert found == pytest.approx(3.0, abs=0.1)
    assert (synthetic_prompts(3, 100, 3.0, 512, seed=1) == synthetic_prompts(3, 100, 3.0, 512, seed=1)).all()
    assert (synthetic_prompts(3, 100, 3.0, 512, seed=1) != synthetic_prompts(3, 100, 3.0, 512, seed=2)).any()


def test_synthetic_parameters() -> None:
    found = load_workload("synthetic:prompt=16,output=5,entropy=2,count=3", vocab_size=512)
    assert [len(c.token_ids or ()) for c in found.conversations] == [16] * 3
    assert {c.max_tokens for c in found.conversations} == {5}
    for text, message in (
        ("synthetic:promt=3", "did you mean prompt"),
        ("synthetic:prompt=x", "must be a number"),
        ("synthetic:count=0", "an integer of 1 or more"),
        ("synthetic:entropy=10", "at most 9 bits"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_workload(text, vocab_size=512)


def test_a_synthetic_prompt_leaves_room_for_a_token() -> None:
    (fits,) = load_workloads(["synthetic:prompt=127,count=1"], vocab_size=512, max_context=128)
    assert len(fits.conversations[0].token_ids or ()) == 127
    with pytest.raises(
        ConfigError, match=r"^synthetic prompt must be at most 127: the context holds 128 tokens .*, got 128$"
    ):
        load_workloads(["synthetic:prompt=128,count=1"], vocab_size=512, max_context=128)
