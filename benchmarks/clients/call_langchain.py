"""LangChain: `ChatOpenAI` by way of chats and of responses, and agents of it."""

from __future__ import annotations

from typing import Any

import openai
from calls import (
    AGAIN,
    ASK_TEXT,
    HELLO_TEXT,
    MODEL,
    OPENAI,
    PLAN_TEXT,
    TOKENS,
    Trip,
    call,
    expect,
    functions,
    get_weather,
    run,
    text,
    validated,
)
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

WEATHER = tool(get_weather)


def chat(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, **OPENAI | {"temperature": 0, "max_tokens": TOKENS} | more)


llm, responses = chat(), chat(use_responses_api=True)
one_by_one = chat(model_kwargs={"parallel_tool_calls": False})


def called(message: Any, *, fits: bool = True) -> str:
    expect(message.tool_calls and not message.invalid_tool_calls, f"no call but {message}")
    for one in message.tool_calls:
        validated(one["name"], one["args"], fits=fits)
    return "call"


def called_or_said(message: Any, *, fits: bool = False) -> str:
    if message.tool_calls or message.invalid_tool_calls:
        return called(message, fits=fits)
    return text(message.text)


def whole(stream: Any) -> Any:
    """All chunks of a stream as one message."""
    found = None
    for chunk in stream:
        found = chunk if found is None else found + chunk
    expect(found is not None and found.usage_metadata, f"no usage: {found}")
    return found


@call("chat")
def invoke() -> str:
    return text(llm.invoke(HELLO_TEXT).text)


@call("chat, streamed, with usage")
def stream() -> str:
    return text(whole(chat(stream_usage=True).stream(HELLO_TEXT)).text)


@call("tools, auto")
def auto() -> str:
    return called_or_said(llm.bind_tools(functions()).invoke(AGAIN))


@call("tools, any")
def required() -> str:
    return called(llm.bind_tools(functions(), tool_choice="any").invoke(ASK_TEXT))


@call("tools, named")
def by_name() -> str:
    message = llm.bind_tools(functions(), tool_choice="get_weather").invoke(ASK_TEXT)
    expect([one["name"] for one in message.tool_calls] == ["get_weather"], message)
    return called(message)


@call("tools, strict, auto")
def strict_auto() -> str:
    return called_or_said(llm.bind_tools(functions(), strict=True).invoke(AGAIN), fits=True)


@call("tools, strict, any, one at a time")
def strict_required() -> str:
    given: Any = {"strict": True, "tool_choice": "any", "parallel_tool_calls": False}
    message = llm.bind_tools(functions(), **given).invoke(ASK_TEXT)
    expect(len(message.tool_calls) == 1, message)
    return called(message)


@call("tools, streamed, auto")
def stream_auto() -> str:
    return called_or_said(whole(chat(stream_usage=True).bind_tools(functions()).stream(AGAIN)))


@call("tools, streamed, any")
def stream_required() -> str:
    return called(whole(chat(stream_usage=True).bind_tools(functions(), tool_choice="any").stream(ASK_TEXT)))


@call("tool loop")
def loop() -> str:
    given: Any = {"tool_choice": "get_weather", "parallel_tool_calls": False}
    first = llm.bind_tools([WEATHER], **given).invoke(ASK_TEXT)
    expect(len(first.tool_calls) == 1, first)
    result = WEATHER.invoke(first.tool_calls[0])
    expect(isinstance(result, ToolMessage), result)
    last = llm.bind_tools([WEATHER]).invoke([HumanMessage(ASK_TEXT), first, result])
    return called_or_said(last)


@call("agent (create_agent)")
def agent() -> str:
    found = create_agent(llm, [WEATHER], system_prompt="Be brief.").invoke(
        {"messages": [HumanMessage(ASK_TEXT)]}, {"recursion_limit": 50}
    )
    return text(found["messages"][-1].text)


@call("agent with structured output (ToolStrategy)")
def agent_tool() -> str:
    found = create_agent(one_by_one, [], response_format=ToolStrategy(Trip)).invoke(
        {"messages": [HumanMessage(PLAN_TEXT)]}
    )
    expect(isinstance(found["structured_response"], Trip), found)
    return "parsed"


@call("agent with structured output and tools (ProviderStrategy)")
def agent_provider() -> str:
    built = create_agent(one_by_one, [WEATHER], response_format=ProviderStrategy(Trip))
    found = built.invoke({"messages": [HumanMessage(PLAN_TEXT)]}, {"recursion_limit": 50})
    expect(isinstance(found["structured_response"], Trip), found)
    return "parsed"


def structured(method: str, **more: Any) -> str:
    found = llm.with_structured_output(Trip, method=method, **more).invoke(PLAN_TEXT)
    expect(isinstance(found, Trip), found)
    return "parsed"


@call("structured output (json_schema)")
def json_schema() -> str:
    return structured("json_schema")


@call("structured output (json_schema, strict)")
def json_schema_strict() -> str:
    return structured("json_schema", strict=True)


@call("structured output (function_calling)")
def function_calling() -> str:
    return structured("function_calling")


@call("structured output (function_calling, strict)")
def function_calling_strict() -> str:
    return structured("function_calling", strict=True)


@call("structured output (json_mode)")
def json_mode() -> str:
    found = llm.with_structured_output(Trip, method="json_mode", include_raw=True).invoke(PLAN_TEXT)
    return text(found["raw"].text)


@call("structured output, streamed (json_schema)")
def structured_stream() -> str:
    found = list(llm.with_structured_output(Trip, method="json_schema").stream(PLAN_TEXT))
    expect(found and isinstance(found[-1], Trip), found[-1:])
    return "parsed"


@call("tools with structured output (bind_tools, response_format)")
def both() -> str:
    message = llm.bind_tools(functions(strict=True), response_format=Trip, strict=True).invoke(ASK_TEXT)
    if message.tool_calls:
        return called(message)
    expect(isinstance(message.additional_kwargs.get("parsed"), Trip), message)
    return "parsed"


@call("response")
def response() -> str:
    return text(responses.invoke(HELLO_TEXT).text)


@call("response, streamed")
def response_stream() -> str:
    return text(whole(responses.stream(HELLO_TEXT)).text)


@call("response, tools, any, strict")
def response_required() -> str:
    return called(responses.bind_tools(functions(), tool_choice="any", strict=True).invoke(ASK_TEXT))


@call("response, tool loop")
def response_loop() -> str:
    first = responses.bind_tools([WEATHER], tool_choice="any", parallel_tool_calls=False).invoke(ASK_TEXT)
    expect(len(first.tool_calls) == 1, first)
    result = WEATHER.invoke(first.tool_calls[0])
    return called_or_said(responses.bind_tools([WEATHER]).invoke([HumanMessage(ASK_TEXT), first, result]))


@call("response, structured output")
def response_structured() -> str:
    found = responses.with_structured_output(Trip).invoke(PLAN_TEXT)
    expect(isinstance(found, Trip), found)
    return "parsed"


@call("error names the field")
def wrong() -> str:
    try:
        chat(extra_body={"colour": 1}).invoke(HELLO_TEXT)
    except openai.BadRequestError as error:
        expect(error.param == "colour", f"param is {error.param!r}: {error}")
        return "error"
    return str(expect(False, "colour was accepted"))


if __name__ == "__main__":
    run()
