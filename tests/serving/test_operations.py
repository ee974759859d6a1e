"""What operators see: when the server is ready, how it stops, which hosts and pages may use it, metrics and logs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import Command
from forked import Forked
from prometheus_client.parser import text_string_to_metric_families
from serving.conftest import Live, comes, serve, slowed

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig
from paceline.errors import ConfigError, PacelineError
from paceline.serving import JsonLines, Server, create_app, front_app, warm_up
from paceline.serving.api_errors import ApiError
from paceline.serving.metrics import Metrics
from paceline.serving.request_log import LogFields

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Say hello"}]
serving = contextmanager(serve)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


# Ready, and not yet


def test_until_the_model_is_there_the_server_says_what_it_waits_for() -> None:
    server = Server(ServerConfig(port=0, api_key=["key"]))
    key = {"authorization": "Bearer key"}
    with httpx.Client(base_url=server.url, timeout=30) as http, server.not_ready() as told:
        assert http.get("/health/live").status_code == 200
        for path in ("/health", "/health/ready"):
            found = http.get(path)
            assert (found.status_code, found.json()["status"]) == (503, "loading the model")
            assert found.json()["error"]["type"] == "unavailable_error", "as llama-server"
            assert int(found.headers["retry-after"]) > 0
        told.doing = "warming up"
        assert http.get("/health").json()["status"] == "warming up"
        found = http.post(COMPLETIONS, json={"prompt": "a"}, headers=key)
        assert (found.status_code, found.json()["error"]["code"]) == (503, "not_ready")
        assert "warming up" in found.json()["error"]["message"]
        assert found.headers["retry-after"]
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 401
        assert http.get("/health", headers={"host": "evil.example"}).status_code == 421
    server.socket.close()


def test_who_connects_while_the_model_is_loaded_is_answered_by_the_same_address_afterwards(llm: LLM) -> None:
    config = ServerConfig(port=0)
    server = Server(config)
    with server.not_ready():
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 503
    with ThreadPoolExecutor() as pool:
        early = pool.submit(httpx.get, f"{server.url}/health", timeout=30)  # nobody answers yet
        serving = server.prepared(create_app(AsyncLLM(llm), config))
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [server.socket]}, daemon=True)
        thread.start()
        answer = early.result()
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    serving.should_exit = True
    thread.join(20)


def test_readiness_and_liveness_of_a_model_that_is_closed() -> None:
    model = LLM(dtype="float32", profile=False)
    app = create_app(AsyncLLM(model))
    assert {path: asked(app, path).status_code for path in ("/health", "/health/ready", "/health/live")} == {
        "/health": 200, "/health/ready": 200, "/health/live": 200}  # fmt: skip
    model.close()
    assert asked(app, "/health").json()["status"] == "closed"
    assert [asked(app, path).status_code for path in ("/health", "/health/ready", "/health/live")] == [503] * 3


def test_files_are_read_and_the_model_is_warm_before_the_server_is_ready(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[Any] = []

    def look(*_: Any, **__: Any) -> Any:
        found.append(httpx.get(f"http://127.0.0.1:{port}/health", timeout=30).json()["status"])

    def load(*_: Any, **__: Any) -> LLM:
        look()
        return LLM(dtype="float32", profile=False)

    def served(_: Server, app: Any) -> int:
        found.append(asked(app, "/health").json()["status"])
        return 7

    monkeypatch.setattr("paceline.cli.serve.open_llm", load)
    monkeypatch.setattr("paceline.serving.warm_up", look)
    monkeypatch.setattr("paceline.serving.server.Server.run", served)
    missing = str(tmp_path / "missing")
    for flag in ("--chat-template", "--api-key-file", "--admin-key-file"):
        assert run("serve", "--port", port, flag, missing).code == 2
    assert run("serve", "--port", port, "--response-file", tmp_path).code == 2
    assert not found, "nothing was loaded"
    assert run("serve", "--port", port, "--response-file", tmp_path / "responses").code == 7
    assert found == ["loading the model", "warming up", "ok"]


def test_warming_up_runs_all_passes_that_drafts_need_and_leaves_no_trace(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llm.with_speculative_config({"method": "suffix"})
    read, rows, steps = list[list[int]](), list[int](), list[int]()
    extend, score = model.runner.extend, model.runner.score

    def extended(caches: Any, tokens: Any, *rest: Any, **more: Any) -> Any:
        read.extend(tokens)
        return extend(caches, tokens, *rest, **more)

    def scored(caches: Any, roots: Any, trees: Any, *rest: Any, **more: Any) -> Any:
        rows.append(sum(1 + len(tree) for tree in trees))
        return score(caches, roots, trees, *rest, **more)

    with monkeypatch.context() as patched:
        patched.setattr(model.runner, "extend", extended)
        patched.setattr(model.runner, "score", scored)
        patched.setattr(model.engine, "step", lambda: steps.append(1))
        warm_up(model)
    prompt = max(read, key=len)
    assert len(prompt) > 32
    assert {1, 2, 4, 8, 16, 32} <= set(rows)
    assert not steps, "the engine of the requests has had none"

    def cached(salt: str) -> int | None:
        return model.generate({"prompt_token_ids": [*prompt, 1], "cache_salt": salt})[0].num_cached_tokens

    assert (cached("somebody") or 0) == 0 < (cached("paceline serve: warm-up") or 0)

    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(model.runner, "score", broken)
    with pytest.raises((PacelineError, MemoryError), match="no room"):
        warm_up(model)


# The end


def asked(app: Any, path: str, *, host: str = "localhost", method: str = "GET", **more: Any) -> httpx.Response:
    """The answer of an application that no server runs."""

    async def found() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            return await http.request(method, path, **more)

    return asyncio.run(found())


class Endless(AsyncLLM):
    """Never comes to an end by itself."""

    def stream(self, prompt: Any, params: Any = None, **more: Any) -> Any:
        return super().stream(prompt, replace(params, ignore_eos=True), **more)


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "One day", "max_tokens": 1900}),
    "completion stream": (COMPLETIONS, {"prompt": "One", "max_tokens": 1900, "stream": True}),
    "two streams": (COMPLETIONS, {"prompt": ["A", "I"], "max_tokens": 1900, "stream": True}),
    "messages": (
        "/v1/messages",
        {"model": "bundled", "messages": HELLO, "max_tokens": 1900, "stream": True},
    ),
    "responses": ("/v1/responses", {"input": "Say hello", "stream": True}),
}
SHUT = "the server was shut down before the answer was complete"


def test_what_takes_too_long_at_the_end_is_told_so(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Meanwhile new requests are sent elsewhere."""
    texts: dict[str, str] = {}
    caplog.set_level(logging.INFO, "paceline.serving")
    with slowed(llm), serving(Endless(llm), drain_timeout=1.0) as live, ThreadPoolExecutor() as pool:
        posts = {name: pool.submit(live.post, path, **body) for name, (path, body) in LONG.items()}
        assert comes(lambda: len(llm.engine.scheduler.running) == 1 + len(LONG))
        assert live.http.get("/health").status_code == 200
        stop(live)
        assert comes(lambda: live.http.get("/health").json()["status"] == "draining")
        with httpx.Client(base_url=live.url, timeout=30) as http:
            new = http.post(COMPLETIONS, json={"prompt": "a"})
            assert [http.get(path).status_code for path in ("/health/live", "/health/ready", "/metrics")] == [
                200, 503, 200]  # fmt: skip
        assert (new.status_code, new.json()["error"]["code"]) == (503, "shutting_down")
        assert new.headers["retry-after"]
        found = {name: post.result() for name, post in posts.items()}
        texts = {name: answer.text for name, answer in found.items()}
    assert found["completion"].status_code == 503
    assert json.loads(texts["completion"])["error"] == {
        "message": SHUT, "type": "server_error", "param": None, "code": "shutting_down"}  # fmt: skip
    for name in ("completion stream", "two streams"):
        assert texts[name].count("data: ") > 3
        *_, last, done, _ = texts[name].split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    for name, error in (
        (
            "messages",
            {
                "type": "error",
                "error": {"type": "api_error", "message": SHUT, "details": {"error_code": "shutting_down"}},
            },
        ),
        ("responses", {"type": "error", "code": "shutting_down", "message": SHUT, "param": None}),
    ):
        event, data = texts[name].rstrip("\n").rsplit("\n\n", 1)[1].split("\n")
        assert (event, json.loads(data.removeprefix("data: "))) == ("event: error", error)
    told = [facts for facts in logged(caplog) if facts["path"] in {path for path, _ in LONG.values()}]
    assert sorted(line["status"] for line in told) == [200] * 4 + [503] * 2
    cut = [line for line in told if line.get("error") == SHUT]
    assert len(cut) == len(LONG)
    assert all(line["completion_tokens"] > 0 for line in cut)
    assert any("5 requests are cut off: they took more than 1 seconds" in one.getMessage() for one in caplog.records)


