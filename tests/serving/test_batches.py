"""`/v1/files` and `/v1/batches` through OpenAI's client: each key has its own, live requests go first, and a batch goes
on where the server was stopped."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from command import Command
from forked import Forked
from serving.conftest import Live, comes, serve, slowed

from paceline import LLM, AsyncLLM
from paceline.batch import BatchAnswer, BatchRequest, ResultFile
from paceline.config import ServerConfig
from paceline.errors import ConfigError
from paceline.serving import check_files
from paceline.serving.batch_runs import PoliteSender, Room

serving = contextmanager(serve)
ENDPOINT = "/v1/completions"


def line(number: int, url: str = ENDPOINT, **more: Any) -> dict[str, Any]:
    body = {"model": "bundled", "prompt": f"One day {number}", "max_tokens": 4, "temperature": 0} | more
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def content(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


def client_of(openai: Any, live: Live, key: str = "first-key") -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=60)


def begun(client: Any, *lines: dict[str, Any], endpoint: str = ENDPOINT) -> Any:
    file = client.files.create(file=("in.jsonl", content(*lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def ended(client: Any, batch: Any) -> Any:
    end = ("completed", "failed", "cancelled")
    assert comes(lambda: client.batches.retrieve(batch.id).status in end)
    return client.batches.retrieve(batch.id)


def answers(client: Any, name: str) -> dict[str, Any]:
    lines = [json.loads(one) for one in client.files.content(name).text.splitlines()]
    return {one["custom_id"]: one["response"] for one in lines}


@pytest.fixture(scope="module")
def kept(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("batches")
    yield from serve(
        AsyncLLM(llm), batch_folder=str(folder), api_key=["first-key", "second-key"], max_batch_file_bytes=5000,
        max_batch_requests=12, allowed_origins=["https://good.example"],
    )  # fmt: skip


def test_files_are_kept_told_and_deleted(openai: Any, kept: Live) -> None:
    client = client_of(openai, kept)
    given = content(line(1))
    file = client.files.create(file=("in.jsonl", given), purpose="batch")
    assert isinstance(file, openai.types.FileObject)
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(given), "batch")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == given
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    second = client.files.create(file=io.BytesIO(given), purpose="batch")
    page = client.files.list(limit=1)
    assert [one.id for one in page.data] == [second.id]
    assert client.files.list(limit=1, after=second.id).data[0].id == file.id
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_batch_is_answered_as_live_requests_are(openai: Any, kept: Live, endpoint: str) -> None:
    client = client_of(openai, kept)
    words = [{"role": "user", "content": "Hi"}]
    more: dict[str, Any] = {
        "/v1/completions": {},
        "/v1/chat/completions": {"messages": words, "prompt": None},
        "/v1/responses": {"input": "Hi", "prompt": None, "max_tokens": None, "max_output_tokens": 4},
    }[endpoint]
    lines = [line(number, endpoint, **more) for number in range(4)]
    batch = begun(client, *lines, line(9, endpoint, nonsense=1, **more), endpoint=endpoint)
    assert isinstance(batch, openai.types.Batch)
    assert batch.status == "validating"
    batch = ended(client, batch)
    assert batch.status == "completed", batch.errors
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 4, 1)
    assert batch.metadata == {"a": "b"}
    found = answers(client, batch.output_file_id)
    assert found.keys() == {"r0", "r1", "r2", "r3"}
    headers = {"authorization": "Bearer first-key"}
    alone = kept.http.post(endpoint, json=lines[2]["body"], headers=headers).json()
    if endpoint == "/v1/responses":
        assert found["r2"]["body"]["output"][0]["content"] == alone["output"][0]["content"]
    else:
        assert found["r2"]["body"]["choices"] == alone["choices"]
    failed = answers(client, batch.error_file_id)["r9"]
    assert (failed["status_code"], failed["body"]["error"]["param"]) == (400, "nonsense")
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in [one.id for one in client.batches.list(limit=100)]


def test_a_key_sees_only_its_own(openai: Any, kept: Live) -> None:
    mine, other = client_of(openai, kept), client_of(openai, kept, "second-key")
    batch = begun(mine, line(1))
    for ask in (
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.input_file_id),
        lambda: other.files.delete(batch.input_file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(input_file_id=batch.input_file_id, endpoint=ENDPOINT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not list(other.files.list())
    assert not list(other.batches.list())
    assert ended(mine, batch).status == "completed"
    with pytest.raises(openai.AuthenticationError):
        client_of(openai, kept, "wrong").files.list()


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([line(1), line(1)], {2: "has the custom_id"}),
        ([line(1), line(2, "/v1/chat/completions")], {2: "line 2 is for /v1/chat/completions"}),
        ([line(number) for number in range(13)], {None: "at most 12 requests"}),
        ([{"custom_id": "a"}], {1: "url"}),
        ([line(1), *[{"custom_id": "a"}] * 4], {2: "url", 3: "url", 4: "url", None: "1 more line"}),
    ],
)
def test_what_is_wrong_with_a_file_is_told_by_its_batch(openai: Any, kept: Live, lines: Any, told: Any) -> None:
    client = client_of(openai, kept)
    batch = ended(client, begun(client, *lines))
    assert batch.status == "failed"
    assert [error.line for error in batch.errors.data] == list(told)
    for error in batch.errors.data:
        assert told[error.line] in error.message
        assert "files/" not in error.message, "no path of the server"
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_uploads_have_limits_and_pages_of_others_cannot_send_any(openai: Any, kept: Live) -> None:
    client = client_of(openai, kept)
    for size, status in ((5000, 200), (5001, 413), (200_000, 413)):
        with pytest.raises(openai.APIStatusError) if status != 200 else contextmanager(lambda: (yield))() as found:
            client.files.create(file=("a", b"x" * size), purpose="batch")
        if found is not None:
            assert found.value.status_code == status
    for purpose, file in (("fine-tune", b"x"), ("batch", b"")):
        with pytest.raises(openai.BadRequestError):
            client.files.create(file=("a", file), purpose=purpose)
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    for origin, status in (("https://evil.example", 403), ("https://good.example", 200)):
        headers = {"authorization": "Bearer first-key", "origin": origin}
        assert kept.http.post("/v1/files", headers=headers, **form).status_code == status
    json_body = kept.http.post("/v1/files", json={}, headers={"authorization": "Bearer first-key"})
    assert json_body.status_code == 415


def test_the_files_of_a_key_have_no_more_bytes_than_its_limits_say(llm: LLM, tmp_path: Path, openai: Any) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "first-key", "max_file_bytes": 100}, {"key": "second-key"}]}))
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path / "batches"), api_key_file=str(keys)) as live:
        bound, free = client_of(openai, live), client_of(openai, live, "second-key")
        kept = [bound.files.create(file=("a", b"x" * size), purpose="batch") for size in (60, 40)]
        with pytest.raises(openai.APIStatusError) as found:
            bound.files.create(file=("a", b"x"), purpose="batch")
        assert (found.value.status_code, found.value.param) == (413, "file")
        assert "max_file_bytes" in found.value.message
        free.files.create(file=("a", b"x" * 101), purpose="batch")
        bound.files.delete(kept[1].id)
        bound.files.create(file=("a", b"x" * 40), purpose="batch")


def test_without_a_folder_the_flag_is_named(live: Live, openai: Any) -> None:
    client = client_of(openai, live)
    for ask in (lambda: client.files.create(file=("a", b"x"), purpose="batch"), client.batches.list):
        with pytest.raises(openai.NotFoundError, match="--batch-folder"):
            ask()


def test_a_cancelled_batch_keeps_what_it_has(openai: Any, llm: LLM, tmp_path: Path) -> None:
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path)) as live, slowed(llm):
        client = client_of(openai, live)
        lines = [line(number, max_tokens=4 if number < 2 else 1500, ignore_eos=True) for number in range(30)]
        batch = begun(client, *lines)
        assert comes(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        with pytest.raises(openai.ConflictError):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch)
        assert batch.status == "cancelled"
        assert answers(client, batch.output_file_id).keys() >= {"r0", "r1"}
        assert client.files.delete(batch.input_file_id).deleted


def test_live_requests_begin_while_a_batch_runs(openai: Any, llm: LLM, tmp_path: Path) -> None:
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path)) as live, slowed(llm):
        client, gauges = client_of(openai, live), llm.backend.gauges
        batch = begun(client, *(line(number, max_tokens=1500, ignore_eos=True) for number in range(40)))
        half = gauges().max_running // 2
        assert comes(lambda: gauges().running == half)
        started = time.monotonic()
        assert live.ok(ENDPOINT, prompt="Hi", max_tokens=2)
        assert time.monotonic() - started < 10, "it did not wait for the batch"
        assert gauges().running <= half
        assert gauges().waiting == 0
        client.batches.cancel(batch.id)
        ended(client, batch)


def test_a_batch_goes_on_after_a_stop(openai: Any, llm: LLM, tmp_path: Path) -> None:
    lines = [line(number, max_tokens=4 if number < 2 else 300, ignore_eos=True) for number in range(8)]
    keys = ["first-key"]
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path), api_key=keys) as live, slowed(llm):
        client = client_of(openai, live)
        batch = begun(client, *lines)
        assert comes(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        with pytest.raises(ConfigError, match="used by another server"):
            check_files(ServerConfig(batch_folder=str(tmp_path)))
    (record,) = (tmp_path / "batches").glob("*.json")
    assert json.loads(record.read_text())["told"]["status"] == "in_progress"
    (written,) = [path for path in (tmp_path / "files").glob("*.jsonl") if b"batch_req_" in path.read_bytes()]
    before = written.read_text().splitlines()
    assert 2 <= len(before) < 8, "control: it was cut off"
    (tmp_path / "files" / "file-000.jsonl").write_text("left by a crash")
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path), api_key=keys) as live:
        client = client_of(openai, live)
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 8)
        text = client.files.content(batch.output_file_id).text
        assert len(text.splitlines()) == 8
        assert set(before) <= set(text.splitlines()), "what was answered is not answered again"
        assert not (tmp_path / "files" / "file-000.jsonl").exists()
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path), api_key=keys) as live:
        assert client_of(openai, live).batches.retrieve(batch.id).status == "completed"


@contextmanager
def process(folder: Path) -> Iterator[tuple[Forked, str]]:
    """A server of its own, once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = ("--port", port, "--batch-folder", str(folder), "-s", "null", "--dtype", "float32")
    with (folder.parent / "log").open("ab") as log:
        server = Forked(["serve", *flags], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        assert comes(lambda: server.poll() is not None or _ready(url))
        yield server, url
    finally:
        server.kill()
        server.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_a_batch_goes_on_after_a_kill(openai: Any, llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    lines = [line(number, max_tokens=48, ignore_eos=True) for number in range(40)]
    with process(folder) as (server, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        batch = begun(client, *lines)
        assert comes(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 2)
        server.kill()
        server.wait()
    written = [path.read_bytes() for path in (folder / "files").glob("*.jsonl")]
    (before,) = [text for text in written if b"batch_req_" in text]
    whole = before.splitlines(keepends=True)
    assert 2 <= len(whole) < 40, "control: it was killed in the middle"
    with serving(AsyncLLM(llm), batch_folder=str(folder)) as live:
        client = client_of(openai, live)
        batch = ended(client, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 40)
        text = client.files.content(batch.output_file_id).content
        assert {one for one in whole if one.endswith(b"\n")} <= set(text.splitlines(keepends=True))
        assert len(answers(client, batch.output_file_id)) == 40


def test_a_full_disk_fails_the_batch_and_leaves_what_was_answered(
    openai: Any, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = ResultFile.append, 0

    def append(self: ResultFile, lines: Any) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise ConfigError(f"{str(self.path)!r} cannot be written (No space left on device); make room")
        real(self, lines)

    monkeypatch.setattr(ResultFile, "append", append)
    with serving(AsyncLLM(llm), batch_folder=str(tmp_path)) as live:
        client = client_of(openai, live)
        batch = ended(client, begun(client, *(line(number, max_tokens=number + 1) for number in range(40))))
        assert batch.status == "failed"
        assert batch.errors.data[0].message.startswith("the file cannot be written (No space left")
        assert len(answers(client, batch.output_file_id)) >= 2


def test_replicas_take_no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("paceline.cli.serve.need_ray", lambda _: None)
    found = Command(capsys, monkeypatch)("serve", "--replicas", 2, "--port", 0, "--batch-folder", tmp_path)
    assert found.code == 2
    assert "--batch-folder is for one engine" in found.line


def test_damaged_records_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    check_files(ServerConfig(batch_folder=str(tmp_path)))
    (tmp_path / "batches" / "batch_1.json").write_text("{")
    with pytest.raises(ConfigError, match="no record of batches"):
        check_files(ServerConfig(batch_folder=str(tmp_path)))


def test_requests_of_a_batch_count_in_the_quotas_of_their_key(openai: Any, llm: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    limits = {"key": "limited", "requests_per_minute": 100, "tokens_per_minute": 600}
    file.write_text(json.dumps({"keys": [limits]}))
    with serving(AsyncLLM(llm), api_key_file=str(file), batch_folder=str(tmp_path / "batches")) as live:
        client = client_of(openai, live, "limited")

        def left(unit: str) -> int:
            answer = httpx.get(f"{live.url}/v1/models", headers={"x-api-key": "limited"}, timeout=60)
            return int(answer.headers[f"x-ratelimit-remaining-{unit}"])

        before = left("tokens")
        done = ended(client, begun(client, *(line(number, max_tokens=40, ignore_eos=True) for number in range(5))))
        assert done.request_counts.completed == 5
        assert before - left("tokens") >= 5 * 40 - 60  # and what a few seconds give back
        assert left("requests") <= 95


def test_requests_of_a_batch_that_are_cancelled_twice_leave_their_room_to_others() -> None:
    """As when one of them finds that the batch is to stop, and the others are cancelled while they end."""

    async def slow(request: httpx.Request) -> httpx.Response:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)  # it ends some time after it is told to
        return httpx.Response(200)

    async def told() -> None:
        room, stop = Room(lambda: 0, lambda: 6), asyncio.Event()
        request = BatchRequest(custom_id="r1", url=ENDPOINT, body={"prompt": "x"})
        async with httpx.AsyncClient(transport=httpx.MockTransport(slow), base_url="http://batch") as http:
            sender = PoliteSender(http, room, stop)
            sending = [asyncio.create_task(sender.send(request)) for _ in range(3)]
            await asyncio.sleep(0.1)
            stop.set()
            await asyncio.sleep(0.02)
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
            for _ in range(3):
                await asyncio.wait_for(room.take(asyncio.Event()), 5)
            with pytest.raises(asyncio.TimeoutError):  # the control: there are three places
                await asyncio.wait_for(room.take(asyncio.Event()), 0.5)

    asyncio.run(told())


def test_a_request_that_waits_for_its_quota_leaves_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.batch.sending.FIRST_WAIT", 0.2)
    answers, asked = iter([httpx.Response(429), httpx.Response(200, json={"id": "x"})]), list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return next(answers)

    async def told() -> None:
        room = Room(lambda: 0, lambda: 2)  # one place
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://batch") as http:
            sender = PoliteSender(http, room, asyncio.Event())
            request = BatchRequest(custom_id="r1", url=ENDPOINT, body={"prompt": "x"})
            sending = asyncio.create_task(sender.send(request))
            while not asked:
                await asyncio.sleep(0.01)
            await asyncio.wait_for(room.take(asyncio.Event()), 1)
            await asyncio.sleep(0.4)
            assert not sending.done(), "it comes back when there is room"
            assert len(asked) == 1
            room.give()
            assert isinstance(await asyncio.wait_for(sending, 5), BatchAnswer)
            await asyncio.wait_for(room.take(asyncio.Event()), 1)

    asyncio.run(told())
