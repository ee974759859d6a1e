"""`/v1/responses`: OpenAI's own client reads it; events tell what the answer holds; conversations are remembered, of
each key alone, and survive a kill."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from forked import Forked
from serving.conftest import Live, comes, serve, slowed

from paceline import LLM, AsyncLLM
from paceline.errors import ConfigError
from paceline.serving.api_errors import ApiError
from paceline.serving.response_store import ResponseStore

serving = contextmanager(serve)

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False}}]  # fmt: skip
SCRIPT = '<think>hm, so</think>Yes. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def scripted(talking: Live, monkeypatch: pytest.MonkeyPatch) -> Live:
    monkeypatch.setattr(talking.model, "script", SCRIPT)
    return talking


def client_of(openai: Any, live: Live, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0, timeout=60)


def events(live: Live, **body: Any) -> list[Any]:
    with live.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    names = [line.removeprefix("event: ") for line in lines[:-1:2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1:-1:2]]
    assert names == [one["type"] for one in found]
    return found


GIVEN: dict[str, dict[str, Any]] = {
    "text": {},
    "instructions": {"instructions": "Be brief."},
    "items": {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [
        {"type": "input_text", "text": "One"}, {"type": "input_text", "text": "Two"}]}]},
    "talk": {"input": [{"role": "user", "content": "Hi"}, {"type": "message", "role": "assistant", "content": [
        {"type": "output_text", "text": "Hello"}]}, {"role": "user", "content": "Again"}]},
    "rules": {"temperature": 0.9, "top_p": 0.5, "extra_body": {"seed": 3, "top_k": 9, "presence_penalty": 0.4}},
    "logprobs": {"temperature": 0, "top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "json": {"text": {"format": {"type": "json_object"}}},
    "for the record": {"metadata": {"a": "b"}, "user": "me", "service_tier": "auto", "truncation": "disabled",
                       "store": False, "prompt_cache_key": "mine", "safety_identifier": "me", "background": False},
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_openais_client_reads_whole_and_streamed_responses(openai: Any, live: Live, case: str) -> None:
    client = client_of(openai, live)
    given = {"model": "bundled", "input": "Say hello", "max_output_tokens": 8, "temperature": 0} | GIVEN[case]
    whole = client.responses.create(**given)
    assert isinstance(whole, openai.types.responses.Response)
    assert whole.status in ("completed", "incomplete")
    assert (whole.incomplete_details is None) == (whole.status == "completed")
    assert isinstance(whole.output[0], openai.types.responses.ResponseOutputMessage)
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert re.fullmatch(r"resp_[0-9a-f]{32}", whole.id)
    found = list(client.responses.create(**given, stream=True))
    assert [one.sequence_number for one in found] == list(range(len(found)))
    types = [one.type for one in found]
    assert types[:4] == [f"response.{name}" for name in (
        "created", "in_progress", "output_item.added", "content_part.added")]  # fmt: skip
    assert types[-4:] == [f"response.{name}" for name in (
        "output_text.done", "content_part.done", "output_item.done", whole.status)]  # fmt: skip
    text = "".join(one.delta for one in found if one.type == "response.output_text.delta")
    assert text == found[-1].response.output_text == whole.output_text
    if case == "logprobs":
        entries = whole.output[0].content[0].logprobs
        assert all(len(one.top_logprobs) == 2 for one in entries)
        assert "".join(one.token for one in entries) == text
    if case == "for the record":
        assert (whole.metadata, whole.user) == ({"a": "b"}, "me")


def test_the_text_is_that_of_the_chat(live: Live) -> None:
    chat = live.ok("/v1/chat/completions", temperature=0, max_tokens=12, messages=[
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello"}])  # fmt: skip
    found = live.ok(PATH, input="Say hello", instructions="Be brief.", temperature=0, max_output_tokens=12)
    assert found["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    counts, chats = found["usage"], chat["usage"]
    assert (counts["input_tokens"], counts["output_tokens"]) == (chats["prompt_tokens"], chats["completion_tokens"])


def test_what_the_specification_requires_is_there(live: Live) -> None:
    whole = live.ok(PATH, input="Say hello", max_output_tokens=3)
    names = (
        *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "output", "error"),
        *("previous_response_id", "instructions", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text"),
        *("top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage"),
        *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "user"),
        *("safety_identifier", "prompt_cache_key"),
    )
    assert not [name for name in names if name not in whole]
    assert all({"id", "type", "status"} <= item.keys() for item in whole["output"])


def test_thoughts_text_and_calls_are_items(openai: Any, scripted: Live) -> None:
    client = client_of(openai, scripted)
    whole = client.responses.create(model="bundled", input="Hi", tools=TOOLS)
    thought, said, call = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm, so")
    assert (said.type, said.content[0].text.strip()) == ("message", "Yes.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model="bundled", input="Hi", tools=TOOLS) as stream:
        kinds = [one.type.removeprefix("response.") for one in stream]
        final = stream.get_final_response()
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call"]
    assert json.loads(final.output[2].arguments) == {"a": 1}
    for name in ("reasoning_text", "output_text", "function_call_arguments"):
        assert kinds.index(f"{name}.delta") < kinds.index(f"{name}.done")
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3


def test_calls_go_on_with_their_results(openai: Any, talking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(openai, talking)
    with monkeypatch.context() as patched:
        patched.setattr(talking.model, "script", SCRIPT)
        first = client.responses.create(model="bundled", input="Hi", tools=TOOLS)
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    given = {"model": "bundled", "tools": TOOLS, "temperature": 0, "max_output_tokens": 6}
    remembered = client.responses.create(input=[result], previous_response_id=first.id, **given)
    resent = client.responses.create(input=[{"role": "user", "content": "Hi"}, *first.output, result], **given)
    chat = talking.ok("/v1/chat/completions", temperature=0, max_tokens=6,
        tools=[{"type": "function", "function": {name: TOOLS[0][name] for name in ("name", "parameters")}}], messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": first.output[1].content[0].text, "reasoning_content": "hm, so",
             "tool_calls": [{"id": call.call_id, "type": "function", "function": {
                 "name": "add", "arguments": call.arguments}}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "7"}])  # fmt: skip
    assert remembered.usage.input_tokens == resent.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert remembered.output_text == resent.output_text == chat["choices"][0]["message"]["content"]
    items = client.responses.input_items.list(remembered.id, order="asc")
    assert [one.type for one in items] == ["message", "reasoning", "message", "function_call", "function_call_output"]


def test_a_required_call_is_one(talking: Live) -> None:
    for choice in ("required", {"type": "function", "name": "add"}):
        given = {"input": "Hi", "tools": TOOLS, "tool_choice": choice, "temperature": 0, "frequency_penalty": 2}
        (item,) = talking.ok(PATH, parallel_tool_calls=False, **given)["output"]
        assert (item["type"], item["name"]) == ("function_call", "add")
        assert isinstance(json.loads(item["arguments"])["a"], int)


def test_text_formats_bind_the_text(openai: Any, live: Live) -> None:
    from pydantic import BaseModel

    class Age(BaseModel):
        age: bool

    client = client_of(openai, live)
    found = client.responses.parse(model="bundled", input="How old?", text_format=Age, temperature=0)
    assert isinstance(found.output_parsed, Age)
    form = {"type": "json_schema", "name": "x", "schema": {"type": "integer", "minimum": 3, "maximum": 3}}
    lenient = {**form, "schema": {**form["schema"], "not": {"const": 3}}}
    found = live.ok(PATH, input="a", text={"format": lenient}, temperature=0)
    assert "should not be valid" in found["schema_errors"][0]
    assert "schema_errors" not in live.ok(PATH, input="a", text={"format": form}, temperature=0)
    strict = {**lenient, "strict": True}
    assert live.error(PATH, input="a", text={"format": strict})["param"] == "text.format"


def test_a_conversation_is_remembered(openai: Any, live: Live) -> None:
    client = client_of(openai, live)
    given = {"model": "bundled", "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input="Say hello", instructions="Be brief.", **given)
    second = client.responses.create(input="Again", previous_response_id=first.id, **given)
    third = client.responses.create(input="And again", previous_response_id=second.id, **given)
    talk = [{"role": "user", "content": "Say hello"}]
    for answer, asked in ((first, "Again"), (second, "And again")):
        talk += [{"role": "assistant", "content": answer.output_text}, {"role": "user", "content": asked}]
    fresh = client.responses.create(input=talk, **given)  # instructions are of one turn alone
    assert fresh.output_text == third.output_text
    assert fresh.usage.input_tokens == third.usage.input_tokens
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="Once more", previous_response_id=second.id, **given)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    last = client.responses.create(input="Once more", previous_response_id=third.id, **given)
    pages = client.responses.input_items.list(last.id, limit=3, order="asc")
    texts = [item.content[0].text for item in pages]
    assert texts == [*(one["content"] for one in talk), third.output_text, "Once more"]
    assert client.responses.input_items.list(last.id, limit=1).data[0].content[0].text == "Once more"


def test_responses_are_kept_unless_they_are_not_to_be(openai: Any, live: Live) -> None:
    client = client_of(openai, live)
    kept = client.responses.create(model="bundled", input="Hi", max_output_tokens=3)
    assert client.responses.retrieve(kept.id).to_dict() == kept.to_dict()
    lost = client.responses.create(model="bundled", input="Hi", max_output_tokens=3, store=False)
    for name in (lost.id, "resp_0"):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(name)
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(kept.id)
    assert live.http.get(f"{PATH}/{kept.id}", params={"stream": "true"}).json()["error"]["param"] == "stream"
    for wrong in ({"limit": "0"}, {"order": "up"}, {"after": "msg_0"}, {"before": "x"}):
        found = live.http.get(f"{PATH}/{kept.id}/input_items", params=wrong)
        assert (found.status_code, found.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert live.http.delete(f"{PATH}/{kept.id}").json() == {"id": kept.id, "object": "response", "deleted": True}


def test_other_keys_see_nothing(openai: Any, locked: Live) -> None:
    mine, yours = (client_of(openai, locked, key) for key in ("first-key", "second-key"))
    given: Any = {"model": "bundled", "input": "Hi", "max_output_tokens": 3}
    kept = mine.responses.create(**given)
    for call in (yours.responses.retrieve, yours.responses.delete, yours.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(kept.id)
    with pytest.raises(openai.NotFoundError):
        yours.responses.input_items.list(kept.id)
    with pytest.raises(openai.NotFoundError):
        yours.responses.create(**given, previous_response_id=kept.id)
    assert mine.responses.retrieve(kept.id).id == kept.id
    assert locked.http.get(f"{PATH}/{kept.id}").status_code == 401
    long: Any = given | {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}, "stream": True}
    streams = [mine.responses.create(**long) for _ in range(2)]
    running = next(iter(streams[0])).response
    with pytest.raises(openai.NotFoundError):
        yours.responses.cancel(running.id)
    with pytest.raises(openai.RateLimitError):
        mine.responses.create(**given)
    for stream in streams:
        stream.close()


def test_keys_that_change_places_keep_what_is_theirs(llm: LLM, tmp_path: Path) -> None:
    file, name = str(tmp_path / "a.db"), ""
    for keys in (["one", "two"], ["two", "one"]):
        for live in serve(AsyncLLM(llm), response_file=file, api_key=keys):
            mine, yours = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
            if not name:
                name = live.http.post(PATH, json={"input": "Hi", "max_output_tokens": 2}, headers=mine).json()["id"]
            assert live.http.get(f"{PATH}/{name}", headers=mine).status_code == 200
            assert live.http.get(f"{PATH}/{name}", headers=yours).status_code == 404


def test_a_running_response_is_seen_and_cancelled(openai: Any, live: Live) -> None:
    client, found, name = client_of(openai, live), list[Any](), ""
    with slowed(live.model.llm):
        stream = client.responses.create(model="bundled", input="Hi", stream=True, extra_body={"ignore_eos": True})
        for one in stream:
            found.append(one)
            if one.type == "response.output_text.delta" and not name:
                name = found[0].response.id
                assert client.responses.retrieve(name).status == "in_progress"
                assert live.http.delete(f"{PATH}/{name}").status_code == 409
                assert client.responses.cancel(name).status == "cancelled"
    assert found[-1].response.status == "cancelled"
    assert found[-1].response.output[0].status == "incomplete"
    assert client.responses.retrieve(name).output_text == found[-1].response.output_text != ""
    assert client.responses.cancel(name).status == "cancelled"
    assert comes(lambda: not live.model.llm.engine.has_work)


def test_a_client_that_goes_away_leaves_nothing(openai: Any, live: Live) -> None:
    client = client_of(openai, live)
    with slowed(live.model.llm):
        stream = client.responses.create(model="bundled", input="Hi", stream=True, extra_body={"ignore_eos": True})
        name = next(iter(stream)).response.id
        stream.close()
        assert comes(lambda: live.http.get(f"{PATH}/{name}").status_code == 404)


def test_a_failure_is_an_event_and_an_error(llm: LLM) -> None:
    for live in serve(AsyncLLM(llm), request_timeout=0.15):
        body = {"input": "Hi", "ignore_eos": True}
        with slowed(llm):
            found = events(live, **body)
            assert live.error(PATH, 504, **body)["code"] == "timeout"
        assert found[-1]["type"] == "response.failed"
        assert "longer than this server allows" in found[-1]["response"]["error"]["message"]
        assert live.http.get(f"{PATH}/{found[0]['response']['id']}").json()["status"] == "failed"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"colour": 1}, "colour"),
    "a range": ({"temperature": -1}, "temperature"),
    "an unknown model's": ({"max_output_tokens": 0}, "max_output_tokens"),
    "nothing": ({"input": []}, "input"),
    "a stream in the background": ({"background": True, "stream": True}, "background"),
    "a background that is not kept": ({"background": True, "store": False}, "background"),
    "a sealed summary": ({"input": [{"type": "compaction", "encrypted_content": "paceline-1.?"}]},
                         "input.0.encrypted_content"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "truncation": ({"truncation": "middle"}, "truncation"),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "included": ({"include": ["everything"]}, "include.0"),
    "obfuscation": ({"stream": True, "stream_options": {"include_obfuscation": True}},
                    "stream_options.include_obfuscation"),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    "a remote tool": ({"tools": [*TOOLS, {"type": "mcp", "server_url": "http://a"}]}, "tools.1.type"),
    "a tool's name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
    "some tools": ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
                   "tool_choice.type"),
    "a missing tool": ({"tool_choice": "required"}, "tool_choice"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]},
                 "input.0.content.0.type"),
    "a file": ({"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_file", "file_id": "f"}]}]}, "input.0.content.1.type"),
    "a part's field": ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "size": 1}]}]},
                       "input.0.content.0.size"),
    "a reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type"),
    "a role": ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role"),
    "a call": ({"input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": "f"}]},
               "input.1.call_id"),
    "a result's image": ({"input": [{"type": "function_call_output", "call_id": "c", "output": [
        {"type": "input_image", "image_url": "http://a"}]}]}, "input.0.output.0.type"),
    "secret thoughts": ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
                        "input.0.encrypted_content"),
    "a schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    "metadata": ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    "a long word of it": ({"metadata": {"a": "b" * 513}}, "metadata.a"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_honoured_is_named(live: Live, case: str) -> None:
    more, param = WRONG[case]
    error = live.error(PATH, **{"input": "Hi"} | more)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"]


def test_unknown_models_and_responses_are_404(live: Live) -> None:
    assert live.error(PATH, 404, model="gpt-9", input="a")["code"] == "model_not_found"
    for name in ("resp_0", "\u00e9", "\x00", ""):
        assert live.error(PATH, 404, input="a", previous_response_id=name)["param"] == "previous_response_id"
    body = '{"input": "a", "previous_response_id": "\\ud800"}'
    half = live.http.post(PATH, content=body, headers={"content-type": "application/json"})
    assert (half.status_code, half.json()["error"]["param"]) == (404, "previous_response_id")


def test_after_an_internal_error_a_client_goes_on(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("a fault")

    with monkeypatch.context() as patched:
        patched.setattr(ResponseStore, "get", fails)
        answer = live.http.get(f"{PATH}/resp_0")
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")
    assert answer.json()["error"]["message"] == "internal error"
    after = live.http.get(f"{PATH}/resp_0")  # on another connection, since that one ends
    assert (after.status_code, after.headers.get("connection")) == (404, None)


@pytest.mark.parametrize("path", ["", "/input_items?limit=100"])
def test_a_long_stored_response_is_written_beside_the_event_loop(
    live: Live, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    long = "a" * 100_000
    thought = {"type": "reasoning", "summary": [{"text": long}], "content": [{"text": "b"}]}
    tool = {"type": "function", "name": "f", "description": long}
    items = [thought, {"role": "user", "content": "Hi"}]
    told = live.ok(PATH, input=items, tools=[tool], tool_choice="none", max_output_tokens=1)
    encode, written = json.JSONEncoder.encode, {True: 0, False: 0}

    def spied(self: json.JSONEncoder, value: Any) -> str:
        text = encode(self, value)
        try:
            on_loop = asyncio.get_running_loop().is_running()
        except RuntimeError:
            on_loop = False
        written[on_loop] += len(text)
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", spied)
    assert live.http.get(f"{PATH}/{told['id']}{path}").status_code == 200
    assert written[False] > len(long)
    assert written[True] < 10_000  # the line in the log


def test_what_is_not_built_and_what_is_empty_is_said_in_plain_words(live: Live) -> None:
    for field, value, told in (
        (
            "context_management",
            [{}],
            "context_management must be [] (nothing is taken out of the context); leave it out",
        ),
        ("conversation", "conv_1", "conversation is not supported (give the items in input); leave it out"),
    ):
        error = live.error(PATH, input="Hi", **{field: value})
        assert error["message"] == told
        assert error["code"] == "unsupported_field"
    for empty in ("", []):
        assert live.error(PATH, input=empty)["message"] == "input must not be empty"


def test_pages_of_input_have_a_limit_that_is_checked(live: Live) -> None:
    """Thousands of digits were an internal error."""
    items = f"{PATH}/{live.ok(PATH, input='Hi', max_output_tokens=1)['id']}/input_items"
    for limit in ("0", "101", "-1", "x", "9" * 5000):
        answer = live.http.get(items, params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limit")
    assert live.http.get(items, params={"limit": "100"}).status_code == 200


# ------------------------------------------------------------------------------------------------ the store


def put(store: ResponseStore, name: str, owner: str = "", text: str = "") -> None:
    store.put(owner, {"id": name, "text": text}, [{"id": "msg_1"}])


def test_the_store_forgets_what_is_old_or_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.time()]
    monkeypatch.setattr("paceline.serving.response_store.time", SimpleNamespace(time=lambda: now[0]))
    store = ResponseStore(str(tmp_path / "a.db"), 1000, 100.0)
    put(store, "one")
    now[0] += 99.0
    assert store.get("", "one") is not None
    now[0] += 2.0
    assert store.get("", "one") is None
    assert not store.delete("", "one")
    store.close()
    store = ResponseStore(str(tmp_path / "a.db"), 1000, 100.0)
    for name in ("two", "three", "four"):
        put(store, name, text="x" * 400)
    kept = [name for name in ("two", "three", "four") if store.get("", name) is not None]
    assert kept == ["three", "four"]
    with pytest.raises(ApiError, match="store"):
        put(store, "five", text="x" * 1000)
    assert store.get("", "four") is not None
    store.close()


def test_the_file_is_its_owners_alone_and_holds_nothing_deleted(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.db"
    store = ResponseStore(str(file), 10**6, 100.0)
    put(store, "one", "me", "a secret text")
    for path in file.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert store.get("you", "one") is None
    assert not store.delete("you", "one")
    assert store.delete("me", "one")
    store.close()
    assert b"a secret text" not in b"".join(path.read_bytes() for path in file.parent.iterdir())


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    text, other = tmp_path / "a.txt", tmp_path / "other.db"
    text.write_text("no database, " * 100)
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE mine (a)")
    base.close()
    for file in (text, other, tmp_path):
        before = file.read_bytes() if file.is_file() else b""
        with pytest.raises(ConfigError, match="response_file"):
            ResponseStore(str(file), 1000, 100.0)
        assert not file.is_file() or file.read_bytes() == before


def test_no_key_forgets_the_responses_of_another(tmp_path: Path) -> None:
    store = ResponseStore(str(tmp_path / "a.db"), 3000, 100.0)
    for name in ("one", "two"):
        put(store, name, "small", "x" * 400)
    for number in range(20):
        put(store, f"many-{number}", "flood", "x" * 400)
    assert [name for name in ("one", "two") if store.get("small", name) is None] == []
    kept = [number for number in range(20) if store.get("flood", f"many-{number}") is not None]
    assert kept == list(range(20 - len(kept), 20)), "the oldest of its own have gone"
    assert len(kept) == 4
    with pytest.raises(ApiError, match="other keys"):
        put(store, "wide", "third", "x" * 2500)
    assert store.get("third", "wide") is None
    assert store.get("flood", "many-19") is not None
    put(store, "fair", "third", "x" * 900)
    assert store.get("third", "fair") is not None
    store.close()


def test_a_file_of_an_earlier_version_is_read_and_counted(tmp_path: Path) -> None:
    file = str(tmp_path / "a.db")
    store = ResponseStore(file, 2000, 100.0)
    put(store, "mine", "me", "x" * 400)
    put(store, "old", "you", "x" * 400)
    put(store, "new", "you", "x" * 400)
    store.close()
    with sqlite3.connect(file) as base:  # as it was then
        for kind, name in (("TRIGGER", "more_of_owner"), ("TRIGGER", "less_of_owner"), ("TABLE", "owners")):
            base.execute(f"DROP {kind} {name}")
        base.execute("DROP INDEX by_owner")
    base.close()
    store = ResponseStore(file, 2000, 100.0)
    for number in range(3):
        put(store, f"more-{number}", "you", "x" * 400)
    assert store.get("me", "mine") is not None
    assert store.get("you", "new") is None
    store.close()


@contextmanager
def full(kind: str, file: Path) -> Iterator[None]:
    """Files may grow by little more inside the block: by SQLite's own limit, or by the system's, which gives way by as
    much as a reserve has that is given up.
    """
    if kind == "pages":
        connect, base = sqlite3.connect, sqlite3.connect(file)
        pages = base.execute("PRAGMA page_count").fetchone()[0]
        base.close()

        def limited(*given: Any, **more: Any) -> sqlite3.Connection:
            found = connect(*given, **more)
            found.execute(f"PRAGMA max_page_count = {pages + 2}")
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("sqlite3.connect", limited)
            yield
        return
    resource, unlink = pytest.importorskip("resource"), Path.unlink
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE), file.stat().st_size + 50_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))

    def given_up(path: Path, **more: Any) -> None:
        if path.name.endswith("-reserve") and path.exists():  # and not a lock that is let go of meanwhile
            resource.setrlimit(resource.RLIMIT_FSIZE, (most + path.stat().st_size, before[1]))
        unlink(path, **more)

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Path, "unlink", given_up)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("kind", "reason"), [("pages", "database or disk is full"), ("bytes", "disk I/O error")])
def test_on_a_full_disk_answers_are_given_and_deleted(llm: LLM, tmp_path: Path, kind: str, reason: str) -> None:
    file = tmp_path / "a.db"
    store = ResponseStore(str(file), 10**7, 1000.0)
    for number in range(3):
        put(store, f"resp_{number}", text="x" * 60_000)
    store.close()
    given: dict[str, Any] = {"input": "Hi", "max_output_tokens": 3, "instructions": "a " * 900}
    with full(kind, file):
        for live in serve(AsyncLLM(llm), response_file=str(file)):
            answers = [live.ok(PATH, **given) for _ in range(45)]
            lost = [one for one in answers if not one["store"]]
            assert lost
            assert all(one["output"] and reason in one["store_error"] for one in lost)
            assert all("store_error" not in one for one in answers if one["store"])
            assert live.http.get(f"{PATH}/{lost[0]['id']}").status_code == 404
            last = events(live, **given)[-1]
            assert last["type"] == "response.incomplete"
            assert last["response"]["store"] is False
            health = live.http.get("/health")
            assert health.status_code == 200
            assert health.json()["response_store_error"] == reason
            assert health.json()["response_store_failures"] > len(lost)
            page = live.http.get("/metrics").text
            assert f"paceline:response_store_failures_total {len(lost) + 1}" in page
            for number in range(3):
                assert live.http.delete(f"{PATH}/resp_{number}").status_code == 200
                assert live.http.get(f"{PATH}/resp_{number}").status_code == 404
            assert live.ok(PATH, **given)["store"], "there is room again"
            assert live.http.get("/health").json()["response_store_error"] is None


def test_several_servers_share_a_file(tmp_path: Path) -> None:
    stores = [ResponseStore(str(tmp_path / "a.db"), 10**6, 100.0) for _ in range(3)]

    def work(number: int) -> None:
        for i in range(20):
            put(stores[number], f"{number}-{i}")

    threads = [threading.Thread(target=work, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(stores[0].get("", f"{number}-{i}") is not None for number in range(3) for i in range(20))


def test_a_response_that_is_too_large_is_rejected_before_it_is_decoded(llm: LLM) -> None:
    for live in serve(AsyncLLM(llm), max_response_bytes=2400):
        assert live.error(PATH, 413, input="a " * 1600)["param"] == "store"
        long: dict[str, Any] = {"input": "a " * 500, "max_output_tokens": 200, "ignore_eos": True}
        for found in (live.ok(PATH, **long), events(live, **long)[-1]["response"]):
            assert found["output"]
            assert found["store"] is False
            assert "2400" in found["store_error"]
        live.ok(PATH, input="a " * 500, max_output_tokens=2, store=False)


def test_completed_is_said_after_the_commit(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    order, put = list[str](), ResponseStore.put

    def slow(store: ResponseStore, *stored: Any) -> None:
        time.sleep(0.2)
        put(store, *stored)
        order.append("stored")

    monkeypatch.setattr(ResponseStore, "put", slow)
    with live.http.stream("POST", PATH, json={"input": "Hi", "max_output_tokens": 3, "stream": True}) as answer:
        order += [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert order.index("stored") < order.index("event: response.incomplete")


def events_of(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a stream of responses with what each is about."""
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            yield event["type"], event.get("response", {})


