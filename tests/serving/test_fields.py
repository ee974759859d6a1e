"""Fields that clients send: what asks for nothing is taken, other names are understood, the rest is named with its true
place and cause, or ignored and told where the operator has chosen that.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM
from paceline.serving.api_errors import ApiError
from paceline.serving.protocol import ChatRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 3, "temperature": 0},
    COMPLETIONS: {"prompt": "One day", "max_tokens": 3, "temperature": 0},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3, "temperature": 0},
    MESSAGES: {"model": "bundled", "messages": HELLO, "max_tokens": 3, "temperature": 0},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ODD = {"no such key": 1}
NO: Any = object()

# name: (a value that asks for nothing, one that would change the answer, or NO where there is none)
DRAWN: dict[str, tuple[Any, Any]] = {
    "store": (True, "yes"), "service_tier": ("flex", 3), "prompt_cache_retention": ("24h", 1),
    "prompt_cache_options": ({"mode": "explicit", "ttl": "30m"}, {"prewarm": True}),
    "moderation": (None, {"model": "m"}),
    "best_of": (1, 2), "use_beam_search": (False, True), "length_penalty": (1, 1.5), "early_stopping": (False, True),
    "num_beams": (1, 4), "spaces_between_special_tokens": (True, False), "detokenize": (True, False),
    "logit_bias": ({}, {"x": 1}), "mm_processor_kwargs": (None, {"a": 1}), "media_io_kwargs": ({}, {"a": 1}),
    "session_id": ("s", 1), "kv_transfer_params": (None, {"a": 1}), "vllm_xargs": ({}, {"a": 1}),
    "logits_processors": ([], ["a.b"]), "return_tokens_as_token_ids": (False, True),
    "return_prompt_text": (False, True),
    "logprob_token_ids": (None, [1]), "repetition_detection": (None, {}), "stream_interval": (1, 8),
    "truncation_side": ("left", "right"), "guided_json": (None, NO), "guided_regex": (None, NO),
    "guided_decoding_backend": ("auto", 1), "guided_whitespace_pattern": (None, " "), "cache_prompt": (True, "yes"),
    "id_slot": (-1, "a"), "n_keep": (0, "a"), "n_probs": (0, 3), "repeat_penalty": (1.0, 1.2),
    "repeat_last_n": (64, "a"),
    "typical_p": (1, 0.9), "top_n_sigma": (-1, 1), "mirostat": (0, 2), "mirostat_tau": (5.0, "a"),
    "mirostat_eta": (0.1, "a"), "dynatemp_range": (0, 0.5), "dynatemp_exponent": (1, "a"), "xtc_probability": (0, 0.5),
    "xtc_threshold": (0.1, "a"), "dry_multiplier": (0, 0.8), "dry_base": (1.75, "a"), "dry_allowed_length": (2, "a"),
    "dry_penalty_last_n": (-1, "a"), "dry_sequence_breakers": (["\n"], NO), "min_keep": (0, 2),
    "samplers": ([], ["top_k"]),
    "timings_per_token": (False, True), "return_progress": (False, True), "return_tokens": (False, True),
    "response_fields": ([], ["content"]), "lora": ([], [{"id": 0}]), "t_max_predict_ms": (0, 9), "n_indent": (0, 2),
    "keep_alive": ("5m", NO), "options": ({}, {"num_ctx": 9}), "grammar": ("", NO), "json_schema": (None, NO),
    "transforms": ([], ["a"]), "provider": ({}, {"a": 1}), "colour": (None, "red"),
}  # fmt: skip
NOTHING: dict[str, dict[str, tuple[Any, Any]]] = {
    CHAT: DRAWN | {
        "verbosity": ("medium", "low"), "modalities": (["text"], ["text", "audio"]), "audio": (None, {"voice": "a"}),
        "web_search_options": (None, {}), "functions": ([], [{"name": "f"}]), "function_call": ("auto", {"name": "f"}),
        "documents": ([], [{"text": "a"}]), "chat_template": (None, "a"), "echo": (False, True),
        "add_special_tokens": (False, True), "top_logprobs": (0, 2), "max_completion_tokens": (-1, NO),
        "reasoning_format": ("auto", "none"), "include_reasoning": (True, False), "n_predict": (None, NO),
    },
    COMPLETIONS: DRAWN | {"suffix": ("", "b"), "prompt_embeds": (None, "a")},
    RESPONSES: {
        "service_tier": ("priority", 3), "prompt_cache_retention": ("in_memory", 1),
        "context_management": ([], [{"type": "compaction"}]), "conversation": (None, "c"),
        "prompt": (None, {"id": "p"}),
        "max_tool_calls": (3, "a"), "moderation": (None, {"model": "m"}), "truncation": ("auto", "all"),
        "text": ({"verbosity": "medium"}, {"verbosity": "low"}), "top_logprobs": (0, 21), "image": ({}, NO),
        "include": (["reasoning.encrypted_content", "web_search_call.action.sources"], ["everything"]),
        "reasoning": ({"summary": "auto", "effort": None, "context": "auto"}, {"summary": "concise"}),
        "background_options": ({}, {"completion_window": "8h"}), "access_programs": ({}, {"cyber": "standard"}),
        "prompt_cache_options": ({"ttl": "30m"}, {"prewarm": True}), "colour": (None, "red"),
    },
    MESSAGES: {
        "service_tier": ("standard_only", 3), "speed": ("fast", 1), "container": (None, "c"), "mcp_servers": ([], [{}]),
        "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                               {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        "diagnostics": ({"previous_message_id": None}, {"previous_message_id": "m"}), "fallbacks": ("default", [{}]),
        "inference_geo": ("global", "eu"), "thread": (None, {"type": "create"}), "compaction": (None, {}),
        "billing_policy": ({"type": "billing_policy", "bill_to": "self"}, {"bill_to": "user_profile"}),
        "fallback_credit_token": (None, "t"), "betas": (["a"], NO), "anthropic_version": ("2023-06-01", 1),
        "thinking_token_budget": (-1, 9), "colour": (None, "red"),
    },
}  # fmt: skip


def said(path: str, answer: Any) -> Any:
    if path in (CHAT, COMPLETIONS):
        return answer["choices"][0].get("text", answer["choices"][0].get("message"))
    return [item["content"][0]["text"] for item in answer["output"]] if path == RESPONSES else answer["content"]


@pytest.mark.parametrize("path", NOTHING)
def test_values_that_ask_for_nothing_change_nothing(live: Live, path: str) -> None:
    idle = {name: value for name, (value, _) in NOTHING[path].items()}
    assert said(path, live.ok(path, **BODIES[path], **idle)) == said(path, live.ok(path, **BODIES[path]))


@pytest.mark.parametrize("path", NOTHING)
def test_other_values_of_theirs_are_named_with_a_reason(live: Live, path: str) -> None:
    for name, (_, value) in NOTHING[path].items():
        if value is not NO:
            answer = live.post(path, **BODIES[path] | {name: value})
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert name in error["message"]
            assert path == MESSAGES or error["param"].split(".")[0] == name


def test_an_unknown_name_is_told_with_the_one_that_was_meant(live: Live) -> None:
    error = live.error(CHAT, **BODIES[CHAT], max_token=3)
    assert (error["message"], error["param"]) == (
        "max_token is not known here; did you mean max_tokens?", "max_token")  # fmt: skip
    assert live.error(CHAT, **BODIES[CHAT], colour=1)["message"] == "colour is not known here; leave it out"


def test_penalties_over_a_part_of_the_text_are_not_those_over_all(live: Live) -> None:
    body = BODIES[CHAT] | {"repeat_penalty": 1.3}
    assert live.error(CHAT, **body)["param"] == "repeat_penalty"
    ours = live.ok(CHAT, **BODIES[CHAT], repetition_penalty=1.3)
    assert said(CHAT, live.ok(CHAT, **body, repeat_last_n=-1)) == said(CHAT, ours)
    error = live.error(CHAT, **BODIES[CHAT], repeat_last_n=64, presence_penalty=0.5)
    assert error["param"] == "repeat_last_n"


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}
NAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}),
    ({"guided_regex": "[ab]"}, {"structured_outputs": {"regex": "[ab]"}}),
    ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
    ({"guided_grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ({"grammar": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"n_predict": 7}, {"max_tokens": 7}),
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({"n_cmpl": 2}, {"n": 2}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}},
     {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
     {"structured_outputs": {"structural_tag": {"structures": [], "triggers": ["<"]}}}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "ours"), NAMES)
def test_other_names_mean_the_same(given: dict[str, Any], ours: dict[str, Any]) -> None:
    for kind, start in ((ChatRequest, {"messages": HELLO}), (CompletionRequest, {"prompt": "a"})):
        found, meant, plain = (kind.model_validate(json.loads(json.dumps(start | one))) for one in (given, ours, {}))
        assert found.model_dump() == meant.model_dump() != plain.model_dump()


def test_other_names_bind_the_answer_and_errors_speak_of_them(live: Live) -> None:
    body = {"messages": HELLO, "temperature": 0}
    assert said(CHAT, live.ok(CHAT, **body, guided_choice=["tea"]))["content"] == "tea"
    assert said(CHAT, live.ok(CHAT, **body, grammar='root ::= "tea"'))["content"] == "tea"
    assert live.ok(CHAT, **body, n_predict=1, ignore_eos=True)["usage"]["completion_tokens"] == 1
    for name, value in (("guided_regex", "("), ("grammar", "root ::= nothing"), ("n_predict", -3), ("guided_json", 3)):
        error = live.error(CHAT, **body, **{name: value})
        assert error["param"] == name
        assert "structured_outputs" not in error["message"]
    assert live.error(CHAT, **body, n_predict=3, max_tokens=4)["param"] == "n_predict"
    schema = {"type": "json_schema", "schema": SCHEMA | {"required": ["a"], "additionalProperties": False}}
    answer = live.ok(MESSAGES, **BODIES[MESSAGES] | {"max_tokens": 60}, output_format=schema)
    if answer["stop_reason"] == "end_turn":
        assert json.loads(answer["content"][0]["text"]).keys() == {"a"}


MARK = {"type": "ephemeral", "ttl": "1h"}


def test_marks_for_caches_and_what_servers_told_are_not_shown_to_the_model(talking: Live) -> None:
    def tokens(messages: list[Any], tools: list[Any]) -> Any:
        return talking.ok("/tokenize", messages=messages, tools=tools)["tokens"]

    part = {"type": "text", "text": "One"}
    plain: list[dict[str, Any]] = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "Two"}]
    marked = [
        {"role": "user", "content": [part | {"cache_control": MARK, "prompt_cache_breakpoint": {"mode": "explicit"}}],
         "cache_control": MARK},
        {"role": "assistant", "content": "Two", "id": "m1", "annotations": [], "audio": None, "function_call": None,
         "refusal": None, "tool_calls": None, "provider_specific_fields": {"a": 1}, "prefix": False,
         "parsed": {"a": 1}},
    ]  # fmt: skip
    function = TOOL["function"] | {"cache_control": MARK}  # type: ignore[operator]
    expected = tokens(plain, [TOOL])
    assert tokens(marked, [TOOL | {"cache_control": MARK, "function": function}]) == expected
    assert tokens([plain[0], plain[1] | {"content": "Three"}], [TOOL]) != expected
    thought = [*HELLO, {"role": "assistant", "content": "a", "reasoning_content": "because"}]
    other = [*HELLO, {"role": "assistant", "content": "a", "reasoning": "because"}]
    both = [*HELLO, thought[1] | {"reasoning": "because"}]
    expected = tokens(thought, [])
    assert tokens(other, []) == tokens(both, []) == expected
    assert tokens([*HELLO, {"role": "assistant", "content": "a"}], []) != expected


def test_parsed_answers_may_go_back_as_clients_have_them(talking: Live) -> None:
    def chat_tokens(call: Any) -> Any:
        said = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]}
        result = {"role": "tool", "tool_call_id": "c", "content": "2"}
        return talking.ok("/tokenize", messages=[*HELLO, said, result], tools=[TOOL])["tokens"]

    call = {"name": "f", "arguments": '{"a": 1}'}
    assert chat_tokens(call | {"parsed_arguments": {"a": 1}}) == chat_tokens(call)
    assert chat_tokens(call | {"arguments": '{"a": 2}'}) != chat_tokens(call)
    part = {"type": "output_text", "text": "Two", "annotations": [], "parsed": {"a": 1}}
    items = [
        {"type": "message", "role": "assistant", "content": [part]},
        {"type": "function_call", "call_id": "c", "parsed_arguments": {"a": 1}, **call},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    answer = talking.ok(RESPONSES, **BODIES[RESPONSES] | {"input": items})
    stored = talking.http.get(f"{RESPONSES}/{answer['id']}/input_items").json()["data"]
    assert len(stored) == 3
    assert "parsed" not in json.dumps(stored)


def test_anthropics_client_is_told_that_conversations_are_not_held_so_that_it_sends_them_whole(live: Live) -> None:
    error = live.error(MESSAGES, **BODIES[MESSAGES], thread={"type": "create"})
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "thread" in error["message"]
    assert live.error(MESSAGES, **BODIES[MESSAGES], compaction=ODD)["details"] == {"error_code": "unsupported_field"}


# ------------------------------------------------------------------------------------------------ lenient


@pytest.fixture(scope="module")
def lenient(llm: LLM) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm), lenient_fields=True)


IGNORED: dict[str, tuple[dict[str, Any], str]] = {
    CHAT: (
        {"verbosity": "low", "colour": 1, "mirostat": 2, "messages": [
            HELLO[0] | {"size": 1}, {"role": "assistant", "content": "a", "size": 2, "audio": {"id": "a"}},
            {"role": "user", "content": [{"type": "text", "text": "b", "size": 1}]}]},
        "verbosity, colour, mirostat, messages.size, messages.audio, messages.content.size",
    ),
    RESPONSES: (
        {"context_management": [{"type": "compaction"}], "text": {"verbosity": "medium", "size": 1},
         "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "size": 1}]}]},
        "context_management, text.size, input.content.size",
    ),
    MESSAGES: (
        {"inference_geo": "eu", "system": [{"type": "text", "text": "a", "size": 1}]}, "inference_geo, system.size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path", IGNORED)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_are_ignored_and_told_where_the_operator_says_so(
    live: Live, lenient: Live, path: str, stream: bool
) -> None:
    more, names = IGNORED[path]
    body = BODIES[path] | more | {"stream": stream}
    answer = lenient.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == names
    assert live.post(path, **body).status_code == 400
    plain = lenient.post(path, **BODIES[path])
    assert "x-ignored-fields" not in plain.headers
    assert "x-ignored-fields" not in lenient.post(path, **BODIES[path], service_tier="flex").headers


def test_what_the_model_is_to_read_and_wrong_values_are_never_ignored(lenient: Live) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    for name, value in (("documents", [{"text": "a"}]), ("functions", [{"name": "f"}]), ("temperature", "hot"),
                        ("messages", image), ("stop", [1]), ("tool_choice", {"type": "custom"})):  # fmt: skip
        assert lenient.error(CHAT, **BODIES[CHAT] | {name: value})["param"].split(".")[0] == name
    assert lenient.error(RESPONSES, input="a", conversation="c")["param"] == "conversation"
    many = [HELLO[0] | {f"a{number}": 1 for number in range(100)}]
    assert lenient.error(CHAT, messages=many)["message"]
    names = lenient.post(CHAT, **BODIES[CHAT], **{f"a\r\nb: {number}": 1 for number in range(500)}).headers
    assert "b" not in names
    assert len(names["x-ignored-fields"]) < 5000


# ------------------------------------------------------------------------------------------------ errors


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], **more}


TEXT = {"type": "text", "text": "a"}
ERRORS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "1,025 stops": (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 1025}, "stop",
                    "stop may hold at most 1024 texts, got 1025"),
    "a stop of another kind": (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop",
                               "stop must be a text or a list, got 5"),
    "an item of another kind": (COMPLETIONS, {"prompt": "a", "stop": ["a", 5]}, "stop.1",
                                "stop.1 must be a text, got 5"),
    "a mixed prompt": (COMPLETIONS, {"prompt": [[1, "a"]]}, "prompt.0.1",
                       "prompt.0.1 must be a whole number, got a text"),
    "a negative id": (COMPLETIONS, {"prompt": [-1]}, "prompt.0", "prompt.0 must be at least 0, got -1"),
    "a prompt of another kind": (COMPLETIONS, {"prompt": {"a": 1}}, "prompt",
                                 "prompt must be a text or a list, got an object"),
    "no prompt": (COMPLETIONS, {}, "prompt", "prompt is missing"),
    "a text for a number": (COMPLETIONS, {"prompt": "a", "n": "2"}, "n", "n must be a whole number, got a text"),
    "a fraction": (COMPLETIONS, {"prompt": "a", "n": 1.5}, "n", "n must be a whole number, got 1.5"),
    "a key of a part": (CHAT, chat(TEXT, TEXT | {"size": 1}), "messages.0.content.1.size",
                        "messages.0.content.1.size is not supported; leave it out"),
    "a kind of mark": (CHAT, chat(TEXT | {"cache_control": {"type": "forever"}}),
                       "messages.0.content.0.cache_control.type",
                       "messages.0.content.0.cache_control.type must be 'ephemeral', got 'forever'"),
    "an image": (CHAT, chat(TEXT, {"type": "image_url", "image_url": {"url": "http://a"}}),
                 "messages.0.content.1.type",
                 "messages.0.content.1.type must be 'text' or 'refusal', got 'image_url'"),
    "no message": (CHAT, {"messages": []}, "messages", "messages must not be empty"),
    "a role": (CHAT, {"messages": [{"role": "function", "content": "a"}]}, "messages.0.role",
               "messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'function'"),
    "an old call": (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
                    "messages.0.function_call",
                    "messages.0.function_call is not supported (send tool_calls); leave it out"),
    "a choice of another kind": (CHAT, {"messages": HELLO, "tool_choice": 5}, "tool_choice",
                                 "tool_choice must be 'none', 'auto' or 'required' or an object, got 5"),
    "a custom tool": (CHAT, {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "f"}}]},
                      "tools.0.type", "tools.0.type must be 'function', got 'custom'"),
    "tools": (CHAT, {"messages": HELLO, "tools": [TOOL] * 129}, "tools", "tools may hold at most 128 tools, got 129"),
    "a bias": (CHAT, {"messages": HELLO, "logit_bias": {"Str": ""}}, "logit_bias.Str",
               "logit_bias.Str must be a number, got a text"),
    "a mark in an item": (RESPONSES, {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "a", "cache_control": {"ttl": "1h"}}]}]},
        "input.0.content.0.cache_control.type", "input.0.content.0.cache_control.type is missing"),
    "truncation": (RESPONSES, {"input": "a", "truncation": "middle"}, "truncation",
                   "truncation must be 'disabled' or 'auto', got 'middle'"),
    "a summary": (RESPONSES, {"input": "a", "reasoning": {"summary": "concise"}}, "reasoning.summary",
                  "reasoning.summary must be 'auto', got 'concise' (thoughts come whole)"),
    "metadata": (RESPONSES, {"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata",
                 "metadata may hold at most 16 items, got 17"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_true_field_and_cause(live: Live, case: str) -> None:
    path, body, param, message = ERRORS[case]
    error = live.error(path, **body)
    assert (error["param"], error["message"]) == (param, message)


DEEP = "the body must nest at most 128 lists and objects within each other"
RAW: dict[bytes, str] = {
    b'{"prompt": "a\xff"}': "the body is not UTF-8: byte 0xff at position 13",
    b'{"prompt": "\xed\xa0\x80"}': "the body is not UTF-8: byte 0xed at position 12",
    b'{"prompt": "a",\n"n"}': "the body is not JSON: Expecting ':' delimiter at line 2, column 4",
    b'{"prompt": "a", "top_p": NaN}': "top_p holds NaN, which is no number of JSON's",
    b'{"prompt": "a", "stop": ["b", -Infinity]}': "stop holds -Infinity, which is no number of JSON's",
    b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}": "the body holds a number of too many digits",
    b'{"prompt": ' + b"[" * 128 + b"]" * 128 + b"}": DEEP,
    b'{"prompt": ' + b"[" * 9999 + b"]" * 9999 + b"}": DEEP,
    b"[]": "the body must be an object, got a list of 0",
    b"3": "the body must be an object, got 3",
    b"": "the body is missing",
    b"null": "the body must be an object, got null",
}  # fmt: skip


def test_bodies_that_are_no_json_say_where(live: Live) -> None:
    for body, message in RAW.items():
        answer = live.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    for body in (b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}', b'{"prompt": 1, "prompt": "a", "max_tokens": 1}'):
        answer = live.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text


def test_names_and_texts_that_were_sent_are_not_taken_for_others(live: Live) -> None:
    """Names of alternatives stand in the places of errors, and look like fields."""
    for name in ("str", "NamedTool", "list[str]", "Str"):
        assert live.error(CHAT, messages=HELLO, metadata={name: 1})["param"] == f"metadata.{name}"
    assert live.error(CHAT, messages=HELLO, tool_choice={"type": "function"})["param"] == "tool_choice.function"
    secret = live.error(CHAT, messages=[{"role": "user", "content": {"a": "secret"}}])
    assert "secret" not in secret["message"]


def test_a_busy_machine_makes_no_constraint_too_difficult(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "integer"}}
    with monkeypatch.context() as patched:
        patched.setattr("paceline.serving.workers.PATIENCE", 0.0)
        answer = live.post(COMPLETIONS, **BODIES[COMPLETIONS], structured_outputs={"regex": "busy [ab]"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    assert int(answer.headers["retry-after"]) > 0
    live.ok(COMPLETIONS, **BODIES[COMPLETIONS], structured_outputs={"regex": "busy [ab]"})
    monkeypatch.setattr("paceline.serving.grammars.COMPILE_SECONDS", 0.2)
    schema = {"$defs": hard, "$ref": "#/$defs/d0"}
    assert "too long" in live.error(COMPLETIONS, **BODIES[COMPLETIONS], structured_outputs={"json": schema})["message"]


# ------------------------------------------------------------------------------------------------ the clients' types


def named(live: Live, path: str, body: dict[str, Any], key: str) -> None:
    """A key is taken, or rejected under its name and with a reason."""
    answer = live.post(path, **body)
    if answer.status_code != 200:
        error = answer.json()["error"]
        told = error.get("param") or error["message"]
        assert (answer.status_code, key in told) == (400, True), (key, error)
        assert "is not known" not in error["message"], (key, error)


def keys(*kinds: Any) -> set[str]:
    return {key for kind in kinds for key in kind.__annotations__}


def test_every_field_of_openais_types_is_known(openai: Any, live: Live) -> None:
    from openai.types import completion_create_params as completion
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params as response

    for path, module, name in (
        (CHAT, chat_params, "CompletionCreateParamsBase"),
        (COMPLETIONS, completion, "CompletionCreateParamsBase"),
        (RESPONSES, response, "ResponseCreateParamsBase"),
    ):
        found = keys(getattr(module, name))
        assert len(found) > 15
        for key in found - {"model"}:
            named(live, path, BODIES[path] | {key: ODD}, key)
    assert "is not known" in live.error(CHAT, **BODIES[CHAT], colour=ODD)["message"]


def test_every_key_inside_them_is_named(openai: Any, live: Live) -> None:
    from openai.types import chat as kinds
    from openai.types import responses, shared_params

    roles = {
        "user": kinds.ChatCompletionUserMessageParam, "system": kinds.ChatCompletionSystemMessageParam,
        "assistant": kinds.ChatCompletionAssistantMessageParam, "tool": kinds.ChatCompletionToolMessageParam,
    }  # fmt: skip
    for role, kind in roles.items():
        for key in keys(kind) - {"role"}:
            message = {"role": role, "content": "a", "tool_call_id": "c"} | {key: ODD}
            named(live, CHAT, BODIES[CHAT] | {"messages": [message]}, key)
    for key in keys(kinds.ChatCompletionContentPartTextParam) - {"type"}:
        named(live, CHAT, BODIES[CHAT] | chat(TEXT | {key: ODD}), key)
    for key in keys(shared_params.FunctionDefinition):
        tool = {"type": "function", "function": {"name": "f"} | {key: ODD}}
        named(live, CHAT, BODIES[CHAT] | {"tools": [tool]}, key if key != "parameters" else "tools")
    for key in keys(kinds.ChatCompletionStreamOptionsParam):
        named(live, CHAT, BODIES[CHAT] | {"stream": True, "stream_options": {key: ODD}}, key)
    item: dict[str, Any] = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    for key in keys(responses.EasyInputMessageParam) - {"type"}:
        named(live, RESPONSES, BODIES[RESPONSES] | {"input": [item | {key: ODD}]}, key)
    for key in keys(responses.ResponseInputTextParam) - {"type"}:
        parts = [{"type": "input_text", "text": "a"} | {key: ODD}]
        named(live, RESPONSES, BODIES[RESPONSES] | {"input": [item | {"content": parts}]}, key)
    for key in keys(responses.FunctionToolParam) - {"type", "parameters"}:
        tool = {"type": "function", "name": "f"} | {key: ODD}
        named(live, RESPONSES, BODIES[RESPONSES] | {"tools": [tool]}, key)
    for key in keys(shared_params.Reasoning):
        named(live, RESPONSES, BODIES[RESPONSES] | {"reasoning": {key: ODD}}, key)


def test_every_field_of_anthropics_types_is_known(anthropic: Any, live: Live) -> None:
    from anthropic.types import message_create_params as plain
    from anthropic.types.beta import message_create_params as beta

    found = keys(plain.MessageCreateParamsBase, beta.MessageCreateParamsBase)
    assert len(found) > 20
    for key in found - {"model"}:
        named(live, MESSAGES, BODIES[MESSAGES] | {key: ODD}, key)
    for key in keys(anthropic.types.TextBlockParam) - {"type"}:
        named(live, MESSAGES, BODIES[MESSAGES] | chat(TEXT | {key: ODD}), key)
    for key in keys(anthropic.types.ToolParam) - {"input_schema"}:
        tool = {"name": "f", "input_schema": {"type": "object"}} | {key: ODD}
        named(live, MESSAGES, BODIES[MESSAGES] | {"tools": [tool]}, key)
    for key in keys(anthropic.types.OutputConfigParam, anthropic.types.beta.BetaOutputConfigParam):
        named(live, MESSAGES, BODIES[MESSAGES] | {"output_config": {key: ODD}}, key)
    for key in keys(anthropic.types.ThinkingConfigAdaptiveParam) - {"type"}:
        named(live, MESSAGES, BODIES[MESSAGES] | {"thinking": {"type": "adaptive", key: ODD}}, key)


def test_the_documentation_has_them_all() -> None:
    docs = Path(__file__).parents[2] / "docs"
    spec = importlib.util.spec_from_file_location("generate", docs / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.filled((docs / "serving.md").read_text(encoding="utf-8"))
    own = {
        "logit_bias",
        "truncation",
        "text",
        "top_logprobs",
        "include",
        "reasoning",
        "colour",
        "max_completion_tokens",
    }
    for table in NOTHING.values():
        assert not {name for name in table if f"`{name}`" not in page} - own
    assert "| `length_penalty` | chat, completions, llama-server | null, 1.0 | give search, as" in page
    assert "understood as structured\\_outputs.regex" in page


def test_a_field_that_cannot_be_honoured_is_an_error_of_the_library_too() -> None:
    with pytest.raises(ApiError) as caught:
        ChatRequest.model_validate({"messages": HELLO, "mirostat": 2})
    assert (caught.value.param, caught.value.status) == ("mirostat", 400)
