"""The golden files: what changed is seen, what did not is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from golden import toy_tokens
from golden.branches import by_package
from golden.golden import PARTS, compare, differences, path_of, read, write

CELL = "token_recycling, greedy, greedy, three"


def cell(golden: Any) -> dict[str, Any]:
    return {CELL: toy_tokens.cell("token_recycling", {}, "rejection_sampler", "greedy", "three")}


def test_a_cell_is_as_its_file_says_and_a_changed_token_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, steps = read("tokens")[CELL]
    write("tokens", {CELL: [tokens, steps]}, tmp_path)
    assert compare("tokens", cell, tmp_path), capsys.readouterr().out
    other = ("1" if tokens[0] != "1" else "2") + tokens[1:]
    for wrong in ([other, steps], [tokens, [steps[0] + 1, *steps[1:]]]):
        write("tokens", {CELL: wrong}, tmp_path)
        assert not compare("tokens", cell, tmp_path)
        shown = capsys.readouterr().out
        assert CELL in shown
        assert all(json.dumps(value) in shown for value in (wrong, [tokens, steps]))


def test_a_drafter_of_trees_drafts_chains_under_a_rule_for_chains() -> None:
    found = toy_tokens.cell("token_recycling", {}, "fly", "greedy", "three")
    assert found == read("tokens")["token_recycling, fly, greedy, three"]


def test_a_file_that_is_not_there_is_no_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not compare("tokens", cell, tmp_path)
    assert "make it first" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("golden", "found", "line"),
    [
        ({"a": 1}, {}, "a: gone, was 1"),
        ({}, {"a": {"b": 1}}, 'a: new, is {"b": 1}'),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a / b:\n    - 1\n    + 2"),
        ({"a": ["x", "y"]}, {"a": ["x", "z"]}, "a:\n    - y\n    + z"),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}, "a: other order"),
    ],
)
def test_differences_are_named(golden: Any, found: Any, line: str) -> None:
    assert list(differences(golden, found)) == [line]
    assert not list(differences(found, found))


def test_the_files_are_small() -> None:
    assert sum(path_of(part).stat().st_size for part in PARTS if path_of(part).exists()) < 320_000


def test_branches_are_summed_by_package() -> None:
    files = {
        f"src/paceline/{name}": {"summary": {"covered_branches": taken, "num_branches": known}}
        for name, taken, known in (
            ("engine/loop.py", 3, 4),
            ("engine/drafter_set.py", 1, 4),
            ("llm.py", 2, 2),
            ("errors.py", 0, 0),
        )
    }
    assert by_package(files) == {"all": 60.0, "engine": 50.0, "paceline": 100.0}
