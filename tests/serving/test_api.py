"""The API over HTTP: answers equal those of `LLM`, whole and streamed; what is wrong is named; limits hold."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import Any

import pytest
from serving.conftest import Live, comes, serve, slowed

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.models import memory_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Say hello"}]


def events(live: Live, path: str, **body: Any) -> list[Any]:
    with live.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def texts(found: list[Any]) -> dict[int, str]:
    out: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            out[choice["index"]] = out.get(choice["index"], "") + text
    return out


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 4},
    "two outputs": {"temperature": 0.8, "seed": 1, "n": 2},
    "rules": {"temperature": 0.9, "seed": 2, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.4,
              "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {"5": -3}, "min_tokens": 4},
    "stops": {"temperature": 0.0, "stop": ["\n"], "include_stop_str_in_output": True},
    "constrained": {"temperature": 0.0, "structured_outputs": {"regex": "[a-z]+ [0-9]{2}"}},
}  # fmt: skip


@pytest.mark.parametrize("case", SAMPLED)
def test_texts_are_those_of_the_library_whole_and_streamed(live: Live, llm: LLM, case: str) -> None:
    given = {**SAMPLED[case], "max_tokens": 12}
    expected = llm.generate("Once upon", llm.default_sampling_params(**given))[0]
    whole = live.ok(COMPLETIONS, model="bundled", prompt="Once upon", **given)
    assert [one["text"] for one in whole["choices"]] == [one.text for one in expected.outputs]
    assert [one["finish_reason"] for one in whole["choices"]] == [one.finish_reason for one in expected.outputs]
    made = sum(len(one.token_ids) for one in expected.outputs)
    assert whole["usage"]["completion_tokens"] == made
    assert whole["usage"]["total_tokens"] == made + len(expected.prompt_token_ids)
    streamed = events(live, COMPLETIONS, prompt="Once upon", **given)
    assert texts(streamed) == {one.index: one.text for one in expected.outputs}


def test_chat_is_rendered_by_the_template_and_streams_the_same(live: Live, llm: LLM) -> None:
    expected = llm.chat(HELLO, SamplingParams(temperature=0.0, max_tokens=10))[0].outputs[0].text
    whole = live.ok(CHAT, messages=HELLO, temperature=0, max_completion_tokens=10)
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["object"] == "chat.completion"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say hello"}]}]
    found = events(live, CHAT, messages=parts, temperature=0, max_tokens=10, stream_options={"include_usage": True})
    assert texts(found) == {0: expected}
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 10
    assert all(one["usage"] is None for one in found[:-1])
    assert {one["object"] for one in found} == {"chat.completion.chunk"}


def test_several_prompts_and_token_ids_keep_their_order(live: Live, llm: LLM) -> None:
    words = ["One day", "The name of", "In the"]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    expected = [one.outputs[0].text for one in llm.generate(words, params)]
    ids = [llm.tokenizer.encode(text) for text in words]
    for prompt in (words, ids):
        found = live.ok(COMPLETIONS, prompt=prompt, temperature=0, max_tokens=6)["choices"]
        assert [one["text"] for one in found] == expected
        assert [one["index"] for one in found] == [0, 1, 2]
        assert texts(events(live, COMPLETIONS, prompt=prompt, temperature=0, max_tokens=6)) == dict(enumerate(expected))
    assert live.ok(COMPLETIONS, prompt=ids[0], temperature=0, max_tokens=6)["choices"][0]["text"] == expected[0]


def test_the_likelihood_of_a_prompt_is_told_without_decoding(live: Live, llm: LLM) -> None:
    ids = llm.tokenizer.encode("The name of the king")
    expected = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0))
    for most in (0, 1):
        choice = live.ok(COMPLETIONS, prompt=[ids], echo=True, logprobs=1, max_tokens=most, temperature=0)["choices"][0]
        told, wanted = choice["logprobs"]["token_logprobs"], expected[0].prompt_logprobs
        assert wanted is not None
        assert told[0] is None
        assert told[1 : len(ids)] == pytest.approx([wanted[i][ids[i]].logprob for i in range(1, len(ids))], abs=1e-4)
        assert len(told) == len(ids) + most
        assert choice["text"].startswith(llm.tokenizer.decode(ids, False))
        tokens = choice["logprobs"]["tokens"]
        assert "".join(tokens) == choice["text"]
        assert choice["logprobs"]["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]


def test_logprobs_of_a_chat_hold_the_likeliest_tokens(live: Live) -> None:
    whole = live.ok(CHAT, messages=HELLO, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert len(entries) == 5
    assert all(len(one["top_logprobs"]) == 3 for one in entries)
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in entries)
    assert bytes(b for one in entries for b in one["bytes"]).decode() == whole["choices"][0]["message"]["content"]
    streamed = events(live, CHAT, messages=HELLO, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3)
    found = [entry for one in streamed for entry in one["choices"][0]["logprobs"]["content"]]
    assert found == entries


def test_a_prediction_is_drafted_from_and_counted(following: Live) -> None:
    live = following
    first = live.ok(COMPLETIONS, prompt="One day", temperature=0, max_tokens=24)["choices"][0]["text"]
    usage = live.ok(
        COMPLETIONS, prompt="One day", temperature=0, max_tokens=24, prediction={"type": "content", "content": first}
    )["usage"]
    counts, drafters = usage["completion_tokens_details"], usage["speculative"]["drafters"]
    assert counts["accepted_prediction_tokens"] == drafters["prediction"]["num_accepted_tokens"] > 10
    assert usage["speculative"]["num_accepted_tokens"] == counts["accepted_prediction_tokens"]


def test_a_request_chooses_among_the_drafters_of_the_server(following: Live) -> None:
    body: dict[str, Any] = {"prompt": "One day", "temperature": 0, "max_tokens": 24}
    first = following.ok(COMPLETIONS, **body)["choices"][0]["text"]

    def drafts(**more: Any) -> tuple[int, str]:
        found = following.ok(COMPLETIONS, **body, **more)
        return found["usage"]["speculative"]["num_draft_tokens"], found["choices"][0]["text"]

    many, text = drafts(prediction=first)
    assert (many > 10, text) == (True, first)
    assert drafts(speculative_config=None) == drafts(speculative_config={"method": "none"}) == (0, first)
    few, text = drafts(prediction=first, speculative_config={"method": "prediction", "num_speculative_tokens": 1})
    assert (0 < few <= 12, text) == (True, first)  # each of them saves a step
    assert following.error(COMPLETIONS, **body, prediction=first, speculative_config="none")["param"] == "prediction"


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_response_formats_bind_the_answer(live: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    choice = live.ok(CHAT, messages=HELLO, response_format=form, max_tokens=40, temperature=0)["choices"][0]
    if choice["finish_reason"] == "stop":
        assert set(json.loads(choice["message"]["content"])) == {"age"}
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}, "strict": True}}
    assert live.error(CHAT, messages=HELLO, response_format=bad)["param"] == "response_format"
    assert '["not"]' in live.error(CHAT, messages=HELLO, response_format=bad)["message"]
    bad["json_schema"]["strict"] = False
    live.ok(CHAT, messages=HELLO, response_format=bad, max_tokens=2)


TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


def test_calls_that_are_required_always_parse(live: Live) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        given = {"tools": TOOLS, "tool_choice": choice, "temperature": 0, "max_tokens": 90}
        found = live.post(CHAT, messages=HELLO, parallel_tool_calls=False, **given)
        if found.status_code == 400:  # the bundled template reads no tools
            assert "tools" in found.text
            return
        message = found.json()["choices"][0]
        assert message["finish_reason"] in ("tool_calls", "length")
        if message["finish_reason"] == "tool_calls":
            (call,) = message["message"]["tool_calls"]
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


WRONG: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "unknown field": (COMPLETIONS, {"prompt": "a", "max_tokns": 3}, "max_tokns"),
    "out of range": (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    "a text for a number": (COMPLETIONS, {"prompt": "a", "top_k": "3"}, "top_k"),
    "too many outputs": (COMPLETIONS, {"prompt": "a", "n": 5}, "n"),
    "an empty prompt": (COMPLETIONS, {"prompt": []}, "prompt"),
    "ids out of range": (COMPLETIONS, {"prompt": [10**6]}, None),
    "no prompt": (COMPLETIONS, {}, "prompt"),
    "best_of": (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
    "suffix": (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
    "no messages": (CHAT, {"messages": []}, "messages"),
    "an image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
    "an unknown role": (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages.0.role"),
    "top_logprobs alone": (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    "audio": (CHAT, {"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    "stream options alone": (CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
    "an id of blanks": (CHAT, {"messages": HELLO, "request_id": "a b"}, "request_id"),
    "a hidden token in a stream": (COMPLETIONS, {"prompt": "a", "max_tokens": 0, "stream": True}, "max_tokens"),
    "two limits": (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "a missing tool": (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    "a method that is not loaded": (CHAT, {"messages": HELLO, "speculative_config": "eagle"}, "speculative_config"),
    "a draft model": (
        CHAT,
        {"messages": HELLO, "speculative_config": {"method": "draft_model", "model": "/etc"}},
        "speculative_config",
    ),
    "a module": (COMPLETIONS, {"prompt": "a", "speculative_config": "os:system"}, "speculative_config"),
    "too many drafts": (
        COMPLETIONS,
        {"prompt": "a", "speculative_config": {"num_speculative_tokens": 10**9}},
        "speculative_config",
    ),
    "a path": (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": "/etc/passwd"}}, "structured_outputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_answered_400_with_the_field(live: Live, case: str) -> None:
    path, body, param = WRONG[case]
    error = live.error(path, **body)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param


def test_unknown_models_and_paths_are_404(live: Live) -> None:
    assert live.error(COMPLETIONS, 404, model="gpt-9", prompt="a")["code"] == "model_not_found"
    assert live.http.get("/v1/models/nothing").status_code == 404
    assert live.http.get("/v1/files").status_code == 404
    assert [one["id"] for one in live.http.get("/v1/models").json()["data"]] == ["bundled", "other-name"]
    assert live.http.get("/v1/models/other-name").json()["id"] == "other-name"
    live.ok(COMPLETIONS, model="other-name", prompt="a", max_tokens=1)


def test_bodies_that_are_no_json_or_too_large_are_rejected_before_they_are_read(live: Live) -> None:
    assert live.http.post(COMPLETIONS, content="{", headers={"content-type": "application/json"}).status_code == 400
    assert live.http.post(COMPLETIONS, content="{}", headers={"content-type": "text/plain"}).status_code == 415
    assert live.error(COMPLETIONS, 413, prompt="a" * 500_000)["code"] == "request_too_large"

    def endless() -> Any:
        for _ in range(500):
            yield b" " * 1000

    chunked = live.http.post(COMPLETIONS, content=endless(), headers={"content-type": "application/json"})
    assert chunked.status_code == 413
    assert live.http.get("/health", headers={"host": "evil.example"}).status_code == 421


def test_tokens_go_there_and_back(live: Live, llm: LLM) -> None:
    found = live.ok("/tokenize", prompt="One day, äöü")
    assert found["tokens"] == llm.tokenizer.encode("One day, äöü")
    assert live.ok("/detokenize", tokens=found["tokens"])["prompt"].endswith("One day, äöü")
    assert live.ok("/tokenize", messages=HELLO)["tokens"] == llm.chat_ids(HELLO)
    assert live.error("/detokenize", tokens=[10**7])["param"] == "tokens"
    assert live.error("/tokenize")["param"] == "prompt"


def test_keys_open_every_route_but_health_and_keep_tenants_apart(locked: Live) -> None:
    assert locked.http.get("/health").status_code == 200
    for path in ("/health", "/"):
        assert (locked.http.head(path).status_code, locked.http.head(path).text) == (200, "")
    assert locked.http.head("/v1/models").status_code in (401, 405)
    for path in ("/v1/models", "/metrics", "/version"):
        assert locked.http.get(path).status_code == 401
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 8, "max_tokens": 2, "temperature": 0}

    def cached(key: str) -> int:
        answer = locked.http.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("first-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") == 0
    for wrong in ("third-key", "first", "first-key2"):
        headers = {"authorization": f"Bearer {wrong}"}
        assert locked.http.post(COMPLETIONS, json=body, headers=headers).status_code == 401


def test_a_key_may_run_only_so_many_requests_at_once(locked: Live) -> None:
    headers = {"authorization": "Bearer first-key"}
    long = {"prompt": "One day", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with (
        slowed(locked.model.llm),
        locked.http.stream("POST", COMPLETIONS, json=long, headers=headers) as first,
        locked.http.stream("POST", COMPLETIONS, json=long, headers=headers) as second,
    ):
        assert first.status_code == second.status_code == 200
        third = locked.http.post(COMPLETIONS, json=long, headers=headers)
        assert (third.status_code, third.headers["retry-after"]) == (429, "1")
        other = {"authorization": "Bearer second-key"}
        assert locked.http.post(COMPLETIONS, json={**long, "max_tokens": 1, "stream": False}, headers=other).is_success
    assert settled(locked)


def settled(live: Live) -> bool:
    """Whether nothing runs any more, within some seconds."""
    return comes(lambda: not live.model.llm.engine.has_work)


def asked(live: Live, key: str = "", **body: Any) -> socket.socket:
    """A connection on which completions were asked for; nothing is read."""
    host, port = live.url.removeprefix("http://").split(":")
    text, authorization = json.dumps(body), f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\n{authorization}Content-Type: application/json\r\n"
    raw = socket.create_connection((host, int(port)))
    raw.settimeout(60)
    raw.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n{text}".encode())
    return raw


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot(live: Live, stream: bool) -> None:
    def left_early() -> float:
        return counted(live, 'request_success_total{finished_reason="abort"}')

    before, made = left_early(), counted(live, "generation_tokens_total")
    with slowed(live.model.llm):
        body = {"prompt": "One day", "max_tokens": 1900, "ignore_eos": True, "stream": stream, "temperature": 0}
        with asked(live, **body):
            assert comes(lambda: counted(live, "generation_tokens_total") > made)
            assert live.model.llm.engine.has_work
        assert settled(live)
    assert comes(lambda: left_early() == before + 1), "it went on to its end"


def test_requests_at_once_get_what_each_gets_alone(live: Live, llm: LLM) -> None:
    prompts = [f"{word} day" for word in ("One", "Two", "Some", "A", "Another", "The", "This", "My")]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    expected = [llm.generate(prompt, params)[0].outputs[0].text for prompt in prompts]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        body = {"prompt": prompts[i], "temperature": 0, "max_tokens": 16}
        found[i] = texts(events(live, COMPLETIONS, **body))[0]

    threads = [threading.Thread(target=ask, args=[i]) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[i] for i in range(len(prompts))] == expected


def counted(live: Live, name: str) -> float:
    """What the metrics say of a counter; all its labels together, where none is named."""
    lines = [line for line in live.http.get("/metrics").text.splitlines() if line.startswith(f"paceline:{name}")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_metrics_count_what_was_served_under_vllms_stems(live: Live) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total", "e2e_request_latency_seconds_count")
    before = [counted(live, name) for name in names]
    live.ok(COMPLETIONS, prompt=[5, 6, 7], temperature=0, max_tokens=9, ignore_eos=True)
    after = [counted(live, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [9, 3, 1]
    live.error(COMPLETIONS, prompt="a", temperature=-1)
    assert 'status="400"' in live.http.get("/metrics").text


def test_metrics_are_read_while_blocks_change_hands(live: Live) -> None:
    """A block that is counted and in no list yet: whoever counts anew in this moment gives it away a second time."""
    memory, pool = memory_of(live.model.llm.runner), live.model.llm.runner.arena.pool
    pool.begin()
    pool.add_reference([pool.find(1)])
    counts = pool.counts.copy()
    page = live.http.get("/metrics").text
    assert re.search(r"^paceline:kv_cache_usage_perc [0-9.e-]+$", page, re.M)
    assert (pool.counts == counts).all()
    memory.spare()
    assert (pool.counts != counts).any()


def test_what_is_not_let_in_is_counted_under_its_status(locked: Live) -> None:
    key = {"authorization": "Bearer first-key"}

    def counts() -> dict[str, float]:
        lines = locked.http.get("/metrics", headers=key).text.splitlines()
        found = [line for line in lines if line.startswith("paceline:requests_rejected_total{")]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}

    before = counts()
    for path in ("/v1/models", "/v1/secret-path"):
        assert locked.http.get(path).status_code == 401
    assert locked.http.get("/health", headers={"host": "evil.example"}).status_code == 421
    assert locked.http.post(COMPLETIONS, content="{}", headers=key).status_code == 415
    body = {"prompt": "a" * 9 * 2**20}
    assert locked.http.post(COMPLETIONS, json=body, headers=key).status_code == 413
    assert locked.http.get("/v1/nothing", headers=key).status_code == 404
    added = {status: count - before.get(status, 0) for status, count in counts().items()}
    assert {status: count for status, count in added.items() if count} == {
        "401": 2, "404": 1, "413": 1, "415": 1, "421": 1}  # fmt: skip


def test_what_came_before_a_fault_is_streamed(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live.model.llm.engine
    step, calls = engine.step, 0

    def failing() -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError("no room")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", failing)
        found = events(live, COMPLETIONS, prompt="One day", max_tokens=200, ignore_eos=True, temperature=0)
    assert "no room" in found[-1]["error"]["message"]
    text = "".join(choice["text"] for one in found[:-1] for choice in one["choices"])
    whole = live.ok(COMPLETIONS, prompt="One day", max_tokens=60, ignore_eos=True, temperature=0)
    assert text
    assert whole["choices"][0]["text"].startswith(text)


def test_a_slot_is_free_again_where_the_client_left_before_the_first_event(locked: Live) -> None:
    for _ in range(8):
        asked(locked, "second-key", prompt="One day", max_tokens=200, ignore_eos=True, stream=True).close()
    body, key = {"prompt": "a", "max_tokens": 1}, {"authorization": "Bearer second-key"}
    assert comes(lambda: locked.http.post(COMPLETIONS, json=body, headers=key).status_code == 200)


def test_ids_and_usage_of_a_stream_are_as_they_are_wanted(live: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(live, CHAT, messages=HELLO, max_tokens=5, ignore_eos=True, request_id="mine", stream_options=options)
    assert {one["id"] for one in found} == {"chatcmpl-mine"}
    counts = [one["usage"]["completion_tokens"] for one in found]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_diffusion_models_are_served_and_say_what_they_cannot_do() -> None:
    for live in serve(AsyncLLM("bundled/diffusion")):
        assert live.ok(COMPLETIONS, prompt="2+2=", max_tokens=8, temperature=0)["choices"][0]["finish_reason"]
        assert live.error(COMPLETIONS, prompt="2+2=", max_tokens=8, top_p=0.5)["param"] == "top_p"
        assert live.error(COMPLETIONS, prompt="a", structured_outputs={"regex": "a"})["param"] == "structured_outputs"
        assert texts(events(live, COMPLETIONS, prompt="2+2=", max_tokens=8, temperature=0))


def test_a_fault_of_the_engine_is_told_and_the_next_request_works(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = live.model.llm.engine
    step, calls = engine.step, 0

    def failing() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise MemoryError("no room")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", failing)
        found = live.post(COMPLETIONS, prompt="One day", max_tokens=200, ignore_eos=True)
    assert found.status_code == 500
    assert "no room" in found.json()["error"]["message"]
    assert live.http.get("/health").json()["faults"] > 0
    assert live.ok(COMPLETIONS, prompt="One day", max_tokens=3)["choices"][0]["text"]


def test_schemas_that_hang_or_crash_the_compiler_harm_nobody(live: Live) -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"type": "integer"}}
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9000)}}
    for schema in ({"$defs": chain, "$ref": "#/$defs/d0"}, wide):
        body = {"messages": HELLO, "max_tokens": 2, "structured_outputs": {"json": schema}}
        error = live.error(CHAT, **body)
        assert error["param"] == "structured_outputs"
        assert "too long" in error["message"]
    assert live.ok(CHAT, messages=HELLO, max_tokens=2, structured_outputs={"choice": ["a"]})


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_lenient_schema_did_not_enforce_is_told(live: Live, stream: bool) -> None:
    schema = {"type": "integer", "minimum": 3, "maximum": 3, "not": {"const": 3}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": HELLO, "response_format": form, "max_tokens": 8, "temperature": 0}
    found = events(live, CHAT, **body) if stream else [live.ok(CHAT, **body)]
    errors = [choice["schema_errors"] for one in found for choice in one["choices"] if "schema_errors" in choice]
    assert len(errors) == 1
    assert "should not be valid" in errors[0][0]
    form["json_schema"]["schema"] = {"type": "integer", "minimum": 3, "maximum": 3}
    assert "schema_errors" not in json.dumps(events(live, CHAT, **body) if stream else live.ok(CHAT, **body))