def stop(live: Live) -> None:
    """As a signal does, in the thread of a test."""
    live.server.should_exit = True


def test_the_openai_client_sees_an_error_where_its_stream_is_cut(llm: LLM, openai: Any) -> None:
    with slowed(llm), serving(Endless(llm), drain_timeout=0.2) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(model="bundled", messages=HELLO, stream=True, max_tokens=1900)
        next(stream)
        stop(live)
        with pytest.raises(openai.APIError, match=SHUT):
            list(stream)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="of Unix")
def test_hanging_up_stops_a_server_unless_it_is_ignored(llm: LLM) -> None:
    config = ServerConfig(port=0)
    listening = Server(config)
    server = listening.prepared(create_app(AsyncLLM(llm), config))
    kept = signal.getsignal(signal.SIGHUP)
    try:
        for before, inside in ((signal.SIG_DFL, server.handle_exit), (signal.SIG_IGN, signal.SIG_IGN)):
            signal.signal(signal.SIGHUP, before)
            with server.capture_signals():
                assert signal.getsignal(signal.SIGHUP) == inside
                assert signal.getsignal(signal.SIGTERM) == server.handle_exit
            assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, kept)
        listening.socket.close()


@contextmanager
def ended(process: Forked) -> Iterator[None]:
    """Behind the block, whatever happens in it."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="of Unix")
def test_the_first_signal_drains_the_second_cuts_and_all_lines_are_json(tmp_path: Path) -> None:
    flags = ["serve", "--port", "0", "--api-key", "k", "--dtype", "float32", "--host", "0.0.0.0"]
    log = (tmp_path / "log").open("w+")
    with Forked(flags, stdout=subprocess.PIPE, stderr=log, text=True) as server, ended(server):
        assert server.stdout is not None
        line = server.stdout.readline()
        port = re.search(r"http://0\.0\.0\.0:(\d+)/v1", line)
        assert port is not None, line + (tmp_path / "log").read_text()
        with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", headers={"authorization": "Bearer k"}) as http:
            bodies = [{"prompt": "One day", "max_tokens": most, "ignore_eos": True, "n": 16} for most in (1900, 1900)]
            http.timeout = httpx.Timeout(60)
            with http.stream("POST", COMPLETIONS, json={**bodies[0], "stream": True}) as answer:
                events = answer.iter_lines()
                next(events)
                server.send_signal(signal.SIGHUP)
                assert comes(lambda: http.get("/health").status_code == 503)
                assert http.get("/health").json() == {"status": "draining"}
                assert http.post(COMPLETIONS, json=bodies[1]).status_code == 503
                assert next(event for event in events if event).startswith("data: {"), "it goes on"
                server.send_signal(signal.SIGTERM)
                rest = [event for event in events if event]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["message"] == SHUT
        assert server.wait(30) == 128 + signal.SIGTERM
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    log.close()
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
    said = " ".join(line.get("message", "") for line in lines)
    assert re.search(r"warmed up in .*requests have ended.*1 requests are cut off: a second signal came", said)
    mine = [line for line in lines if line.get("path") == COMPLETIONS]
    assert [line["status"] for line in mine] == [503, 200]
    assert (mine[1]["error"], mine[1]["error_code"]) == (SHUT, "shutting_down")


# Hosts and origins


HOSTS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "loopback": (
        {},
        ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"),
        ("evil.example", "192.168.1.5", "10.0.0.1:8000", "", "localhost.evil.example"),
    ),
    "all addresses": (
        {"host": "0.0.0.0"},
        (
            "localhost:8000",
            "127.0.0.1",
            "192.168.1.5:8000",
            "[2001:db8::1]:8000",
            "172.17.0.2",
            "",
            "%h",
            "%h.local:80",
        ),
        ("evil.example", "evil.example:8000", "1.evil.example", "127.0.0.1.evil.example", "0x7f.1", "[evil]"),
    ),
    "an address": ({"host": "192.0.2.1"}, ("192.0.2.1:8000", "localhost"), ("evil.example",)),
    "names": (
        {"host": "::", "allowed_host": ["llm.example", "*.pods.example"]},
        ("llm.example:443", "LLM.example", "a.b.pods.example", "192.0.2.1"),
        ("evil.example", "xllm.example", "pods.example", "evilpods.example"),
    ),
    "any": ({"host": "0.0.0.0", "allowed_host": ["*"]}, ("evil.example",), ()),
}


@pytest.mark.parametrize("case", HOSTS)
def test_hosts_that_are_let_in(llm: LLM, case: str) -> None:
    options, fine, wrong = HOSTS[case]
    app = create_app(AsyncLLM(llm), ServerConfig(**options))
    own = socket.gethostname().partition(".")[0]

    def status(host: str) -> int:
        return asked(app, "/version", headers={"host": host.replace("%h", own)}).status_code

    assert {host: status(host) for host in fine} == dict.fromkeys(fine, 200)
    assert {host: status(host) for host in wrong} == dict.fromkeys(wrong, 421)


def test_who_comes_under_another_name_is_told_the_flag(llm: LLM) -> None:
    app = create_app(AsyncLLM(llm), ServerConfig(host="0.0.0.0"))
    error = asked(app, "/version", headers={"host": "llm.example:8000"}).json()["error"]
    assert error["code"] == "wrong_host"
    assert "--allowed-host llm.example" in error["message"]


def preflight(app: Any, origin: str) -> httpx.Response:
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    return asked(app, CHAT, method="OPTIONS", headers={"origin": origin, **wanted})


def test_pages_of_allowed_origins_may_use_a_server_with_keys(llm: LLM) -> None:
    page, key = "https://chat.example", {"authorization": "Bearer key"}
    app = create_app(AsyncLLM(llm), ServerConfig(api_key=["key"], allowed_origins=[page, "http://localhost:3000"]))
    found = preflight(app, page)
    assert found.is_success
    assert found.headers["access-control-allow-origin"] == page
    assert "POST" in found.headers["access-control-allow-methods"]
    assert found.headers["access-control-allow-headers"] == "authorization, content-type"
    for headers, status in (({}, 401), (key, 200)):
        answer = asked(app, "/v1/models", headers={"origin": page, **headers})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, page)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for other in ("https://evil.example", "https://chat.example.evil.example", "http://chat.example", "null"):
        refused = preflight(app, other)
        assert refused.status_code == 403
        assert "--allowed-origins" in refused.json()["error"]["message"]
        answer = asked(app, "/v1/models", headers={"origin": other, **key})
        assert "access-control-allow-origin" not in answer.headers
    assert asked(app, CHAT, method="OPTIONS").status_code == 401, "that is no question of a browser"


def test_by_default_no_page_of_another_origin_is_let_in(llm: LLM) -> None:
    app = create_app(AsyncLLM(llm))
    assert preflight(app, "https://chat.example").status_code == 403
    assert "access-control-allow-origin" not in asked(app, "/version", headers={"origin": "https://a.example"}).headers
    assert preflight(create_app(AsyncLLM(llm), ServerConfig(allowed_origins=["*"])), "https://a.example").is_success


@pytest.mark.parametrize("wrong", ["example.org", "https://example.org/path", "[1]", "[", '{"a": 1}'])
def test_what_is_no_origin_is_rejected(run: Command, wrong: str) -> None:
    assert "allowed" in run("serve", "--allowed-origins", wrong).line


def test_origins_are_typed_as_vllm_has_them_or_one_by_one(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def made(config: ServerConfig) -> Any:
        found.append(config.allowed_origins)
        raise ConfigError("enough")

    monkeypatch.setattr("paceline.serving.Server", made)
    for typed in (['["https://a.example", "*"]'], ["https://a.example", "--allowed-origins", "*"]):
        run("serve", "--allowed-origins", *typed)
    assert [list(one) for one in found] == [["https://a.example", "*"]] * 2


# Metrics


def samples(page: str) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            found.setdefault(one.name, []).append((one.labels, one.value))
    return found


def value(page: str, name: str, **labels: str) -> float:
    return sum(value for found, value in samples(page).get(name, []) if labels.items() <= found.items())


TIMES = ("queue", "prefill", "decode", "inference")
VLLM = (
    *(f"request_{part}_time_seconds_bucket" for part in TIMES),
    *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    *("request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_success_total"),
    *("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting"),
    *("kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    "spec_decode_num_accepted_tokens_per_pos_total",
)
"""Names in vLLM's documentation."""


