"""The routes of audio, on a made Whisper model: OpenAI's client, its formats and events, wrong values, limits."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_whisper
from serving.conftest import Live, comes, serve, slowed
from tiny_whisper import sound, wav

from paceline import LLM, AsyncLLM
from paceline.config import ServerConfig
from paceline.serving import front_app, warm_up
from paceline.serving.request_log import LogFields
from paceline.speech import Transcript, load_audio, write_transcript
from paceline.transcriber import Transcriber, TranscriptionParams

PATH = "/v1/audio/transcriptions"
TRANSLATE = "/v1/audio/translations"
TALK = wav(sound(4, 2))


@pytest.fixture(autouse=True, scope="module")
def _one_temperature() -> Iterator[None]:
    """Of the temperatures 0 is tried alone: all windows of a random model are doubtful."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.transcriber.TEMPERATURES", (0.0,))
        yield


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny_whisper.write(tmp_path_factory.mktemp("whisper"), seed=1)
    return LLM(folder, dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def hearing(whisper: LLM) -> Iterator[Live]:
    yield from serve(
        AsyncLLM(whisper), served_model_name=["whisper-1"], max_audio_bytes=4_000_000, max_audio_seconds=100
    )


@pytest.fixture(scope="module")
def client(openai: Any, hearing: Live) -> Any:
    return openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def expected(whisper: LLM) -> Transcript:
    found = whisper.transcribe(TALK, language="en", words=True)
    assert isinstance(found, Transcript)
    assert found.text
    return found


GIVEN: dict[str, Any] = {"model": "whisper-1", "file": ("talk.wav", TALK), "language": "en"}


def send(live: Live, path: str = PATH, file: bytes | None = TALK, **fields: Any) -> Any:
    """A form, as OpenAI's client sends it."""
    files = {"file": (None, "a text") if file is None else ("talk.wav", file)}
    return live.http.post(path, data={"language": "en"} | fields, files=files)


# ------------------------------------------------------------------------------------------------ OpenAI's client


def test_formats(client: Any, expected: Transcript) -> None:
    create = client.audio.transcriptions.create
    found = create(**GIVEN)
    assert (found.text, found.usage.type, found.usage.seconds) == (expected.text, "duration", 4)
    assert create(**GIVEN, response_format="text") == f"{expected.text}\n"
    for form in ("srt", "vtt"):
        assert create(**GIVEN, response_format=form) == write_transcript(expected, form)


def test_segments_and_words(client: Any, expected: Transcript) -> None:
    create = client.audio.transcriptions.create
    found = create(**GIVEN, response_format="verbose_json")
    assert (found.text, found.language, found.duration) == (expected.text, "english", 4.0)
    assert [one.start for one in found.segments] == [round(one.start, 3) for one in expected.segments]
    assert found.words is None
    both = create(**GIVEN, response_format="verbose_json", timestamp_granularities=["word", "segment"])
    assert [one.word for one in both.words] == [word.text.strip() for word in expected.words]
    assert len(both.segments) == len(found.segments)
    words = create(**GIVEN, response_format="verbose_json", timestamp_granularities=["word"])
    assert (len(words.words), words.segments) == (len(expected.words), None)


def test_streams(client: Any, hearing: Live, whisper: LLM) -> None:
    long = wav(sound(65, 1))
    given = GIVEN | {"file": ("long.wav", long)}
    whole = client.audio.transcriptions.create(**given).text
    events = list(client.audio.transcriptions.create(**given, stream=True))
    deltas = [one.delta for one in events if one.type == "transcript.text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole == events[-1].text
    assert [one.type for one in events] == ["transcript.text.delta"] * len(deltas) + ["transcript.text.done"]
    raw = send(hearing, stream="true").text
    assert raw.endswith("data: [DONE]\n\n")


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # so OpenAI's client says of its whisper-1
def test_languages_prompts_and_translations(client: Any, whisper: LLM, expected: Transcript) -> None:
    def text(**params: Any) -> str:
        found = whisper.transcribe(TALK, **params)
        assert isinstance(found, Transcript)
        return found.text

    create, file = client.audio.transcriptions.create, {"model": "whisper-1", "file": ("talk.wav", TALK)}
    assert create(**file, language="de").text == text(language="de")
    assert create(**file).text == text()
    prompted = create(**GIVEN, prompt="fox and dog").text
    assert prompted == text(language="en", prompt="fox and dog") != expected.text
    drawn = create(**GIVEN, temperature=0.8, extra_body={"seed": 3}).text
    assert drawn == text(language="en", temperature=0.8, seed=3)
    assert client.audio.translations.create(**file).text == text(task="translate")
    told = [
        route.create(**file, response_format="verbose_json")
        for route in (client.audio.translations, client.audio.transcriptions)
    ]
    assert [one.task for one in told] == ["translate", "transcribe"]
    assert told[0].segments[0].avg_logprob != told[1].segments[0].avg_logprob, "the control: another task"


# ------------------------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "doc"}, "response_format"),
        ({"language": "fr"}, "language"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "nan"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"seed": "1.5"}, "seed"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"chunking_strategy": "auto"}, "chunking_strategy"),
        ({"prompt": ["Mr", "Holmes"]}, "prompt"),
        ({"model": ["whisper-1", "whisper-1"]}, "model"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str, hearing: Live) -> None:
    answer = send(hearing, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"] or param == "language"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (b"no audio at all", "the audio cannot be read as audio"),
        (b"", "the audio must be an audio file, got an empty one"),
        (TALK[:-1000], "the audio is cut off"),
        (wav(sound(101)), "the audio is longer than 100 s"),
        (None, "file must be an audio file"),
    ],
)
def test_wrong_files_are_named(file: bytes | None, line: str, hearing: Live) -> None:
    answer = send(hearing, file=file)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "file")
    assert line in error["message"]


