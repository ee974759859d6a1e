"""`paceline methods`: every registered name, readable at 80 columns."""

from __future__ import annotations

import json

import pytest
from command import Command

from paceline import registry
from paceline.cli.methods import AUTO, in_use, left_out, needs
from paceline.diffusion import METHODS
from paceline.llm import LLM
from paceline.models.abilities import FLAGS, PROTOCOLS
from paceline.registry import ABILITIES

NAMES = {name for family in registry.FAMILIES for name in registry.table(family)}


def test_json_holds_what_the_registry_declares(run: Command) -> None:
    rows = json.loads(run("methods", "--json").out)
    diffusion = [row for row in rows if row["family"] == "diffusion"]
    assert {row["name"]: (row["lossless"], row["needs"], row["paper"]) for row in diffusion} == {
        name: (method.lossless, [method.needs] if method.needs else [], method.paper)
        for name, method in METHODS.items()
    }
    rows = [row for row in rows if row["family"] != "diffusion"]
    assert {row["name"] for row in rows} == NAMES
    for row in rows:
        entry = registry.lookup(row["family"], row["name"])
        declared = (None, None) if row["family"] in ("searches", "steerings") else entry.exactness
        assert (row["exactness_greedy"], row["exactness_sampling"]) == declared
        assert (row["kind"], row["needs"], row["paper"]) == (entry.kind, list(entry.needs), entry.paper)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_fits_and_cuts_no_word(run: Command, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("methods").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert {line.strip() for line in lines} >= NAMES | METHODS.keys()
    words = {word.strip(",;") for word in " ".join(lines).split()}
    for family in registry.FAMILIES:
        for entry in registry.table(family).values():
            assert {word.strip(",;") for word in f"{entry.paper} {needs(entry)}".split()} <= words
    for method in METHODS.values():
        assert {word.strip(",") for word in f"{method.paper} {method.needs}".split()} <= words


def test_needs_are_said_in_words() -> None:
    assert {name for entry in registry.table("drafters").values() for name in entry.needs if "_" in name} <= set(
        ABILITIES
    )
    assert set(ABILITIES) == FLAGS | PROTOCOLS.keys()
    assert needs(registry.lookup("drafters", "layer_skip")).startswith(
        "a model that can run its first layers alone and"
    )
    assert needs(registry.lookup("drafters", "ngram")) == "nothing"


def test_what_auto_leaves_out_is_counted_by_reason() -> None:
    lines = left_out()
    assert max(map(len, lines)) <= 80
    counts = [int(word) for line in lines for word in line.split() if word.isdecimal()]
    assert len(counts) == 2
    assert sum(counts) == len(registry.table("drafters")) - len(AUTO)


def test_what_is_in_use_is_said_with_what_is_no_default() -> None:
    llm = LLM(dtype="float32", threads=1, profile=False)
    assert in_use(llm) == ["method: auto, which drafts with prediction, grammar, suffix and draft_model"]
    assert in_use(llm.with_speculative_config(None)) == ["method: none, plain decoding"]
    other = llm.with_speculative_config({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5})
    assert in_use(other) == ["method: ngram, num_speculative_tokens 3, prompt_lookup_max 5"]
