"""Sets are read as published, libraries that take too long are ended, values are followed to their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.peers import PeerError, peer_state
from lab.structured import LibraryProcess, load_questions, load_sets, open_judge, parse_libraries, spellings
from paceline.errors import ConfigError
from tests.lab.structured.libraries import command, data, drivers

TOKENS = {"tokens": [b"7".hex(), b"8".hex(), ""], "ends": [2]}


def test_sets_are_spread_and_leave_out_what_refers_elsewhere(tmp_path: Path) -> None:
    iglu, suite = load_sets(data(tmp_path), 2, 2)
    assert (iglu.name, iglu.found, iglu.elsewhere, iglu.asked) == ("iglu-central", 3, 1, True)
    assert [case.schema for case in iglu.cases] == [{"const": 7}] * 2
    assert (suite.found, suite.asked) == (3, False)
    assert [case.name for case in suite.cases] == ["const: is 7", "const: is 7 or 7"]
    assert (suite.cases[1].valid, suite.cases[1].invalid) == ((7,), ("7", 7.5))
    assert [case.decides for case in load_sets(tmp_path, 1, 3)[1].cases] == [True, True, False]
    assert [(one.worked, one.answer) for one in load_questions(tmp_path, 1)] == [("There are 7 of them.", 7)] * 3
    assert load_questions(tmp_path, 0) == []


def test_files_that_are_something_else_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data must be a folder"):
        load_sets(tmp_path / "nowhere", 2, 2)
    with pytest.raises(ConfigError, match="holds none of the folders schemastore, iglu-central"):
        load_sets(tmp_path, 2, 2)
    folder = data(tmp_path)
    (folder / "iglu-central" / "part.jsonl").write_text('{"path": "x"}\n')
    with pytest.raises(ConfigError, match=r"iglu-central' cannot be read \(KeyError\('schema'\)\); it must hold"):
        load_sets(folder, 2, 2)
    (folder / "iglu-central" / "part.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no schema that can be used"):
        load_sets(folder, 2, 2)
    (folder / "gsm8k" / "test.jsonl").write_text('{"question": "?", "answer": "no number"}\n')
    with pytest.raises(ConfigError, match="gsm8k' cannot be read"):
        load_questions(folder, 1)


def test_a_library_that_takes_too_long_is_replaced(tmp_path: Path) -> None:
    with LibraryProcess("made", command(drivers(tmp_path / "d"), "outlines_peer"), TOKENS, 0.5, {}) as library:
        with pytest.raises(PeerError, match=r"gave no answer to .compile. within 0\.5 s"):
            library.ask("compile", schema='{"title": "slow"}')
        found = library.ask("compile", schema="{}")
        assert found["error"] == "ValueError: no schema is good enough"


def followed(folder: Path, name: str, texts: list[list[int]]) -> list[bool]:
    with LibraryProcess("made", command(folder, name), TOKENS, 10.0, {}) as library:
        assert library.ask("compile", schema="{}")["error"] is None
        found = library.ask("follow", texts=texts)
    assert len(found["seconds"]) == sum(map(len, texts)) or not all(found["accepted"])
    accepted: list[bool] = found["accepted"]
    return accepted


def test_texts_are_followed_token_by_token_to_their_end(tmp_path: Path) -> None:
    """7 alone is right: 8 is not, 7 with more behind it is not, and nothing has not ended yet."""
    folder, texts = drivers(tmp_path / "d"), [[0], [1], [0, 0], []]
    assert followed(folder, "lmfe_peer", texts) == [True, False, False, False]
    assert followed(folder, "xgrammar_peer", texts) == [True] * 4, "which the walk must not reject by itself"


def test_the_judge_tells_schemas_from_what_is_none() -> None:
    with open_judge() as judge:
        assert judge.ask("check", schema='{"const": 7}', texts=["7", "8", "7 7"])["valid"] == [True, False, False]
        for schema in ({"type": "sevn"}, {"$ref": "http://elsewhere/schema"}):
            assert not judge.ask("check", schema=json.dumps(schema), texts=["7"])["sound"]


def test_keys_are_tried_in_several_orders() -> None:
    inner: dict[str, Any] = {"properties": {"x": {}, "y": {}}}
    schema = {"properties": {"a": {"items": inner}, "b": {}}}
    many = dict.fromkeys("zyxbc", 1) | {"a": [{"y": 1, "x": 2}]}
    as_is, ordered = spellings(schema, many)
    assert list(as_is) == list("zyxbca")
    assert list(ordered) == list("abzyxc")
    assert list(ordered["a"][0]) == ["x", "y"]
    assert len(spellings(True, {"p": 1, "q": 2, "r": 3})) == 6
    assert spellings({}, [1]) == [[1]]


def test_peers_are_libraries_that_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert not peer_state("outlines").ready
    assert parse_libraries("") == {}
    for text, error, told in (
        ("outlines", PeerError, "peer outlines has no environment; run `python -m lab peers install outlines`"),
        ("llama.cpp", ConfigError, "--peers must be all or of xgrammar, outlines, lm-format-enforcer"),
    ):
        with pytest.raises(error, match=told):
            parse_libraries(text)
