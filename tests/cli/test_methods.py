"""`paceline methods`: every registered name, readable at 80 columns."""

from __future__ import annotations

import json

import pytest
from command import Command

from paceline import registry
from paceline.diffusion import METHODS

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
        assert (row["exactness_greedy"], row["exactness_sampling"]) == entry.exactness
        assert (row["kind"], row["needs"], row["paper"]) == (entry.kind, list(entry.needs), entry.paper)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_fits_and_cuts_no_word(run: Command, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("methods").out.splitlines()
    assert max(map(len, lines)) <= columns
    assert {line.strip() for line in lines} >= NAMES | METHODS.keys()
    words = {word.strip(",") for word in " ".join(lines).split()}
    for family in registry.FAMILIES:
        for entry in registry.table(family).values():
            assert {word.strip(",") for word in f"{entry.paper} {' '.join(entry.needs)}".split()} <= words
    for method in METHODS.values():
        assert {word.strip(",") for word in f"{method.paper} {method.needs}".split()} <= words
