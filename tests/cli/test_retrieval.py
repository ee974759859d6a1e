"""`paceline retrieval`: building, describing, generating with an index, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Command

from paceline.retrieval import open_index

TEXTS = ["The town was founded by a miller.", "It rains a lot there in spring."]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def test_an_index_is_built_described_and_used(run: Command, rows: Path, tmp_path: Path) -> None:
    words, tokens = tmp_path / "words", tmp_path / "tokens"
    built = run("retrieval", "build", rows, "--output", words, "--passage-words", "5")
    assert built.code == 0
    assert json.loads(run("retrieval", "info", words, "--json").out)["entries"] == 4
    assert open_index(words).passage(0) == "The town was founded by"  # type: ignore[attr-defined]
    assert run("retrieval", "build", rows, "-o", tokens, "--kind", "knn").code == 0
    for index, name in ((words, "ralm"), (tokens, "knn_lm")):
        made = run("generate", "The town", "--temperature", "0", "--max-tokens", "4", "--retrieval", index, "--json")
        search = json.loads(made.out)["search"]
        assert search["method"] == name
        assert search["retrieval"]["searches"] > 0


def test_wrong_calls_get_one_line(run: Command, rows: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("x")
    for call, says in (
        (("retrieval", "build", rows, "-o", full), "is there already"),
        (("retrieval", "build", rows, "-o", tmp_path / "a", "--kind", "words"), "--kind must be one of"),
        (("retrieval", "build", rows, "-o", tmp_path / "a", "--vectors", "flat"), "--vectors must be one of"),
        (("retrieval", "info", full), "index: cannot read"),
        (("generate", "x", "--retrieval", full), "index: cannot read"),
        (("generate", "x", "--retrieval", full, "--search", "beam"), "give one of them"),
        (("generate", "x", "--retrieval", full, "-s", "ngram"), "leave --speculative-config out"),
    ):
        found = run(*call)
        assert found.code == 2
        assert says in found.err
