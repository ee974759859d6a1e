"""`paceline datastore`: building, describing, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command

from paceline.checkpoints import Tokenizer
from paceline.drafters.retrieval import Datastore
from paceline.llm import BUNDLED


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("def add(a, b):\n    return a + b\n")
    return path


def test_build_and_info(run: Command, text: Path, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out.datastore"
    rows.write_text(json.dumps({"question": "What?", "answer": "That."}) + "\n")
    built = run("datastore", "build", text, rows, "--output", output)
    assert built.code == 0
    assert "documents   3" in built.out
    tokenizer = Tokenizer.load(BUNDLED / "target")
    store = Datastore(output)
    ids = [
        i
        for part in (text.read_text(), "What?", "That.")
        for i in [*tokenizer.encode(part, add_special_tokens=False), -1]
    ]
    assert store.data[: store.header.tokens].tolist() == ids
    facts = json.loads(run("datastore", "info", output, "--json").out)
    assert facts["tokens"] == len(ids)
    assert facts["tokenizer"] == tokenizer.fingerprint()
    assert (facts["files"], facts["shards"], facts["made_for"]) == (2, 1, "the bundled model")


def test_fields_are_chosen(run: Command, tmp_path: Path) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out"
    rows.write_text(json.dumps({"question": "What?", "answer": "That."}) + "\n")
    assert run("datastore", "build", rows, "-o", output, "--field", "answer").code == 0
    assert Datastore(output).header.documents == 1


def test_a_file_is_replaced_only_when_asked(run: Command, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text("precious")
    refused = run("datastore", "build", text, "-o", output)
    assert refused.code == 2
    assert refused.line == f"there is a file {str(output)!r} already; choose another --output, or add --overwrite"
    assert output.read_text() == "precious"
    assert run("datastore", "build", text, "-o", output, "--overwrite").code == 0
    assert run("datastore", "info", output).code == 0
    own = run("datastore", "build", text, "-o", text, "--overwrite")
    assert (own.code, text.read_text()[:3]) == (2, "def")
    assert run("datastore", "build", text, "-o", tmp_path).code == 2


def test_bad_input_is_one_line(run: Command, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    (tmp_path / "empty").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"x": 1}\n')
    cases = {
        (tmp_path / "none",): "no file or folder",
        (tmp_path / "empty",): "no text",
        (tmp_path / "rows.jsonl",): "holds no text",
        (text, "--shard-tokens", "1"): "--shard-tokens",
        (text, "--model", tmp_path / "no-model"): "hub id",
    }
    for arguments, words in cases.items():
        found = run("datastore", "build", *arguments, "-o", output)
        assert (found.code, found.out) == (2, "")
        assert words in found.line
        assert not output.exists()


def test_info_rejects_what_is_no_datastore_or_damaged(run: Command, text: Path, tmp_path: Path) -> None:
    assert "cannot be read as a datastore" in run("datastore", "info", text).line
    output = tmp_path / "out"
    run("datastore", "build", text, "-o", output)
    data = bytearray(output.read_bytes())
    data[-1] ^= 64
    output.write_bytes(bytes(data))
    found = run("datastore", "info", output)
    assert (found.code, found.out) == (2, "")
    assert "damaged" in found.line


def test_a_field_of_no_rows_is_rejected(run: Command, text: Path, tmp_path: Path) -> None:
    output, thing = tmp_path / "out", tmp_path / "thing.json"
    thing.write_text('{"foo": "x"}')
    found = run("datastore", "build", text, "--field", "foo", "-o", output)
    assert (found.code, found.out) == (2, "")
    assert found.line == "--field chooses among the fields of .json and .jsonl files, and there are none; leave it out"
    found = run("datastore", "build", thing, "--field", "foo", "-o", output)
    assert (found.code, output.exists()) == (2, False)
    assert "is not a list of rows with fields; leave --field out" in found.line


def test_a_file_that_came_meanwhile_stays(
    run: Command, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, load = tmp_path / "out", Tokenizer.load

    def meanwhile(*given: Any, **more: Any) -> Tokenizer:
        output.write_text("precious")
        return load(*given, **more)

    monkeypatch.setattr(Tokenizer, "load", meanwhile)
    found = run("datastore", "build", text, "-o", output)
    assert (found.code, found.out) == (2, "")
    assert found.line == f"there is a file {str(output)!r} already; choose another --output, or add --overwrite"
    assert output.read_text() == "precious"
    assert sorted(tmp_path.iterdir()) == [output, text]
