"""Keys with limits of their own: a file gives them, and answers tell what is left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving.conftest import Live, comes, serve, slowed
from serving.test_operations import Near

from paceline import LLM, AsyncLLM
from paceline.config import KeyLimits, ServerConfig
from paceline.errors import ConfigError
from paceline.serving import create_app, entrance, front_app, read_keys
from paceline.serving.quotas import Bucket, duration

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = [5, 6, 7]
KEYS = """
keys:
  - {key: few, name: team A, requests_per_minute: 3}
  - {key: short, tokens_per_minute: 40}
  - {key: small, max_tokens: 8, max_outputs: 4, max_running: 2}
  - {key: late, priority: 5}
  - key: free
"""
serving = contextmanager(serve)


class Clock:
    """Stands in for `time.monotonic`, and stands still."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("paceline.serving.quotas.monotonic", clock)
    return clock


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    return file


class Noting(AsyncLLM):
    """Keeps the priorities of what it is asked to decode."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.priorities: list[int] = []
        self.running: list[int | None] = []

    def stream(self, prompt: Any, params: Any = None, **more: Any) -> Any:
        self.priorities.append(more["priority"])
        self.running.append(more["max_running"])
        return super().stream(prompt, params, **more)


@pytest.fixture
def limited(llm: LLM, key_file: Path, clock: Clock) -> Iterator[Live]:
    yield from serve(Noting(llm), api_key_file=str(key_file))


def ask(live: Live, key: str, path: str = COMPLETIONS, **more: Any) -> httpx.Response:
    body = {"ignore_eos": True} | ({"prompt": PROMPT, "max_tokens": 4} if path == COMPLETIONS else {}) | more
    return live.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def left(answer: httpx.Response, unit: str) -> int:
    return int(answer.headers[f"x-ratelimit-remaining-{unit}"])


def test_a_bucket_fills_up_steadily_and_owes_what_was_too_much(clock: Clock) -> None:
    bucket = Bucket(60)
    assert (bucket.left, bucket.seconds_until(60)) == (60, 0)
    bucket.take(70)
    assert (bucket.left, bucket.seconds_until(1)) == (-10, 11)
    clock.now += 11
    assert bucket.left == 1
    clock.now += 1000
    assert bucket.left == 60, "and no more than it holds"


def test_times_are_written_as_openai_writes_them() -> None:
    assert [duration(seconds) for seconds in (0, 0.0201, 1, 12.3456, 59.9999, 360, 3661)] == [
        "0ms", "21ms", "1s", "12.346s", "60s", "6m0s", "61m1s"
    ]  # fmt: skip


def test_requests_of_a_minute_are_counted_and_answers_say_what_is_left(limited: Live, clock: Clock) -> None:
    first = ask(limited, "few")
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-reset-requests"] == "20s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert limited.http.get("/v1/models", headers={"x-api-key": "few"}).headers["x-ratelimit-remaining-requests"] == "2"
    assert [left(ask(limited, "few"), "requests") for _ in range(2)] == [1, 0], "reading names costs nothing"
    refused = ask(limited, "few", CHAT, messages=[{"role": "user", "content": "a"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "3 requests of a minute; try again in 20 s" in refused.json()["error"]["message"]
    assert (refused.headers["retry-after"], left(refused, "requests")) == ("20", 0)
    clock.now += 20
    assert ask(limited, "few").status_code == 200, "when the header says so"
    assert ask(limited, "few").status_code == 429
    others = [ask(limited, "free") for _ in range(5)]
    assert {other.status_code for other in others} == {200}
    assert not any("x-ratelimit" in name for other in others for name in other.headers)


def test_without_limits_in_the_file_nobody_is_held_back(llm: LLM, tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "keys"
    file.write_text("few\n")
    with serving(AsyncLLM(llm), api_key_file=str(file)) as live:
        assert {ask(live, "few").status_code for _ in range(6)} == {200}


def test_tokens_of_prompts_and_answers_are_counted(limited: Live, clock: Clock) -> None:
    first = ask(limited, "short", max_tokens=30)
    assert first.status_code == 200
    assert 40 - 33 <= left(first, "tokens") <= 40
    told = limited.http.get("/v1/models", headers={"x-api-key": "short"})
    assert (left(told, "tokens"), told.headers["x-ratelimit-reset-tokens"]) == (7, "49.5s")
    assert ask(limited, "short", max_tokens=30, stream=True).status_code == 200, "some are left when it comes"
    refused = ask(limited, "short")
    assert (refused.status_code, left(refused, "tokens")) == (429, 0)
    assert "its 40 tokens" in refused.json()["error"]["message"]
    seconds = int(refused.headers["retry-after"])
    assert seconds == 41, "26 are owed, and one more is needed: 27 at 40 a minute"
    clock.now += seconds
    assert ask(limited, "short").status_code == 200


def test_who_goes_away_has_used_what_was_decoded(limited: Live, clock: Clock) -> None:
    with slowed(limited.model.llm):
        body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        headers = {"authorization": "Bearer short"}
        with limited.http.stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("data: {"):
                pass

    def charged() -> bool:
        return left(limited.http.get("/v1/models", headers={"x-api-key": "short"}), "tokens") <= 40 - len(PROMPT) - 1

    assert comes(charged)


def test_new_tokens_and_outputs_of_a_key_have_a_limit(limited: Live) -> None:
    too_many = ask(limited, "small", max_tokens=9)
    assert too_many.status_code == 400
    assert too_many.json()["error"]["message"] == "max_tokens must be at most 8, got 9"
    assert ask(limited, "free", max_tokens=9).status_code == 200, "the control"
    for path, body in ((COMPLETIONS, {"max_tokens": None}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        answer = ask(limited, "small", path, **body).json()
        assert answer["usage"]["completion_tokens"] == 8, "whoever asks for no number gets so many"
    assert "at most 4 outputs" in ask(limited, "small", n=5).json()["error"]["message"]
    assert len(ask(limited, "small", n=4).json()["choices"]) == 4
    model = limited.model
    assert isinstance(model, Noting)
    assert ask(limited, "free", n=4).status_code == 200
    assert model.running[-2:] == [2, None], "of four, two at a time"


def test_priorities_go_to_the_engine_and_no_key_raises_its_own(limited: Live) -> None:
    model = limited.model
    assert isinstance(model, Noting)
    for key, asked, found in (("late", None, 5), ("late", 0, 5), ("late", 9, 9), ("free", None, 0), ("free", -3, -3)):
        assert ask(limited, key, priority=asked).status_code == 200
        assert model.priorities[-1] == found, (key, asked)
    error = ask(limited, "late", priority=4).json()["error"]
    assert (error["param"], error["message"]) == ("priority", "priority must be at least 5 with this key, got 4")
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert ask(limited, "free", CHAT, **chat, priority=2).status_code == 200
    headers = {"authorization": "Bearer free"}
    body = {"input": "a", "max_output_tokens": 2, "priority": 7, "store": False}
    assert limited.http.post(RESPONSES, json=body, headers=headers).status_code == 200
    assert model.priorities[-2:] == [2, 7]


@pytest.mark.parametrize("suffix", ["yaml", "json", "toml"])
def test_a_file_of_keys_may_be_yaml_json_or_toml(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"keys.{suffix}"
    texts = {
        "yaml": "keys:\n- {key: a, name: A, max_tokens: 5}\n- key: b",
        "json": '{"keys": [{"key": "a", "name": "A", "max_tokens": 5}, {"key": "b"}]}',
        "toml": '[[keys]]\nkey = "a"\nname = "A"\nmax_tokens = 5\n[[keys]]\nkey = "b"\n',
    }
    file.write_text(texts[suffix])
    clients, _ = read_keys(ServerConfig(api_key_file=str(file), api_key=["a", "c"]))
    assert clients == {"a": KeyLimits(name="A", max_tokens=5), "b": KeyLimits(), "c": KeyLimits()}


WRONG = {
    "unknown": (
        "keys:\n- {key: secret-a, token_per_minute: 5}",
        "key 1 does not know 'token_per_minute'; did you mean ",
    ),
    "range": ("keys:\n- {key: secret-a, max_tokens: 0}", "key 1: max_tokens must be an integer of 1 or more, got 0"),
    "switch": ("keys:\n- {key: secret-a, max_tokens: yes}", "key 1: max_tokens must be an integer"),
    "no key": ("keys:\n- {name: A}", "key 1 must have a text as `key`"),
    "number": ("keys:\n- {key: 123456}", "key 1 must have a text as `key`"),
    "twice": ("keys:\n- key: secret-a\n- key: secret-a", "each key once, got key 2 again"),
    "field twice": ("keys:\n- key: secret-a\n  max_tokens: 5\n  max_tokens: 9", "'max_tokens' occurs twice"),
    "texts": ("keys: [secret-a]", "key 1 must be an object"),
    "list": ("- key: secret-a", "must hold one list, `keys`"),
    "beside": ("keys: [{key: secret-a}]\nother: 5", "must hold one list, `keys`"),
    "empty": ("", "must hold one list, `keys`"),
    "no yaml": ("keys: [secret-a", "must be YAML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_file_of_keys_is_told_without_the_key(tmp_path: Path, case: str) -> None:
    text, line = WRONG[case]
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_keys(ServerConfig(api_key_file=str(file)))
    assert line in str(error.value)
    assert "secret" not in str(error.value)
    assert "\n" not in str(error.value)


def test_before_replicas_quotas_are_counted_once(llm: LLM, key_file: Path, clock: Clock) -> None:
    config = ServerConfig(api_key_file=str(key_file))
    app = front_app(Near(create_app(AsyncLLM(llm), config)), config)
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}

    async def told() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            few = [await http.post(COMPLETIONS, json=body, headers={"x-api-key": "few"}) for _ in range(4)]
            short = [await http.post(COMPLETIONS, json=body, headers={"x-api-key": "short"}) for _ in range(3)]
            load = await http.get("/load", headers={"x-api-key": "free"})
            return [*few, *short, load]

    answers = asyncio.run(told())
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 200, 200, 429, 200]
    assert len(answers[0].headers.get_list("x-ratelimit-limit-requests")) == 1
    assert answers[6].headers["retry-after"] == "41", "as with one server: its replica has told the tokens"
    assert answers[7].json() == {"server_load": 0}


def test_before_replicas_too_who_goes_away_has_used_what_was_decoded(
    llm: LLM, key_file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "FACTS_SECONDS", 0.02)
    config = ServerConfig(api_key_file=str(key_file))
    app = front_app(Near(create_app(AsyncLLM(llm), config)), config)
    body = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
    head = [(b"authorization", b"Bearer short"), (b"content-type", b"application/json"), (b"host", b"localhost")]

    async def left_alone() -> httpx.Response:
        sent, gone = [{"type": "http.request", "body": json.dumps(body).encode()}], asyncio.Event()

        async def receive() -> Any:
            if not sent:
                await gone.wait()
            return sent.pop() if sent else {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            raise AssertionError("no answer is complete before the client goes away")

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "headers": head}
        asking = asyncio.create_task(app(scope | {"http_version": "1.1", "scheme": "http"}, receive, send))
        await asyncio.sleep(1.0)
        gone.set()
        await asking
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await http.get("/v1/models", headers={"x-api-key": "short"})

    with slowed(llm):
        assert left(asyncio.run(left_alone()), "tokens") <= 40 - len(PROMPT) - 1


def test_what_a_request_leaves_open_keeps_within_the_limit_of_its_key(limited: Live) -> None:
    for path, body in (
        ("/completion", {"prompt": PROMPT}),
        ("/v1/responses/compact", {"input": "Tell me more."}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = limited.http.post(path, json=body, headers={"authorization": "Bearer small"})
        assert answer.status_code == 200, (path, answer.text)
    told = limited.http.post("/completion", json={"prompt": PROMPT, "n_predict": 9}, headers={"x-api-key": "small"})
    assert (told.status_code, "must be at most 8, got 9" in told.text) == (400, True)


def test_no_path_is_redirected(limited: Live) -> None:
    for path in ("/metrics/", "/v1/models/"):
        assert limited.http.get(path, headers={"x-api-key": "free"}, follow_redirects=False).status_code == 404


def test_what_is_decoded_behind_an_answer_and_in_a_search_is_paid_for(llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": [{"key": "mine", "tokens_per_minute": 600}]}))
    with serving(AsyncLLM(llm), api_key_file=str(file), enable_search=True) as live:

        def remaining() -> int:
            return left(live.http.get("/v1/models", headers={"x-api-key": "mine"}), "tokens")

        before = remaining()
        begun = ask(live, "mine", RESPONSES, input="Count.", max_output_tokens=100, background=True).json()
        path = f"{RESPONSES}/{begun['id']}"
        assert comes(lambda: live.http.get(path, headers={"x-api-key": "mine"}).json()["status"] == "incomplete")
        assert before - remaining() > 70, "100 tokens, less what some seconds give back"
        before = remaining()
        body = {"search": {"method": "beam", "beam_width": 4}, "max_tokens": 20, "temperature": 0}
        usage = ask(live, "mine", **body).json()["usage"]
        assert usage["search"]["num_tokens"] > 2 * usage["completion_tokens"]
        assert before - remaining() > usage["search"]["num_tokens"] - 30
