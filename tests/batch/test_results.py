"""What was acknowledged stays, what is torn goes, and what belongs to somebody else is not touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.batch import Requests, ResultFile
from paceline.errors import ConfigError

COUNT = 4


@pytest.fixture
def requests(tmp_path: Path) -> Requests:
    return made(tmp_path / "in.jsonl")


def made(path: Path, prompt: str = "x") -> Requests:
    lines = [
        {"custom_id": f"r{number}", "url": "/v1/completions", "body": {"prompt": f"{prompt}{number}"}}
        for number in range(COUNT)
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return Requests(path)


def answer(requests: Requests, index: int, **more: Any) -> bytes:
    body = {"model": "m", "choices": [{"text": f"answer {index}"}]}
    found = {"id": requests.id(index), "custom_id": f"r{index}", "response": {"status_code": 200, "body": body}} | more
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def written(path: Path, requests: Requests, indexes: tuple[int, ...] = (2, 0, 3)) -> bytes:
    with ResultFile(path, requests) as results:
        for index in indexes:
            results.append([(index, answer(requests, index))])
    return path.read_bytes()


def test_lines_go_on_after_those_of_an_earlier_run(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path, requests)
    with ResultFile(path, requests) as results:
        assert [index in results for index in range(COUNT)] == [True, False, True, True]
        results.append([(1, answer(requests, 1))])
        assert results.count == COUNT
    assert path.read_bytes() == before + answer(requests, 1)
    assert not path.with_name("out.jsonl.lock").exists()


def test_a_torn_line_is_cut_off_wherever_it_was_torn(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, requests)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with ResultFile(path, requests) as results:
            assert results.count == whole[:size].count(b"\n")
        assert path.read_bytes() == whole[: whole[:size].rfind(b"\n") + 1]


def test_zeros_after_a_loss_of_power_are_cut_off(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, requests)
    path.write_bytes(whole + bytes(100))
    with ResultFile(path, requests) as results:
        assert results.count == 3
    assert path.read_bytes() == whole


@pytest.mark.parametrize("text", ["notes\n", "notes", '{"id": 1}\n', '{"id":"x"', "\n"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path: Path, requests: Requests, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    for fresh in (False, True):
        with (
            pytest.raises(ConfigError, match="line 1 is no answer of a batch"),
            ResultFile(path, requests, fresh=fresh),
        ):
            pass
    assert path.read_text() == text


def test_answers_to_other_requests_are_left_as_they_are(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path, requests)
    for other, words in (
        (made(tmp_path / "other.jsonl", "y"), "line 1 answers 'r2', which is another request in"),
        (made(tmp_path / "fewer.jsonl"), ""),
    ):
        if not words:  # the same requests, elsewhere
            with ResultFile(path, other) as results:
                assert results.count == 3
            continue
        with pytest.raises(ConfigError, match=words), ResultFile(path, other):
            pass
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"custom_id": "zz"}, "line 4 answers 'zz', which is not in"),
        ({"custom_id": "r1"}, "line 4 answers 'r1', which is another request in"),
        ({}, "line 4 answers 'r2' once more"),
        ({"response": 1}, "line 4 is damaged"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, requests: Requests, more: dict[str, Any], words: str) -> None:
    path = tmp_path / "out.jsonl"
    before = written(path, requests) + answer(requests, 2, **more)
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=words), ResultFile(path, requests):
        pass
    assert path.read_bytes() == before


def test_answers_of_another_model_are_not_mixed_in(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    written(path, requests)
    with ResultFile(path, requests, model="m") as results:
        assert results.count == 3
    with pytest.raises(ConfigError, match="line 1 is of the model 'm', not 'n'"), ResultFile(path, requests, model="n"):
        pass


def test_two_runs_do_not_write_one_file(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path, requests) as results:
        with pytest.raises(ConfigError, match="is written by another run"), ResultFile(path, requests):
            pass
        results.append([(0, answer(requests, 0))])
    with ResultFile(path, requests) as results:
        assert results.count == 1


def test_in_the_end_the_order_is_that_of_the_requests(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    path.with_name("out.jsonl.part").write_text("of a run that was killed here")
    assert written(path, requests) != b"".join(answer(requests, index) for index in (0, 2, 3))
    with ResultFile(path, requests) as results:
        results.sort()
    assert path.read_bytes() == b"".join(answer(requests, index) for index in (0, 2, 3))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_fresh_file_forgets_and_an_empty_one_goes(tmp_path: Path, requests: Requests) -> None:
    path = tmp_path / "out.jsonl"
    written(path, requests)
    with ResultFile(path, requests, fresh=True) as results:
        assert results.count == 0
        assert path.read_bytes() == b""
        results.sort()
    assert not path.exists()