def test_what_was_completed_survives_a_kill_and_what_had_begun_is_lost(llm: LLM, tmp_path: Path) -> None:
    """In a stream it is unknown then, in the background it has failed."""
    file = str(tmp_path / "responses.db")
    command = ["serve", "--port", "0", "--response-file", file, "--dtype", "float32"]
    process = Forked(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"})
    long: dict[str, Any] = {"input": "Hi", "max_output_tokens": 1900, "ignore_eos": True}
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://[\d.:]+", line)))
        with httpx.Client(base_url=url, timeout=60) as http:

            def asked(**more: Any) -> Any:
                return http.post(PATH, json=long | more).json()

            whole = asked(max_output_tokens=3)
            with http.stream("POST", PATH, json=long | {"max_output_tokens": 4, "stream": True}) as answer:
                done = dict(events_of(answer.iter_lines()))["response.incomplete"]
            ended = asked(max_output_tokens=4, background=True)["id"]
            assert comes(lambda: http.get(f"{PATH}/{ended}").json()["status"] == "incomplete")
            with http.stream("POST", PATH, json=long | {"stream": True}) as answer:
                events = events_of(answer.iter_lines())
                cut = next(response["id"] for kind, response in events if kind == "response.created")
                assert any(kind == "response.output_text.delta" for kind, _ in events)
                lost = [asked(background=True)["id"] for _ in range(20)]  # some run, the others wait
                process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    with serving(AsyncLLM(llm), response_file=file) as live:
        assert live.http.get(f"{PATH}/{done['id']}").json() == done
        assert live.http.get(f"{PATH}/{whole['id']}").json() == whole
        assert live.http.get(f"{PATH}/{cut}").status_code == 404
        assert live.ok(PATH, input="Again", previous_response_id=done["id"], max_output_tokens=2)["output"]
        assert live.http.get(f"{PATH}/{ended}").json()["status"] == "incomplete", "control"
        for name in lost:
            found = live.http.get(f"{PATH}/{name}").json()
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            assert "the server ended before the answer was complete" in found["error"]["message"]
        assert live.http.get(f"{PATH}/{lost[0]}/input_items").json()["data"][0]["content"][0]["text"] == "Hi"
        assert live.http.delete(f"{PATH}/{lost[0]}").status_code == 200
        assert live.http.get(f"{PATH}/{lost[0]}").status_code == 404
    assert not list(tmp_path.glob("*-server-*")), "no marks of servers are left"


@pytest.mark.parametrize(("text", "wanted"), [(None, ""), ("", ""), ("hm", "hm")])
def test_thoughts_without_a_text_say_nothing(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: str
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text("{% for one in messages %}[{{ one.reasoning_content or '' }}]{{ one.content }}{% endfor %}")
    seen = list[str]()
    real = llm.tokenizer.encode_rendered

    def spied(rendered: Any, **more: Any) -> Any:
        seen.append(rendered.text)
        return real(rendered, **more)

    monkeypatch.setattr(llm.tokenizer, "encode_rendered", spied)
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}
    said, asked = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}
    for live in serve(AsyncLLM(llm), chat_template=str(template)):
        live.ok(PATH, input=[thought, said, asked], max_output_tokens=1)
    assert f"[{wanted}]Yes.[]So?" in seen