def test_under_vllms_names_all_samples_have_vllms_labels(llm: LLM) -> None:
    model = AsyncLLM(llm.with_speculative_config({"method": "prediction", "num_speculative_tokens": 8}))
    with serving(model, vllm_metrics=True, served_model_name=["my-model", "other"]) as live:
        body: dict[str, Any] = {"prompt": "One day", "max_tokens": 24, "temperature": 0}
        live.ok(COMPLETIONS, **body, prediction=live.ok(COMPLETIONS, **body)["choices"][0]["text"])
        live.error(COMPLETIONS, prompt="a", temperature=-1)
        found = samples(live.http.get("/metrics").text)
    assert {f"vllm:{name}" for name in VLLM} <= found.keys()
    for name, each in found.items():
        for labels, _ in each:
            known = {"model_name": "my-model", "engine": "0"}
            assert (known.items() <= labels.items()) == name.startswith("vllm:"), name
    ours = samples(Metrics(AsyncLLM(llm)).page().decode())
    assert {name for name in ours if name.startswith("vllm:")} == set()
    assert not any("model_name" in labels for each in ours.values() for labels, _ in each)


def test_times_lengths_and_cached_prefixes_are_counted(llm: LLM) -> None:
    prompt = [5 + number % 50 for number in range(100)]
    names = ("request_prompt_tokens_sum", "request_generation_tokens_sum", "request_generation_tokens_count",
             "prefix_cache_queries_total", "prefix_cache_hits_total",
             *(f"request_{part}_time_seconds_count" for part in TIMES))  # fmt: skip
    with serving(AsyncLLM(llm)) as live:

        def page() -> str:
            return live.http.get("/metrics").text

        def added(**body: Any) -> list[float]:
            before = page()
            live.ok(COMPLETIONS, prompt=prompt, max_tokens=9, temperature=0.5, ignore_eos=True, **body)
            after = page()
            return [value(after, f"paceline:{name}") - value(before, f"paceline:{name}") for name in names]

        first, second = added(cache_salt="mine"), added(cache_salt="mine", n=2)
        assert first == [100, 9, 1, 100, 0, 1, 1, 1, 1]
        hits = second.pop(4)
        assert 0 < hits < 100
        assert second == [100, 18, 2, 100, 1, 1, 1, 1]
        sums = {part: value(page(), f"paceline:request_{part}_time_seconds_sum") for part in TIMES}
        assert all(seconds > 0 for seconds in sums.values())
        assert sums["inference"] == pytest.approx(sums["prefill"] + sums["decode"])
        whole = value(page(), "paceline:e2e_request_latency_seconds_sum")
        assert sums["queue"] + sums["inference"] <= whole


