"""LiteLLM: its providers for OpenAI's API, for vLLM and for Anthropic's API."""

from __future__ import annotations

from typing import Any

import litellm
from calls import (
    ADDRESS,
    AGAIN,
    ASK,
    HELLO,
    KEY,
    MODEL,
    PLAN,
    RESULT,
    SECONDS,
    TOKENS,
    Guest,
    Trip,
    call,
    expect,
    flat_functions,
    functions,
    named,
    run,
    text,
    validated,
)
from pydantic import BaseModel

litellm.telemetry = False
PROVIDERS = {"openai": f"{ADDRESS}/v1", "hosted_vllm": f"{ADDRESS}/v1", "anthropic": ADDRESS}
KINDS: dict[str, type[BaseModel]] = {"anthropic": Guest}
"""References to models within models lead nowhere in the schemas that this client writes for Anthropic's API."""


def ask(provider: str, **given: Any) -> Any:
    more: Any = {"api_base": PROVIDERS[provider], "api_key": KEY, "timeout": SECONDS, "num_retries": 0}
    if provider != "anthropic":
        more["frequency_penalty"] = 1  # a small model would call for ever
    return litellm.completion(model=f"{provider}/{MODEL}", temperature=0, max_tokens=TOKENS, **more, **given)


def called(choice: Any, *, fits: bool = True) -> str:
    calls = choice.message.tool_calls
    expect(calls, f"no call but {choice.message.content!r} ({choice.finish_reason})")
    for one in calls:
        validated(one.function.name, one.function.arguments, fits=fits)
    return "call"


def called_or_said(choice: Any, *, fits: bool = False) -> str:
    return called(choice, fits=fits) if choice.message.tool_calls else text(choice.message.content)


def streamed(provider: str, **given: Any) -> Any:
    """A stream as one answer, put together by the client."""
    chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}, **given))
    found = litellm.stream_chunk_builder(chunks, messages=given["messages"])
    expect(found.usage.completion_tokens > 0, found)
    return found.choices[0]


def plain(provider: str) -> str:
    return text(ask(provider, messages=HELLO).choices[0].message.content)


def stream(provider: str) -> str:
    return text(streamed(provider, messages=HELLO).message.content)


def auto(provider: str) -> str:
    return called_or_said(ask(provider, messages=AGAIN, tools=functions()).choices[0])


def required(provider: str) -> str:
    given: Any = {"tools": functions(), "tool_choice": "required", "parallel_tool_calls": False}
    return called(ask(provider, messages=ASK, **given).choices[0])


def by_name(provider: str) -> str:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    return called(ask(provider, messages=ASK, tools=functions(), tool_choice=choice).choices[0])


def strict_auto(provider: str) -> str:
    return called_or_said(ask(provider, messages=AGAIN, tools=functions(strict=True)).choices[0], fits=True)


def stream_auto(provider: str) -> str:
    return called_or_said(streamed(provider, messages=AGAIN, tools=functions()))


def stream_required(provider: str) -> str:
    given: Any = {"tools": functions(), "tool_choice": "required", "parallel_tool_calls": False}
    return called(streamed(provider, messages=ASK, **given))


def loop(provider: str) -> str:
    given: Any = {"tools": functions(), "tool_choice": "required", "parallel_tool_calls": False}
    message = ask(provider, messages=ASK, **given).choices[0].message
    expect(len(message.tool_calls or ()) == 1, message)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    return called_or_said(ask(provider, messages=[*ASK, message, result], tools=functions()).choices[0])


def parsed(provider: str) -> str:
    kind = KINDS.get(provider, Trip)
    kind.model_validate_json(ask(provider, messages=PLAN, response_format=kind).choices[0].message.content)
    return "parsed"


def both(provider: str) -> str:
    kind = KINDS.get(provider, Trip)
    choice = ask(provider, messages=ASK, tools=functions(), response_format=kind).choices[0]
    if choice.message.tool_calls:
        return called(choice, fits=False)
    kind.model_validate_json(choice.message.content)
    return "parsed"


def wrong(provider: str) -> str:
    try:
        ask(provider, messages=HELLO, colour=1)
    except litellm.BadRequestError as error:
        return named(error, "colour")
    return str(expect(False, "colour was accepted"))


COMPLETIONS = {
    "chat": plain,
    "chat, streamed, with usage": stream,
    "tools, auto": auto,
    "tools, required": required,
    "tools, named": by_name,
    "tools, strict, auto": strict_auto,
    "tools, streamed, auto": stream_auto,
    "tools, streamed, required": stream_required,
    "tool loop": loop,
    "structured output (response_format)": parsed,
    "tools with structured output": both,
    "error names the field": wrong,
}


@call("openai, response")
def response() -> str:
    given: Any = {"api_base": PROVIDERS["openai"], "api_key": KEY, "max_output_tokens": TOKENS, "temperature": 0}
    found = litellm.responses(model=f"openai/{MODEL}", input="Say hello.", **given)
    return text("".join(part.text for item in found.output if item.type == "message" for part in item.content))


@call("openai, response, tools, required")
def response_required() -> str:
    given: Any = {"api_base": PROVIDERS["openai"], "api_key": KEY, "max_output_tokens": TOKENS, "temperature": 0}
    tools: Any = flat_functions(strict=True)
    found = litellm.responses(model=f"openai/{MODEL}", input=ASK, tools=tools, tool_choice="required", **given)
    calls = [item for item in found.output if item.type == "function_call"]
    expect(calls, found)
    for one in calls:
        validated(one.name, one.arguments)
    return "call"


if __name__ == "__main__":
    for provider in PROVIDERS:
        for name, function in COMPLETIONS.items():
            call(f"{provider}, {name}")(lambda function=function, provider=provider: function(provider))
    run()