def test_files_that_cannot_be_kept_are_the_servers_fault(hearing: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the form keeps in memory, and one that it puts on the disk."""
    files = TALK, wav(sound(60))
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    for file in files:
        answer = send(hearing, file=file)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "store_failed")
        assert error["message"] == "the file cannot be kept (No such file or directory)"
    monkeypatch.undo()
    assert [send(hearing, file=file).status_code for file in files] == [200, 200]


def test_sizes_types_and_models(hearing: Live, live: Live) -> None:
    answer = send(hearing, file=bytes(4_200_000))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (413, "file", "request_too_large")
    assert error["message"] == "file must be at most 4000000 bytes long (--max-audio-bytes); cut or compress it"
    assert hearing.http.post(PATH, json={"file": "x"}).status_code == 415
    assert send(hearing, model="whisper-2").status_code == 404
    answer = send(live)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_reads_no_speech")
    assert send(live, TRANSLATE).json()["error"]["code"] == "model_reads_no_speech"
    assert send(live, file=bytes(500_000)).status_code != 413, "the limit of other bodies is not that of audio"


def test_forms_that_are_none_are_answered(hearing: Live) -> None:
    two = [("file", ("a.wav", TALK)), ("file", ("b.wav", TALK))]
    wrong = (
        {"files": two},
        {"content": b"--x\r\nno form", "headers": {"Content-Type": "multipart/form-data"}},
        {"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        {"files": {"file": ("a.wav", TALK)}, "data": {"prompt": "x" * 100_000}},
        {"files": {"file": ("a.wav", TALK)}, "data": {f"field{number}": "x" for number in range(100)}},
    )
    for body in wrong:
        answer = hearing.http.post(PATH, **body)  # type: ignore[arg-type]
        assert answer.status_code in (400, 413), body
        assert answer.json()["error"]["message"]
    several, unbounded, _, long = (hearing.http.post(PATH, **body).json()["error"] for body in wrong[:4])  # type: ignore[arg-type]
    assert (several["param"], unbounded["param"], long["param"]) == ("file", "file", "prompt")
    assert long["message"].startswith("a part without a filename may be at most 65536 bytes long; shorten prompt")
    assert "one audio file" in several["message"]
    assert "boundary" in unbounded["message"]

    def pieces() -> Iterator[bytes]:  # without a length
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        yield from [bytes(2**16)] * 64

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    answer = hearing.http.post(PATH, content=pieces(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "file")
    assert send(hearing).status_code == 200


def test_english_models_name_what_they_cannot_do(tmp_path: Path) -> None:
    folder = tiny_whisper.write(tmp_path, multilingual=False)
    for live in serve(AsyncLLM(LLM(folder, dtype="float32", speculative_config=None))):
        for path, language, param, got in (
            (TRANSLATE, "en", "model", "task 'translate'"),
            (TRANSLATE, "", "model", "task 'translate'"),
            (PATH, "de", "language", "language 'de'"),
        ):
            error = send(live, path, language=language).json()["error"]
            wanted = f"this model only transcribes English, got {got}; take a multilingual one"
            assert (error["param"], error["message"]) == (param, wanted)
        assert send(live).status_code == 200


def test_lenient_servers_ignore_fields_and_say_so(whisper: LLM) -> None:
    for live in serve(AsyncLLM(whisper), lenient_fields=True):
        answer = send(live, chunking_strategy="auto")
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "chunking_strategy")


def test_pages_of_other_origins_may_not_send_forms(hearing: Live) -> None:
    files = {"file": ("talk.wav", TALK)}
    answer = hearing.http.post(PATH, files=files, headers={"Origin": "https://elsewhere.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_other_routes_say_what_the_model_reads(hearing: Live) -> None:
    error = hearing.error("/v1/completions", prompt="One day")
    assert error["param"] == "prompt"
    assert error["message"] == "whisper-1 reads no text; it transcribes audio at /v1/audio/transcriptions"
    turns: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (
        ("/v1/chat/completions", turns),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"model": "whisper-1", "max_tokens": 9, **turns}),
        ("/v1/messages", {"model": "whisper-1", "max_tokens": 9, "thinking": {"type": "adaptive"}, **turns}),
        ("/tokenize", turns),
    ):
        message = hearing.error(path, **body)["message"]
        assert "whisper-1 " in message
        assert "/v1/audio/transcriptions" in message
        assert str(hearing.model.llm.folder) not in message


@pytest.mark.parametrize("stream", ["true", "false"])
def test_what_takes_too_long_is_told_and_logged(stream: str, whisper: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.serving")
    for live in serve(AsyncLLM(whisper), request_timeout=1.5):
        with slowed(whisper):
            answer = send(live, file=wav(sound(90)), stream=stream)
        last = answer.text.split("data: ")[-2] if stream == "true" else answer.text
        assert json.loads(last)["error"]["code"] == "timeout"
        send(live)
    told = [record.args for record in caplog.records if isinstance(record.args, LogFields)]
    assert [facts.get("error_code") for facts in told if facts.get("path") == PATH] == ["timeout", None]


# ------------------------------------------------------------------------------------------------ beside others


def test_requests_side_by_side_are_those_alone(hearing: Live, whisper: LLM) -> None:
    audios = [wav(sound(seconds, seed)) for seed, seconds in enumerate((3, 35, 8, 5))]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = send(hearing, file=audios[number]).json()["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(audios))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = [one.text for one in whisper.transcribe(audios, language="en")]  # type: ignore[union-attr]
    assert [found[number] for number in range(len(audios))] == alone


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_goes_away_ends_its_request(stream: str, hearing: Live, whisper: LLM) -> None:
    async def ask() -> None:
        async with httpx.AsyncClient(base_url=hearing.url, timeout=60) as http:
            fields = {"language": "en", "stream": stream}
            task = asyncio.create_task(http.post(PATH, data=fields, files={"file": ("talk.wav", wav(sound(90)))}))
            assert await asyncio.to_thread(comes, lambda: whisper.backend.gauges().running > 0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with slowed(whisper):
        asyncio.run(ask())
        assert comes(lambda: whisper.backend.gauges().running == 0 and not whisper.runner.sources_held)
    assert comes(lambda: hearing.http.get("/load").json()["server_load"] == 0)
    assert send(hearing).status_code == 200


def test_keys_and_metrics(whisper: LLM, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys:\n  - key: first-key\n    name: me\n    tokens_per_minute: 30\n")
    for live in serve(AsyncLLM(whisper), served_model_name=["whisper-1"], api_key_file=str(file)):
        assert send(live).status_code == 401
        live.http.headers["Authorization"] = "Bearer first-key"
        answer = send(live)
        assert answer.status_code == 200
        assert int(send(live).status_code) == 429, "the tokens of its windows are counted"
        metrics = live.http.get("/metrics").text
        assert 'paceline:audio_requests_total{kind="transcribe"} 1.0' in metrics
        assert 'paceline:audio_seconds_total{kind="transcribe"} 4.0' in metrics


def test_one_transcriber_of_a_server_counts_all_requests(whisper: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Transcriber] = []

    def noted(llm: LLM) -> Transcriber:
        made.append(Transcriber(llm))
        return made[-1]

    monkeypatch.setattr("paceline.serving.transcriptions.Transcriber", noted)
    alone = Transcriber(whisper)
    alone.transcribe([load_audio(TALK)], TranscriptionParams(language="en"))
    for live in serve(AsyncLLM(whisper)):
        assert [send(live).status_code for _ in range(3)] == [200] * 3
    assert [one.cost.tokens for one in made] == [3 * alone.cost.tokens]


def test_warming_up_hears_something(whisper: LLM) -> None:
    before = whisper.runner.sources_read
    warm_up(whisper)
    assert whisper.runner.sources_read == before + 1


def test_events_are_json(hearing: Live) -> None:
    lines = [line for line in send(hearing, stream="true").text.splitlines() if line]
    assert all(json.loads(line.removeprefix("data: "))["type"] for line in lines[:-1])


class Silent:
    """In the place of replicas: keeps what it was asked, and answers with nothing."""

    gone: tuple[type[Exception], ...] = ()
    failed: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    @asynccontextmanager
    async def answer(self, scope: Any, body: bytes, affinity: Any) -> AsyncIterator[AsyncIterator[list[Any]]]:
        async def parts() -> AsyncIterator[list[Any]]:
            yield [{"type": "http.response.start", "status": 200, "headers": []}]
            yield [{"type": "http.response.body", "body": b"{}"}]

        self.bodies.append(body)
        yield parts()

    async def all(self, scope: Any, body: bytes = b"") -> list[tuple[str, int, list[Any]]]:
        return []


@pytest.mark.parametrize(("path", "status"), [(PATH, 200), ("/v1/completions", 400)])
def test_before_replicas_audio_is_not_taken_for_json(path: str, status: int) -> None:
    """Its bytes may look like more items than a body may hold, which JSON is refused for (the control)."""
    fleet, file = Silent(), b"[," * 300_000
    app = front_app(fleet, ServerConfig())

    async def ask() -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            if path == PATH:
                return (await http.post(path, files={"file": ("talk.wav", file)})).status_code
            return (await http.post(path, content=file, headers={"Content-Type": "application/json"})).status_code

    assert asyncio.run(ask()) == status
    assert [file in body for body in fleet.bodies] == [True] * (status == 200)