def test_the_process_and_failures_of_the_store_are_in_the_metrics(llm: LLM) -> None:
    metrics = Metrics(AsyncLLM(llm))
    page = metrics.page().decode()
    assert value(page, "process_resident_memory_bytes") > 1e6
    assert value(page, "process_cpu_seconds_total") > 0
    ((labels, one),) = samples(page)["paceline:build_info"]
    assert (set(labels), one) == ({"version", "python", "torch"}, 1.0)
    assert value(page, "paceline:response_store_failures_total") == 0
    metrics.store_failed()
    assert value(metrics.page().decode(), "paceline:response_store_failures_total") == 1
    assert metrics.store_failures == 1


# The log


def logged(caplog: pytest.LogCaptureFixture) -> list[LogFields]:
    return [record.args for record in caplog.records if isinstance(record.args, LogFields) and "path" in record.args]


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[LogFields]:
    """As many as there must be; each is written when its answer has been sent."""
    assert comes(lambda: len(logged(caplog)) >= count)
    return logged(caplog)


@pytest.fixture
def keyed(llm: LLM, caplog: pytest.LogCaptureFixture) -> Iterator[Live]:
    caplog.set_level(logging.INFO, "paceline.serving")
    with serving(AsyncLLM(llm), api_key=["key"]) as live:
        live.http.headers["authorization"] = "Bearer key"
        yield live


