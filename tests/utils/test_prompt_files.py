"""Files in each known format, tiny ones of our own, recognised by content and by name; what is none of them gets one
line.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.workloads import load_workload
from paceline.errors import ConfigError, PromptError
from paceline.utils import read_prompts


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


TALK = {"question_id": 81, "category": "writing", "turns": ["Write a line.", "Write it again."]}
TRANSLATE = {"question_id": 7, "category": "translation", "turns": ["Translate: eins"], "reference": ["one"]}
PROGRAM = {
    "task_id": "HumanEval/0",
    "prompt": "def f(x):\n",
    "entry_point": "f",
    "canonical_solution": "    return x\n",
}
PROBLEM = {"question": "How many?", "answer": "#### 3"}
MESSAGES = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize(
    ("name", "rows", "format", "task", "turns", "chat"),
    [
        ("question.jsonl", [TALK, TRANSLATE], "spec-bench", "writing", ("Write a line.", "Write it again."), True),
        ("question.jsonl", [TALK], "mt-bench", "writing", ("Write a line.", "Write it again."), True),
        ("question_redundant.jsonl", [TALK], "mt-redundant", "writing", ("Write a line.", "Write it again."), True),
        ("HumanEval.jsonl", [PROGRAM], "humaneval", "code", ("def f(x):\n",), False),
        ("test.jsonl", [PROBLEM], "gsm8k", "maths", ("How many?",), True),
        ("mine.jsonl", [{"prompt": "Hi", "task": "greeting"}], "jsonl", "greeting", ("Hi",), True),
        ("mine.jsonl", [{"text": "Once"}], "jsonl", "prompts", ("Once",), False),
        ("mine.jsonl", [MESSAGES], "jsonl", "prompts", ("Hello",), True),
        ("mine.jsonl", ["Hi"], "jsonl", "prompts", ("Hi",), True),
    ],
)
def test_formats_are_recognised(
    tmp_path: Path, name: str, rows: list[Any], format: str, task: str, turns: tuple[str, ...], chat: bool
) -> None:
    found = load_workload(str(jsonl(tmp_path / name, *rows)))
    first = found.conversations[0]
    assert (found.format, first.task, first.turns, first.chat) == (format, task, turns, chat)
    assert len(found.conversations) == len(rows)
    assert found.source == name


def test_a_named_format_wins_and_a_json_list_is_rows_too(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", TALK)
    assert load_workload(f"mt-redundant={path}").name == "mt-redundant"
    whole = tmp_path / "b.json"
    whole.write_text(json.dumps([PROBLEM, PROBLEM]))
    found = read_prompts(whole)
    assert found.format == "gsm8k"
    assert [c.id for c in found.conversations] == ["1", "2"]


def test_history_and_equal_ids(tmp_path: Path) -> None:
    found = read_prompts(jsonl(tmp_path / "a.jsonl", MESSAGES | {"id": "x"}, MESSAGES | {"id": "x"}))
    assert [c.id for c in found.conversations] == ["x", "x#2"]
    assert found.conversations[0].history == ({"role": "system", "content": "Be brief."},)


def test_an_answer_at_the_end_is_kept_apart_and_files_may_be_compressed(tmp_path: Path) -> None:
    said = {"messages": [*MESSAGES["messages"], {"role": "assistant", "content": "Hi."}]}
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(said).encode() + b"\n" + json.dumps(said | {"ended": False}).encode()))
    first, second = read_prompts(path).conversations
    assert (first.turns, first.history, first.answer) == (("Hello",), (MESSAGES["messages"][0],), "Hi.")
    assert (first.ended, second.ended) == (True, False)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PromptError, match="cannot read the workload"):
        read_prompts(path)


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\ntwo\n")
    assert [c.turns for c in read_prompts(path).conversations] == [("one",), ("two",)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "no prompts"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "row 1 is not an object"),
        ("a.jsonl", '{"colour": 1}', "in no known format .* the keys colour"),
        ("a.jsonl", '{"prompt": 3}', "row 1 is not in the format jsonl .prompt is not text"),
        ("a.jsonl", '{"turns": ["a"]}', "row 1 is not in the format spec-bench .no key 'category'"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "x"}]}', "neither from the user nor"),
        ("a.txt", "\n\n", "no prompts"),
        ("a.csv", "a,b\n1,2\n", "row 1 is not a request"),
    ],
)
def test_what_cannot_be_read_gets_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PromptError, match=message):
        read_prompts(path)


def test_missing_files_binary_files_and_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="cannot read the workload"):
        load_workload(str(tmp_path / "none.jsonl"))
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="not UTF-8"):
        load_workload(str(tmp_path / "b.jsonl"))
    with pytest.raises(ConfigError, match="unknown format 'nope'"):
        load_workload("nope=x.jsonl")
    with pytest.raises(ConfigError, match="format must be one of"):
        read_prompts(tmp_path / "b.jsonl", "nope")


def test_a_text_may_hold_separators_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "one\u2028two"}\r\n{"prompt": "three\x85four"}\n'.encode())
    found = [conversation.turns for conversation in read_prompts(path).conversations]
    assert found == [("one\u2028two",), ("three\x85four",)]
