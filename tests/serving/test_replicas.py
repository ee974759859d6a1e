"""Replicas: which one answers, what of a death clients see, and the whole of it on Ray."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from command import Command

from paceline import LLM, SamplingParams
from paceline.config import ServerConfig
from paceline.serving import front, front_app
from paceline.serving.routing import SeenPrefixes, affinity_of, ranked

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def affinity(owner: str = "", **body: Any) -> Any:
    return affinity_of(owner, CHAT, json.dumps(body).encode())


def talk(number: int, turns: int) -> list[dict[str, str]]:
    return [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": f"{number}.{turn} " * 100}
        for turn in range(2 * turns + 1)
    ]


def stayed(choose: Any) -> int:
    """How many turns of ten conversations, mixed, went where the turn before had been."""
    seen, before, found = SeenPrefixes(), dict[int, str](), 0
    loads = {"a": 0, "b": 0, "c": 0}
    for turn in range(5):
        for number in range(10):
            asked = affinity(messages=[{"role": "system", "content": "Be brief. " * 30}, *talk(number, turn)])
            loads["abc"[(turn + number) % 3]] += 1 if turn % 2 == 0 else -1  # others come and go
            name = choose(asked, seen.shared(asked), loads)[0]
            found += before.get(number) == name
            before[number] = name
            seen.add(asked, name)
    return found


def test_conversations_stay_where_their_prefix_is() -> None:
    assert stayed(ranked) > 36
    assert stayed(lambda asked, shared, loads: ranked(asked, {}, loads)) < 30, "without what was seen, few do"


def test_the_queue_outweighs_a_short_beginning_and_not_a_long_one() -> None:
    short, long = affinity(prompt="x" * 100), affinity(prompt="x" * 5000)
    seen = SeenPrefixes()
    for one in (short, long):
        seen.add(one, "busy")
    loads = {"busy": 3, "free": 0}
    assert ranked(short, seen.shared(short), loads) == ["free", "busy"]
    assert ranked(long, seen.shared(long), loads) == ["busy", "free"]
    assert ranked(long, seen.shared(long), {"busy": 100, "free": 0}) == ["free", "busy"]
    seen.keep(["free"])
    assert ranked(long, seen.shared(long), loads) == ["free", "busy"], "a replica that was replaced has seen nothing"


def test_names_say_what_belongs_together_and_owners_share_nothing() -> None:
    seen = SeenPrefixes()
    seen.add(affinity("me", prompt="one", prompt_cache_key="k"), "a")
    shared = [
        seen.shared(affinity(owner, prompt="another", **names)).get("a", 0) > 0
        for owner, names in (
            ("me", {"prompt_cache_key": "k"}),
            ("me", {"prompt_cache_key": "l"}),
            ("me", {"cache_salt": "k"}),
            ("you", {"prompt_cache_key": "k"}),
            ("me", {}),
        )
    ]
    assert shared == [True, False, False, False, False]


def test_new_prompts_spread_over_idle_replicas() -> None:
    first = [ranked(affinity(prompt=f"prompt {number}"), {}, {"a": 0, "b": 0})[0] for number in range(40)]
    assert 8 < first.count("a") < 32


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 100_000, b'{"prompt": "\xff"}'])
def test_what_is_no_request_goes_anywhere(body: bytes) -> None:
    assert not affinity_of("", CHAT, body)


class DiedError(Exception):
    """A replica has."""


class Script:
    """Replicas that answer as they are told: a list of messages for each try, in which None is a death, a number are
    seconds, and an error is raised.
    """

    gone: tuple[type[Exception], ...] = (DiedError,)
    failed: tuple[type[Exception], ...] = (ZeroDivisionError,)

    def __init__(self, *tries: Sequence[Any]) -> None:
        self.tries, self.asked = list(tries), list[Any]()

    @asynccontextmanager
    async def answer(self, scope: Any, body: bytes, affinity: Any) -> AsyncIterator[AsyncIterator[list[Any]]]:
        self.asked.append(body)

        async def parts(told: Sequence[Any]) -> AsyncIterator[list[Any]]:
            for one in told:
                if one is None:
                    raise DiedError
                if isinstance(one, Exception):
                    raise one
                if isinstance(one, float):
                    await asyncio.sleep(one)
                    continue
                yield [one]

        yield parts(self.tries.pop(0))

    async def all(self, scope: Any, body: bytes = b"") -> list[tuple[str, int, list[Any]]]:
        pages = {"a": (404, b"no"), "b": (200, b"# TYPE x:n counter\nx:n_total 2.0\n")}
        return [(name, status, [start(status), part(text)]) for name, (status, text) in pages.items()]


def start(status: int = 200, kind: bytes = b"text/event-stream") -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def part(text: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


def asked(fleet: Script, path: str = COMPLETIONS, body: Any = None, **options: Any) -> httpx.Response:
    async def found() -> httpx.Response:
        config = ServerConfig(**{"max_body_bytes": 1000, **options.pop("config", {})})
        transport = httpx.ASGITransport(front_app(fleet, config, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await (http.get(path) if body is None else http.post(path, json=body))

    return asyncio.run(found())


def test_a_request_of_which_nothing_was_sent_goes_to_another_replica() -> None:
    fleet = Script([None], [start(), None], [start(), part(b"data: 1\n\n")])
    found = asked(fleet, body={"prompt": "x"})
    assert (found.status_code, found.text) == (200, "data: 1\n\n")
    assert fleet.asked == [b'{"prompt":"x"}'] * 3

    found = asked(Script([], [start()], [start(), part(b"data: 1\n\n")]), body={"prompt": "x"})
    assert (found.status_code, found.text) == (200, "data: 1\n\n"), "a replica that ends without a word has died"

    found = asked(Script([None], [None], [None]), body={"prompt": "x"})
    assert found.status_code == 503
    assert found.json()["error"]["code"] == "replica_died"


@pytest.mark.parametrize(
    ("path", "end"),
    [
        (COMPLETIONS, r'data: \{"error":\{"message":"the replica .*"code":"replica_died"\}\}\n\ndata: \[DONE\]\n\n'),
        ("/v1/responses", r'event: error\ndata: \{"type":"error","code":"replica_died",.*\n\n'),
        ("/v1/messages", r'event: error\ndata: \{"type":"error","error":\{"type":"api_error",.*\n\n'),
    ],
)
def test_a_stream_that_has_begun_ends_with_an_error_event(path: str, end: str) -> None:
    fleet = Script([start(), part(b"data: 1\n\n", more=True), None], [start(), part(b"data: 2\n\n")])
    found = asked(fleet, path, {"stream": True})
    assert re.fullmatch("data: 1\n\n" + end, found.text)
    assert len(fleet.tries) == 1, "it is not asked for again"
    silent = asked(Script([start(), part(b"data: 1\n\n", more=True)]), path, {"stream": True})
    assert silent.text == found.text, "so does one that stops without an error"


def test_a_request_that_nobody_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "LATER", 0.0)
    quick = {"config": {"request_timeout": 0.1}}
    assert asked(Script([60.0]), body={"prompt": "x"}, **quick).status_code == 504
    begun = Script([start(), part(b"data: 1\n\n", more=True), 0.3, part(b"data: 2\n\n")])
    assert asked(begun, body={"prompt": "x"}, **quick).text == "data: 1\n\ndata: 2\n\n", "one that has begun goes on"


def test_half_an_answer_is_no_answer() -> None:
    with pytest.raises(ConnectionError):
        asked(Script([start(200, b"application/json"), part(b'{"a', more=True), None]), body={"prompt": "x"})


def test_an_error_of_a_replica_announces_that_the_connection_ends() -> None:
    found = asked(Script([ZeroDivisionError()]), body={"prompt": "x"})
    assert (found.status_code, found.json()["error"]["message"]) == (500, "internal error")
    assert found.headers["connection"] == "close"
    fine = asked(Script([start(), part(b"data: 1\n\n")]), body={"prompt": "x"})
    assert "connection" not in fine.headers


@pytest.mark.parametrize("end", [None, ZeroDivisionError()], ids=["death", "error"])
def test_what_happens_behind_a_whole_answer_harms_it_no_more(end: Exception | None) -> None:
    """A replica whose application has failed raises when it has told the client."""
    whole = [start(500, b"application/json"), part(b"{}")]
    assert asked(Script([*whole, end]), body={"prompt": "x"}).text == "{}"
    if end is not None:
        half = [start(500, b"application/json"), part(b"{", more=True)]
        with pytest.raises(ConnectionError, match="internal error"):
            asked(Script([*half, end]), body={"prompt": "x"})


def test_all_replicas_are_asked_what_only_one_may_know() -> None:
    assert asked(Script(), "/v1/responses/resp_1").text.startswith("# TYPE"), "the one that answers 200"
    one = Script([start(), part(b"{}")])
    assert asked(one, "/v1/responses/compact", {"input": "x"}).text == "{}"
    assert [json.loads(body) for body in one.asked] == [{"input": "x"}], "one of them decodes"
    page = asked(Script(), "/metrics").text
    assert 'x:n_total{replica="b"} 2.0' in page
    assert 'paceline:num_replicas{replica="front"} 1.0' in page


@pytest.mark.parametrize(
    ("body", "param"), [({"previous_response_id": "r"}, "previous_response_id"), ({"store": True}, "store")]
)
def test_where_no_responses_are_stored_who_needs_one_is_told(body: Mapping[str, Any], param: str) -> None:
    found = asked(Script(), "/v1/responses", body, shared_responses=False)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == param
    fleet = Script([start(), part(b"")])
    assert asked(fleet, "/v1/responses", {"input": "x"}, shared_responses=False).status_code == 200
    assert json.loads(fleet.asked[0]) == {"input": "x", "store": False}


def test_the_front_lets_in_as_the_server_does() -> None:
    keys = {"config": {"api_key": ["right"]}}
    assert asked(Script(), body={"prompt": "x"}, **keys).status_code == 401
    assert asked(Script(), body={"prompt": "x" * 2000}).status_code == 413
    assert asked(Script(), "/").json()["error"]["code"] == "no_page"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


def test_without_ray_one_line_names_the_extra(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "url": COMPLETIONS, "body": {"prompt": "x"}}))
    for words in (("serve", "--replicas", 2, "--port", 0), ("batch", "run", source, "-o", tmp_path / "o", "--ray")):
        found = run(*words)
        assert found.code == 2
        assert found.line.endswith("needs Ray; pip install '.[ray]' in a checkout")
    assert run("serve", "--replicas", 0).line == "replicas must be an integer in 1..1024, got 0"
    assert "add --ray" in run("batch", "run", source, "-o", tmp_path / "o", "--replicas", 2).line


@contextmanager
def replicas(*flags: str) -> Iterator[tuple[psutil.Process, httpx.Client]]:
    command = [sys.executable, "-m", "paceline", "serve", "--replicas", "2", "--threads", "1", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        url = re.search(r"http://[0-9.:]+", process.stdout.readline())
        assert url is not None
        with httpx.Client(base_url=url.group(), timeout=60) as http:
            yield psutil.Process(process.pid), http
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'")
def test_replicas_answer_as_the_library_does_and_survive_a_kill(llm: LLM) -> None:
    prompts = [f"Once upon a time {number}" for number in range(6)]
    wanted = [one.outputs[0].text for one in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))]
    with replicas("--dtype", "float32") as (server, http):

        def texts() -> list[str]:
            bodies = [{"prompt": one, "max_tokens": 12, "temperature": 0} for one in prompts]
            return [http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for body in bodies]

        assert texts() == wanted
        children = server.children(recursive=True)
        for one in [server, *children]:
            listening = [at.laddr.ip for at in one.net_connections("inet") if at.status == psutil.CONN_LISTEN]
            assert {ip.removeprefix("::ffff:") for ip in listening} <= {"127.0.0.1"}
        engines = [one for one in children if "ray::ServeReplica" in "".join(one.cmdline())]
        assert len(engines) == 2
        os.kill(engines[0].pid, signal.SIGKILL)
        assert texts() == wanted
        end = time.monotonic() + 60
        while 'num_replicas{replica="front"} 2.0' not in http.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.1)
