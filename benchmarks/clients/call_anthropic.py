"""Anthropic's client for Python: messages, tools, and counting of tokens."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import beta_tool
from calls import (
    ADDRESS,
    ASK,
    CITIES,
    FUNCTIONS,
    HELLO,
    KEY,
    MODEL,
    PLAN,
    RESULT,
    SECONDS,
    TOKENS,
    Trip,
    asked,
    call,
    expect,
    named,
    run,
    text,
    validated,
)

client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0, timeout=SECONDS)
GREEDY: Any = {"model": MODEL, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


def turn(city: str) -> list[Any]:
    """A question, the call and its result."""
    use = {"type": "tool_use", "id": f"call_{city}", "name": "get_weather", "input": {"city": city, "unit": "celsius"}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": RESULT}
    return [asked(city), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


AGAIN: Any = [*(message for city in CITIES for message in turn(city)), *ASK]


def tools(*, strict: bool | None = None) -> list[Any]:
    more = {} if strict is None else {"strict": strict}
    return [
        {"name": name, "description": kind.__doc__, "input_schema": kind.model_json_schema(), **more}
        for name, kind in FUNCTIONS.items()
    ]


def said(message: Any) -> str:
    return text("".join(block.text for block in message.content if block.type == "text"))


def uses(message: Any) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def called(message: Any, *, fits: bool = True) -> str:
    """A message that must hold calls."""
    expect(uses(message), f"no call but {message.content} ({message.stop_reason})")
    for one in uses(message):
        validated(one.name, one.input, fits=fits)
    expect(message.stop_reason == "tool_use", f"stop_reason {message.stop_reason}")
    return "call"


def called_or_said(message: Any, *, fits: bool = False) -> str:
    return called(message, fits=fits) if uses(message) else said(message)


@call("message")
def message() -> str:
    return said(client.messages.create(**GREEDY, messages=HELLO, system="Be brief."))


@call("message, streamed, with usage")
def stream() -> str:
    with client.messages.stream(**GREEDY, messages=HELLO) as events:
        parts = "".join(events.text_stream)
        found = events.get_final_message()
    expect(found.usage.output_tokens > 0 and found.usage.input_tokens > 0, found.usage)
    expect(said(found) == "text" and parts == found.content[0].text, f"{parts!r} is not {found.content}")
    return "text"


@call("count_tokens")
def count() -> str:
    few = client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
    many = client.messages.count_tokens(model=MODEL, messages=ASK, tools=tools()).input_tokens
    expect(0 < few < many, f"{few} tokens, and {many} with tools")
    return "text"


@call("tools, auto")
def auto() -> str:
    return called_or_said(client.messages.create(**GREEDY, messages=AGAIN, tools=tools()))


@call("tools, any")
def required() -> str:
    return called(client.messages.create(**GREEDY, messages=ASK, tools=tools(), tool_choice=ONE_CALL))


@call("tools, named")
def by_name() -> str:
    choice: Any = {"type": "tool", "name": "get_weather"}
    found = client.messages.create(**GREEDY, messages=ASK, tools=tools(), tool_choice=choice)
    expect([one.name for one in uses(found)] == ["get_weather"], found.content)
    return called(found)


@call("tools, none")
def none() -> str:
    return said(client.messages.create(**GREEDY, messages=HELLO, tools=tools(), tool_choice={"type": "none"}))


@call("tools, strict, auto")
def strict_auto() -> str:
    return called_or_said(client.messages.create(**GREEDY, messages=AGAIN, tools=tools(strict=True)), fits=True)


@call("tools, strict, any, one at a time")
def strict_required() -> str:
    choice = ONE_CALL
    found = client.messages.create(**GREEDY, messages=ASK, tools=tools(strict=True), tool_choice=choice)
    expect(len(uses(found)) == 1, found.content)
    return called(found)


@call("tools, streamed, auto")
def stream_auto() -> str:
    with client.messages.stream(**GREEDY, messages=AGAIN, tools=tools()) as events:
        return called_or_said(events.get_final_message())


@call("tools, streamed, any")
def stream_required() -> str:
    parts = list[str]()
    with client.messages.stream(**GREEDY, messages=ASK, tools=tools(), tool_choice=ONE_CALL) as events:
        for event in events:
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                parts.append(event.delta.partial_json)
        found = events.get_final_message()
    expect(parts, "no part of arguments came")
    return called(found)


@call("tool loop")
def loop() -> str:
    choice = ONE_CALL
    first = client.messages.create(**GREEDY, messages=ASK, tools=tools(), tool_choice=choice)
    result = [{"type": "tool_result", "tool_use_id": one.id, "content": RESULT} for one in uses(first)]
    messages: Any = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": result}]
    return called_or_said(client.messages.create(**GREEDY, messages=messages, tools=tools()))


@call("tool loop (beta.messages.tool_runner)")
def runner() -> str:
    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: its name.
        """
        return f"{city}: {RESULT}"

    messages: Any = client.beta.messages.tool_runner(**GREEDY, messages=ASK, tools=[get_weather], max_iterations=2)
    last = list(messages)[-1]
    return "call" if uses(last) else said(last)


@call("structured output (messages.parse)")
def parse() -> str:
    found = client.messages.parse(**GREEDY, messages=PLAN, output_format=Trip)
    expect(isinstance(found.parsed_output, Trip), found)
    return "parsed"


@call("tools with structured output")
def both() -> str:
    found = client.messages.parse(**GREEDY, messages=ASK, tools=tools(strict=True), output_format=Trip)
    if uses(found):
        return called(found)
    expect(isinstance(found.parsed_output, Trip), found)
    return "parsed"


@call("error names the field")
def wrong() -> str:
    for stream in (False, True):
        try:
            client.messages.create(**GREEDY | {"extra_body": {"colour": 1}}, messages=HELLO, stream=stream)
        except anthropic.BadRequestError as error:
            named(error, "colour")
        else:
            expect(False, "colour was accepted")
    return "error"


if __name__ == "__main__":
    run()
