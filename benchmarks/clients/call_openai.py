"""OpenAI's client for Python: chats, completions and responses."""

from __future__ import annotations

from typing import Any

import openai
from calls import (
    AGAIN,
    ASK,
    FUNCTIONS,
    HELLO,
    MODEL,
    OPENAI,
    PLAN,
    RESULT,
    TOKENS,
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

client = openai.OpenAI(**OPENAI)
CHAT: Any = {"model": MODEL, "temperature": 0, "max_completion_tokens": TOKENS}
RESPONSE: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": TOKENS}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather"}}
PYDANTIC = [openai.pydantic_function_tool(kind, name=name) for name, kind in FUNCTIONS.items()]


def called(choice: Any, *, fits: bool = True) -> str:
    """An answer that must be calls."""
    calls = choice.message.tool_calls
    expect(calls, f"no call but {choice.message.content!r} ({choice.finish_reason})")
    for one in calls:
        validated(one.function.name, one.function.arguments, fits=fits)
    expect(choice.finish_reason == "tool_calls", f"finish_reason {choice.finish_reason}")
    return "call"


def called_or_said(choice: Any, *, fits: bool = False) -> str:
    return called(choice, fits=fits) if choice.message.tool_calls else text(choice.message.content)


def joined(stream: Any) -> tuple[str, list[list[str]], str | None, Any]:
    """Text, calls as [id, name, arguments], the finish reason and the usage of a stream."""
    said, calls, reason, usage = "", list[list[str]](), None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            said += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                if part.id:
                    expect(part.index == len(calls) and part.function.name, f"a call begins with {part}")
                    calls.append([part.id, part.function.name, ""])
                calls[part.index][2] += part.function.arguments or ""
    return said, calls, reason, usage


def streamed_calls(found: tuple[str, list[list[str]], str | None, Any], *, fits: bool) -> str:
    said, calls, reason, usage = found
    expect(usage is not None and usage.completion_tokens > 0, f"usage is {usage}")
    for _, name, arguments in calls:
        validated(name, arguments, fits=fits)
    expect(reason == ("tool_calls" if calls else reason), f"finish_reason {reason}")
    return "call" if calls else text(said)


def streamed(**given: Any) -> tuple[str, list[list[str]], str | None, Any]:
    more: Any = {"stream": True, "stream_options": {"include_usage": True}}
    return joined(client.chat.completions.create(**CHAT, **given, **more))


@call("chat")
def chat() -> str:
    return text(client.chat.completions.create(**CHAT, messages=HELLO).choices[0].message.content)


@call("chat, streamed, with usage")
def chat_stream() -> str:
    said, _, reason, usage = streamed(messages=HELLO)
    expect(usage and usage.total_tokens > usage.completion_tokens > 0, f"usage is {usage}")
    expect(reason in ("stop", "length"), f"finish_reason {reason}")
    return text(said)


@call("completion")
def completion() -> str:
    return text(client.completions.create(model=MODEL, prompt="One day", max_tokens=20, temperature=0).choices[0].text)


@call("tools, auto")
def auto() -> str:
    return called_or_said(client.chat.completions.create(**CHAT, messages=AGAIN, tools=functions()).choices[0])


@call("tools, required")
def required() -> str:
    given: Any = {"messages": ASK, "tools": functions(), "tool_choice": "required", "parallel_tool_calls": False}
    return called(client.chat.completions.create(**CHAT, **given).choices[0])


@call("tools, named")
def by_name() -> str:
    given: Any = {"messages": ASK, "tools": functions(), "tool_choice": WEATHER}
    choice = client.chat.completions.create(**CHAT, **given).choices[0]
    expect([one.function.name for one in choice.message.tool_calls or ()] == ["get_weather"], choice.message.tool_calls)
    for one in choice.message.tool_calls:
        validated(one.function.name, one.function.arguments)
    return "call"


@call("tools, none")
def none() -> str:
    given: Any = {"messages": HELLO, "tools": functions(), "tool_choice": "none"}
    return text(client.chat.completions.create(**CHAT, **given).choices[0].message.content)


@call("tools, strict, auto (pydantic_function_tool)")
def strict_auto() -> str:
    return called_or_said(client.chat.completions.create(**CHAT, messages=AGAIN, tools=PYDANTIC).choices[0], fits=True)


@call("tools, strict, required (pydantic_function_tool)")
def strict_required() -> str:
    given: Any = {"messages": ASK, "tools": PYDANTIC, "tool_choice": "required", "parallel_tool_calls": False}
    return called(client.chat.completions.create(**CHAT, **given).choices[0])


