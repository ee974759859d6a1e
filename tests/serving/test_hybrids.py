"""A model with mixers behind the server: calls of tools, and turns that begin with what earlier ones have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving.conftest import serve
from tiny_hybrid import write

from paceline import LLM, AsyncLLM

CHAT = "/v1/chat/completions"
TEMPLATE = """{{ tools | tojson if tools }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% for
call in message.tool_calls or [] %}<tool_call>{{ call | tojson }}</tool_call>{% endfor %}{% endfor %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather of a town on one of the next nine days.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
                "required": ["where", "days"],
            },
        },
    }
]
BODY: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "temperature": 0.0, "max_tokens": 120}


@pytest.mark.parametrize("method", [None, "ngram"])
def test_turns_with_tools_begin_with_what_earlier_ones_left(tmp_path: Path, method: str | None) -> None:
    folder, file = write(tmp_path / "model"), tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    model = LLM(str(folder), speculative_config=method, threads=1, profile=False)
    cold = LLM(str(folder), speculative_config=None, threads=1, profile=False, enable_prefix_caching=False)
    turns = [{"role": "user", "content": "How is the weather in Rome?"}]
    options = {"chat_template": str(file), "tool_call_parser": "hermes"}
    for live in serve(AsyncLLM(model), **options):
        first, again = (live.ok(CHAT, messages=turns, **BODY) for _ in range(2))
        prompt = first["usage"]["prompt_tokens"]
        assert prompt > 64
        assert _cached(first) == 0
        assert _cached(again) == (prompt - 1) // 16 * 16
        assert _call(again) == _call(first)
        assert json.loads(_call(first)["arguments"]).keys() == {"where", "days"}
        message = first["choices"][0]["message"]
        turns += [message, {"role": "tool", "content": "Sunny", "tool_call_id": message["tool_calls"][0]["id"]}]
        later = live.ok(CHAT, messages=turns, **BODY)
        assert _cached(later) >= _cached(again)
    for live in serve(AsyncLLM(cold), **options):
        for messages, found in ((turns[:1], first), (turns, later)):
            wanted = live.ok(CHAT, messages=messages, **BODY)
            assert _cached(wanted) == 0
            assert _call(wanted) == _call(found)


def _cached(answer: Any) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def _call(answer: Any) -> Any:
    return answer["choices"][0]["message"]["tool_calls"][0]["function"]
