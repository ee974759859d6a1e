"""Anthropic's own client against a live server: messages whole and streamed, tools, thoughts, counts, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving.conftest import Live, serve, slowed

from paceline import LLM, AsyncLLM

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = [{"role": "user", "content": "Say hello"}]
TOOLS: Any = [{"name": "add", "input_schema": {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
    "additionalProperties": False}}]  # fmt: skip
CALLS = '<think>hm, so</think>Yes. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def client_of(live: Live, **given: Any) -> Any:
    client = pytest.importorskip("anthropic").Anthropic
    return client(**{"base_url": live.url, "api_key": "none", "max_retries": 0, "timeout": 60} | given)


GIVEN: dict[str, dict[str, Any]] = {
    "text": {},
    "blocks": {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "One", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "Two"}]}]},
    "system": {"system": "Be brief."},
    "system blocks": {"system": [{"type": "text", "text": "Be brief."}]},
    "talk": {"messages": [*HELLO, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Again"}]},
    "begun": {"messages": [*HELLO, {"role": "assistant", "content": "Hel"}]},
    "rules": {"extra_body": {"temperature": 0.7, "top_p": 0.9, "top_k": 8}},
    "stops": {"stop_sequences": ["zzzz", "yyyy"]},
    "for the record": {"metadata": {"user_id": "me"}, "service_tier": "auto"},
    "thinking": {"thinking": {"type": "adaptive"}},
    "schema": {"max_tokens": 90, "output_config": {"format": {"type": "json_schema", "schema": {
        "type": "object", "properties": {"age": {"type": "boolean"}}, "required": ["age"],
        "additionalProperties": False}}}},
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_messages_whole_and_streamed(anthropic: Any, live: Live, case: str) -> None:
    client = client_of(live)
    given = {"model": "bundled", "messages": HELLO, "max_tokens": 8, "extra_body": {"temperature": 0}} | GIVEN[case]
    whole = client.messages.create(**given)
    assert isinstance(whole, anthropic.types.Message)
    assert [block.type for block in whole.content] in (["text"], [])
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.output_tokens <= given["max_tokens"]
    with client.messages.stream(**given) as stream:
        events = [one for one in stream if one.type not in ("text", "input_json", "thinking", "signature")]
        final = stream.get_final_message()
    assert events[0].type == "message_start"
    assert [one.type for one in events[-2:]] == ["message_delta", "message_stop"]
    if case != "rules":
        assert [block.text for block in final.content] == [block.text for block in whole.content]
    if case == "schema" and whole.stop_reason == "end_turn":
        assert json.loads(whole.content[0].text).keys() == {"age"}


def test_the_text_is_that_of_the_chat_and_tokens_are_counted(live: Live) -> None:
    given: Any = {"model": "bundled", "system": "Be brief.", "messages": HELLO}
    chat = live.ok("/v1/chat/completions", temperature=0, max_tokens=12, messages=[
        {"role": "system", "content": "Be brief."}, *HELLO])  # fmt: skip
    found = live.ok(PATH, **given, temperature=0, max_tokens=12)
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    counts = found["usage"]
    total = counts["input_tokens"] + counts["cache_read_input_tokens"]
    assert total == chat["usage"]["prompt_tokens"] == client_of(live).messages.count_tokens(**given).input_tokens


def test_tools_are_counted_where_the_template_reads_them(live: Live, talking: Live) -> None:
    given: Any = {"model": "bundled", "messages": HELLO}
    assert "tools" in live.error(COUNT, **given, tools=TOOLS)["message"]
    without, with_tools = (talking.ok(COUNT, **given, **more)["input_tokens"] for more in ({}, {"tools": TOOLS}))
    assert with_tools > without > 0


def test_a_stop_sequence_is_told(live: Live) -> None:
    text = live.ok(PATH, model="bundled", messages=HELLO, temperature=0, max_tokens=12)["content"][0]["text"]
    word = text[len(text) // 2 :][:3]
    found = live.ok(PATH, model="bundled", messages=HELLO, temperature=0, max_tokens=12, stop_sequences=["@@", word])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", word)
    assert word not in "".join(block["text"] for block in found["content"])


def test_the_end_of_the_context_is_told(live: Live) -> None:
    body = {"model": "bundled", "messages": [{"role": "user", "content": "word " * 1500}], "max_tokens": 10**6}
    found = live.post(PATH, **body)
    if found.status_code == 200:
        assert found.json()["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_thoughts_and_calls_are_blocks_and_go_on(talking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(talking)
    given: Any = {"model": "bundled", "max_tokens": 90, "tools": TOOLS}
    with monkeypatch.context() as patched:
        patched.setattr(talking.model, "script", CALLS)
        whole = client.messages.create(messages=HELLO, **given)
        with client.messages.stream(messages=HELLO, **given) as stream:
            kinds = [one.delta.type for one in stream if one.type == "content_block_delta"]
            final = stream.get_final_message()
    for found in (whole, final):
        thought, said, call = found.content
        assert (thought.thinking, said.text.strip(), call.name, call.input) == ("hm, so", "Yes.", "add", {"a": 1})
        assert found.stop_reason == "tool_use"
        assert found.usage.output_tokens_details.thinking_tokens > 0
    assert set(kinds) == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "7"}], "is_error": True},
        {"type": "text", "text": "Go on"},
    ]
    talk = [*HELLO, {"role": "assistant", "content": final.content}, {"role": "user", "content": results}]
    after = client.messages.create(**given | {"messages": talk, "max_tokens": 6, "extra_body": {"temperature": 0}})
    chat = talking.ok("/v1/chat/completions", temperature=0, max_tokens=6,
        tools=[{"type": "function", "function": {"name": "add", "parameters": TOOLS[0]["input_schema"]}}], messages=[
            *HELLO,
            {"role": "assistant", "content": said.text, "reasoning_content": "hm, so", "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "tool_call_id": call.id, "content": "Error: 7"},
            {"role": "user", "content": "Go on"}])  # fmt: skip
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert after.content[0].text == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_required_call_is_one(talking: Live, choice: dict[str, Any]) -> None:
    given: Any = {"model": "bundled", "messages": HELLO, "max_tokens": 300, "tools": TOOLS, "temperature": 0}
    found = talking.ok(PATH, **given, tool_choice=choice | {"disable_parallel_tool_use": True})
    assert len(found["content"]) == 1
    if found["stop_reason"] != "max_tokens":
        assert found["content"][0]["name"] == "add"


def test_thoughts_are_switched_where_the_template_can(llm: LLM, tmp_path: Any) -> None:
    switch, fixed = tmp_path / "switch.jinja", tmp_path / "fixed.jinja"
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    switch.write_text(plain + "{% if enable_thinking %}\n<think>{% endif %}")
    fixed.write_text(plain + "\n<think>")
    body: Any = {"model": "bundled", "messages": HELLO, "max_tokens": 5, "temperature": 0}
    for live in serve(AsyncLLM(llm), chat_template=str(switch)):
        for kind, block in (("adaptive", "thinking"), ("disabled", "text")):
            assert live.ok(PATH, **body, thinking={"type": kind})["content"][0]["type"] == block
    for live in serve(AsyncLLM(llm), chat_template=str(fixed)):
        assert live.ok(PATH, **body)["content"][0]["type"] == "thinking"
        assert "thinking" in live.error(PATH, **body, thinking={"type": "disabled"})["message"]


def test_keys_come_in_either_header(anthropic: Any, locked: Live) -> None:
    given: Any = {"model": "bundled", "messages": HELLO, "max_tokens": 2}
    client_of(locked, api_key="first-key").messages.create(**given)
    client_of(locked, api_key=None, auth_token="second-key").messages.create(**given)
    for wrong in ({"api_key": "third-key"}, {"api_key": None, "auth_token": "third-key"}):
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client_of(locked, **wrong).messages.create(**given)
        assert caught.value.body["error"]["type"] == "authentication_error"
    headers = {"x-api-key": "first-key"}
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200
    long = {"prompt": "One day", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        locked.http.stream("POST", "/v1/completions", json=long, headers=headers),
        locked.http.stream("POST", "/v1/completions", json=long, headers=headers),
        pytest.raises(anthropic.RateLimitError),
    ):
        client_of(locked, api_key="first-key").messages.create(**given)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"colour": 1}, "colour"),
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "a range": ({"temperature": 1.5}, "temperature"),
    "nothing": ({"messages": []}, "messages"),
    "no block": ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    "a role": ({"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    "an image": ({"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": "http://a"}}]}]}, "messages.0.content.0.type"),
    "a document": ({"messages": [*HELLO, {"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "document", "source": {}}]}]}, "messages.1.content.1.type"),
    "a result's image": ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
        "content": [{"type": "image", "source": {}}]}]}]}, "messages.0.content.0.content.0.type"),
    "a user's call": ({"messages": [{"role": "user", "content": [
        {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, "messages.0.content.0.type"),
    "an open call": ({"messages": [*HELLO, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, "messages"),
    "a block's field": ({"system": [{"type": "text", "text": "a", "size": 1}]}, "system.0.size"),
    "a server tool": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    "a tool's name": ({"tools": [TOOLS[0] | {"name": "a b"}]}, "tools.0.name"),
    "a missing tool": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a choice without a name": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a budget": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    "effort": ({"output_config": {"effort": "low"}}, "output_config.effort"),
    "a schema": ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format"),
    "a container": ({"container": "c"}, "container"),
    "servers": ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("stream", [True, False])
def test_what_cannot_be_honoured_is_named(live: Live, case: str, stream: bool) -> None:
    more, param = WRONG[case]
    found = live.post(PATH, **{"model": "bundled", "messages": HELLO, "max_tokens": 4, "stream": stream} | more)
    assert found.status_code == 400, found.text
    assert found.json()["type"] == "error"
    assert found.json()["error"]["type"] == "invalid_request_error"
    assert param in found.json()["error"]["message"]


def test_errors_have_anthropics_shape(anthropic: Any, live: Live, llm: LLM) -> None:
    given: Any = {"messages": HELLO, "max_tokens": 4}
    with pytest.raises(anthropic.NotFoundError) as caught:
        client_of(live).messages.create(model="gpt-9", **given)
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert live.error(PATH, 413, model="a" * 500_000)["type"] == "request_too_large"
    assert live.error(f"{PATH}/batches", 404)["type"] == "not_found_error"
    for slow in serve(AsyncLLM(llm), request_timeout=0.1):
        body: Any = {"model": "bundled", "messages": HELLO, "max_tokens": 1800, "stop_sequences": ["zzzz"]}
        with slowed(llm), slow.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
        error = json.loads(lines[-1].removeprefix("data: "))
        assert (error["type"], error["error"]["type"]) == ("error", "timeout_error")
        assert "longer than this server allows" in error["error"]["message"]