@call("tools, parse (pydantic_function_tool)")
def parsed_calls() -> str:
    given: Any = {"messages": ASK, "tools": PYDANTIC, "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.parse(**CHAT, **given).choices[0]
    for one in choice.message.tool_calls or ():
        expect(isinstance(one.function.parsed_arguments, FUNCTIONS[one.function.name]), one)
    return called(choice)


@call("tools, parallel")
def parallel() -> str:
    """A small model may call again and again, until the last call is cut off."""
    given: Any = {"messages": ASK, "tools": functions(), "tool_choice": "required", "parallel_tool_calls": True}
    choice = client.chat.completions.create(**CHAT, **given).choices[0]
    if choice.finish_reason == "length":
        choice.message.tool_calls.pop()
        expect(len(choice.message.tool_calls) > 1, choice.message.tool_calls)
        choice.finish_reason = "tool_calls"
    return called(choice)


@call("tools, one at a time")
def one_call() -> str:
    given: Any = {"messages": ASK, "tools": functions(), "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**CHAT, **given).choices[0]
    expect(len(choice.message.tool_calls or ()) == 1, choice.message.tool_calls)
    return called(choice)


@call("tools, streamed, auto")
def stream_auto() -> str:
    return streamed_calls(streamed(messages=AGAIN, tools=functions()), fits=False)


@call("tools, streamed, required")
def stream_required() -> str:
    found = streamed(messages=ASK, tools=functions(), tool_choice="required", parallel_tool_calls=False)
    expect(found[1], f"no call but {found[0]!r}")
    return streamed_calls(found, fits=True)


@call("tools, streamed, strict (chat.completions.stream)")
def stream_helper() -> str:
    given: Any = {"messages": AGAIN, "tools": PYDANTIC}
    with client.chat.completions.stream(**CHAT, **given) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        choice = stream.get_final_completion().choices[0]
    calls = choice.message.tool_calls or []
    expect(len(done) == len(calls), f"{len(done)} events of {len(calls)} calls")
    for event in done:
        expect(isinstance(event.parsed_arguments, FUNCTIONS[event.name]), event)
    return called_or_said(choice, fits=True)


@call("tool loop")
def loop() -> str:
    """A call, its result, and an answer to it; messages go back as the client's own objects."""
    messages: list[Any] = [*ASK]
    given: Any = {"tools": functions(), "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**CHAT, messages=messages, **given).choices[0].message
    messages.append(message)
    for one in message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": one.id, "content": RESULT})
    expect(len(messages) == 3, messages)
    given = {"tools": functions(), "tool_choice": "auto"}
    return called_or_said(client.chat.completions.create(**CHAT, messages=messages, **given).choices[0])


@call("tool loop, parsed objects go back")
def parsed_loop() -> str:
    messages: list[Any] = [*ASK]
    given: Any = {"tools": PYDANTIC, "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.parse(**CHAT, messages=messages, **given).choices[0].message
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}]
    return called_or_said(
        client.chat.completions.parse(**CHAT, messages=messages, tools=PYDANTIC).choices[0], fits=True
    )


@call("structured output (chat.completions.parse)")
def parse() -> str:
    message = client.chat.completions.parse(**CHAT, messages=PLAN, response_format=Trip).choices[0].message
    expect(isinstance(message.parsed, Trip), message)
    return "parsed"


@call("structured output, streamed (chat.completions.stream)")
def parse_stream() -> str:
    with client.chat.completions.stream(**CHAT, messages=PLAN, response_format=Trip) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    expect(isinstance(message.parsed, Trip), message)
    expect({"content.delta", "content.done"} <= set(kinds), set(kinds))
    return "parsed"


@call("JSON mode")
def json_mode() -> str:
    given: Any = {"messages": PLAN, "response_format": {"type": "json_object"}}
    choice = client.chat.completions.create(**CHAT, **given).choices[0]
    return text(choice.message.content)


@call("tools with structured output")
def both() -> str:
    choice = client.chat.completions.parse(**CHAT, messages=ASK, tools=PYDANTIC, response_format=Trip).choices[0]
    if choice.message.tool_calls:
        return called(choice)
    expect(isinstance(choice.message.parsed, Trip), choice)
    return "parsed"


@call("tools with structured output, required")
def both_required() -> str:
    given: Any = {"tools": PYDANTIC, "tool_choice": "required", "parallel_tool_calls": False, "response_format": Trip}
    return called(client.chat.completions.parse(**CHAT, messages=ASK, **given).choices[0])


@call("tools with structured output, streamed")
def both_stream() -> str:
    given: Any = {"messages": ASK, "tools": PYDANTIC, "response_format": Trip}
    with client.chat.completions.stream(**CHAT, **given) as stream:
        choice = stream.get_final_completion().choices[0]
    if choice.message.tool_calls:
        return called(choice)
    expect(isinstance(choice.message.parsed, Trip), choice)
    return "parsed"


@call("error names the field")
def wrong() -> str:
    for more, field in (({"extra_body": {"colour": 1}}, "colour"), ({"top_p": 7}, "top_p")):
        for stream in (False, True):
            try:
                client.chat.completions.create(**CHAT, messages=HELLO, stream=stream, **more)
            except openai.BadRequestError as error:
                expect(error.param == field, f"param is {error.param!r}: {error}")
            else:
                expect(False, f"{field} was accepted")
    return "error"


@call("response")
def response() -> str:
    return text(client.responses.create(**RESPONSE, input="Say hello.").output_text)


@call("response, streamed, with usage")
def response_stream() -> str:
    given: Any = {"input": "Say hello.", "max_output_tokens": 20}
    said, last = "", None
    for event in client.responses.create(**RESPONSE | given, stream=True):
        said += event.delta if event.type == "response.output_text.delta" else ""
        last = event
    expect(last.type in ("response.completed", "response.incomplete"), last)
    expect(last.response.output_text == said and last.response.usage.output_tokens > 0, last)
    return text(said)


def response_called(found: Any, *, fits: bool = True) -> str:
    calls = [item for item in found.output if item.type == "function_call"]
    for item in calls:
        validated(item.name, item.arguments, fits=fits)
    return "call" if calls else text(found.output_text)


@call("response, tools, auto, strict")
def response_auto() -> str:
    return response_called(client.responses.create(**RESPONSE, input=ASK, tools=flat_functions(strict=True)))


@call("response, tools, required")
def response_required() -> str:
    found = client.responses.create(**RESPONSE, input=ASK, tools=flat_functions(), tool_choice="required")
    expect(response_called(found) == "call", found.output)
    return "call"


@call("response, tools, named, streamed")
def response_named() -> str:
    choice: Any = {"type": "function", "name": "get_weather"}
    given: Any = {"input": ASK, "tools": flat_functions(), "tool_choice": choice}
    with client.responses.stream(**RESPONSE, **given) as stream:
        kinds = [event.type for event in stream]
        found = stream.get_final_response()
    expect("response.function_call_arguments.done" in kinds, set(kinds))
    expect(response_called(found) == "call", found.output)
    return "call"


@call("response, tool loop (previous_response_id)")
def response_loop() -> str:
    given: Any = {"tools": flat_functions(strict=True), "parallel_tool_calls": False}
    first = client.responses.create(**RESPONSE, input=ASK, tool_choice="required", **given)
    output: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
        for item in first.output
        if item.type == "function_call"
    ]
    expect(len(output) == 1, first.output)
    return response_called(client.responses.create(**RESPONSE, input=output, previous_response_id=first.id, **given))


@call("response, tool loop (items go back)")
def response_items() -> str:
    given: Any = {"tools": flat_functions(strict=True), "parallel_tool_calls": False, "store": False}
    first = client.responses.create(**RESPONSE, input=ASK, tool_choice="required", **given)
    items: list[Any] = [*ASK, *first.output]
    for item in first.output:
        if item.type == "function_call":
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": RESULT})
    return response_called(client.responses.create(**RESPONSE, input=items, **given))


@call("response, structured output (responses.parse)")
def response_parse() -> str:
    found = client.responses.parse(**RESPONSE, input=PLAN, text_format=Trip)
    expect(isinstance(found.output_parsed, Trip), found)
    return "parsed"


@call("response, structured output, streamed (responses.stream)")
def response_parse_stream() -> str:
    with client.responses.stream(**RESPONSE, input=PLAN, text_format=Trip) as stream:
        for _ in stream:
            pass
        found = stream.get_final_response()
    expect(isinstance(found.output_parsed, Trip), found)
    return "parsed"


@call("response, tools with structured output")
def response_both() -> str:
    tools: Any = flat_functions(strict=True)
    found = client.responses.parse(**RESPONSE, input=ASK, tools=tools, text_format=Trip)
    if any(item.type == "function_call" for item in found.output):
        return response_called(found)
    expect(isinstance(found.output_parsed, Trip), found)
    return "parsed"


@call("response, error names the field")
def response_wrong() -> str:
    try:
        client.responses.create(**RESPONSE, input="Say hello.", extra_body={"colour": 1})
    except openai.BadRequestError as error:
        expect(error.param == "colour", f"param is {error.param!r}: {error}")
        return named(error, "colour")
    return str(expect(False, "colour was accepted"))


if __name__ == "__main__":
    run()
