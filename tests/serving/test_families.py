"""What clients are told of answers in the forms of today's families: whole and streamed alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM
from paceline.llm import BUNDLED

CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "Hi"}]
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]
HARMONY = """<|start|>system<|message|>{{ reasoning_effort or 'medium' }}{{ tools | tojson if tools }}<|end|>{% for m in
messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ m.thinking }}<|end|>{% endfor %}<|start|>assistant"""
RENAMED = {"<|user|>": "<|other|>", "<|assistant|>": "<|message|>", "<|endoftext|>": "<|channel|>"}


class Forced(AsyncLLM):
    """Decodes tokens that are set, and ends."""

    tokens: Sequence[int] = ()

    def stream(self, prompt: Any, params: Any = None, **more: Any) -> Any:
        tokens = self.tokens

        def force(output_ids: Any, logits: Any) -> Any:
            wanted = tokens[len(output_ids)] if len(output_ids) < len(tokens) else self.llm.tokenizer.eos_id
            logits = logits.clone().fill_(float("-inf"))
            logits[wanted] = 0.0
            return logits

        return super().stream(prompt, replace(params, logits_processors=[force], max_tokens=len(tokens) + 1), **more)


def told(live: Live, **body: Any) -> dict[str, Any]:
    """What a chat's answer says, which is what its events say."""
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 120} | body
    choice = live.ok(CHAT, **body)["choices"][0]
    message = choice["message"]
    whole = {
        "content": message["content"] or "",
        "reasoning": message["reasoning_content"] or "",
        "calls": [one["function"] for one in message.get("tool_calls", ())],
        "reason": choice["finish_reason"],
    }
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    with live.http.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                _add(found, choice["delta"])
                found["reason"] = choice["finish_reason"]
    assert found == whole
    return whole


def _add(found: dict[str, Any], delta: dict[str, Any]) -> None:
    found["content"] += delta.get("content", "")
    found["reasoning"] += delta.get("reasoning_content", "")
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            found["calls"].append({"name": call["function"]["name"], "arguments": ""})
        found["calls"][call["index"]]["arguments"] += call["function"]["arguments"]


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The bundled model with special tokens of gpt-oss, and a chat template that reads the variables of its own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (BUNDLED / "target" / name).read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        (folder / name).write_text(text)
    template = folder / "chat.jinja"
    template.write_text(HARMONY)
    llm = LLM(dtype="float32", profile=False, tokenizer=str(folder), speculative_config=None)
    yield from serve(Forced(llm), chat_template=str(template))


def forced(live: Live, text: str) -> None:
    assert isinstance(live.model, Forced)
    live.model.tokens = live.model.llm.tokenizer.encode(text, add_special_tokens=False)


ANALYSIS = "<|channel|>analysis<|message|>We think.<|end|><|channel|>"


def test_marks_that_are_special_tokens_are_read_and_not_shown(channels: Live) -> None:
    tokenizer = channels.model.llm.tokenizer
    special = {tokenizer.token_text(index) for index in tokenizer.special_ids}
    assert set(RENAMED.values()) <= special
    given: dict[str, Any] = {"ignore_eos": True}
    forced(channels, f"{ANALYSIS}final<|message|>Hello!")
    found = told(channels, **given)
    assert (found["content"], found["reasoning"]) == ("Hello!", "We think.")
    assert found == told(channels, **given, skip_special_tokens=True)
    forced(channels, f"{ANALYSIS}final<|message|>Hello<|other|>!")
    assert told(channels, **given)["content"] == "Hello!"
    assert told(channels, **given, skip_special_tokens=False)["content"] == "Hello<|other|>!"
    forced(channels, "a <|end|> <|message|> b")
    assert told(channels, **given)["content"].split() == ["a", "b"]
    call = 'commentary to=functions.weather json<|message|>{"city": "Oslo"}'
    forced(channels, f"{ANALYSIS}{call}")
    found = told(channels, **given, tools=WEATHER)
    assert (found["content"], found["reasoning"]) == ("", "We think.")
    assert found["calls"] == [{"name": "weather", "arguments": '{"city": "Oslo"}'}]
    other = [{"type": "function", "function": {"name": "climate"}}]
    assert told(channels, **given, tools=other)["content"] == '{"city": "Oslo"}'
    answer = channels.ok("/v1/completions", prompt="Hi", ignore_eos=True, max_tokens=9)["choices"][0]["text"]
    assert "<|" not in answer


def rendered(live: Live, **body: Any) -> str:
    """The prompt of a chat."""
    given: dict[str, Any] = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
    tokens = live.ok(CHAT, **given | body)["prompt_token_ids"]
    return str(live.ok("/detokenize", tokens=tokens)["prompt"])


def test_efforts_reach_the_template(channels: Live) -> None:
    assert "medium" in rendered(channels)
    assert "high" in rendered(channels, reasoning_effort="high")
    for level in ("none", "minimal", "xhigh"):
        error = channels.error(CHAT, messages=HELLO, reasoning_effort=level)
        assert error["param"] == "reasoning_effort"
        assert "low, medium, high" in error["message"]
    assert channels.error(CHAT, messages=HELLO, reasoning_effort="much")["param"] == "reasoning_effort"
    assert channels.error(CHAT, messages=HELLO, enable_thinking=False)["param"] == "enable_thinking"
    asked = {"input": "Hi", "max_output_tokens": 1, "store": False}
    found = channels.ok("/v1/responses", **asked, reasoning={"effort": "low"})
    assert found["reasoning"] == {"effort": "low", "summary": None}
    assert channels.error("/v1/responses", **asked, reasoning={"effort": "none"})["param"] == "reasoning.effort"


