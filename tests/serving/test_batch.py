"""`paceline batch run`: with a model of its own and with a server, killed and run again, the answers are the same."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Command
from forked import Forked
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM

SYSTEM = {"role": "system", "content": "You tell stories about the sea and what lives in it, in short words. " * 3}
OWN = ("--dtype", "float32", "-s", "null")
"""Plainly, so that nothing that is measured decides what usage tells."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm.with_speculative_config(None)), api_key=["right"])


def line(number: int, **more: Any) -> dict[str, Any]:
    """A completion or a conversation, greedy or drawn with a seed, by its number."""
    body: dict[str, Any] = {"model": "bundled", "max_tokens": 8 + number % 5, "temperature": 0}
    if number % 3 == 0:
        body |= {"prompt": f"One day {number}", "temperature": 0.8, "seed": number}
        url = "/v1/completions"
    else:
        body |= {"messages": [SYSTEM, {"role": "user", "content": f"Story {number}"}]}
        url = "/v1/chat/completions"
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body | more}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(one) for one in text.splitlines()]


def essence(line: dict[str, Any]) -> Any:
    """A line without what another time must differ in: ids, the time, what was cached."""
    found = json.loads(json.dumps(line))
    found["response"].pop("request_id")
    body = found["response"]["body"]
    for name in ("id", "created"):
        body.pop(name, None)
    body.get("usage", {}).pop("prompt_tokens_details", None)
    return found


def test_both_ways_give_the_answers_of_the_server(run: Command, plain: Live, tmp_path: Path) -> None:
    wrong = [line(20, wrong=1), line(21, model="gpt-4o"), line(22, max_tokens=-2), line(23, n=2, logprobs=True)]
    source = write(tmp_path / "in.jsonl", *map(line, range(10)), *wrong)
    paths = {"own": tmp_path / "own.jsonl", "url": tmp_path / "url.jsonl"}
    served = ("--served-model-name", "bundled")
    found = {
        "own": run("batch", "run", source, "-o", paths["own"], *OWN, *served),
        "url": run("batch", "run", source, "-o", paths["url"], "--url", plain.url + "/v1", "--api-key", "right"),
    }
    for name, path in paths.items():
        assert found[name].code == 1
        assert "11 of 14 requests are answered in" in " ".join(found[name].out.split())
        assert "3 requests failed" in found[name].err
        assert "line 11: 400 wrong is not known here; leave it out" in " ".join(found[name].err.split())
        assert [one["custom_id"] for one in read(path)] == [*(f"r{number}" for number in range(10)), "r23"]
        errors = read(path.with_suffix(".errors.jsonl"))
        assert [one["custom_id"] for one in errors] == ["r20", "r21", "r22"]
        assert [one["response"]["status_code"] for one in errors] == [400, 404, 400]
    assert [essence(one) for one in read(paths["own"])] == [essence(one) for one in read(paths["url"])]
    texts = {json.dumps(one["response"]["body"]["choices"]) for one in read(paths["own"])}
    assert len(texts) > 5, "answers differ from each other, so that their equality means something"

    plain.http.headers["authorization"] = "Bearer right"
    for one in map(line, (3, 4)):
        answer = plain.ok(one["url"], **one["body"])
        mine = next(each for each in read(paths["own"]) if each["custom_id"] == one["custom_id"])
        assert (
            essence(mine)["response"]["body"]
            == essence({"response": {"request_id": "", "body": answer}})["response"]["body"]
        )