def test_the_log_has_who_asked_how_much_and_how_long_it_took(keyed: Live, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True, "n": 2, "temperature": 1}
    keyed.http.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"})
    keyed.http.post(COMPLETIONS, json={**body, "stream": True, "n": 1})
    whole, streamed = lines(caplog, 2)
    assert (whole["request_id"], whole["path"], whole["status"]) == ("mine", COMPLETIONS, 200)
    assert re.fullmatch(r"key-[0-9a-f]{8}", whole["owner"])
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (3, 18)
    assert (streamed["prompt_tokens"], streamed["completion_tokens"]) == (3, 9)
    for line in (whole, streamed):
        assert 0 < line["first_token_seconds"] <= line["seconds"]
        assert "error" not in line


WRONG: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a value": (COMPLETIONS, {"prompt": "a", "temperature": -1}, {"status": 400, "error_param": "temperature"}),
    "a model": (
        COMPLETIONS,
        {"prompt": "a", "model": "secret"},
        {"status": 404, "error_code": "model_not_found", "error": "the model '...' is not served here"},
    ),
    "no JSON": (COMPLETIONS, {}, {"status": 400, "error": "the body is not JSON"}),
    "a field": (COMPLETIONS, {"prompt": "a", "unknown": "secret"}, {"error": "unknown is not known here"}),
    "a grammar": (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"grammar": "secret ::= ("}},
        {"status": 400, "error_param": "structured_outputs"},
    ),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 1, "model": "x"}, {"error_code": "not_found_error"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_log_says_why_without_texts(keyed: Live, caplog: pytest.LogCaptureFixture, case: str) -> None:
    path, body, wanted = WRONG[case]
    keyed.http.post(path, content=json.dumps(body) if body else "{", headers={"content-type": "application/json"})
    (line,) = lines(caplog, 1)
    for name, text in wanted.items():
        assert line[name] == text or str(line[name]).startswith(str(text)), line
    assert "secret" not in str(line)


def test_the_log_says_why_a_request_was_not_let_in(keyed: Live, caplog: pytest.LogCaptureFixture) -> None:
    keyed.http.get("/version", headers={"host": "evil.example"})
    keyed.http.get("/version", headers={"authorization": "Bearer wrong"})
    host, key = lines(caplog, 2)
    assert (host["status"], host["error_code"]) == (421, "wrong_host")
    assert (key["status"], key["error_code"]) == (401, "invalid_api_key")
    assert "owner" not in key


@pytest.mark.parametrize("stream", [True, False])
def test_the_log_says_why_decoding_failed(
    keyed: Live, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    step, calls = keyed.model.llm.engine.step, list[int]()

    def failing() -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(keyed.model.llm.engine, "step", failing)
        body = {"prompt": "a", "stream": stream, "max_tokens": 200, "ignore_eos": True}
        keyed.http.post(COMPLETIONS, json=body)
    (line,) = lines(caplog, 1)
    assert line["status"] == (200 if stream else 500)
    assert line["error_code"] == "decoding_failed"
    assert "no room" in line["error"]


def test_with_prompts_in_the_log_errors_are_told_in_full(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.serving")
    with serving(AsyncLLM(llm), log_requests=True) as live:
        live.error(COMPLETIONS, 404, prompt="a", model="secret")
    assert "secret" in logged(caplog)[-1]["error"]


def test_quoted_texts_are_left_out_wherever_they_end() -> None:
    def told(message: str, **more: Any) -> Any:
        facts = LogFields(**more)
        facts.failed(400, message, None, None)
        return facts["error"]

    assert told("stop must be a text, got ['my secret', 'and \\'more']") == "stop must be a text, got ['...', '...']"
    assert told('role must be one of user, got "it\'s secret" here') == "role must be one of user, got '...' here"
    assert told("a function's name is 'secret") == "a function's name is '...'"
    assert told("max_tokens must be at most 5, got 9") == "max_tokens must be at most 5, got 9"
    assert told("got 'secret'", texts=True) == "got 'secret'"


def test_every_line_is_json_with_a_time() -> None:
    def line(*given: Any, error: BaseException | None = None) -> dict[str, Any]:
        info = None if error is None else (type(error), error, error.__traceback__)
        text = JsonLines().format(logging.LogRecord("uvicorn.error", logging.ERROR, "", 1, *given, info))
        assert "\n" not in text
        found: dict[str, Any] = json.loads(text)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
        assert (found["level"], found["logger"]) == ("error", "uvicorn.error")
        return found

    assert line('two\nlines of "%s", 100 %%', ("ä\ud800",))["message"] == 'two\nlines of "ä\ud800", 100 %'
    assert line("no arguments, 100 %", ())["message"] == "no arguments, 100 %"
    assert line("a mapping %(a)s", ({"a": 1},))["message"] == "a mapping 1"
    assert line("%s", (LogFields(path="/", status=200),))["status"] == 200
    assert line("%s", (LogFields(time="no", logger="no"),))["logger"] == "uvicorn.error"
    assert "ZeroDivisionError: x" in line("failed", (), error=ZeroDivisionError("x"))["exception"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(logging.Formatter("%(levelname)s: %(message)s").format(
            logging.LogRecord("a", 20, "", 1, "%s", (LogFields(path="/"),), None)))  # fmt: skip


def test_an_error_of_the_api_is_told_in_full_where_the_server_is_to_blame() -> None:
    facts, error = LogFields(), ApiError("the disk '/data' is full", status=500, code="store_failed")
    facts.failed_with(error.status, json.dumps(error.body()).encode())
    assert facts == {"error": "the disk '/data' is full", "error_code": "store_failed"}


class Near:
    """Replicas of one, in this process."""

    gone: tuple[type[Exception], ...] = ()
    failed: tuple[type[Exception], ...] = ()

    def __init__(self, app: Any) -> None:
        self.app = app

    @asynccontextmanager
    async def answer(self, scope: Any, body: bytes, affinity: Any) -> AsyncIterator[AsyncIterator[list[Any]]]:
        sent, gone = asyncio.Queue[Any](), asyncio.Event()
        asked = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not asked:
                await gone.wait()
            return asked.pop() if asked else {"type": "http.disconnect"}

        async def parts() -> AsyncIterator[list[Any]]:
            while (message := await sent.get()) is not None:
                yield [message]

        task = asyncio.create_task(self.app(scope, receive, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        yield parts()
        gone.set()
        await task

    async def all(self, scope: Any, body: bytes = b"") -> list[tuple[str, int, list[Any]]]:
        return []


@pytest.mark.parametrize("stream", [True, False])
def test_before_replicas_there_is_one_line_one_id_and_one_allowed_origin(
    llm: LLM, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "paceline.serving")
    config = ServerConfig(api_key=["key"], allowed_origins=["https://chat.example"], allowed_host=["front"])
    replica = create_app(AsyncLLM(llm), replace(config, allowed_host=()))  # whose machine has another name
    headers = {"authorization": "Bearer key", "origin": "https://chat.example", "x-request-id": "mine"}
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "stream": stream}
    app = front_app(Near(replica), config)
    answer = asked(app, COMPLETIONS, host="front", method="POST", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    for name in ("access-control-allow-origin", "x-request-id"):
        assert len(answer.headers.get_list(name)) == 1
    line = logged(caplog)[-1]
    assert (line["request_id"], line["prompt_tokens"], line["completion_tokens"]) == ("mine", 3, 4)
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert asked(app, "/health/live", host="front").status_code == 200
    assert asked(app, "/health", host="front").status_code == 503, "no replica answers"