def test_thoughts_before_calls_reach_the_template(channels: Live) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = {"role": "assistant", "tool_calls": [call], "reasoning_content": "I look it up."}
    result = {"role": "tool", "tool_call_id": "a", "content": "Rain"}
    for turn, shown in ((said, 1), (said | {"content": "Well."}, 0)):
        prompt = rendered(channels, messages=[*HELLO, turn, result], tools=WEATHER)
        assert prompt.count("I look it up.") == shown


def test_thoughts_are_switched_by_the_templates_own_name(llm: LLM, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if thinking else '</think>' }}")
    for live in serve(AsyncLLM(llm), chat_template=str(template)):
        assert rendered(live).endswith("</think>")
        for given in (
            {"enable_thinking": True},
            {"thinking": {"type": "enabled"}},
            {"reasoning_effort": "low"},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "none"},
        ):
            assert rendered(live, **given).endswith("<think>")
        for given in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}):
            assert rendered(live, **given).endswith("</think>")


def test_budgets_and_efforts_of_anthropic_reach_the_template(llm: LLM, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    shown = "{{ 'x ' * (thinking_budget or 0) }}{{ 'y ' * 50 if reasoning_effort == 'high' }}"
    template.write_text(f"{shown}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}")
    path, asked = "/v1/messages/count_tokens", {"model": "bundled", "messages": HELLO}
    for live in serve(AsyncLLM(llm), chat_template=str(template)):
        plain = live.ok(path, **asked)["input_tokens"]
        assert live.ok(path, **asked, thinking={"type": "disabled"})["input_tokens"] == plain
        thinking = {"type": "enabled", "budget_tokens": 40}
        assert live.ok(path, **asked, thinking=thinking)["input_tokens"] >= plain + 40
        assert live.ok(path, **asked, output_config={"effort": "high"})["input_tokens"] >= plain + 50
        assert live.ok(path, **asked, output_config={"effort": "low"})["input_tokens"] == plain


def test_what_a_template_cannot_do_is_ignored_by_choice(llm: LLM) -> None:
    thinking = {"type": "enabled", "budget_tokens": 40}
    asked: dict[str, dict[str, Any]] = {
        "/v1/messages": {"thinking": thinking, "output_config": {"effort": "low"}, "max_tokens": 1, "model": "bundled"},
        CHAT: {"reasoning_effort": "low", "max_tokens": 1},
    }
    named = {"/v1/messages": "thinking.budget_tokens, reasoning_effort", CHAT: "reasoning_effort"}
    for live in serve(AsyncLLM(llm), lenient_fields=True):
        for path, body in asked.items():
            answer = live.post(path, messages=HELLO, **body)
            assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, named[path])


def test_tools_need_a_format_that_is_known(llm: LLM, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    for live in serve(AsyncLLM(llm), chat_template=str(template)):
        for choice in ("auto", "required"):
            error = live.error(CHAT, messages=HELLO, tools=WEATHER, tool_choice=choice)
            assert error["param"] == "tools"
            assert "--tool-call-parser" in error["message"]
        live.ok(CHAT, messages=HELLO, tools=WEATHER, tool_choice="none", max_tokens=1)
        live.ok(CHAT, messages=HELLO, max_tokens=1)
        responses = {"input": "Hi", "tools": [{"type": "function", "name": "weather"}]}
        assert live.error("/v1/responses", **responses)["param"] == "tools"
    for live in serve(AsyncLLM(llm), chat_template=str(template), tool_call_parser="glm45"):
        live.ok(CHAT, messages=HELLO, tools=WEATHER, max_tokens=1)


TEXT = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


@pytest.mark.parametrize(("stop", "content", "arguments", "reason"), [
    (None, "Well. ", '{"city": "Oslo"}', "tool_calls"),
    ("weather", "Well. ", None, "stop"),
    ('"name', "Well. ", None, "stop"),
    ("city", "Well. ", '{"', "stop"),
    ("slo", "Well. ", '{"city": "O', "stop"),
    ("</tool", "Well. ", '{"city": "Oslo"}', "tool_calls"),
    ("ell", "W", None, "stop"),
])  # fmt: skip
def test_a_call_that_a_stop_text_cuts_is_none(
    talking: Live,
    monkeypatch: pytest.MonkeyPatch,
    stop: str | None,
    content: str,
    arguments: str | None,
    reason: str,
) -> None:
    monkeypatch.setattr(talking.model, "script", TEXT)
    found = told(talking, tools=WEATHER, **({} if stop is None else {"stop": [stop]}))
    calls = [] if arguments is None else [{"name": "weather", "arguments": arguments}]
    assert found == {"content": content, "reasoning": "", "calls": calls, "reason": reason}


def test_a_call_that_a_limit_cuts_is_none(talking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talking.model, "script", TEXT)
    seen = set()
    for limit in range(4, 60, 5):
        found = told(talking, tools=WEATHER, max_tokens=limit)
        whole = found["calls"] == [{"name": "weather", "arguments": '{"city": "Oslo"}'}]
        seen.add((bool(found["calls"]), whole, found["reason"]))
        assert (
            found["content"] in ("Well. ", "Well.")
            or "Well. ".startswith(found["content"])
            or len(found["content"]) < 18
        )
        assert "name" not in found["content"]
    assert (True, False, "length") in seen
    assert (True, True, "tool_calls") in seen


def test_calls_of_other_functions_are_content(talking: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talking.model, "script", TEXT)
    other = [{"type": "function", "function": {"name": "climate"}}]
    for given in ({"tools": other}, {}, {"tools": WEATHER, "tool_choice": "none"}):
        assert told(talking, **given) == {"content": TEXT, "reasoning": "", "calls": [], "reason": "stop"}