# In the background


def test_a_response_in_the_background_is_asked_for_until_it_has_ended(openai: Any, live: Live) -> None:
    client = client_of(openai, live)
    asked = {"model": "bundled", "input": "Hi", "max_output_tokens": 40, "temperature": 0, "background": True}
    with slowed(live.model.llm):
        first = client.responses.create(**asked)
        assert (first.status, first.background, first.output) == ("in_progress", True, [])
        assert client.responses.retrieve(first.id).status == "in_progress"
    assert comes(lambda: client.responses.retrieve(first.id).status != "in_progress")
    found = client.responses.retrieve(first.id)
    control = client.responses.create(**asked | {"background": False})
    assert not control.background
    assert found.output_text == control.output_text != ""
    assert found.status == control.status
    items = client.responses.input_items.list(first.id).data
    assert items[0].content[0].text == "Hi"


def test_a_response_in_the_background_is_cancelled(openai: Any, live: Live) -> None:
    client = client_of(openai, live)
    with slowed(live.model.llm):
        first = client.responses.create(model="bundled", input="Hi", background=True, extra_body={"ignore_eos": True})
        assert live.http.delete(f"{PATH}/{first.id}").status_code == 409
        assert client.responses.cancel(first.id).status == "cancelled"
    assert client.responses.retrieve(first.id).status == "cancelled"
    assert comes(lambda: not live.model.llm.engine.has_work)


