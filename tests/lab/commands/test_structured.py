"""`python -m lab structured`: figures that tell a right library from one that accepts all and from one that takes no
schema; files; wrong use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import Command

from lab.peers import catalogue, peer
from tests.lab.structured.libraries import data, drivers

EVERYTHING, NOTHING, SEVEN = "xgrammar", "outlines", "lm-format-enforcer"


def test_a_run_tells_right_libraries_from_others(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(peer, "DRIVERS", drivers(tmp_path / "drivers"))
    monkeypatch.setattr(catalogue, "python_of", lambda _name: Path(sys.executable))
    monkeypatch.setenv("COLUMNS", "80")
    files = ("-o", tmp_path / "s.json", "--html", tmp_path / "s.html", "--plot", tmp_path / "s.svg")
    few = ("--schemas", "3", "--questions", "1", "--max-tokens", "8")
    found = run("structured", "--data", data(tmp_path / "data"), "--peers", "all", *few, *files)
    assert found.code == 0, found.err
    made = json.loads((tmp_path / "s.json").read_text())
    suite, iglu = (made["sets"][name] for name in ("json-schema-test-suite", "iglu-central"))
    true = {name: one["true"]["value"] for name, one in suite["libraries"].items()}
    assert true == {"paceline": 1, "paceline, lenient": 1, EVERYTHING: 0, NOTHING: 0, SEVEN: 1}
    assert {one["true"]["n"] for one in suite["libraries"].values()} == {2}, "the case that decides nothing is left out"
    declared = {name: one["declared"]["value"] for name, one in suite["libraries"].items()}
    assert declared == {"paceline": 1, "paceline, lenient": 1, EVERYTHING: 1, NOTHING: 0, SEVEN: 1}
    assert (suite["libraries"][EVERYTHING]["lenient"], suite["libraries"][EVERYTHING]["narrow"]) == (2, 0)
    valid = {name: one["empirical"]["value"] for name, one in iglu["libraries"].items()}
    right = {"paceline": 1, "paceline, lenient": 1, SEVEN: 1}
    assert valid == right | {EVERYTHING: 0, NOTHING: 0, "no constraint": 0}, "and a free model does not write 7"
    assert iglu["libraries"]["paceline"]["compliance"] == 1
    assert suite["common"] == 0, "as one library compiles nothing"
    assert suite["libraries"]["paceline"]["compile_own"]["n"] == 3
    assert "ValueError: no schema is good enough" in suite["libraries"][NOTHING]["errors"]
    assert made["questions"]["paceline"]["parsed"]["n"] == 1
    assert NOTHING not in made["questions"]
    for text in ("json-schema-test-suite: coverage, 3 schemas", "lm-format-enforcer", "1 schemas refer to other files"):
        assert text in found.out
    page = (tmp_path / "s.html").read_text()
    assert "true: decides as the schema" in page
    assert "made up 1" in page
    assert (tmp_path / "s.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--data", "/nowhere"), "--data must be a folder, got '/nowhere'; name one that holds schemastore"),
        (("--data", "."), "holds none of the folders"),
        (("--data", ".", "--peers", "vllm"), "--peers must be all or of xgrammar, outlines, lm-format-enforcer"),
        (("--data", ".", "--schemas", "0"), "--schemas"),
        (("--data", ".", "--plot", "x.txt"), "--plot must end with one of pdf, png, svg, got 'x.txt'"),
        (("--data", ".", "-o", "/nowhere/s.json"), "must lie in a folder that exists"),
        (("--data", ".", "-o", "same", "--html", "same"), "must be different files"),
        ((), "--data"),
    ],
)
def test_one_line_for_wrong_use(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run("structured", *more)
    assert found.code == 2
    assert told in found.line
    assert not list(tmp_path.iterdir())