def test_lines_have_openais_format(openai: Any, run: Command, plain: Live, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    asked = {"input": "Hello", "max_output_tokens": 5}
    source = write(tmp_path / "in.jsonl", line(0), line(1), {"custom_id": "r", "url": "/v1/responses", "body": asked})
    assert run("batch", "run", source, "-o", out, "--url", plain.url, "--api-key", "right").code == 0
    first, second, third = read(out)
    assert set(first) == {"id", "custom_id", "response", "error"}
    assert set(first["response"]) == {"status_code", "request_id", "body"}
    assert first["response"]["request_id"].startswith("req-")
    assert first["error"] is None
    openai.types.Completion.model_validate(first["response"]["body"], strict=True)
    openai.types.chat.ChatCompletion.model_validate(second["response"]["body"], strict=True)
    answered = openai.types.responses.Response.model_validate(third["response"]["body"])
    assert answered.usage.output_tokens == 5
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_what_is_answered_is_not_asked_again_and_failures_are(run: Command, plain: Live, tmp_path: Path) -> None:
    out, errors = tmp_path / "out.jsonl", tmp_path / "failures"
    lines = list(map(line, range(6)))
    source = write(tmp_path / "in.jsonl", *lines)
    command = ("batch", "run", source, "-o", out, "--errors", errors, "--url", plain.url, "--api-key", "right")
    assert run(*command).code == 0
    whole = out.read_bytes()

    kept = b"".join(whole.splitlines(keepends=True)[3:5])
    out.write_bytes(kept + whole[:100])
    found = run(*command)
    assert found.code == 0
    assert "2 of 6 requests are answered already" in found.err
    after = out.read_bytes()
    assert after.splitlines()[3:5] == whole.splitlines()[3:5]
    assert after.splitlines()[0] != whole.splitlines()[0], "this one was asked again"
    assert [essence(json.loads(one)) for one in after.splitlines()] == [
        essence(json.loads(one)) for one in whole.splitlines()
    ]

    write(source, *lines, line(6, wrong=1))
    assert run(*command).code == 1
    assert [one["custom_id"] for one in read(errors)] == ["r6"]
    assert run(*command).code == 1, "it failed again"
    write(source, *lines, line(6))
    assert run(*command).code == 0
    assert not errors.exists()
    assert out.read_bytes().startswith(after)


def test_a_complete_file_needs_neither_model_nor_server(run: Command, plain: Live, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = write(tmp_path / "in.jsonl", line(1), line(2))
    run("batch", "run", source, "-o", out, "--url", plain.url, "--api-key", "right")
    out.write_bytes(b"".join(reversed(out.read_bytes().splitlines(keepends=True))))
    found = run("batch", "run", source, "-o", out, "--url", "http://127.0.0.1:9")
    assert (found.code, found.out.split()) == (0, f"2 of 2 requests are answered in {out}".split())
    assert [one["custom_id"] for one in read(out)] == ["r1", "r2"]


WRONG: dict[str, tuple[list[str], str]] = {
    "engine": (["--url", "http://x", "--dtype", "float32", "-m", "y"], "leave --model, --dtype out"),
    "sequences": (["--url", "http://x", "--max-num-seqs", "4"], "leave --max-num-seqs out"),
    "scheme": (["--url", "localhost:8000"], "--url must be as http://host:8000/v1, got 'localhost:8000'"),
    "host": (["--url", "http:///v1"], "--url must be as http://host:8000/v1"),
    "key": (["--api-key", "k"], "give its --url"),
    "errors": (["--errors", "in.jsonl"], "must be three files"),
    "away": (["--url", "http://127.0.0.1:9", "--retry-for", "0"], "no server answers at http://127.0.0.1:9"),
    "other": (["--url", "http://127.0.0.1:9", "-o", "in.jsonl"], "must be three files"),
    "folder": (["-o", "."], "--output must be a file"),
    "device": (["-o", "/dev/null"], "--output must be a file on a disk"),
    "device of failures": (["--errors", "/dev/null"], "--errors must be a file on a disk"),
    "template": (["--chat-template", "/no/such"], "chat_template"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), line(1))
    arguments, words = WRONG[case]
    found = run("batch", "run", "in.jsonl", "-o", "out.jsonl", *arguments)
    assert found.code == 2
    assert words in found.line


def test_a_wrong_key_and_a_foreign_output_end_the_run(run: Command, plain: Live, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", line(1)), tmp_path / "out.jsonl"
    found = run("batch", "run", source, "-o", out, "--url", plain.url, "--api-key", "wrong")
    assert found.code == 2
    assert "give --api-key" in found.line
    assert run("batch", "run", source, "-o", out, "--url", plain.url, "--api-key", "right").code == 0
    write(source, line(1, seed=1))
    found = run("batch", "run", source, "-o", out, "--url", plain.url, "--api-key", "right")
    assert found.code == 2
    assert "answers 'r1', which is another request in" in found.line


SLOW = """
import sys, time
from paceline.cli.main import main
from paceline.engine.loop import Engine
step = Engine.step
def slow(self):
    time.sleep(0.03)
    return step(self)
Engine.step = slow
sys.exit(main(sys.argv[1:]))
"""


def test_a_run_that_is_killed_goes_on(run: Command, tmp_path: Path) -> None:
    lines = [line(number, max_tokens=24, ignore_eos=True) for number in range(12)]
    source, out = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    more = ("batch", "run", source, "-o", out, *OWN, "--concurrency", "2")
    process = Forked(more, program=SLOW, stderr=subprocess.PIPE)
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = out.read_bytes()
    acknowledged = before[: before.rfind(b"\n") + 1].splitlines()
    assert 3 <= len(acknowledged) < 12
    out.write_bytes(before + b'{"id":"batch_req_12')

    found = run(*more)
    assert found.code == 0
    assert f"{len(acknowledged)} of 12 requests are answered already" in found.err
    assert set(acknowledged) <= set(out.read_bytes().splitlines())
    undisturbed = tmp_path / "undisturbed.jsonl"
    assert run("batch", "run", source, "-o", undisturbed, *OWN).code == 0
    assert [essence(one) for one in read(out)] == [essence(one) for one in read(undisturbed)]
