"""A file of requests is checked before anything is decoded, takes little memory, and is put in a good order."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from paceline.batch import Requests
from paceline.errors import ConfigError, PromptError


def line(name: str = "a", prompt: Any = "x", **more: Any) -> str:
    found = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}} | more
    return json.dumps({key: value for key, value in found.items() if value is not None})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(f"{one}\n" for one in lines), encoding="utf-8")
    return path


DAMAGED = {
    "torn": (line()[:-4], "is not JSON"),
    "no number": ('{"custom_id": "a", "body": {"x": NaN}}', "is not JSON (NaN"),
    "list": ("[1]", "is not an object"),
    "no id": (line(custom_id=None), "custom_id is wrong: Field required"),
    "empty id": (line(""), "custom_id is wrong"),
    "no body": (line(body=None), "body is wrong: Field required"),
    "method": (line(method="GET"), "method is wrong"),
    "url": (line(url="/v1/embeddings"), "url is wrong: Input should be '/v1/chat/completions'"),
    "unknown": (line(priority=1), "priority is not known: leave it out"),
    "stream": (line(body={"prompt": "x", "stream": True}), "body.stream"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_line_is_named(tmp_path: Path, case: str) -> None:
    text, words = DAMAGED[case]
    with pytest.raises(ConfigError) as error:
        Requests(write(tmp_path, line("first"), "", text))
    assert f"line 3 {words}" in str(error.value)
    assert "nothing was decoded" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_custom_id_of_two_lines_is_named_with_both(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 4 has the custom_id 'a' of line 2 again"):
        Requests(write(tmp_path, line("b"), line("a"), line("c"), line("a", "y")))


def test_many_damaged_lines_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1 .*line 2 .*line 3 .*; 4 more lines are damaged"):
        Requests(write(tmp_path, *["{"] * 7))


def test_a_file_without_requests_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="holds no requests"):
        Requests(write(tmp_path, "", " "))
    with pytest.raises(PromptError, match="cannot read"):
        Requests(tmp_path / "missing.jsonl")


def test_requests_are_read_from_where_they_lie(tmp_path: Path) -> None:
    path = write(tmp_path, line("ä", "è"), "", line("b", [1, 2]))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    requests = Requests(path)
    assert [requests.read(index).body["prompt"] for index in (1, 0)] == [[1, 2], "è"]
    assert (requests.find("b"), requests.find("c"), requests.line(1)) == (1, None, 3)


def test_an_id_tells_requests_apart_but_not_their_spelling(tmp_path: Path) -> None:
    spelled = '{ "url": "/v1/completions",  "body": {"prompt": "x"}, "custom_id": "a" }'
    first, second = (Requests(write(tmp_path, text)).id(0) for text in (line(), spelled))
    assert first == second
    assert first != Requests(write(tmp_path, line(prompt="y"))).id(0)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    requests = Requests(path := write(tmp_path, line("a"), line("b", "x")))
    path.write_text(path.read_text().replace('"x"', '"y"'))
    with pytest.raises(ConfigError, match="was changed while it was read"):
        requests.read(1)


def test_prompts_that_begin_alike_follow_each_other(tmp_path: Path) -> None:
    """Groups within groups, each in the order of the file."""
    one, two = "first beginning " * 20, "second beginning " * 20
    longer = one + "and on " * 100
    prompts = [one + "a", two + "a", "short", longer + "a", two + "b", one + "b", "other", longer + "b"]
    requests = Requests(write(tmp_path, *(line(str(number), text) for number, text in enumerate(prompts))))
    order = requests.order()
    assert order.index(5) - order.index(0) in (1, -1, 3)
    assert abs(order.index(3) - order.index(7)) == 1
    assert abs(order.index(1) - order.index(4)) == 1
    assert {*order[:4]} == {0, 3, 5, 7}
    assert sorted(order) == list(range(8))


def test_prompts_that_share_nothing_stay_in_order(tmp_path: Path) -> None:
    requests = Requests(write(tmp_path, *(line(str(number), f"{number} text") for number in range(50))))
    assert requests.order() == list(range(50))


def test_conversations_are_grouped_by_their_system_message(tmp_path: Path) -> None:
    def chat(number: int) -> str:
        system = {"role": "system", "content": f"You are number {number % 2}. " * 20}
        body = {"messages": [system, {"role": "user", "content": str(number)}]}
        return line(str(number), url="/v1/chat/completions", body=body)

    assert Requests(write(tmp_path, *map(chat, range(6)))).order() == [0, 2, 4, 1, 3, 5]


def test_the_bodies_are_not_held(tmp_path: Path) -> None:
    path = write(tmp_path, *(line(str(number), f"{number}" + "x" * 10_000) for number in range(2000)))
    tracemalloc.start()
    requests = Requests(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(requests) == 2000
    assert held < 2000 * 600 < path.stat().st_size / 10
