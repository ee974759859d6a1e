"""Searches through the server and in batches find what `LLM` finds, within its limits; a client that goes ends its."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, AsyncLLM, RequestOutput, SamplingParams
from paceline.search.sandbox.verdicts import available_isolation
from tests.command import Command
from tests.serving.conftest import Live, comes, serve

BEAM: dict[str, Any] = {"method": "beam", "beam_width": 4}
VOTE: dict[str, Any] = {"method": "self_consistency", "num_samples": 4}
PROMPT = "Once upon a time"
CASES: list[tuple[Any, dict[str, Any]]] = [
    ("beam", {"temperature": 0}),
    (BEAM, {"temperature": 0, "n": 3, "stop": ["."]}),
    (VOTE, {"temperature": 0.9, "seed": 5, "n": 2}),
    ({"method": "sample_and_rank", "num_samples": 3}, {"temperature": 0.9, "seed": 5}),
    (json.dumps({"method": "adadec", "threshold": 0.5}), {"temperature": 0}),
    ({**BEAM, "early_stopping": "never", "budget_tokens": 30}, {"temperature": 0}),
]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def plain(llm: LLM) -> LLM:
    return llm.with_speculative_config(None)


@pytest.fixture(scope="module")
def searching(plain: LLM) -> Iterator[Live]:
    yield from serve(
        AsyncLLM(plain), enable_search=True, max_n=6, max_outputs_per_key=8, max_search_tokens=20_000, api_key=["right"]
    )


@pytest.fixture(autouse=True)
def _with_key(searching: Live) -> None:
    searching.http.headers["authorization"] = "Bearer right"


def told(result: RequestOutput) -> list[Any]:
    return [(one.text, one.score) for one in result.outputs]


def events(live: Live, path: str, **body: Any) -> list[Any]:
    with live.http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("search", "sampling"), CASES)
def test_completions_are_what_llm_finds(searching: Live, plain: LLM, search: Any, sampling: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 16, "search": search, **sampling}
    (wanted,) = plain.generate(PROMPT, SamplingParams(max_tokens=16, **sampling), search=search)
    assert wanted.search is not None
    whole = searching.ok(COMPLETIONS, **body)
    assert [(one["text"], one["score"]) for one in whole["choices"]] == told(wanted)
    assert [one["index"] for one in whole["choices"]] == list(range(len(wanted.outputs)))
    assert whole["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in wanted.outputs)
    assert whole["usage"]["search"] == {
        "num_tokens": wanted.search.num_tokens,
        "num_passes": wanted.search.num_passes,
        "budget_spent": "budget_tokens" in str(search),
    }
    choices = [event["choices"][0] for event in events(searching, COMPLETIONS, **body)]
    for number, (text, score) in enumerate(told(wanted)):
        mine = [choice for choice in choices if choice["index"] == number]
        assert "".join(choice["text"] for choice in mine) == text
        assert (mine[-1]["score"], mine[-1]["finish_reason"]) == (score, whole["choices"][number]["finish_reason"])
        assert not any("score" in choice for choice in mine[:-1])


def test_another_seed_or_width_finds_something_else(searching: Live) -> None:
    def found(search: Any, **more: Any) -> Any:
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "search": search}
        return [(one["text"], one["score"]) for one in searching.ok(COMPLETIONS, **body | more)["choices"]]

    assert found(BEAM) == found("beam") != found({"method": "beam", "beam_width": 2})
    drawn = [found(VOTE, temperature=0.9, seed=seed) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_chats_are_what_llm_finds(searching: Live, plain: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    params = SamplingParams(max_tokens=16, temperature=0, n=2)
    (wanted,) = plain.chat(messages, params, search=BEAM)
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "n": 2, "search": BEAM}
    whole = searching.ok(CHAT, **body)
    assert [(one["message"]["content"], one["score"]) for one in whole["choices"]] == told(wanted)
    choices = [event["choices"][0] for event in events(searching, CHAT, **body)]
    for number, (text, score) in enumerate(told(wanted)):
        mine = [choice for choice in choices if choice["index"] == number]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert mine[-1]["score"] == score


def test_what_all_beams_share_is_streamed(searching: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    assert len(events(searching, COMPLETIONS, search={"method": "beam", "beam_width": 2}, **body)) > 3


def test_fewer_texts_than_n_keep_their_places(searching: Live, plain: LLM) -> None:
    """The last letter is one of two, so that a vote finds at most two answers."""
    ids = [plain.tokenizer.encode(text)[-1] for text in "12"]
    body = {"prompt": ["1", "2"], "max_tokens": 1, "temperature": 1.0, "seed": 1, "n": 3, "allowed_token_ids": ids}
    body |= {"search": {"method": "self_consistency", "num_samples": 3}}
    choices = searching.ok(COMPLETIONS, **body)["choices"]
    assert len(choices) < 6
    assert {one["index"] for one in choices} == {
        event["choices"][0]["index"] for event in events(searching, COMPLETIONS, **body)
    }
    assert min(one["index"] for one in choices) == 0
    assert 3 in {one["index"] for one in choices}


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})]
)
def test_searches_are_off_until_the_operator_lets_them(live: Live, path: str, body: dict[str, Any]) -> None:
    error = live.error(path, search="beam", **body)
    assert (error["param"], error["code"]) == ("search", "search_disabled")
    assert "--enable-search" in error["message"]
    live.ok(path, search=None, max_tokens=1, **body)


WRONG: list[tuple[Any, str]] = [
    ("paceline.search.methods.beam:BeamSearch", "must name a method"),
    ("bam", "must name a method"),
    ({"beam_width": 2}, "be the name of a method"),
    ({"method": "beam", "width_": 2}, "width_"),
    ({"method": "beam", "early_stopping": "os:getcwd"}, "early_stopping"),
    ({"method": "self_consistency", "answer": "os:getcwd"}, "'answer' must be made of numbers"),
    ({"method": "sample_and_rank", "scorer": {"model": "/etc"}}, "'scorer' must be made of numbers"),
    ({"method": "gfd", "model": "org/name"}, "'model' must be made of numbers"),
    ({"method": "superposed", "texts": "/etc/passwd"}, "'texts' must be made of numbers"),
    ({"method": "backoff", "denied": "(a+)+b"}, "'denied' must be made of numbers"),
    ({"method": "pg_td", "tests": ["assert f(1)"]}, "tests must be left out: this server runs no programs"),
    ({"method": "pg_td", "reward": "os:getcwd"}, "'reward' must be made of numbers"),
    ({"method": "pg_td", "unsafe_execution": True}, "'unsafe_execution' is not for requests"),
    *((name, f"{name!r} needs a function or another model, which") for name in ("a_star", "transfer_q", "gfd")),
    ({"method": "backoff", "rewinds": 1025}, "'rewinds' must be at most 1024"),
    ({"method": "beam", "beam_width": 7}, "at most 6 branches side by side"),
    ({"method": "beam", "budget_tokens": 20_001}, "budget_tokens must be at most 20000"),
    ({"method": "self_consistency", "num_samples": 2}, "temperature"),
]


@pytest.mark.parametrize(("search", "message"), WRONG)
def test_what_is_not_for_clients_is_answered_with_400(searching: Live, search: Any, message: str) -> None:
    error = searching.error(COMPLETIONS, prompt="a", temperature=0, search=search)
    assert message in error["message"]
    assert "module:function" not in error["message"], "clients can name none"
    assert error["param"] in ("search", "temperature")


def test_a_server_has_no_index(searching: Live) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        assert searching.error(path, **body, retrieval={"index": "/etc"})["param"] == "retrieval"
    error = searching.error(COMPLETIONS, prompt="a", search={"method": "ralm", "index": "/etc"})
    assert error["param"] == "search"
    assert "index" in error["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"prediction": "a b"}, "prediction"),
        ({"speculative_config": "none"}, "speculative_config"),
        ({"search": "adadec", "n": 2}, "n"),
        ({"steering": "dola"}, "steering"),
    ],
)
def test_fields_that_do_not_go_with_a_search_are_named(searching: Live, more: dict[str, Any], param: str) -> None:
    assert searching.error(COMPLETIONS, **{"prompt": "a", "search": "beam", **more})["param"] == param
    searching.ok(COMPLETIONS, prompt="a", search="beam", max_tokens=2)


def test_the_budget_of_the_server_holds(plain: LLM) -> None:
    for live in serve(AsyncLLM(plain), enable_search=True, max_search_tokens=20):
        answer = live.ok(COMPLETIONS, prompt=PROMPT, max_tokens=50, ignore_eos=True, temperature=0, search=BEAM)
        assert answer["usage"]["search"]["budget_spent"]
        assert 20 <= answer["usage"]["search"]["num_tokens"] < 24
        small = live.ok(COMPLETIONS, prompt=PROMPT, max_tokens=4, temperature=0, search=BEAM)
        assert not small["usage"]["search"]["budget_spent"], "the control"


def test_programs_run_in_the_sandbox_alone_and_only_where_a_flag_lets_them(plain: LLM) -> None:
    search = {"method": "pg_td", "tests": ["assert f(2) == 4", "assert f(3) == 9"], "rollouts": 2}
    body = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}
    for live in serve(AsyncLLM(plain), enable_search=True, enable_search_programs=True):
        for more in ({"unsafe_execution": True}, {"unsafe_execution": False}, {"test_seconds": 60}):
            assert "is not for requests" in live.error(COMPLETIONS, search=search | more, **body)["message"]
        assert "tests" in live.error(COMPLETIONS, search=search | {"tests": "os:getcwd"}, **body)["message"]
        assert (
            "at most 64" in live.error(COMPLETIONS, search=search | {"tests": ["assert f(1)"] * 65}, **body)["message"]
        )
        if available_isolation() is None:
            assert "permits no sandbox" in live.error(COMPLETIONS, search=search, **body)["message"]
            continue
        (found,) = plain.generate(
            "def f(x):", SamplingParams(max_tokens=4, temperature=0), search={**search, "test_seconds": 5.0}
        )
        answer = live.ok(COMPLETIONS, search=search, **body)
        assert [(one["text"], one["score"]) for one in answer["choices"]] == told(found)
    for live in serve(AsyncLLM(plain), enable_search_programs=True):
        assert live.error(COMPLETIONS, search=search, **body)["code"] == "search_disabled"


def used(live: Live) -> int:
    memory: Any = live.model.llm.runner.memory  # type: ignore[attr-defined]
    return int(memory.used)


def going(live: Live) -> int:
    return sum(backend.gauges().running + backend.gauges().waiting for backend in live.model.llm.backends)


def test_branches_count_as_outputs_and_a_client_that_goes_frees_them(searching: Live) -> None:
    assert searching.model.llm.reset_prefix_cache()
    before = used(searching)
    error = searching.error(COMPLETIONS, prompt=["a", "b", "c"], search=BEAM)
    assert "at most 8 outputs (prompts times n, or branches of searches), got 12" in error["message"]
    body = {"prompt": PROMPT, "search": {"method": "beam", "beam_width": 6}, "stream": True, **LONG}
    with searching.http.stream("POST", COMPLETIONS, json=body) as answer:
        assert comes(lambda: used(searching) > before)
        assert going(searching) == 1
        page = searching.http.get("/metrics").text
        assert "paceline:num_requests_running 1.0" in page
        full = searching.error(COMPLETIONS, 429, prompt="a", n=3)
        assert full["code"] == "too_many_outputs"
        searching.ok(COMPLETIONS, prompt="a", n=2, max_tokens=2)
        assert answer.status_code == 200
    assert comes(lambda: going(searching) == 0)
    assert searching.model.llm.reset_prefix_cache()
    assert comes(lambda: used(searching) == before)
    searching.ok(COMPLETIONS, prompt="a", n=3, max_tokens=2)


def test_a_client_that_waits_for_a_whole_answer_and_goes_frees_it_too(searching: Live) -> None:
    with pytest.raises(Exception, match="timed out"):
        searching.http.post(COMPLETIONS, json={"prompt": PROMPT, "search": BEAM, **LONG}, timeout=1.0)
    assert comes(lambda: going(searching) == 0)


def test_ordinary_requests_go_on_beside_searches(searching: Live) -> None:
    body = {"prompt": "One day", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone, found = searching.ok(COMPLETIONS, **body)["choices"], dict[int, Any]()
    wanted = searching.ok(COMPLETIONS, **body, search=BEAM)["choices"]

    def search(number: int) -> None:
        found[number] = searching.ok(COMPLETIONS, **body, search={**BEAM, "beam_width": 4})["choices"]

    thread = threading.Thread(target=search, args=[0], daemon=True)
    thread.start()
    beside = [searching.ok(COMPLETIONS, **body)["choices"] for _ in range(3)]
    thread.join(60)
    assert beside == [alone] * 3
    assert found[0] == wanted


def test_a_search_that_fails_is_an_error_of_its_request(searching: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.search.methods.beam import BeamSearch

    monkeypatch.setattr(BeamSearch, "choose", lambda *_: 1 / 0)
    error = searching.error(COMPLETIONS, 500, prompt="a", search="beam")
    assert "search method 'beam' failed (ZeroDivisionError" in error["message"]
    *_, last = events(searching, COMPLETIONS, prompt="a", search="beam")
    assert "ZeroDivisionError" in last["error"]["message"]
    searching.ok(COMPLETIONS, prompt="a", max_tokens=2, search={"method": "adadec"})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


def test_batches_search_with_a_model_of_their_own_and_with_a_server(
    run: Command, searching: Live, plain: LLM, tmp_path: Path
) -> None:
    lines = [
        {
            "custom_id": f"r{number}",
            "url": COMPLETIONS,
            "body": {"prompt": PROMPT, "max_tokens": 16, "search": search, **more},
        }
        for number, (search, more) in enumerate(CASES)
    ]
    source, own, url = (tmp_path / f"{name}.jsonl" for name in ("in", "own", "url"))
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mine = run("batch", "run", source, "-o", own, "--dtype", "float32", "-s", "null", "--served-model-name", "bundled")
    assert mine.code == 0, mine.err
    theirs = run("batch", "run", source, "-o", url, "--url", searching.url, "--api-key", "right")
    assert theirs.code == 0, theirs.err
    for path in (own, url):
        bodies = [json.loads(line)["response"]["body"] for line in path.read_text().splitlines()]
        for body, (search, more) in zip(bodies, CASES, strict=True):
            (wanted,) = plain.generate(PROMPT, SamplingParams(max_tokens=16, **more), search=search)
            assert [(one["text"], one["score"]) for one in body["choices"]] == told(wanted)
