"""`paceline tune --search adadec`: the threshold from texts, as the function finds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command

from paceline import LLM
from paceline.errors import ConfigError
from paceline.search import SearchConfig, entropies_of, learned_threshold

FAST = ("--dtype", "float32", "--threads", "1")
TEXTS = [
    f"Once upon a time there were {i} little girls, and the sum of {i} and {i + 1} is {2 * i + 1}." for i in range(12)
]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    found = tmp_path / "texts.txt"
    found.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    return found


def by_hand(llm: LLM, tokens: Sequence[int], first: int) -> tuple[list[float], list[bool]]:
    """A pass for each place."""
    entropies, right = [], []
    for place in range(first, len(tokens)):
        cache = llm.runner.open()
        row = llm.runner.extend([cache], [tokens[:place]]).logits[0].float().softmax(-1)
        llm.runner.release(cache)
        entropies.append(float(-(row * row.clamp(min=1e-45).log()).sum()))
        right.append(int(row.argmax()) == tokens[place])
    return entropies, right


def test_entropies_are_those_of_a_pass_for_each_place(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(TEXTS[0])
    tokens = [*tokens, *(7 + i % 300 for i in range(140 - len(tokens)))]  # more than a pass takes
    for first in (1, 5, 130):
        entropies, right = entropies_of(llm.runner, [(tokens, first), (tokens[:8], 3)])
        expected, hits = by_hand(llm, tokens, first)
        more, others = by_hand(llm, tokens[:8], 3)
        assert entropies == pytest.approx([*expected, *more], abs=2e-3)
        assert right == [*hits, *others]
    assert llm.runner.memory.used == 0  # type: ignore[attr-defined]


def test_the_threshold_is_found_said_and_kept(llm: LLM, run: Command, file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "search.json"
    found = run("tune", "--search", '{"method": "adadec", "candidates": 2}', "--prompts", file, "-o", kept, *FAST)
    assert (found.code, found.err) == (0, "")
    search = json.loads(kept.read_text())
    ids = [llm.tokenizer.encode(one) for one in TEXTS]
    entropies, right = entropies_of(llm.runner, [(one, 2) for one in ids])
    expected = learned_threshold(entropies, right)
    assert search == {"method": "adadec", "candidates": 2, "threshold": pytest.approx(expected, abs=2e-3)}
    assert SearchConfig.parse(kept.read_text()).method == "adadec"
    assert f"Use it: --search '{json.dumps(search)}'" in found.out
    assert f"of {len(right)} tokens of texts" in found.out
    told = json.loads(run("tune", "--search", "adadec", "--prompts", file, "-o", kept, "--json", *FAST).out)
    unsure = [one >= told["threshold"] for one in entropies]
    assert told["places"] == len(right)
    assert told["share_from"] == pytest.approx(sum(unsure) / len(right), abs=5e-3)
    assert told["right_from"] < told["right_below"]


def test_what_does_not_go_together_is_said(run: Command, file: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    texts = ("--prompts", file, *FAST)
    for flags, why in [
        (("--search", "beam", *texts), "finds the threshold of adadec, got beam"),
        (("--search", '{"method": "adadec", "threshold": 1}', *texts), "give adadec, without threshold"),
        (("--search", '{"method": "adadec", "treshold": 1}', *texts), "treshold"),
        (("--search", "adadec"), "add --prompts FILE"),
        (("--search", "adadec", "--steering", "svdecode", *texts), "find different things; give one of them"),
        (("--search", "adadec", "-s", "ngram", *texts), "leave --speculative-config out"),
        (("--search", "adadec", "-o", tmp_path / "other.json", *texts), "is not a search that tune found"),
        (("-o", tmp_path / "new.json"), "--output keeps what --steering or --search finds"),
    ]:
        found = run("tune", *flags)
        assert found.code == 2, flags
        assert why in found.err
    one_line = tmp_path / "short.txt"
    one_line.write_text("A text.\n")
    found = run("tune", "--search", "adadec", "--prompts", one_line, *FAST)
    assert "10 places of each kind are needed" in found.err


X = [0.1 + i / 20 for i in range(20)] + [1.0 + i / 20 for i in range(20)]
Y = [True] * 20 + [False] * 20


@pytest.mark.parametrize(
    ("entropies", "right", "message"),
    [
        ([nan, *X[1:]], Y, "entropies must be finite numbers of 0 or more"),
        ([inf, *X[1:]], Y, "entropies must be finite numbers of 0 or more"),
        ([-0.1, *X[1:]], Y, "entropies must be finite numbers of 0 or more"),
        ([None, *X[1:]], Y, "entropies must be finite numbers of 0 or more"),
        (["x", *X[1:]], Y, "entropies must be finite numbers of 0 or more"),
        ([X], Y, "entropies must be finite numbers of 0 or more"),
        (3.0, Y, "entropies must be finite numbers of 0 or more"),
        (X, Y[:-1], "right must have as many values as entropies .40., got 39"),
        (X, [2, *Y[1:]], "right must be truth values"),
        (X, [None, *Y[1:]], "right must be truth values"),
        (X, ["yes"] * 40, "right must be truth values"),
        (X, [not one for one in Y], "entropies must be lower where the likeliest token is right, got 1.48 nats there"),
        ([1.0] * 40, Y, "entropies must be lower where"),
        (X[:5] + X[20:], Y[:5] + Y[20:], "10 places of each kind are needed, right and wrong, got 5"),
    ],
)
def test_what_the_threshold_is_learned_from_is_checked(entropies: Any, right: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learned_threshold(entropies, right)
    assert 0.5 < learned_threshold(X, Y) < 1.5
    assert learned_threshold(torch.tensor(X), torch.tensor(Y)) == pytest.approx(learned_threshold(X, Y), abs=1e-3)
