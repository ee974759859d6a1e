"""Bodies that nobody should send are answered with an error of the client's, whatever is in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", params=["hermes", "pythonic"])
def calling(llm: LLM, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Live]:
    file = Path(tmp_path_factory.mktemp("templates")) / "calls.jinja"
    file.write_text("{{ tools | tojson if tools }}{% for message in messages %}{{ message.content }}{% endfor %}")
    yield from serve(AsyncLLM(llm), chat_template=str(file), tool_call_parser=request.param, max_request_tokens=8)


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


SCHEMAS: list[Any] = [
    {"properties": []}, {"$defs": 3}, {"properties": {"a": 3}}, {"properties": {"a": {"$ref": "#"}}}, {"type": 3},
    {"properties": {"a": {"$ref": "http://a/b"}}}, nested(100), nested(400), {"required": 3}, {"required": "a"},
    {"properties": {"a": {"enum": 3}}}, {"properties": {"a": {"enum": []}}}, {"properties": {"a": {"anyOf": 3}}},
    {"properties": {"a": {"type": "array", "items": 3}}}, {"properties": {"a": {"type": "array", "minItems": -1}}},
    {"properties": {"a": {"type": "array", "minItems": 10**30}}}, {"properties": {"a": {"type": ["string", 3]}}},
    {"properties": {"a": {"type": "integer", "minimum": "x"}}}, {"properties": {"\n": {}}},
    {"$defs": {"x": {"$ref": "#/$defs/x"}}, "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]},
    {"properties": {"a": {"enum": ["\ud800"]}}, "required": ["a"]},
]  # fmt: skip
CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "("}, {"regex": "a{1000000}"}, {"regex": "(a*)*b"}, {"regex": "\ud800"}, {"choice": []},
    {"choice": ["a"] * 10_000}, {"choice": ["\ud800"]}, {"grammar": "start: start"}, {"grammar": "x"},
    {"structural_tag": {}}, {"structural_tag": {"structures": 3}}, {"json": True}, {"json": False}, {"json": "{"}, {},
    {"json_object": True, "whitespace_pattern": "("},
]  # fmt: skip
FIELDS: list[dict[str, Any]] = [
    {"prompt": "\ud800"}, {"stop": ["\ud800"]}, {"bad_words": ["\ud800"]}, {"cache_salt": "\ud800"},
    {"prediction": "\ud800"}, {"model": "\ud800"}, {"user": "\ud800"}, {"stop": [""]}, {"bad_words": [""]},
    {"allowed_token_ids": [10**12]}, {"stop_token_ids": [10**30]}, {"logit_bias": {"x": 1}},
    {"logit_bias": {str(10**20): 1}}, {"prompt_logprobs": 10**9}, {"truncate_prompt_tokens": 10**20},
    {"min_tokens": 10**20}, {"n": 10**30}, {"seed": 2**70}, {"temperature": 10**400},
    {"prediction": {"content": [{"type": "text"}]}}, {"speculative_config": [{}]}, {"prompt": "a" * 200_000},
]  # fmt: skip


def below_500(live: Live, path: str, body: str) -> None:
    answer = live.http.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code < 500, (body[:200], answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


def test_schemas_and_constraints(calling: Live) -> None:
    for schema in SCHEMAS:
        for strict in (False, True):
            function = {"name": "f", "parameters": schema, "strict": strict}
            tools = [{"type": "function", "function": function}]
            for choice in ("required", "auto"):
                below_500(calling, CHAT, json.dumps({"messages": HELLO, "tools": tools, "tool_choice": choice}))
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
        below_500(calling, CHAT, json.dumps({"messages": HELLO, "response_format": form}))
    for constraint in CONSTRAINTS:
        below_500(calling, COMPLETIONS, json.dumps({"prompt": "a", "structured_outputs": constraint}))


def test_fields_and_texts_that_are_no_json(live: Live) -> None:
    for field in FIELDS:
        below_500(live, COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 2} | field))
    for name in ("temperature", "top_p", "min_p", "seed", "n", "top_k", "logprobs", "repetition_penalty"):
        for value in ("NaN", "Infinity", "1e999", "1" + "0" * 5000):
            below_500(live, COMPLETIONS, f'{{"prompt": "a", "max_tokens": 2, "{name}": {value}}}')
    for body in ("[" * 100_000, '{"prompt": ' + "[" * 900 + "]" * 900 + "}", "", "null", "\x00"):
        below_500(live, COMPLETIONS, body)
    deep: Any = 1
    for _ in range(300):
        deep = {"a": deep}
    below_500(live, CHAT, json.dumps({"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"a": deep}}))
    below_500(live, "/detokenize", json.dumps({"tokens": [10**30]}))


@pytest.mark.parametrize("token", [2**31, 2**53 + 1, 2**64, 10**30])
@pytest.mark.parametrize("echo", [False, True])
def test_ids_that_no_tokenizer_has_are_the_prompts_fault(live: Live, token: int, *, echo: bool) -> None:
    error = live.error(COMPLETIONS, prompt=[1, token], max_tokens=1, echo=echo)
    assert (error["param"], error["type"]) == ("prompt", "invalid_request_error")
    assert error["message"].startswith("prompt token ids must be integers in 0..")
    assert live.http.post(COMPLETIONS, json={"prompt": [1, 2], "max_tokens": 1, "echo": echo}).status_code == 200


def test_a_constraint_that_cannot_be_followed_is_the_clients_fault(live: Live) -> None:
    native = {"grammar": "%llguidance {}\nstart: start"}
    error = live.error(COMPLETIONS, prompt="a", max_tokens=4, structured_outputs=native)
    assert (error["param"], error["code"]) == ("structured_outputs", "constraint_failed")
    assert "<state>" not in error["message"]
    for grammar in ("start: start", 'root ::= "a" root'):
        error = live.error(COMPLETIONS, prompt="a", max_tokens=4, structured_outputs={"grammar": grammar})
        assert error["param"] == "structured_outputs"
        assert "never comes to an end" in error["message"]


def test_the_openapi_document_tells_requests_and_errors_behind_the_key(live: Live, locked: Live) -> None:
    assert locked.http.get("/openapi.json").status_code == 401
    found = live.http.get("/openapi.json").json()
    chat = found["paths"][CHAT]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert set(chat["responses"]) == {"200", "4XX", "5XX"}
    answer = live.http.put(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
