"""`paceline serve` from outside: it starts, answers, drains at SIGTERM, and says what is wrong in one line."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from command import Command
from forked import Forked

WRONG: dict[str, tuple[list[str], str]] = {
    "port": (["--port", "70000"], "port"),
    "no number": (["--max-waiting", "x"], "--max-waiting"),
    "two models": (["a", "--model", "b"], "not both"),
    "template": (["--chat-template", "/no/such/file"], "chat_template"),
    "keys": (["--host", "0.0.0.0", "--api-key-file", "/no/such/file"], "api_key_file"),
    "responses": (["--response-file", "/"], "response_file"),
    "their age": (["--max-response-age", "0"], "max_response_age"),
    "empty key": (["--api-key", " "], "api_key"),
    "address": (["--host", "203.0.113.7", "--port", "0"], "cannot listen"),
    "format": (["--tool-call-parser", "xml"], "tool_call_parser"),
    "what cannot learn": (["--port", "0", "--learn", "-s", "ngram"], "ngram cannot learn from requests"),
    "nothing that learns": (["--learn", "-s", "null"], "--learn needs drafts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(run: Command, case: str) -> None:
    arguments, word = WRONG[case]
    found = run("serve", *arguments)
    assert found.code == 2
    assert word in found.line


def test_it_serves_and_drains_at_a_signal(tmp_path: Path) -> None:
    command = ["serve", "--port", "0", "--api-key", "k", "--dtype", "float32"]
    with Forked(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if (found := re.search(r"http://\S+/v1", line)) is not None:
                break
        else:
            pytest.fail("".join(lines))
        headers = {"authorization": "Bearer k"}
        body = {"prompt": "One day", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{found[0]}/completions", json=body, headers=headers, timeout=60) as answer:
            events = answer.iter_lines()
            next(events)
            server.send_signal(signal.SIGTERM)
            rest = list(events)
        assert rest[-2] == "data: [DONE]"
        assert server.wait(30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(found[0].removesuffix("/v1") + "/health")