def test_what_cannot_begin_in_the_background_is_an_error_at_once(live: Live) -> None:
    assert live.error(PATH, input="Hi", background=True, max_output_tokens=0)["param"] == "max_output_tokens"
    assert live.error(PATH, 404, input="Hi", background=True, model="another")["code"] == "model_not_found"
    with live.http.stream("POST", PATH, json={"input": "Hi", "max_output_tokens": 2}) as control:
        assert control.status_code == 200


def test_the_background_counts_in_the_limits_of_its_key(locked: Live) -> None:
    headers, body = {"authorization": "Bearer first-key"}, {"input": "Hi", "background": True, "ignore_eos": True}
    with slowed(locked.model.llm):
        names = [locked.http.post(PATH, json=body, headers=headers).json()["id"] for _ in range(2)]
        refused = locked.http.post(PATH, json={"input": "Hi"}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        other = {"authorization": "Bearer second-key"}
        assert locked.http.get(f"{PATH}/{names[0]}", headers=other).status_code == 404
        for name in names:
            assert locked.http.post(f"{PATH}/{name}/cancel", json={}, headers=headers).status_code == 200
    assert locked.http.post(PATH, json={"input": "Hi", "max_output_tokens": 1}, headers=headers).status_code == 200


def test_the_background_fails_with_the_server_and_by_its_clock(llm: LLM, tmp_path: Path) -> None:
    file, body = str(tmp_path / "responses"), {"input": "Hi", "background": True, "ignore_eos": True}
    with slowed(llm):
        for live in serve(AsyncLLM(llm), response_file=file):
            name = live.ok(PATH, **body)["id"]
    with contextmanager(serve)(AsyncLLM(llm), response_file=file, request_timeout=0.15) as live:
        found = live.http.get(f"{PATH}/{name}").json()
        assert (found["status"], "shut down" in found["error"]["message"]) == ("failed", True)
        with slowed(llm):
            slow = live.ok(PATH, **body)["id"]
            assert comes(lambda: live.http.get(f"{PATH}/{slow}").json()["status"] == "failed")
        assert "longer than this server allows" in live.http.get(f"{PATH}/{slow}").json()["error"]["message"]


def test_a_response_in_the_background_runs_for_all_servers_that_share_a_file(llm: LLM, tmp_path: Path) -> None:
    file, body = str(tmp_path / "responses"), {"input": "Hi", "background": True, "ignore_eos": True}
    with serving(AsyncLLM(llm), response_file=file) as one, serving(AsyncLLM(llm), response_file=file) as other:
        with slowed(llm):
            name = one.ok(PATH, **body)["id"]
            assert other.http.get(f"{PATH}/{name}").json()["status"] == "in_progress"
            assert other.http.delete(f"{PATH}/{name}").status_code == 409
            assert other.error(f"{PATH}/{name}/cancel", 409)["code"] == "response_elsewhere"
            assert other.error(PATH, input="a", previous_response_id=name)["code"] == "response_running"
            assert one.ok(f"{PATH}/{name}/cancel")["status"] == "cancelled"
        assert other.http.get(f"{PATH}/{name}").json()["status"] == "cancelled"


def test_what_cannot_be_kept_in_the_background_says_so(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise ApiError("no room", status=500, code="store_failed")

    body: dict[str, Any] = {"input": "Hi", "background": True, "max_output_tokens": 2, "ignore_eos": True}
    with serving(AsyncLLM(llm), response_file=str(tmp_path / "responses")) as live:
        with monkeypatch.context() as patched:
            patched.setattr(ResponseStore, "put", full)
            name = live.ok(PATH, **body)["id"]
            assert comes(lambda: live.http.get(f"{PATH}/{name}").json()["status"] == "failed")
            patched.setattr(ResponseStore, "begin", full)
            assert live.error(PATH, 500, **body)["code"] == "store_failed"
        name = live.ok(PATH, **body)["id"]
        assert comes(lambda: live.http.get(f"{PATH}/{name}").json()["status"] == "incomplete"), "the control"
        assert comes(lambda: not llm.engine.has_work)


# Carried along


def test_thoughts_are_carried_along_unread(openai: Any, scripted: Live) -> None:
    client = client_of(openai, scripted)
    asked = {"model": "bundled", "input": "Hi", "tools": TOOLS, "store": False}
    plain = client.responses.create(**asked)
    found = client.responses.create(**asked, include=["reasoning.encrypted_content"])
    thoughts = found.output[0]
    assert (thoughts.type, thoughts.content[0].text) == ("reasoning", "hm, so")
    assert thoughts.encrypted_content
    assert plain.output[0].encrypted_content is None, "control"
    last = events(scripted, **asked, include=["reasoning.encrypted_content"])[-1]
    assert last["response"]["output"][0]["encrypted_content"] == thoughts.encrypted_content
    sent = {"type": "reasoning", "id": thoughts.id, "summary": [], "encrypted_content": thoughts.encrypted_content}
    told = {"role": "assistant", "content": "Yes."}
    begin, more = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}
    body = {"max_output_tokens": 1, "store": False}

    def count(*items: Any) -> int:
        return int(scripted.ok(PATH, input=[begin, *items, told, more], **body)["usage"]["input_tokens"])

    in_the_open = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm, so"}]}
    assert count(sent) == count(in_the_open) > count()


def test_a_conversation_is_compacted_and_goes_on(openai: Any, talking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talking.model, "script", "<think>hm</think>Seven ducks.")
    client = client_of(openai, talking)
    first = client.responses.create(model="bundled", input="One", max_output_tokens=30)
    found = client.responses.compact(
        model="bundled", previous_response_id=first.id, input=[{"role": "user", "content": "Two"}]
    )
    assert isinstance(found, openai.types.responses.CompactedResponse)
    assert found.object == "response.compaction"
    *said, summary = found.output
    assert [item.content[0].text for item in said] == ["One", "Two"]
    assert summary.type == "compaction"
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens > 0
    read: list[str] = []
    encode = talking.model.llm.tokenizer.encode_rendered

    def spied(rendered: Any, **more: Any) -> list[int]:
        read.append(rendered.text)
        return encode(rendered, **more)

    monkeypatch.setattr(talking.model.llm.tokenizer, "encode_rendered", spied)
    going_on = [item.to_dict(warnings=False) for item in found.output]
    answer = client.responses.create(
        model="bundled", input=[*going_on, {"role": "user", "content": "Three"}], max_output_tokens=2
    )
    assert "[user]One[user]Two[assistant]Summary of our conversation so far:\nSeven ducks.[user]Three" in read[-1]
    kept = client.responses.input_items.list(answer.id, order="asc").data
    assert kept[2].encrypted_content == summary.encrypted_content
    client.responses.create(model="bundled", input="Four", previous_response_id=answer.id, max_output_tokens=2)
    assert "Seven ducks" in read[-1]


def test_what_cannot_be_compacted_is_named(live: Live) -> None:
    compact = f"{PATH}/compact"
    assert live.error(compact, input=[])["param"] == "input"
    assert live.error(compact, input=[{"role": "robot", "content": "a"}])["param"] == "input.0.role"
    assert live.error(compact, 404, previous_response_id="resp_1")["code"] == "previous_response_not_found"
    assert live.error(compact, input="a", temperature=1)["param"] == "temperature"
